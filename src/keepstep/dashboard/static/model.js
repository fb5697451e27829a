/**
 * The page's data of the run: the newest state, and the phases of all ranks over time.
 *
 * All times are microseconds since the run's start. Phases are in ring buffers of typed arrays, so the memory of a page
 * stays constant for days. The page requests older phases again when the viewer looks at them.
 */

export const PHASES = ["starting", "forward", "backward", "synced", "optimizer", "updated"];
export const [STARTING, FORWARD, BACKWARD, SYNCED, OPTIMIZER, UPDATED] = [0, 1, 2, 3, 4, 5];
export const [BEGUN, COMPLETE, LOADED] = [6, 7, 8]; // moments of a snapshot, numbered after the phases
const NUM_PHASES = PHASES.length;
const NUM_EVENTS = 400;
const NUM_WINDOWS = 6;

/** The entries of one lane in order of time. When it is full, new entries replace the oldest. */
export class Ring {
  /** @param {number} capacity a power of two */
  constructor(capacity) {
    this.capacity = capacity;
    this.start = 0;
    this.length = 0;
    this.allocate(Math.min(64, capacity));
  }

  allocate(room) {
    const old = this.t && { t: this.t, s: this.s, g: this.g, w: this.w, p: this.p };
    const index = (i) => (this.start + i) & this.mask;
    const order = old ? Array.from({ length: this.length }, (_, i) => index(i)) : [];
    this.t = new Float64Array(room);
    this.s = new Int32Array(room);
    this.g = new Int32Array(room);
    this.w = new Int32Array(room);
    this.p = new Uint8Array(room);
    order.forEach((from, to) => this.set(to, old.t[from], old.s[from], old.g[from], old.w[from], old.p[from]));
    this.start = 0;
    this.mask = room - 1;
  }

  set(slot, t, s, g, w, p) {
    this.t[slot] = t;
    this.s[slot] = s;
    this.g[slot] = g;
    this.w[slot] = w;
    this.p[slot] = p;
  }

  /** @returns {number} the slot of the i-th oldest entry */
  slot(i) {
    return (this.start + i) & this.mask;
  }

  /** Inserts an entry by its time. Entries of a slow agent may arrive after newer ones of another worker. */
  push(t, s, g, w, p) {
    if (this.length > this.mask) {
      if (this.mask + 1 < this.capacity) this.allocate(2 * (this.mask + 1));
      else {
        this.start = (this.start + 1) & this.mask;
        this.length--;
      }
    }
    let i = this.length++;
    for (; i > 0 && this.t[this.slot(i - 1)] > t; i--) {
      const from = this.slot(i - 1);
      this.set(this.slot(i), this.t[from], this.s[from], this.g[from], this.w[from], this.p[from]);
    }
    this.set(this.slot(i), t, s, g, w, p);
  }

  /** @returns {number} the index of the last entry at or before t, or -1 */
  before(t) {
    let [low, high] = [0, this.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.t[this.slot(middle)] <= t) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }
}

/**
 * Many ranks folded into one lane: for each (generation, step) and phase, when the first and the last rank entered it.
 * The result does not depend on the order in which entries arrive, so slow agents do no harm.
 */
export class StepFold {
  constructor(capacity) {
    this.capacity = capacity;
    this.newest = -1;
    this.g = new Int32Array(capacity);
    this.s = new Int32Array(capacity);
    this.first = new Float64Array(capacity * NUM_PHASES);
    this.last = new Float64Array(capacity * NUM_PHASES);
    this.count = new Uint16Array(capacity * NUM_PHASES);
  }

  get oldest() {
    return Math.max(0, this.newest - this.capacity + 1);
  }

  record(g, s) {
    for (let n = this.newest; n >= Math.max(this.oldest, this.newest - 32); n--) {
      const i = n % this.capacity;
      if (this.s[i] === s && this.g[i] === g) return i;
      if (this.g[i] < g) break;
    }
    this.newest++;
    const i = this.newest % this.capacity;
    this.g[i] = g;
    this.s[i] = s;
    this.count.fill(0, i * NUM_PHASES, (i + 1) * NUM_PHASES);
    return i;
  }

  add(t, g, s, p) {
    const at = this.record(g, s) * NUM_PHASES + p;
    if (this.count[at]++ === 0) this.first[at] = this.last[at] = t;
    else if (t < this.first[at]) this.first[at] = t;
    else if (t > this.last[at]) this.last[at] = t;
  }

  /** @returns {number} the ranks of the n-th record: the most in one phase of it, or of the one before */
  needed(n) {
    let most = 0;
    for (let m = n; m >= Math.max(this.oldest, n - 1); m--) {
      const i = m % this.capacity;
      if (this.g[i] !== this.g[n % this.capacity]) break;
      for (let p = 0; p < NUM_PHASES; p++) most = Math.max(most, this.count[i * NUM_PHASES + p]);
    }
    return most;
  }

