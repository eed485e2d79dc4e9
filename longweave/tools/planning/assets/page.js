// The page: two panels that share a clock and a window on the tokens; hovering says what is there.

const plan = JSON.parse(document.getElementById("plan").textContent);
const STRATEGY_NAMES = { groupcast: "group-cast", ring: "ring", allgather: "all-gather", ulysses: "Ulysses", affine: "affine chain (linear attention)" };
const STRATEGY_WORDS = {
  groupcast: "Each rank receives only the K/V that its queries see, once, in stages; the next stage travels while this one is computed.",
  ring: "K/V go round: in every step each rank computes with what has arrived and passes it on to the next rank.",
  allgather: "Every rank receives all K/V, a few heads at a time; the next heads travel while these are computed.",
  ulysses: "Tokens are exchanged for heads: every rank computes all pairs for its share of the heads, then outputs go back.",
  affine: "A fragment of a document maps its incoming state S to M·S + U. M and U travel, then every fragment runs from its true state.",
};
const SHOWN_RANKS = 6; // of a list in words
const LEAST_TOKENS = 8; // of a window

const shared = {
  documents: new Documents(plan.lengths),
  mask: new MaskRows(plan.mask.rows),
  spans: Object.fromEntries(Object.entries(plan.layouts).map(([name, packed]) => [name, new Spans(packed)])),
};
const colours = rankColours(plan.ranks);
const whole = () => ({ q0: 0, q1: Math.max(1, plan.total), k0: 0, k1: Math.max(1, plan.total) });
const page = { area: whole(), pinned: null, panels: [], clock: null };
const find = id => document.getElementById(id);

// -- words ---------------------------------------------------------------------------------------------

const range = (start, stop) => stop - start === 1 ? `${count(start)}` : `${count(start)} to ${count(stop - 1)}`;

/** "30 of rank 1, 20 of rank 4", the most first if there are many. */
function byRanks(byRank, say = count, word = "of") {
  const many = byRank.size > SHOWN_RANKS, all = many ? [...byRank].sort((a, b) => b[1] - a[1]) : [...byRank];
  const shown = many ? all.slice(0, SHOWN_RANKS) : all;
  const rest = all.slice(shown.length).reduce((sum, [, number]) => sum + number, 0);
  const words = shown.map(([rank, number]) => `${say(number)} ${word} rank ${rank}`).join(", ");
  return words + (many ? `, ${say(rest)} ${word} ${all.length - shown.length} others` : "");
}

const tokenCount = tokens => `${count(tokens)} ${tokens === 1 ? "token" : "tokens"}`;
const total = byRank => [...byRank.values()].reduce((a, b) => a + b, 0);

function documentWords(first, last) { return first === last ? `document ${first}` : `documents ${first} to ${last}`; }

function tokenLine(what, found) {
  return { rank: found.owner, text: `${what} ${count(found.token)}: document ${found.document}, position ${count(found.position)}, held by rank ${found.owner} in the span ${range(...found.span)}` };
}

function needsLine(view, needs, who) {
  if (view.strategy === "ulysses") return { text: `${who} would need K/V of ${tokenCount(total(needs))} of others; with Ulysses every rank gets all tokens for its heads` };
  if (!needs.size) return { text: `${who} receives nothing for it: all K/V are its own` };
  const all = view.strategy === "groupcast" ? "" : "; this strategy brings it all others' too";
  return { text: `for it ${who} must receive K/V of ${tokenCount(total(needs))}: ${byRanks(needs)}${all}` };
}

/** The fragments of a document in token order: who holds them. */
function chainOf(view, document) {
  const [start, stop] = view.documents.span(document), found = [];
  for (let i = view.spans.at(start); i < view.spans.count && view.spans.edges[i] < stop; i++) found.push({ rank: view.spans.owners[i], start: Math.max(start, view.spans.edges[i]) });
  return found;
}

