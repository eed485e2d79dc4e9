// Lookups in the plan's integers: who holds a token, what it sees, and from whom that comes. Nothing is drawn here.

/** The number of entries of a sorted list that are at most `value`, minus one: the place of the last such entry. */
function lastAtMost(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function runningSum(lengths) {
  const edges = new Float64Array(lengths.length + 1);
  for (let i = 0; i < lengths.length; i++) edges[i + 1] = edges[i] + lengths[i];
  return edges;
}

class Documents {
  constructor(lengths) {
    this.edges = runningSum(lengths);
    this.count = lengths.length;
  }

  of(token) { return Math.min(lastAtMost(this.edges, token), this.count - 1); }
  span(document) { return [this.edges[document], this.edges[document + 1]]; }
}

class Spans {
  constructor(packed) {
    this.edges = runningSum(packed.lengths);
    this.owners = packed.owners;
    this.count = packed.owners.length;
  }

  at(token) { return Math.max(0, Math.min(lastAtMost(this.edges, token), this.count - 1)); }
  owner(token) { return this.owners[this.at(token)]; }

  /** Tokens of start … stop by rank, as a Map. */
  holders(start, stop) {
    const found = new Map();
    for (let i = this.at(start); i < this.count && this.edges[i] < stop; i++) {
      const tokens = Math.min(stop, this.edges[i + 1]) - Math.max(start, this.edges[i]);
      if (tokens > 0) found.set(this.owners[i], (found.get(this.owners[i]) || 0) + tokens);
    }
    return found;
  }
}

/** Rows (q0, q1, k0, k1, lo, hi): q sees k where q0 <= q < q1, k0 <= k < k1 and lo <= k - q <= hi. */
class MaskRows {
  constructor(rows) {
    this.rows = rows.slice().sort((a, b) => a[0] - b[0]);
    this.starts = Float64Array.from(this.rows, row => row[0]);
    this.furthest = new Float64Array(this.rows.length);
    this.rows.forEach((row, i) => { this.furthest[i] = Math.max(row[1], i ? this.furthest[i - 1] : 0); });
  }

  /** The keys that some query of start … stop sees, as sorted runs that do not touch. */
  seen(start, stop) {
    const runs = [];
    for (let i = lastAtMost(this.starts, stop - 1); i >= 0 && this.furthest[i] > start; i--) {
      const [q0, q1, k0, k1, lo, hi] = this.rows[i];
      const first = Math.max(start, q0, k0 - hi), last = Math.min(stop, q1, k1 - lo);
      if (first >= last) continue;
      const from = Math.max(k0, first + lo), to = Math.min(k1, last + hi);
      if (from < to) runs.push([from, to]);
    }
    runs.sort((a, b) => a[0] - b[0]);
    const joined = [];
    for (const run of runs) {
      const before = joined[joined.length - 1];
      if (before && run[0] <= before[1]) before[1] = Math.max(before[1], run[1]); else joined.push(run);
    }
    return joined;
  }

  sees(query, key) { return this.seen(query, query + 1).some(([from, to]) => from <= key && key < to); }
}

/** Bytes from rank to rank, in any of the forms that they are stored in. */
class Messages {
  constructor(stored, ranks) {
    this.ranks = ranks;
    this.bytes = new Float64Array(ranks * ranks);
    if (!stored) return;
    if (stored.all) this.bytes.set(stored.all);
    if (stored.each) stored.each.forEach((bytes, from) => { for (let to = 0; to < ranks; to++) if (to !== from) this.bytes[from * ranks + to] = bytes; });
    if (stored.some) for (let i = 0; i < stored.some.length; i += 3) this.bytes[stored.some[i] * ranks + stored.some[i + 1]] = stored.some[i + 2];
  }

  between(from, to) { return this.bytes[from * this.ranks + to]; }
  sentBy(rank) { let sum = 0; for (let to = 0; to < this.ranks; to++) sum += this.between(rank, to); return sum; }
  receivedBy(rank) { let sum = 0; for (let from = 0; from < this.ranks; from++) sum += this.between(from, rank); return sum; }
  most() { return this.bytes.reduce((a, b) => Math.max(a, b), 0); }
}

/** One stage with its modelled seconds: of every rank's computing, receiving and sending, and of the whole. */
class Stage {
  constructor(stored, unit, data) {
    const { rates, ranks } = data;
    this.name = stored.name;
    this.work = stored.work;
    this.messages = new Messages(stored.messages, ranks);
    const seconds = bytes => bytes ? bytes * rates.byte + rates.latency : 0;
    const everyRank = Array.from({ length: ranks }, (_, rank) => rank);
    this.received = everyRank.map(rank => this.messages.receivedBy(rank));
    this.sent = everyRank.map(rank => this.messages.sentBy(rank));
    this.compute = this.work.map(work => work * rates[unit]);
    this.receive = this.received.map(seconds);
    this.send = this.sent.map(seconds);
    this.seconds = Math.max(...this.compute, ...this.receive, ...this.send);
  }
}

/** A layout with a strategy: the report, the stages, and what can be asked of tokens. */
class View {
  constructor(name, data, shared) {
    const stored = data.views[name];
    [this.layout, this.strategy] = name.split("/");
    this.name = name;
    this.stored = stored;
    this.ranks = data.ranks;
    this.documents = shared.documents;
    this.mask = shared.mask;
    this.spans = shared.spans[this.layout];
    this.matrix = new Messages(stored.matrix, data.ranks);
    this.stages = stored.stages.map(stage => new Stage(stage, stored.unit, data));
    this.seconds = this.stages.reduce((sum, stage) => sum + stage.seconds, 0);
    this.pace(false);
  }

  /** Where stages lie on the axis of time: as long as they take, or all equally wide. */
  pace(equal) {
    this.widths = this.stages.map(stage => equal ? 1 : stage.seconds);
    this.begins = runningSum(this.widths);
    this.length = this.begins[this.stages.length];
  }

  stageAt(place) { return Math.max(0, Math.min(lastAtMost(this.begins, place), this.stages.length - 1)); }

  /** How much of the time ranks compute. */
  get busy() {
    const computing = this.stages.reduce((sum, stage) => sum + stage.compute.reduce((a, b) => a + b, 0), 0);
    return this.seconds ? computing / (this.seconds * this.ranks) : 1;
  }

  /** The stage in which the pair of a query of rank `reader` with `key` of rank `holder` is computed; -1: in all. */
  stageOf(reader, key, holder) {
    const turn = this.stored.turn;
    if (!turn) return -1;
    if (turn.kind === "ring") return (reader - holder + this.ranks) % this.ranks;
    return reader === holder ? 0 : 1 + Math.max(0, lastAtMost(turn.starts[reader], key));
  }

  /** What the queries start … stop need that is not held by `owner`: tokens by rank, as a Map. */
  needs(start, stop, owner) {
    const found = new Map();
    for (const [from, to] of this.mask.seen(start, stop))
      for (const [rank, tokens] of this.spans.holders(from, to))
        if (rank !== owner) found.set(rank, (found.get(rank) || 0) + tokens);
    return new Map([...found].sort((a, b) => a[0] - b[0]));
  }

  token(token) {
    const document = this.documents.of(token), owner = this.spans.owner(token), place = this.spans.at(token);
    return {
      token, document, owner, position: token - this.documents.edges[document],
      span: [this.spans.edges[place], this.spans.edges[place + 1]],
      sees: this.mask.seen(token, token + 1).reduce((sum, [from, to]) => sum + to - from, 0),
      needs: this.needs(token, token + 1, owner),
    };
  }

  span(place) {
    const start = this.spans.edges[place], stop = this.spans.edges[place + 1], owner = this.spans.owners[place];
    return { start, stop, owner, documents: [this.documents.of(start), this.documents.of(stop - 1)], needs: this.needs(start, stop, owner) };
  }
}