  /** @returns {number} number of a record from which on the records contain everything at or after t */
  from(t) {
    let [low, high] = [this.oldest, this.newest + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      const at = (middle % this.capacity) * NUM_PHASES;
      let begin = Infinity;
      for (let p = 0; p < NUM_PHASES; p++) if (this.count[at + p]) begin = Math.min(begin, this.first[at + p]);
      if (begin <= t) low = middle + 1;
      else high = middle;
    }
    return Math.max(this.oldest, low - 2);
  }
}

/** The phases of all lanes in a time window: a ring per rank and per spare, a fold per node and one for the job. */
export class PhaseStore {
  constructor(knownFrom, laneCapacity, foldCapacity, { nodeOf, shardOf }) {
    Object.assign(this, { knownFrom, laneCapacity, foldCapacity, nodeOf, shardOf });
    this.ranks = new Map();
    this.spares = new Map();
    this.nodes = new Map();
    this.shards = new Map();
    this.snapshots = new Map(); // rank -> ring of the moments of its snapshots
    this.job = new StepFold(foldCapacity);
  }

  /** Appends a columnar batch. With `after`, it skips entries that a lane already has. */
  append({ t, r, w, g, s, p }, after = false) {
    const order = Uint32Array.from(t, (_, i) => i);
    if (t.some((time, i) => i > 0 && time < t[i - 1])) order.sort((a, b) => t[a] - t[b]);
    for (const i of order) {
      if (p[i] >= NUM_PHASES) {
        this.addMoment(t[i], r[i], s[i], g[i], w[i], p[i], after);
        continue;
      }
      const ring = this.ring(r[i], w[i]);
      const newest = ring.length ? ring.slot(ring.length - 1) : -1;
      if (after && newest >= 0 && t[i] <= ring.t[newest]) continue;
      // A rank whose step was undone, or that rewound, enters `updated` without an update. That is not progress.
      const undone = newest >= 0 && p[i] === UPDATED && ![STARTING, OPTIMIZER].includes(ring.p[newest]);
      if (ring.length >= this.laneCapacity) this.knownFrom = Math.max(this.knownFrom, ring.t[ring.slot(1)]);
      ring.push(t[i], s[i], g[i], w[i], p[i]);
      if (r[i] < 0 || undone) continue;
      this.job.add(t[i], g[i], s[i], p[i]);
      this.fold(this.nodes, this.nodeOf(w[i])).add(t[i], g[i], s[i], p[i]);
      if (this.shardOf(r[i]) !== undefined) this.fold(this.shards, this.shardOf(r[i])).add(t[i], g[i], s[i], p[i]);
    }
  }

  addMoment(t, r, s, g, w, p, after) {
    if (r < 0) return;
    let ring = this.snapshots.get(r);
    if (!ring) this.snapshots.set(r, (ring = new Ring(this.foldCapacity)));
    if (after && ring.length && t <= ring.t[ring.slot(ring.length - 1)]) return;
    ring.push(t, s, g, w, p);
  }

  ring(rank, worker) {
    const [lanes, key] = rank < 0 ? [this.spares, worker] : [this.ranks, rank];
    let ring = lanes.get(key);
    if (!ring) lanes.set(key, (ring = new Ring(this.laneCapacity)));
    return ring;
  }

  fold(folds, key) {
    let fold = folds.get(key);
    if (!fold) folds.set(key, (fold = new StepFold(this.foldCapacity)));
    return fold;
  }
}

/** All data of the page. `changed` counts the changes of each part, so that a panel knows whether to draw again. */
export class Model {
  constructor() {
    this.changed = { run: 0, job: 0, workers: 0, recoveries: 0, events: 0, stragglers: 0, weights: 0 };
    this.mostWindows = NUM_WINDOWS;
    this.reset(null);
  }

  reset(run) {
    this.run = run;
    this.job = null;
    this.shards = []; // shard number of each rank; empty if all ranks hold the same shard
    this.now = 0;
    this.workers = [];
    this.recoveries = [];
    this.stragglers = [];
    this.weights = []; // the published weights of each folder
    this.events = [];
    this.overview = null;
    this.windows = []; // requested windows of older time: {begin, end, store}
    this.mostAtOnce = Infinity; // microseconds of phases that one request can bring
    this.holders = new Map(); // rank -> worker's row
    this.byWorker = new Map();
    this.spares = new Map(); // worker -> {worker, from, until, slot}
    this.deaths = new Map(); // worker -> when it was lost
    this.undoneFrom = new Map(); // generation -> its first undone step
    this.begun = []; // when each recovery began, sorted
    this.live = this.store(0);
    for (const part of Object.keys(this.changed)) this.changed[part]++;
  }

