"""The demo as one page: text, numbers and drawings of one run in a single HTML file that needs nothing else.

Drawings are inline SVG in the colours of the page, light or dark. The page of the plan is inside, as a document of its
own: neither's names and styles meet the other's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from longweave.tools.charts import SHADES, shade
from longweave.tools.timeline import BUSY, WAITING, Lane, Timeline
from longweave.tools.train.loop import Metrics

STYLE = """
:root { color-scheme: light; --paper: #fff; --card: #f6f7f9; --ink: #15181d; --quiet: #59616d; --line: #d4d8de;
  --first: #2f6fd0; --second: #c2681b; --rest: #9dbfec; --waiting: #e08a2e; --call: #2f6fd0; }
@media (prefers-color-scheme: dark) { :root { color-scheme: dark; --paper: #101317; --card: #181c22; --ink: #e8ebef;
  --quiet: #9aa4b1; --line: #353c46; --first: #6aa2f5; --second: #eba050; --rest: #35557f; --waiting: #eba050;
  --call: #5b95ee; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 12px; max-width: 1180px; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 4px 0; } h2 { font-size: 1.05rem; margin: 22px 0 6px; } p { margin: 6px 0; }
a { color: var(--first); } .quiet { color: var(--quiet); font-size: 0.85rem; }
pre, .wide { overflow-x: auto; } pre { font-size: 12px; line-height: 1.3; background: var(--card); padding: 8px;
  border: 1px solid var(--line); border-radius: 8px; }
.facts, .charts { display: grid; gap: 10px; margin: 10px 0; }
.facts { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr)); }
.facts div, figure { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px;
  margin: 0; min-width: 0; }
.facts dt, figcaption { color: var(--quiet); font-size: 0.82rem; } .facts dd { margin: 0; font-weight: 600; }
svg { display: block; width: 100%; height: auto; } .lanes { min-width: 760px; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; } svg text.dim { fill: var(--quiet); }
.axis { stroke: var(--line); stroke-width: 1; } .curve { fill: none; stroke-width: 2; }
.keyed { white-space: nowrap; margin-right: 12px; display: inline-block; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 4px; vertical-align: -1px; }
figcaption .keyed { float: right; margin: 0 0 0 12px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.88rem; }
th, td { padding: 2px 12px 2px 0; text-align: right; white-space: nowrap; }
th { color: var(--quiet); font-weight: 400; }
td:first-child, th:first-child { text-align: left; }
#bar { min-height: 1.45em; font-variant-numeric: tabular-nums; } .lanes [tabindex] { outline-offset: 1px; }
.lanes :focus { outline: 2px solid var(--ink); }
iframe { display: block; width: 100%; height: 900px; border: 1px solid var(--line); border-radius: 8px; }
"""

# What a bar of the timeline is, below the drawing: for pointers, fingers and keys. A lane is one stop of Tab.
SCRIPT = """
const lanes = document.querySelector(".lanes"), words = document.getElementById("bar");
const show = ({ target }) => { if (target.hasAttribute("tabindex")) words.textContent = target.textContent; };
for (const kind of ["pointerover", "click", "focusin"]) lanes.addEventListener(kind, show);
lanes.addEventListener("keydown", event => {
  const way = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  const bar = way && event.target[way];
  if (!bar || !bar.hasAttribute("tabindex")) return;
  event.preventDefault();
  bar.focus();
});
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {
  const page = frame.contentDocument.body;
  const fit = () => { frame.style.height = `${page.getBoundingClientRect().height + 24}px`; };
  new frame.contentWindow.ResizeObserver(fit).observe(page);
});
"""

LOSS_COLUMNS = ("step", "two ranks", "one process", "difference")
LANE, GUTTER, WIDTH = 34, 62, 1000  # of the timeline: height of a lane, room for its name, all of it


@dataclass(frozen=True)
class DemoResult:
    """What the demo has seen."""

    plan_text: str
    two: Sequence[Metrics]  # ranks
    one: Sequence[Metrics]  # process
    timeline: Timeline  # of the two ranks

    @property
    def worst(self) -> float:
        """The largest difference of a loss."""
        return max(abs(a.loss - b.loss) for a, b in zip(self.two, self.one, strict=True))

    @property
    def kv_share(self) -> float:
        """K/V that were sent, over what gathering sends."""
        return sum(m.kv_received for m in self.two) / sum(m.kv_gathered for m in self.two)

    @property
    def imbalance(self) -> float:
        return max(m.imbalance for m in self.two)

    def loss_rows(self) -> list[list[str]]:
        """Of every fifth step and the last; see LOSS_COLUMNS."""
        return [
            [str(a.step), f"{a.loss:.6f}", f"{b.loss:.6f}", f"{a.loss - b.loss:+.1e}"]
            for a, b in zip(self.two, self.one, strict=True)
            if a.step % 5 == 0 or a is self.two[-1]
        ]


def demo_page(result: DemoResult, plan_page: str) -> str:
    """The page as text, with the page of the plan inside."""
    two, one, timeline = result.two, result.one, result.timeline
    speeds = {name: float(np.median([m.tokens_per_second for m in run])) for name, run in _runs(result).items()}
    facts = {
        "largest difference of a loss": f"{result.worst:.1e}",
        "last loss, two ranks and one process": f"{two[-1].loss:.6f} and {one[-1].loss:.6f}",
        "busiest rank over the mean, worst step": f"{result.imbalance:.3f}",
        "K/V sent, of what gathering sends": f"{100 * result.kv_share:.1f} %",
        "tokens/s, median: two ranks, one process": " and ".join(f"{speed:.0f}" for speed in speeds.values()),
    }
    cards = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    losses = {name: [m.loss for m in run] for name, run in _runs(result).items()}
    speed = {name: [m.tokens_per_second for m in run] for name, run in _runs(result).items()}
    loads = {f"rank {rank}": [m.loads[rank] for m in two] for rank in range(len(two[0].loads))}
    steps = [m.step for m in two]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>longweave demo</title><style>{STYLE}</style></head><body>
<h1>The same model on two ranks and on one</h1>
<p>A byte-level Qwen3.5-style model, {len(two)} steps on packed documents: GatedDeltaNet and softmax attention
on one balanced layout. With the sequence split between two ranks the losses are those of one process.</p>
<dl class="facts">{cards}</dl>
<div class="charts">
{_chart("loss, nats per byte", steps, losses)}
{_chart("tokens a second", steps, speed, floor=0.0)}
{_chart("attention work over the mean", steps, loads, floor=0.9, ceiling=1.1)}
</div>
<h2>One step, rank by rank</h2>
<p class="quiet">{escape(timeline.title)}, {1e3 * timeline.seconds:.1f} ms. Every rank's own clock, from when it left
the barrier in front of the step. Triangles are exchanges that were sent.</p>
<p class="quiet">{"".join(_key(name) for name in SHADES)}</p>
<div class="wide">{_lanes(timeline)}</div>
<p id="bar">Hover, touch, or go with Tab and the arrow keys: what a bar is.</p>
{_lane_table(timeline)}
<h2>Losses</h2>
<div class="wide">{_table(LOSS_COLUMNS, result.loss_rows())}</div>
<h2>The plan of the first pack</h2>
<pre>{escape(result.plan_text)}</pre>
<p>To explore: who holds, computes, sends and receives what, with other layouts and strategies beside it.</p>
<iframe title="the plan, to explore" loading="lazy" srcdoc="{escape(plan_page)}"></iframe>
<script>{SCRIPT}</script>
</body></html>
"""