function chainLines(view, found) {
  const chain = chainOf(view, found.document), place = lastAtMost(chain.map(part => part.start), found.token);
  if (chain.length === 1) return [{ text: `document ${found.document} lies here whole: it starts from zero and waits for nobody` }];
  const near = chain.slice(Math.max(0, place - 4), place + 5).map((part, i) => i + Math.max(0, place - 4) === place ? `[rank ${part.rank}]` : `rank ${part.rank}`).join(" → ");
  const earlier = new Set(chain.slice(0, place).map(part => part.rank).filter(rank => rank !== found.owner));
  const waits = place === 0 ? "it starts from zero" : earlier.size ? `receives states from ${[...earlier].sort((a, b) => a - b).slice(0, 12).map(rank => `rank ${rank}`).join(", ")}${earlier.size > 12 ? ", …" : ""}` : "its state is on its own rank";
  return [{ text: `fragment ${place + 1} of ${chain.length}: ${place > 4 ? "… " : ""}${near}${place + 5 < chain.length ? " …" : ""}` }, { text: waits }];
}

function tokenLines(view, token) {
  const found = view.token(token);
  if (view.strategy === "affine") return [tokenLine("token", found), ...chainLines(view, found)];
  return [tokenLine("token", found), { text: `its query sees ${count(found.sees)} ${found.sees === 1 ? "key" : "keys"}` }, needsLine(view, found.needs, `rank ${found.owner}`)];
}

function spanLines(view, place, rank) {
  if (view.spans.owners[place] !== rank) return [{ rank, text: `rank ${rank} holds none of these; they are on rank ${view.spans.owners[place]}` }];
  const found = view.span(place), lines = [{ rank, text: `span ${range(found.start, found.stop)}: ${tokenCount(found.stop - found.start)} on rank ${rank}, ${documentWords(...found.documents)}` }];
  return [...lines, view.strategy === "affine" ? chainLines(view, view.token(found.start))[0] : needsLine(view, found.needs, `rank ${rank}`)];
}

function pairLines(view, [q0, q1], [k0, k1]) {
  const query = Math.floor((q0 + q1) / 2), key = Math.floor((k0 + k1) / 2), lines = [];
  if (q1 - q0 > 1 || k1 - k0 > 1) {
    for (const [what, start, stop] of [["queries", q0, q1], ["keys", k0, k1]]) {
      const holders = view.spans.holders(start, stop);
      lines.push({ text: `${what} ${range(start, stop)}: ${documentWords(view.documents.of(start), view.documents.of(stop - 1))}; ${byRanks(holders)}` });
    }
    lines.push({ text: "in the middle of this cell (zoom in for each pair):" });
  }
  const asking = view.token(query), asked = view.token(key);
  lines.push(tokenLine("query", asking), tokenLine("key", asked));
  if (!view.mask.sees(query, key)) return [...lines, { text: "the mask does not allow this pair: nobody computes it" }];
  if (view.strategy === "ulysses") lines.push({ text: "every rank computes the pair, for its heads" });
  else {
    const stage = view.stageOf(asking.owner, key, asked.owner), when = stage < 0 ? "" : `, in stage ${stage} (${view.stages[stage].name})`;
    const way = asking.owner === asked.owner ? "with its own K/V" : `with K/V that rank ${asked.owner} sends`;
    lines.push({ text: `rank ${asking.owner} computes the pair ${way}${when}` });
  }
  return [...lines, needsLine(view, asking.needs, `rank ${asking.owner}`)];
}

function laneLines(view, { rank, stage: i }) {
  const stage = view.stages[i], from = new Map(), to = new Map();
  for (let peer = 0; peer < view.ranks; peer++) {
    if (stage.messages.between(peer, rank)) from.set(peer, stage.messages.between(peer, rank));
    if (stage.messages.between(rank, peer)) to.set(peer, stage.messages.between(rank, peer));
  }
  return [
    { rank, text: `rank ${rank}, stage ${i}: ${stage.name}` },
    { text: `computes ${count(stage.work[rank])} ${view.stored.unit}` },
    { text: from.size ? `receives ${megabytes(stage.received[rank])}: ${byRanks(from, megabytes)}` : "receives nothing" },
    { text: to.size ? `sends ${megabytes(stage.sent[rank])}: ${byRanks(to, megabytes, "to")}` : "sends nothing" },
  ];
}

function rankLines(view, rank) { return [{ rank, text: `rank ${rank}` }, ...chartsOf(view).map(chart => ({ text: `${chart.name}: ${chart.say(rank)}` }))]; }