  store(knownFrom, laneCapacity = null) {
    const worldSize = this.run?.world_size ?? 1;
    const lane = laneCapacity ?? (worldSize <= 64 ? 4096 : worldSize <= 256 ? 2048 : 1024);
    const nodeOf = (worker) => this.byWorker.get(worker)?.node ?? "?";
    return new PhaseStore(knownFrom, lane, lane / 4, { nodeOf, shardOf: (rank) => this.shards[rank] });
  }

  /**
   * Processes a snapshot, the whole state. Older data of the same run is kept.
   * @returns {boolean} whether it is another run than the one shown so far
   */
  snapshot(message) {
    const isOther = this.run !== null && this.run.id !== message.run.id;
    const isSame = this.run !== null && !isOther;
    if (!isSame) this.reset(message.run);
    const joins = isSame && message.phases_from <= this.now;
    if (!joins) this.live = null;
    this.recoveries = [];
    const { phases, events, ...rest } = message;
    this.events = events;
    this.changed.events++;
    this.update(rest);
    if (!joins) this.live = this.store(message.phases_from);
    this.live.append(phases, joins);
    return isOther;
  }

  /** Processes an update, which has only the changed parts. */
  update(message) {
    this.now = Math.max(this.now, message.now);
    for (const part of ["run", "job", "stragglers", "weights"]) {
      if (message[part] !== undefined) {
        this[part] = message[part];
        this.changed[part]++;
      }
    }
    if (message.job && String(message.job.shards) !== String(this.shards)) {
      this.shards = message.job.shards;
      this.changed.workers++;
    }
    if (message.workers) this.takeWorkers(message.workers);
    if (message.recoveries) this.takeRecoveries(message.recoveries);
    if (message.events?.length) {
      this.events = this.events.concat(message.events).slice(-NUM_EVENTS);
      this.changed.events++;
    }
    if (message.phases) {
      this.live.append(message.phases);
    }
  }

  takeWorkers(rows) {
    this.workers = rows;
    this.changed.workers++;
    this.holders.clear();
    for (const row of rows) {
      this.byWorker.set(row.worker, row);
      if (row.rank !== null && row.state !== "lost") this.holders.set(row.rank, row);
      if (row.rank === null) {
        const spare = this.spare(row.worker, row.started ?? this.now);
        spare.from = row.started ?? spare.from;
        spare.warm = row.warm ?? spare.warm;
        spare.until = row.ended ?? spare.until;
      }
    }
  }

  takeRecoveries(changes) {
    for (const recovery of changes) {
      const at = this.recoveries.findIndex((known) => known.number === recovery.number);
      if (at >= 0) this.recoveries[at] = recovery;
      else this.recoveries.push(recovery);
      recovery.spans = recovery.spans.flatMap(({ ranks, ...span }) => ranks.map((rank) => ({ rank, ...span })));
      for (const failure of recovery.failures) this.deaths.set(failure.worker, failure.at);
      for (const { rank, worker } of recovery.replacements) {
        const first = recovery.spans.find((span) => span.rank === rank);
        const row = this.byWorker.get(worker);
        const spare = this.spare(worker, row?.started ?? 0);
        spare.until = first ? first.begin : recovery.begun;
        spare.warm = row?.warm ?? spare.warm ?? spare.from;
      }
      recovery.ranks = new Set([...recovery.failures, ...recovery.replacements].map((row) => row.rank));
      recovery.byRank = Map.groupBy ? Map.groupBy(recovery.spans, (span) => span.rank) : groupByRank(recovery.spans);
    }
    this.undoneFrom.clear();
    this.recoveries.sort((a, b) => a.number - b.number);
    // A superseded recovery ended when the newer one began.
    this.recoveries.forEach((recovery, i) => {
      const next = this.recoveries[i + 1];
      recovery.until = recovery.resumed ?? (recovery.superseded ? (next?.begun ?? null) : null);
    });
    this.begun = this.recoveries.map((recovery) => recovery.begun).sort((a, b) => a - b);
    this.changed.recoveries++;
  }

  spare(worker, from) {
    let spare = this.spares.get(worker);
    if (!spare) {
      spare = { worker, from, until: Infinity, warm: undefined, slot: 0 };
      this.spares.set(worker, spare);
    }
    return spare;
  }

  /** Adds requested phases of older time. */
  addWindow({ begin, end, truncated, phases }) {
    const from =
      truncated && phases.t.length
        ? Math.max(
            begin,
            phases.t.reduce((a, b) => Math.min(a, b), end),
          )
        : begin;
    const counts = new Map();
    phases.r.forEach((rank) => rank >= 0 && counts.set(rank, (counts.get(rank) ?? 0) + 1));
    const perLane = 2 ** Math.ceil(Math.log2(64 + Math.max(0, ...counts.values())));
    const store = this.store(from, perLane);
    store.append(phases);
    store.knownFrom = from;
    this.changed.workers++;
    // A truncated answer shows how much time one request can cover.
    if (truncated) this.mostAtOnce = Math.max(1e5, 0.8 * (end - from));
    this.windows = this.windows.filter((known) => known.begin < from || known.end > end);
    this.windows.push({ begin: from, end, store });
    if (this.windows.length > this.mostWindows) this.windows.shift();
  }