def _runs(result: DemoResult) -> dict[str, Sequence[Metrics]]:
    return {"two ranks": result.two, "one process": result.one}


# -- curves --------------------------------------------------------------------------------------------


def _chart(
    title: str, steps: Sequence[int], curves: Mapping[str, Sequence[float]],
    floor: float | None = None, ceiling: float | None = None,
) -> str:  # fmt: skip
    """Curves over steps; `floor` and `ceiling` are shown at least."""
    values = [value for curve in curves.values() for value in curve]
    values += [value for value in (floor, ceiling) if value is not None]
    low, high = min(values), max(values)
    left, top, right, bottom = 46, 8, 352, 168
    span, steps_span = (high - low) or 1.0, max(steps[-1] - steps[0], 1)

    def x(step: int) -> float:
        return left + (right - left) * (step - steps[0]) / steps_span

    def y(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / span

    parts = []
    for tick in np.linspace(low, high, 5):
        parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text class="dim" x="{left - 5}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for step in sorted({steps[0], steps[len(steps) // 2], steps[-1]}):
        parts.append(f'<text class="dim" x="{x(step):.1f}" y="184" text-anchor="middle">{step}</text>')
    for i, curve in enumerate(curves.values()):
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, curve, strict=True))
        dash = 'stroke-dasharray="5 4"' if i else ""
        parts.append(f'<polyline class="curve" style="stroke: {_colour(i)}" {dash} points="{points}"/>')
    keys = "".join(_keyed(_colour(i), name) for i, name in reversed(list(enumerate(curves))))  # they float
    drawing = f'<svg viewBox="0 0 360 190" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escape(title)}{keys}</figcaption>{drawing}</figure>"