function matrixLines(view, from, to) {
  if (from === to) return [{ rank: from, text: `rank ${from} sends nothing to itself` }];
  const bytes = view.matrix.between(from, to);
  return [{ rank: from, text: `rank ${from} → rank ${to}: ${megabytes(bytes)} (${count(bytes)} bytes)` }];
}

// -- showing them --------------------------------------------------------------------------------------

const tip = element("div", "", "tip");
Object.assign(tip.style, { position: "fixed", zIndex: 9, pointerEvents: "none", maxWidth: "min(340px, calc(100vw - 16px))", padding: "6px 9px", borderRadius: "6px", fontSize: "0.82rem",
  background: "var(--paper)", border: "1px solid var(--line)", boxShadow: "0 3px 12px rgba(0, 0, 0, 0.25)", display: "none", overflowWrap: "anywhere" });
document.body.append(tip);

function paragraphs(lines) {
  return lines.map(({ rank, text }) => {
    const made = element("p", text);
    made.style.margin = "1px 0";
    if (rank === undefined) return made;
    const chip = element("span", "", "chip");
    chip.style.background = css(colours[rank]);
    made.prepend(chip);
    return made;
  });
}

function showTip(event, lines) {
  tip.style.display = lines ? "block" : "none";
  if (!lines) return;
  tip.replaceChildren(...paragraphs(lines));
  const { width, height } = tip.getBoundingClientRect(), left = event.clientX + 14, below = event.clientY + 16;
  tip.style.left = `${Math.max(8, Math.min(left, window.innerWidth - width - 8))}px`;
  tip.style.top = `${below + height < window.innerHeight - 8 ? below : Math.max(8, event.clientY - height - 14)}px`;
}

class Panel {
  constructor(root, name) {
    this.root = root;
    root.setAttribute("aria-label", name);
    this.stage = -1;
    for (const part of ["layout", "strategy", "why", "facts", "stage", "above", "lanes", "ruler", "map", "holds", "inspect", "bars", "numbers", "matrix", "exchange", "messages"]) this[`$${part}`] = root.querySelector(`.${part}`);
    this.$layout.append(...Object.keys(plan.layouts).map(name => new Option(name, name)));
    this.$strategy.append(...Object.entries(STRATEGY_NAMES).filter(([name]) => Object.keys(plan.views).some(view => view.endsWith(`/${name}`))).map(([name, words]) => new Option(words, name)));
    for (const select of [this.$layout, this.$strategy]) select.addEventListener("change", () => { this.choose(`${this.$layout.value}/${this.$strategy.value}`); changed(); });
    this.$exchange.addEventListener("toggle", () => this.fillExchange());
    this.hovers();
  }

  /** Of many ranks there are thousands: only when somebody looks. */
  fillExchange() { if (this.$exchange.open) fillMessages(this.$messages, this.view); }