  /**
   * The stores that cover the parts of a time window, in order of time.
   * `missing` is the first gap.
   * @returns {{parts: {store: PhaseStore, from: number, to: number}[], missing: number[]|null}}
   */
  parts(begin, end) {
    const parts = [];
    let cursor = Math.max(0, begin);
    let missing = null;
    const liveFrom = this.live.knownFrom;
    for (const known of [...this.windows].sort((a, b) => a.begin - b.begin)) {
      const to = Math.min(known.end, end, liveFrom);
      if (to <= cursor) continue;
      if (known.begin > cursor && !missing) missing = [cursor, Math.min(known.begin, end, liveFrom)];
      const from = Math.max(cursor, known.begin);
      if (from < to) parts.push({ store: known.store, from, to });
      cursor = Math.max(cursor, to);
    }
    if (cursor < liveFrom && cursor < end && !missing) missing = [cursor, Math.min(end, liveFrom)];
    if (end > liveFrom) parts.push({ store: this.live, from: Math.max(cursor, liveFrom), to: end });
    return { parts, missing: missing && missing[1] > missing[0] ? missing : null };
  }

  /** @returns {number} the latest end of a phase that this worker entered at t: its death or the next recovery */
  cutAfter(t, worker) {
    let [low, high] = [0, this.begun.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.begun[middle] <= t) low = middle + 1;
      else high = middle;
    }
    const begun = low < this.begun.length ? this.begun[low] : Infinity;
    const death = this.deaths.get(worker) ?? Infinity;
    return Math.min(begun, death >= t ? death : Infinity);
  }

  /** @returns {boolean} whether a recovery has undone this step of this generation */
  isUndone(generation, step) {
    if (!this.undoneFrom.has(generation)) {
      const next = this.recoveries.find(
        (recovery) => recovery.generation > generation && recovery.resume_step !== null,
      );
      this.undoneFrom.set(generation, next?.resume_step ?? Infinity);
    }
    return step >= this.undoneFrom.get(generation);
  }

  /** @returns {Map<number, number[]>} shard -> the ranks that hold it, in order */
  get replicas() {
    const groups = new Map();
    this.shards.forEach((shard, rank) => groups.set(shard, [...(groups.get(shard) ?? []), rank]));
    return groups;
  }

  /** @returns {object|null} the current recovery */
  get activeRecovery() {
    const last = this.recoveries.at(-1);
    return last && last.resumed === null && !last.superseded && !this.run?.ended ? last : null;
  }

  /** @returns {number} recent duration of a step in microseconds, or 0 */
  get stepTime() {
    const rate = this.job?.steps_per_s;
    if (rate) return 1e6 / rate;
    const fold = this.live.job;
    if (fold.newest < 2) return 0;
    const at = (n) => fold.first[(n % fold.capacity) * NUM_PHASES + FORWARD];
    return Math.max(0, at(fold.newest) - at(fold.newest - 1));
  }
}

function groupByRank(spans) {
  const groups = new Map();
  for (const span of spans) {
    if (!groups.has(span.rank)) groups.set(span.rank, []);
    groups.get(span.rank).push(span);
  }
  return groups;
}

/** @returns {string} a time of the run, such as 1:02:03.450, with enough digits for `unit` (microseconds) */
export function clock(time, unit = 1000) {
  const digits = unit >= 1e6 ? 0 : Math.min(6, Math.ceil(-Math.log10(unit / 1e6) - 1e-9));
  const total = Math.max(0, Math.round(time / 10 ** (6 - digits))) / 10 ** digits;
  const hours = Math.floor(total / 3600);
  const minutes = Math.floor((total % 3600) / 60);
  const seconds = (total % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, "0");
  return `${hours ? `${hours}:${String(minutes).padStart(2, "0")}` : minutes}:${seconds}`;
}

/** @returns {string} a duration with a suitable unit */
export function duration(time) {
  if (time < 1000) return `${Math.round(time)} µs`;
  if (time < 99950) return `${(time / 1000).toFixed(1)} ms`;
  if (time < 1e6) return `${Math.round(time / 1000)} ms`;
  if (time < 100e6) return `${(time / 1e6).toFixed(2)} s`;
  const seconds = Math.round(time / 1e6);
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min${seconds % 60 ? ` ${seconds % 60} s` : ""}`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}
