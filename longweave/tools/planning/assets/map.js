// Pictures over tokens: the documents, who computes which pair, who holds what. Coarse where a pixel is many tokens.

const SAMPLES = 8; // tokens of a coarse pixel whose colours are mixed
const THIN = 3; // pixels that a run of keys has at least where a pixel is many tokens
const NAMES = 26; // pixels that a document needs for its number

function hslToRgb(hue, saturation, lightness) {
  const reach = saturation * Math.min(lightness, 1 - lightness);
  return [0, 8, 4].map(n => {
    const k = (n + hue / 30) % 12;
    return Math.round(255 * (lightness - reach * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  });
}

/** A colour for each rank: hues in rank order, three shades in turn, so that neighbours differ. */
function rankColours(ranks) {
  const shades = [0.5, 0.36, 0.64];
  return Array.from({ length: ranks }, (_, rank) => hslToRgb((215 + 360 * rank / ranks) % 360, 0.62, ranks > 6 ? shades[rank % 3] : 0.5));
}

const css = (rgb, alpha = 1) => `rgba(${rgb[0]}, ${rgb[1]}, ${rgb[2]}, ${alpha})`;
const variable = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Fit a canvas to its place on the page; returns what to draw with, in CSS pixels. */
function fitted(canvas, height) {
  const width = Math.max(1, Math.floor(canvas.clientWidth)), scale = Math.min(2, window.devicePixelRatio || 1);
  const tall = Math.max(1, Math.floor(height === undefined ? width : height));
  canvas.width = Math.floor(width * scale);
  canvas.height = Math.floor(tall * scale);
  canvas.style.height = `${tall}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, tall);
  pen.font = "11px system-ui, sans-serif";
  return { pen, width, height: tall };
}

/** The tokens of pixel `i` of `pixels` that show start … stop. */
function tokensOfPixel(i, pixels, start, stop) {
  const first = Math.floor(start + i * (stop - start) / pixels);
  return [first, Math.min(stop, Math.max(first + 1, Math.floor(start + (i + 1) * (stop - start) / pixels)))];
}

/** The colour of some tokens: that of their rank, or the mixture of their ranks'. */
function colourOf(spans, colours, first, last) {
  const count = Math.min(SAMPLES, last - first), mixed = [0, 0, 0];
  for (let i = 0; i < count; i++) {
    const rgb = colours[spans.owner(Math.floor(first + (i + 0.5) * (last - first) / count))];
    for (let c = 0; c < 3; c++) mixed[c] += rgb[c] / count;
  }
  return mixed;
}

function pasted(pen, image) {
  const sheet = document.createElement("canvas");
  sheet.width = image.width;
  sheet.height = image.height;
  sheet.getContext("2d").putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(sheet, 0, 0);
}

/** Pairs by the rank that computes them. `stage` >= 0: those of other stages are pale. */
function drawMap(canvas, view, area, colours, stage, pinned) {
  const { pen, width } = fitted(canvas), size = width;
  if (!view.documents.edges[view.documents.count]) return;
  const image = new ImageData(size, size), pixels = image.data;
  const scale = size / (area.k1 - area.k0), pale = 255 * Number(variable("--dim"));
  const keys = Array.from({ length: size }, (_, x) => {
    const [first, last] = tokensOfPixel(x, size, area.k0, area.k1), key = Math.floor((first + last) / 2);
    return { key, holder: view.spans.owner(key) };
  });
  const thin = area.k1 - area.k0 > size ? THIN : 0;
  for (let y = 0; y < size; y++) {
    const [first, last] = tokensOfPixel(y, size, area.q0, area.q1);
    const rgb = colourOf(view.spans, colours, first, last), reader = view.spans.owner(Math.floor((first + last) / 2));
    for (const [from, to] of view.mask.seen(first, last)) {
      const x0 = Math.floor((from - area.k0) * scale), x1 = Math.min(size, Math.max(Math.ceil((to - area.k0) * scale), x0 + thin));
      for (let x = Math.max(0, x0); x < x1; x++) {
        const turn = stage < 0 ? -1 : view.stageOf(reader, keys[x].key, keys[x].holder), at = 4 * (y * size + x);
        pixels[at] = rgb[0]; pixels[at + 1] = rgb[1]; pixels[at + 2] = rgb[2];
        pixels[at + 3] = turn >= 0 && turn !== stage ? pale : 255;
      }
    }
  }
  pasted(pen, image);
  drawBorders(pen, view.documents, area, size);
  const inside = view.documents.of(area.q1 - 1) - view.documents.of(area.q0) + 1;
  if (inside > size / 4) {
    pen.fillStyle = variable("--quiet");
    pen.textAlign = "right";
    pen.fillText(`${inside} documents: choose one above, or zoom in`, size - 8, 16);
  }
  if (pinned !== null) {
    pen.strokeStyle = variable("--ink");
    const y = (pinned + 0.5 - area.q0) * size / (area.q1 - area.q0), x = (pinned + 0.5 - area.k0) * scale;
    pen.beginPath();
    pen.moveTo(0, y); pen.lineTo(size, y); pen.moveTo(x, 0); pen.lineTo(x, size);
    pen.stroke();
  }
}

/** Lines between documents that are wide enough to have some. */
function drawBorders(pen, documents, area, size) {
  pen.strokeStyle = variable("--line");
  pen.lineWidth = 1;
  for (const [start, stop, across] of [[area.k0, area.k1, false], [area.q0, area.q1, true]]) {
    const scale = size / (stop - start);
    pen.beginPath();
    for (let d = documents.of(start); d < documents.count && documents.edges[d] < stop; d++) {
      const at = Math.round((documents.edges[d] - start) * scale) + 0.5;
      if ((documents.edges[d + 1] - documents.edges[d]) * scale < 5) continue;
      if (across) { pen.moveTo(0, at); pen.lineTo(size, at); } else { pen.moveTo(at, 0); pen.lineTo(at, size); }
    }
    pen.stroke();
  }
}

/** Documents above, the ranks of the keys below. */
function drawRuler(canvas, view, area, colours) {
  const { pen, width } = fitted(canvas, 26), { documents } = view, scale = width / (area.k1 - area.k0);
  if (!view.spans.count) return;
  const first = documents.of(area.k0), last = documents.of(Math.max(area.k0, area.k1 - 1));
  pen.textBaseline = "middle";
  pen.textAlign = "center";
  let named = 0;
  for (let d = first; d <= last; d++) {
    const [start, stop] = documents.span(d);
    if (start === stop) continue;
    const x0 = Math.max(0, (start - area.k0) * scale), x1 = Math.min(width, (stop - area.k0) * scale);
    pen.fillStyle = variable(d % 2 ? "--line" : "--faint");
    pen.fillRect(x0, 0, Math.max(x1 - x0, 0.5), 16);
    if (x1 - x0 < NAMES) continue;
    pen.fillStyle = variable("--ink");
    pen.fillText(x1 - x0 > 60 ? `doc ${d}` : d, (x0 + x1) / 2, 8.5);
    named++;
  }
  if (!named) {
    pen.fillStyle = variable("--ink");
    pen.fillText(`documents ${first} to ${last}`, width / 2, 8.5);
  }
  for (let x = 0; x < width; x++) {
    pen.fillStyle = css(colourOf(view.spans, colours, ...tokensOfPixel(x, width, area.k0, area.k1)));
    pen.fillRect(x, 18, 1, 8);
  }
}

const holdsRow = ranks => Math.max(3, Math.min(16, Math.floor(260 / ranks)));

/** A line for each rank, dark where it holds tokens; paler where it holds a part of a pixel's. */
function drawHolds(canvas, view, area, colours) {
  const row = holdsRow(view.ranks), { pen, width } = fitted(canvas, row * view.ranks), { spans } = view;
  const share = new Float32Array(view.ranks * width), scale = width / (area.k1 - area.k0);
  for (let i = spans.at(area.k0); i < spans.count && spans.edges[i] < area.k1; i++) {
    const from = Math.max(0, (spans.edges[i] - area.k0) * scale), to = Math.min(width, (spans.edges[i + 1] - area.k0) * scale);
    for (let x = Math.floor(from); x < to; x++) share[spans.owners[i] * width + x] += Math.min(to, x + 1) - Math.max(from, x);
  }
  for (let rank = 0; rank < view.ranks; rank++) {
    pen.fillStyle = variable(rank % 2 ? "--card" : "--faint");
    pen.fillRect(0, rank * row, width, row);
    for (let x = 0; x < width; x++) {
      const held = share[rank * width + x];
      if (held <= 0) continue;
      pen.fillStyle = css(colours[rank], 0.35 + 0.65 * Math.min(1, held));
      pen.fillRect(x, rank * row, 1, row > 4 ? row - 1 : row);
    }
  }
}