  choose(name) {
    this.view = new View(name, plan, shared);
    [this.$layout.value, this.$strategy.value] = name.split("/");
    this.root.dataset.view = name;
    const { why, details } = this.view.stored;
    const chosen = name === plan.chosen ? `Your plan: ${why}.` : this.view.strategy === "affine" ? `Counted for ${why}.` : "";
    this.$why.textContent = [STRATEGY_WORDS[this.view.strategy], details && `${details}.`, chosen].filter(Boolean).join(" ");
    this.$inspect.replaceChildren(element("p", "Hover or tap a picture to see who holds, computes, receives and sends what is there.", "quiet"));
    fillFacts(this.$facts, this.view);
    fillNumbers(this.$numbers, this.view);
    this.fillExchange();
    this.charts = chartsOf(this.view);
    this.$bars.replaceChildren(...this.charts.flatMap(chart => {
      const label = element("div", undefined, "label quiet"), canvas = element("canvas"), top = most(chart.values);
      const words = `most: ${chart.say(chart.values.indexOf(top))}, rank ${chart.values.indexOf(top)}${chart.bound ? "; dashed: bound" : ""}`;
      label.append(element("span", chart.name), element("span", words));
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${chart.name}, a bar for each rank; ${words}`);
      this.onHover(canvas, (x, y, width) => rankLines(this.view, Math.min(plan.ranks - 1, Math.floor(x / width * plan.ranks))));
      chart.canvas = canvas;
      return [label, canvas];
    }));
    const pairs = this.view.strategy !== "affine";
    this.$map.hidden = !pairs;
    this.$map.style.display = pairs ? "" : "none";
    this.$above.textContent = pairs ? "Who computes which pair" : "Documents, and whose tokens they are";
    this.stage = -1;
  }

  // What is under the pointer, in words.
  hovers() {
    this.onHover(this.$lanes, (x, y, width) => { const at = laneAt(this.view, axisOf(this), x, y, width); return at && laneLines(this.view, at); });
    this.onHover(this.$map, (x, y, width) => pairLines(this.view, tokensOfPixel(Math.floor(y), Math.floor(width), page.area.q0, page.area.q1), tokensOfPixel(Math.floor(x), Math.floor(width), page.area.k0, page.area.k1)));
    this.onHover(this.$ruler, (x, y, width) => tokenLines(this.view, Math.min(plan.total - 1, tokensOfPixel(Math.floor(x), Math.floor(width), page.area.k0, page.area.k1)[0])));
    this.onHover(this.$holds, (x, y, width) => {
      const rank = Math.min(plan.ranks - 1, Math.floor(y / holdsRow(plan.ranks))), [first, last] = tokensOfPixel(Math.floor(x), Math.floor(width), page.area.k0, page.area.k1);
      const { spans } = this.view;
      let place = spans.at(first);
      for (let i = place; i < spans.count && spans.edges[i] < last; i++) if (spans.owners[i] === rank) { place = i; break; }
      return spanLines(this.view, place, rank);
    });
    this.onHover(this.$matrix, (x, y, width) => {
      const cell = (width - MATRIX_EDGE) / plan.ranks, from = Math.floor((y - MATRIX_EDGE) / cell), to = Math.floor((x - MATRIX_EDGE) / cell);
      return from < 0 || to < 0 || from >= plan.ranks || to >= plan.ranks ? null : matrixLines(this.view, from, to);
    });
    this.$map.addEventListener("dblclick", event => { const box = this.$map.getBoundingClientRect(); zoom(0.5, (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height); });
    this.$map.addEventListener("wheel", event => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const box = this.$map.getBoundingClientRect();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
    }, { passive: false });
    this.drag();
  }

  onHover(canvas, linesAt) {
    const show = event => {
      const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
      const lines = plan.total && x >= 0 && y >= 0 && x < box.width && y < box.height ? linesAt(x, y, box.width) : null;
      showTip(event, lines);
      if (lines) this.$inspect.replaceChildren(...paragraphs(lines));
    };
    canvas.addEventListener("pointerenter", () => this.announce(false));
    canvas.addEventListener("pointermove", event => { if (!event.buttons || event.pointerType !== "mouse") show(event); });
    canvas.addEventListener("pointerdown", show);
    canvas.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") showTip(event, null); });
  }

  drag() {
    let from = null;
    this.$map.addEventListener("pointerdown", event => { if (event.pointerType === "mouse") { from = { x: event.clientX, y: event.clientY, area: page.area }; this.$map.setPointerCapture(event.pointerId); } });
    this.$map.addEventListener("pointerup", () => { from = null; });
    this.$map.addEventListener("pointercancel", () => { from = null; });
    this.$map.addEventListener("pointermove", event => {
      if (!from || Math.hypot(event.clientX - from.x, event.clientY - from.y) < 4) return;
      const { width } = this.$map.getBoundingClientRect(), { q0, q1, k0, k1 } = from.area;
      showTip(event, null);
      setArea({ k0: k0 - (event.clientX - from.x) / width * (k1 - k0), k1: k1 - (event.clientX - from.x) / width * (k1 - k0), q0: q0 - (event.clientY - from.y) / width * (q1 - q0), q1: q1 - (event.clientY - from.y) / width * (q1 - q0) });
    });
  }

  /** Screen readers hear of a token that was typed, not of all that a pointer passes. */
  announce(typed) {
    if (typed) this.$inspect.setAttribute("aria-live", "polite");
    else this.$inspect.removeAttribute("aria-live");
  }

  drawTokens() {
    if (this.view.strategy !== "affine") drawMap(this.$map, this.view, page.area, colours, this.stage, page.pinned);
    drawRuler(this.$ruler, this.view, page.area, colours);
    drawHolds(this.$holds, this.view, page.area, colours);
    if (page.pinned !== null) this.$inspect.replaceChildren(...paragraphs(tokenLines(this.view, page.pinned)));
  }

  drawRest() {
    for (const chart of this.charts) drawBars(chart.canvas, chart);
    drawMatrix(this.$matrix, this.view, plan.nodeSize);
  }

  drawTime(now, started) {
    drawLanes(this.$lanes, this.view, axisOf(this), now);
    const over = now >= this.view.length, stage = this.view.stageAt(now), current = this.view.stages[stage];
    this.$stage.textContent = !started ? `${this.view.stages.length} stages; press play` : over ? "done" : `stage ${stage} of ${this.view.stages.length}: ${current.name}`;
    const marked = started && !over && this.view.stored.turn ? stage : -1;
    if (marked === this.stage) return;
    this.stage = marked;
    if (this.view.strategy !== "affine") drawMap(this.$map, this.view, page.area, colours, this.stage, page.pinned);
  }
}

// -- the window and the clock --------------------------------------------------------------------------

let waiting = false;
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; for (const panel of page.panels) panel.drawTokens(); showArea(); });
}

function showArea() {
  const { q0, q1, k0, k1 } = page.area, size = page.panels[0].$ruler.clientWidth || 1, coarse = Math.ceil((k1 - k0) / size);
  find("shown").textContent = `queries ${range(q0, q1)}, keys ${range(k0, k1)}; ${coarse > 1 ? `a pixel is ${count(coarse)} tokens` : "every token is shown"}`;
}

/** Whole tokens, inside the pack, not fewer than a few. */
function setArea(area) {
  const fit = (start, stop) => {
    const size = Math.max(1, Math.min(plan.total, Math.max(LEAST_TOKENS, Math.round(stop - start))));
    const first = Math.max(0, Math.min(Math.round(start), plan.total - size));
    return [first, first + size];
  };
  const [q0, q1] = fit(area.q0, area.q1), [k0, k1] = fit(area.k0, area.k1);
  page.area = { q0, q1, k0, k1 };
  redraw();
}

function zoom(factor, x = 0.5, y = 0.5) {
  const { q0, q1, k0, k1 } = page.area, q = q0 + y * (q1 - q0), k = k0 + x * (k1 - k0);
  setArea({ q0: q - (q - q0) * factor, q1: q + (q1 - q) * factor, k0: k - (k - k0) * factor, k1: k + (k1 - k) * factor });
}

function zoomAtPin(factor) {
  const { q0, q1, k0, k1 } = page.area, at = page.pinned;
  if (at === null || at < q0 || at >= q1 || at < k0 || at >= k1) zoom(factor);
  else zoom(factor, (at - k0) / (k1 - k0), (at - q0) / (q1 - q0));
}

const equalPace = () => find("pace").value === "equal";

/** Seconds, or stages, from left to right: the panels share their seconds, but not the number of their stages. */
const axisOf = panel => equalPace() ? panel.view.length : page.length;

function showTime() {
  const { clock } = page, now = clock.at * page.length;
  for (const panel of page.panels) panel.drawTime(clock.at * axisOf(panel), clock.at > 0 || clock.playing);
  find("time").value = Math.round(1000 * clock.at);
  find("clock").textContent = equalPace() ? `${(100 * clock.at).toFixed(1)} % of the stages` : `${(1e3 * now).toFixed(3)} of ${(1e3 * page.length).toFixed(3)} ms`;
  find("play").textContent = clock.playing ? "❚❚ pause" : "▶ play";
  find("play").setAttribute("aria-pressed", String(clock.playing));
}

/** To the next border of a stage, of either panel, in one direction. */
function step(way) {
  page.clock.stop();
  const now = page.clock.at, near = 1e-6;
  const borders = page.panels.flatMap(panel => [...panel.view.begins].map(at => at / axisOf(panel))).filter(at => way > 0 ? at > now + near : at < now - near);
  page.clock.move((borders.length ? (way > 0 ? Math.min(...borders) : Math.max(...borders)) : way > 0 ? 1 : 0) + 1e-9);
}

/** Other views are shown: everything is drawn anew. */
function changed() {
  for (const panel of page.panels) panel.view.pace(equalPace());
  page.length = Math.max(...page.panels.map(panel => panel.view.length)) || 1e-9;
  const names = page.panels.map(panel => panel.view.name);
  for (const [i, button] of [...find("examples").children].entries()) button.setAttribute("aria-pressed", String(plan.examples[i].left === names[0] && plan.examples[i].right === names[1]));
  for (const panel of page.panels) { panel.drawTokens(); panel.drawRest(); }
  showArea();
  page.clock.move(page.clock.at);
}

function showExample({ left, right }) {
  page.panels[0].choose(left);
  page.panels[1].choose(right);
  page.clock.stop();
  page.clock.at = 0;
  changed();
}

function start() {
  const { mask, shape } = plan, limit = mask.window ? `, window ${count(mask.window)}` : "";
  const nodes = plan.nodeSize ? `, ${plan.nodeSize} to a node` : "";
  find("summary").textContent = `${count(plan.documents)} documents, ${count(plan.total)} tokens, ${plan.ranks} ranks${nodes}; ${mask.name} mask${limit}; ${shape.heads}:${shape.kvHeads} heads of ${shape.headDim}`;
  find("left-out").hidden = !plan.leftOut.length;
  find("left-out").textContent = `Too large for this page: ${plan.leftOut.join(", ")}.`;
  page.clock = new Clock(showTime);
  for (let i = 0; i < 2; i++) {
    find("panels").append(find("panel").content.cloneNode(true));
    page.panels.push(new Panel(find("panels").lastElementChild, `${["left", "right"][i]} plan`));
  }
  find("examples").append(...plan.examples.map(example => {
    const button = element("button", example.name);
    button.type = "button";
    button.addEventListener("click", () => showExample(example));
    return button;
  }));
  find("play").addEventListener("click", () => page.clock.toggle());
  find("back").addEventListener("click", () => step(-1));
  find("forth").addEventListener("click", () => step(1));
  find("time").addEventListener("input", event => { page.clock.stop(); page.clock.move(Number(event.target.value) / 1000); });
  find("speed").addEventListener("change", event => { page.clock.speed = Number(event.target.value); });
  find("pace").addEventListener("change", () => { page.clock.stop(); page.clock.at = 0; changed(); });
  find("stretch").addEventListener("change", event => { for (const panel of page.panels) panel.$lanes.style.width = `${100 * event.target.value}%`; changed(); });
  find("longest").addEventListener("click", () => {
    find("document").value = plan.lengths.indexOf(most(plan.lengths));
    find("document").dispatchEvent(new Event("input"));
  });
  find("zoom-in").addEventListener("click", () => zoomAtPin(0.5));
  find("zoom-out").addEventListener("click", () => zoomAtPin(2));
  find("zoom-all").addEventListener("click", () => { find("document").value = ""; setArea(whole()); });
  find("document").max = plan.documents - 1;
  find("document").addEventListener("input", event => {
    const document = event.target.value === "" ? null : Number(event.target.value);
    if (document === null) return setArea(whole());
    if (!Number.isInteger(document) || document < 0 || document >= plan.documents) return;
    const [begin, end] = shared.documents.span(document);
    setArea({ q0: begin, q1: end, k0: begin, k1: end });
  });
  find("token").max = plan.total - 1;
  find("token").addEventListener("input", event => {
    const token = event.target.value === "" ? null : Number(event.target.value);
    page.pinned = Number.isInteger(token) && token >= 0 && token < plan.total && token !== null ? token : null;
    for (const panel of page.panels) panel.announce(page.pinned !== null);
    redraw();
  });
  find("theme").addEventListener("click", () => {
    const themes = ["system", "light", "dark"], next = themes[(themes.indexOf(document.documentElement.dataset.theme || "system") + 1) % 3];
    document.documentElement.dataset.theme = next;
    find("theme").textContent = `theme: ${next}`;
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; changed(); } });
  const hideTip = () => { tip.style.display = "none"; };
  document.addEventListener("scroll", hideTip, { passive: true });
  document.addEventListener("pointerdown", event => { if (!event.target.closest("canvas")) hideTip(); });
  document.addEventListener("keydown", event => { if (event.key === "Escape") hideTip(); });
  showExample(plan.examples[0]);
}

start();
