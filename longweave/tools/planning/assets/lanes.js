// Stages over time: for each rank three lanes, what it computes, receives and sends. And the clock that plays them.

const LANES_EDGE = 26; // for the numbers of ranks
const LANES_TOP = 16; // for the numbers of stages

const laneRow = ranks => ranks <= 8 ? 30 : ranks <= 16 ? 21 : 12;

function drawLanes(canvas, view, length, now) {
  const row = laneRow(view.ranks), lane = Math.floor((row - 2) / 3), { pen, width } = fitted(canvas, LANES_TOP + row * view.ranks);
  const scale = (width - LANES_EDGE) / (length || 1), current = view.stageAt(now);
  const inks = ["--compute", "--receive", "--send"].map(variable);
  pen.textBaseline = "middle";
  for (let rank = 0; rank < view.ranks; rank++) {
    pen.fillStyle = variable(rank % 2 ? "--card" : "--faint");
    pen.fillRect(LANES_EDGE, LANES_TOP + rank * row, width - LANES_EDGE, row - 1);
    pen.fillStyle = variable("--quiet");
    pen.textAlign = "right";
    pen.fillText(rank, LANES_EDGE - 4, LANES_TOP + (rank + 0.5) * row);
  }
  view.stages.forEach((stage, i) => {
    const begin = view.begins[i], x0 = LANES_EDGE + begin * scale, stretch = stage.seconds ? view.widths[i] / stage.seconds : 0;
    for (const [line, times] of [stage.compute, stage.receive, stage.send].entries()) {
      pen.fillStyle = inks[line];
      for (let rank = 0; rank < view.ranks; rank++) {
        if (!times[rank]) continue;
        const y = LANES_TOP + rank * row + line * lane, long = times[rank] * stretch, done = Math.max(0, Math.min(long, now - begin));
        pen.globalAlpha = 0.3;
        pen.fillRect(x0, y, Math.max(1, long * scale), lane - (lane > 4 ? 1 : 0));
        pen.globalAlpha = 1;
        if (done > 0) pen.fillRect(x0, y, done * scale, lane - (lane > 4 ? 1 : 0));
      }
    }
    const wide = view.widths[i] * scale;
    if (i === current) {
      pen.strokeStyle = variable("--accent");
      pen.strokeRect(x0 + 0.5, LANES_TOP + 0.5, Math.max(1, wide - 1), row * view.ranks - 2);
    }
    if (wide > 16) {
      pen.fillStyle = variable(i === current ? "--accent" : "--quiet");
      pen.textAlign = "center";
      pen.fillText(i, x0 + wide / 2, 8);
    }
  });
  pen.fillStyle = variable("--ink");
  pen.fillRect(LANES_EDGE + Math.min(now, length) * scale, LANES_TOP, 1.5, row * view.ranks);
}

/** The stage and the rank under a point of the lanes, or null. */
function laneAt(view, length, x, y, width) {
  const rank = Math.floor((y - LANES_TOP) / laneRow(view.ranks)), at = (x - LANES_EDGE) / (width - LANES_EDGE) * length;
  if (rank < 0 || rank >= view.ranks || at < 0 || at >= view.length) return null;
  return { rank, stage: view.stageAt(at) };
}

/** Plays 0 … 1 in some seconds of real time, and tells where it is. */
class Clock {
  constructor(tell) {
    this.tell = tell;
    this.at = 0;
    this.speed = 1;
    this.playing = false;
    this.tick = this.tick.bind(this);
  }

  move(at) {
    this.at = Math.max(0, Math.min(1, at));
    this.tell(this);
  }

  toggle() {
    this.playing = !this.playing;
    if (this.playing) {
      if (this.at >= 1) this.at = 0;
      this.last = performance.now();
      requestAnimationFrame(this.tick);
    }
    this.tell(this);
  }

  stop() {
    if (this.playing) this.toggle();
  }

  tick(time) {
    if (!this.playing) return;
    const WHOLE = 10; // seconds
    this.at = Math.min(1, this.at + Math.max(0, time - this.last) / 1e3 / WHOLE * this.speed);
    this.last = time;
    if (this.at >= 1) this.playing = false;
    this.tell(this);
    if (this.playing) requestAnimationFrame(this.tick);
  }
}