def _keyed(colour: str, name: str) -> str:
    return f'<span class="keyed"><span class="key" style="background: {colour}"></span>{escape(name)}</span>'


def _colour(i: int) -> str:
    return ("var(--first)", "var(--second)")[i % 2]


# -- the timeline --------------------------------------------------------------------------------------


def _key(name: str) -> str:
    return _keyed(f"var(--{name})", SHADES[name][0])


def _lanes(timeline: Timeline) -> str:
    scale = (WIDTH - GUTTER - 6) / timeline.seconds
    height = LANE * len(timeline.lanes) + 26
    parts = [_lane(lane, LANE * row, scale) for row, lane in enumerate(timeline.lanes)]
    for tick in np.linspace(0, timeline.seconds, 6):
        at = GUTTER + tick * scale
        anchor = "end" if tick == timeline.seconds else "middle"
        parts.append(
            f'<text class="dim" x="{at:.1f}" y="{height - 6}" text-anchor="{anchor}">{1e3 * tick:.0f} ms</text>'
        )
    label = escape(f"{timeline.title}: busy and waiting, one lane a rank")
    return f'<svg class="lanes" viewBox="0 0 {WIDTH} {height}" role="group" aria-label="{label}">{"".join(parts)}</svg>'


def _lane(lane: Lane, top: int, scale: float) -> str:
    bars = []
    for one in lane.intervals:
        what = one.what or "the rest of the step"
        words = f"{one.kind}: {what}, {1e3 * one.seconds:.3f} ms from {1e3 * one.begin:.3f} ms"
        place = f'x="{GUTTER + one.begin * scale:.2f}" y="{top + 11}" width="{one.seconds * scale:.2f}" height="20"'
        bars.append((f"rect {place}", f"var(--{shade(one)})", words))
    for sent in lane.sent:
        to = f" to rank {', '.join(map(str, sent.peers))}" if sent.peers else ""
        words = f"sent: {sent.what or 'outside of calls'}, {sent.bytes_sent} bytes{to}, at {1e3 * sent.at:.3f} ms"
        bars.append((f'path d="M{GUTTER + sent.at * scale - 4:.1f} {top + 3}h8l-4 7z"', "var(--ink)", words))
    drawn = "".join(
        f'<{shape} style="fill: {fill}" role="img" tabindex="{-1 if i else 0}">'
        f"<title>{escape(f'rank {lane.rank}, {words}')}</title></{shape.split()[0]}>"
        for i, (shape, fill, words) in enumerate(bars)
    )
    return f'<g><text x="0" y="{top + 25}">rank {lane.rank}</text>{drawn}</g>'


def _lane_table(timeline: Timeline) -> str:
    columns = ["rank", "busy ms", "waiting ms", "CPU ms", "busy over the mean", "exchanges sent", "bytes sent"]
    rows = [
        [
            str(lane.rank),
            f"{1e3 * lane.time(BUSY):.1f}",
            f"{1e3 * lane.time(WAITING):.1f}",
            f"{1e3 * lane.cpu_seconds:.1f}",
            f"{load:.3f}",
            str(len(lane.sent)),
            str(lane.bytes_sent()),
        ]
        for lane, load in zip(timeline.lanes, timeline.loads, strict=True)
    ]
    note = (
        "CPU time is of all threads of a process: busy time far above it was spent without a core, which other "
        "programs had. Bytes are longweave's; FSDP2's are not counted, its waits are."
    )
    return f'<div class="wide">{_table(columns, rows)}</div><p class="quiet">{note}</p>'


# -- tables --------------------------------------------------------------------------------------------


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
