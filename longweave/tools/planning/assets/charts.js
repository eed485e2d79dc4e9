// Per-rank bars, the exact numbers, the headline, and the matrix of who sends to whom.

const count = number => Math.round(number).toLocaleString("en-US");
const megabytes = bytes => `${(bytes / 1e6).toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 })} MB`;
const most = list => list.reduce((a, b) => Math.max(a, b), 0);

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

/** Charts of a view: what it is called, its values, their words, and a bound to be drawn. */
function chartsOf(view) {
  const { perRank, unit, loadBound } = view.stored, tokens = perRank.tokensReceived;
  const traffic = (rank, key) => (tokens ? `${count(perRank[`tokens${key}`][rank])} tokens, ` : "") + megabytes(perRank[`bytes${key}`][rank]);
  return [
    { name: `work, ${unit}`, values: perRank.work, say: rank => `${count(perRank.work[rank])} ${unit}`, bound: loadBound, ink: "--compute" },
    { name: "tokens held", values: perRank.tokens, say: rank => `${count(perRank.tokens[rank])} tokens`, ink: "--quiet" },
    { name: "received", values: perRank.bytesReceived, say: rank => traffic(rank, "Received"), ink: "--receive" },
    { name: "sent", values: perRank.bytesSent, say: rank => traffic(rank, "Sent"), ink: "--send" },
  ];
}

function drawBars(canvas, chart) {
  const { pen, width, height } = fitted(canvas, 58), { values } = chart, ranks = values.length;
  const top = Math.max(most(values), chart.bound || 0) || 1, floor = height - 12, step = width / ranks;
  const wide = Math.max(1, step - (step > 4 ? 2 : 0.5));
  values.forEach((value, rank) => {
    pen.fillStyle = variable(chart.ink);
    const tall = Math.max(value ? 1 : 0, (floor - 4) * value / top);
    pen.fillRect(rank * step, floor - tall, wide, tall);
  });
  pen.fillStyle = variable("--quiet");
  pen.textAlign = "center";
  pen.textBaseline = "bottom";
  pen.font = "10px system-ui, sans-serif";
  const every = Math.ceil(18 / step);
  for (let rank = 0; rank < ranks; rank += every) pen.fillText(rank, rank * step + wide / 2, height);
  if (chart.bound) {
    const y = Math.round(floor - (floor - 4) * chart.bound / top) + 0.5;
    pen.strokeStyle = variable("--ink");
    pen.setLineDash([4, 3]);
    pen.beginPath();
    pen.moveTo(0, y); pen.lineTo(width, y);
    pen.stroke();
    pen.setLineDash([]);
  }
}

/** The headline: names and numbers of the report. */
function factsOf(view) {
  const { stored } = view, { perRank, unit } = stored, facts = [["imbalance", stored.imbalance.toFixed(3), "busiest rank over the mean"]];
  facts.push([`${unit} in all`, count(stored.work)]);
  facts.push(["busiest rank", `${count(most(perRank.work))} ${unit}`, stored.loadBound === undefined ? "" : `bound ${count(stored.loadBound)}`]);
  if (perRank.tokensReceived) facts.push(["most received", `${count(most(perRank.tokensReceived))} tokens`, `bound ${count(stored.receiveBound)}`]);
  const gathered = stored.bytesIfGathered ? `${(100 * stored.bytesReceived / stored.bytesIfGathered).toFixed(1)} % of gathering or a ring` : "";
  facts.push(["received in all", megabytes(stored.bytesReceived), gathered]);
  facts.push(["drawn in lock step", `${(1e3 * view.seconds).toPrecision(3)} ms`, `ranks compute ${(100 * view.busy).toFixed(0)} % of it`]);
  return facts;
}

function fillFacts(list, view) {
  list.replaceChildren(...factsOf(view).map(([name, value, note]) => {
    const box = element("div"), number = element("dd", value);
    if (note) number.append(element("small", note));
    box.append(element("dt", name), number);
    return box;
  }));
}

function fillNumbers(table, view) {
  const { perRank, unit } = view.stored;
  const columns = [["rank", null], ["tokens", "tokens"], [unit === "pairs" ? "pairs" : "work", "work"], ["tokens received", "tokensReceived"], ["tokens sent", "tokensSent"],
    ["bytes received", "bytesReceived"], ["bytes sent", "bytesSent"], ["tasks", "tasks"]].filter(([, key]) => key === null || perRank[key]);
  const rows = perRank.tokens.map((_, rank) => columns.map(([, key]) => key === null ? String(rank) : count(perRank[key][rank])));
  fillTable(table, columns.map(([name]) => name), rows);
}

/** The matrix in numbers: those that send anything. */
function fillMessages(table, view) {
  const rows = [];
  for (let from = 0; from < view.ranks; from++) for (let to = 0; to < view.ranks; to++) {
    const bytes = view.matrix.between(from, to);
    if (bytes) rows.push([String(from), String(to), count(bytes)]);
  }
  fillTable(table, ["from rank", "to rank", "bytes"], rows);
}

function fillTable(table, names, rows) {
  const rowOf = (name, cells) => { const row = element("tr"); row.append(...cells.map(cell => element(name, cell))); return row; };
  const head = rowOf("th", names);
  for (const cell of head.children) cell.scope = "col";
  table.replaceChildren(head, ...rows.map(cells => rowOf("td", cells)));
}

const MATRIX_EDGE = 30;

function drawMatrix(canvas, view, nodeSize) {
  const { pen, width } = fitted(canvas), cell = (width - MATRIX_EDGE) / view.ranks, top = view.matrix.most() || 1, heat = variable("--heat");
  for (let from = 0; from < view.ranks; from++) for (let to = 0; to < view.ranks; to++) {
    const bytes = view.matrix.between(from, to);
    pen.fillStyle = bytes ? `rgba(${heat}, ${0.12 + 0.88 * bytes / top})` : variable("--faint");
    pen.fillRect(MATRIX_EDGE + to * cell, MATRIX_EDGE + from * cell, Math.max(1, cell - (cell > 5 ? 1 : 0)), Math.max(1, cell - (cell > 5 ? 1 : 0)));
    if (cell < 44 || !bytes) continue;
    pen.fillStyle = variable(bytes / top > 0.5 ? "--paper" : "--ink");
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillText((bytes / 1e6).toPrecision(3), MATRIX_EDGE + (to + 0.5) * cell, MATRIX_EDGE + (from + 0.5) * cell);
  }
  pen.fillStyle = variable("--quiet");
  pen.textBaseline = "middle";
  const every = Math.ceil(18 / cell);
  for (let rank = 0; rank < view.ranks; rank += every) {
    pen.textAlign = "center";
    pen.fillText(rank, Math.min(MATRIX_EDGE + (rank + 0.5) * cell, width - 7), MATRIX_EDGE - 8);
    pen.textAlign = "right";
    pen.fillText(rank, MATRIX_EDGE - 4, MATRIX_EDGE + (rank + 0.5) * cell);
  }
  pen.textAlign = "left";
  pen.fillText("to rank (MB)", MATRIX_EDGE, 7);
  pen.fillText("from", 0, MATRIX_EDGE - 8);
  if (!nodeSize) return;
  pen.strokeStyle = variable("--ink");
  pen.beginPath();
  for (let rank = nodeSize; rank < view.ranks; rank += nodeSize) {
    const at = MATRIX_EDGE + rank * cell - 0.5;
    pen.moveTo(MATRIX_EDGE, at); pen.lineTo(width, at); pen.moveTo(at, MATRIX_EDGE); pen.lineTo(at, width);
  }
  pen.stroke();
}
