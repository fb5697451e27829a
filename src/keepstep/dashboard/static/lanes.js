/**
 * The lanes, their order and their height: a lane per rank and per spare, or in a large job a lane per node.
 *
 * Nodes that need attention (with a recent failure or a straggler) come first and are unfolded. Lanes that the viewer
 * folds or unfolds stay as they are.
 */

import { UPDATED } from "./model.js";

const FOLD_ABOVE = 40; // ranks
const RECENT = 60e6; // a failure is recent for a minute
const MAX_UNFOLDED = 4; // maximum number of nodes that are unfolded automatically
const LOW = 22; // the minimum height of a lane, in pixels
const HEADING = 26; // the height of a shard's heading

/** The lanes, their order and the vertical scroll position. */
export class Lanes {
  constructor(model) {
    this.model = model;
    this.list = [];
    this.index = new Map(); // key -> place in the list
    this.scroll = 0;
    this.height = 0;
    this.laneHeight = LOW;
    this.tops = [];
    this.total = 0; // the height of all lanes
    this.highest = 54; // the preferred height of a lane
    this.focus = null; // the recovery that the viewer jumped to
    this.selected = null; // key of the lane that the keyboard is on
    this.flash = { key: null, until: 0 };
    this.restart();
  }

  /** Resets the viewer's folding, because another run has other nodes. */
  restart() {
    this.wantsFolding = null;
    this.byHand = new Map();
    this.stamp = "";
    this.focus = null;
    this.scroll = 0;
  }

  get isFolding() {
    const { world_size: worldSize } = this.model.run ?? { world_size: 0 };
    return this.wantsFolding ?? worldSize > FOLD_ABOVE;
  }

  /** Updates the list. It is cheap if nothing has changed. */
  refresh(now) {
    const { changed } = this.model;
    const second = Math.floor(now / 1e6);
    const hand = [...this.byHand].join();
    const stamp = [
      changed.run,
      changed.workers,
      changed.recoveries,
      changed.stragglers,
      second,
      this.isFolding,
      hand,
      this.focus?.number,
    ].join("|");
    if (stamp === this.stamp) return;
    this.stamp = stamp;
    this.list = this.isFolding ? this.folded(now) : [...this.byShard(), ...this.spares()];
    this.index = new Map(this.list.map((lane, i) => [lane.key, i]));
    this.layout(this.height);
  }

  /** The lanes of all ranks. If ranks hold different shards, they are grouped below the headings of shards. */
  byShard() {
    const { replicas } = this.model;
    if (replicas.size === 0) return this.ranks(this.allRanks());
    return [...replicas].flatMap(([shard, ranks]) => {
      const key = `shard ${shard}`;
      const heading = { kind: "shard", key, name: key, rank: null, node: null, shard, ranks, folded: false, indent: 0 };
      return [heading, ...this.ranks(ranks, 1)];
    });
  }

  get hasShards() {
    return this.list.some((lane) => lane.kind === "shard");
  }

  allRanks() {
    return Array.from({ length: this.model.run?.world_size ?? 0 }, (_, rank) => rank);
  }

  ranks(ranks, indent = 0) {
    return ranks.map((rank) => {
      const node = this.model.holders.get(rank)?.node ?? null;
      return { kind: "rank", key: `rank ${rank}`, name: `rank ${rank}`, rank, node, folded: false, indent };
    });
  }

  spares() {
    const slots = Math.max(this.model.run?.num_spares ?? 0, this.model.spares.size ? 1 : 0);
    assignSlots([...this.model.spares.values()], slots);
    return Array.from({ length: slots }, (_, slot) => {
      const name = slots > 1 ? `spare ${slot + 1}` : "spare";
      return { kind: "spare", key: name, name, rank: null, node: null, folded: false, slot, indent: 0 };
    });
  }

  folded(now) {
    const groups = new Map();
    for (const rank of this.allRanks()) {
      const node = this.model.holders.get(rank)?.node ?? "no node yet";
      if (!groups.has(node)) groups.set(node, []);
      groups.get(node).push(rank);
    }
    const attention = this.attention(now);
    const first = [...attention.keys()].filter((node) => groups.has(node));
    const others = [...groups.keys()].filter((node) => !attention.has(node));
    const lanesOf = (node, isFolded) => {
      const ranks = groups.get(node);
      const folded = this.byHand.get(node) ?? isFolded;
      const header = { kind: "node", key: node, name: node, rank: null, node, ranks, folded, indent: 0 };
      header.reason = attention.get(node) ?? null;
      return [header, ...(folded ? [] : this.ranks(ranks, 1))];
    };
    return [
      ...first.flatMap((node, i) => lanesOf(node, i >= MAX_UNFOLDED)),
      ...this.spares(),
      ...others.flatMap((node) => lanesOf(node, true)),
    ];
  }

  /** The nodes that need attention, most urgent first, each with the reason. */
  attention(now) {
    const nodes = new Map();
    const mark = (rank, why) => {
      const node = this.model.holders.get(rank)?.node;
      if (node && !nodes.has(node)) nodes.set(node, why);
    };
    if (this.focus) for (const rank of this.focus.ranks) mark(rank, `recovery ${this.focus.number}`);
    for (const recovery of [...this.model.recoveries].reverse()) {
      if ((recovery.until ?? now) < now - RECENT) break;
      for (const rank of recovery.ranks) mark(rank, recovery.until === null ? "recovering" : "failed recently");
    }
    for (const { rank } of this.model.stragglers) mark(rank, "straggler");
    return nodes;
  }

  /**
   * The texts beside a lane's name.
   * @param {number} moment the time of the state, which is in the past if the viewer looks at older time
   * @returns {{state: string, tone: string, detail: string, warning: string}}
   */
  words(lane, moment, isLive) {
    const { model } = this;
    if (lane.kind === "shard") return { state: replicasOf(lane), tone: "quiet", detail: "", warning: "" };
    if (lane.kind === "spare") {
      const spare = [...model.spares.values()].find(
        ({ slot, shownFrom, until }) => slot === lane.slot && shownFrom <= moment && until > moment,
      );
      if (!spare) return { state: "", tone: "quiet", detail: "none", warning: "" };
      const detail = `${model.byWorker.get(spare.worker)?.node ?? "?"} · worker ${spare.worker}`;
      return { state: spare.warm <= moment ? "warm" : "starts", tone: "quiet", detail, warning: "" };
    }
    const ranks = lane.kind === "node" ? lane.ranks : [lane.rank];
    const entries = ranks.map((rank) => this.entryOf(rank, moment)).filter(Boolean);
    const holder = model.byWorker.get(entries[0]?.worker) ?? model.holders.get(lane.rank);
    const slow = model.stragglers.find(({ rank }) => rank === lane.rank);
    const words = {
      state: entries.length ? `at step ${Math.min(...entries.map(({ step }) => step))}` : "",
      tone: "quiet",
      detail: holder && lane.kind === "rank" ? `${holder.node} · worker ${holder.worker}` : "",
      warning: slow ? `▲ slow ${slow.phase} ${slow.ratio.toFixed(1)}×` : "",
    };
    const active = isLive ? model.activeRecovery : null;
    if (!active) return words;
    const isLost = active.failures.some(({ rank }) => ranks.includes(rank));
    return { ...words, state: isLost ? "⚡ lost" : "recovering", tone: isLost ? "failure" : "takes" };
  }

  /** The worker that held a rank at this time, and the step of its parameters. */
  entryOf(rank, moment) {
    if (this.partsOf !== moment) [this.partsOf, this.parts] = [moment, this.model.parts(moment - 1, moment).parts];
    for (const { store, to } of this.parts) {
      const ring = store.ranks.get(rank);
      const at = ring ? ring.before(Math.min(moment, to)) : -1;
      if (at < 0) continue;
      const i = ring.slot(at);
      return { worker: ring.w[i], step: ring.s[i] + (ring.p[i] === UPDATED ? 1 : 0) };
    }
    return null;
  }

  /** Distributes the height among the lanes. */
  layout(height) {
    this.height = height;
    const headings = this.numHeadings;
    const fits = Math.floor((height - headings * HEADING) / Math.max(1, this.list.length - headings));
    this.laneHeight = Math.max(LOW, Math.min(this.highest, fits));
    this.total = 0;
    this.tops = this.list.map((lane) => (this.total += this.heightOf(lane)) - this.heightOf(lane));
    this.scrollBy(0);
  }

  get numHeadings() {
    return this.list.filter((lane) => lane.kind === "shard").length;
  }

  /** @returns {number} the height of one lane, in pixels */
  heightOf(lane) {
    return lane.kind === "shard" ? HEADING : this.laneHeight;
  }

  /** @returns {number} the height at which all lanes have their preferred height, at most `most` */
  wanted(most) {
    const headings = this.numHeadings;
    return Math.min(most, headings * HEADING + Math.max(3, this.list.length - headings) * this.highest);
  }

  scrollBy(pixels) {
    const most = Math.max(0, this.total - this.height);
    this.scroll = Math.max(0, Math.min(most, this.scroll + pixels));
  }

  /** @returns {number} the upper edge of the i-th lane */
  top(i) {
    return this.tops[i] - this.scroll;
  }

  /** @returns {[number, number]} the first and the last lane that are at least partly visible */
  visible() {
    const first = this.indexAt(this.scroll);
    const last = this.indexAt(this.scroll + this.height - 1);
    return [Math.max(0, first), last < 0 ? this.list.length - 1 : last];
  }

  /** @returns {number} the lane at a height below the upper edge of the first one; -1 below the last one */
  indexAt(y) {
    return y >= this.total ? -1 : this.tops.findLastIndex((top) => top <= y);
  }

  /** @returns {object|null} the lane at this height */
  at(y) {
    if (y < 0 || y >= this.height) return null;
    return this.list[this.indexAt(y + this.scroll)] ?? null;
  }

  /** @returns {number} index of a rank's lane or of its node's lane; -1 if there is none */
  indexOfRank(rank) {
    return this.index.get(`rank ${rank}`) ?? this.index.get(this.model.holders.get(rank)?.node) ?? -1;
  }

  indexOfSpare(worker) {
    const slot = this.model.spares.get(worker)?.slot;
    return this.list.findIndex((lane) => lane.kind === "spare" && lane.slot === slot);
  }

  /** Folds or unfolds one node. */
  toggle(lane) {
    if (lane?.kind === "node") this.byHand.set(lane.key, !lane.folded);
    else if (lane?.kind === "rank" && this.isFolding && lane.node) this.byHand.set(lane.node, true);
  }

  /** Switches between a lane per node and a lane per rank. */
  toggleFolding() {
    this.wantsFolding = !this.isFolding;
    this.byHand.clear();
    this.scroll = 0;
  }

  /** Moves the keyboard's selection up or down and scrolls it into view. */
  select(step) {
    const at = this.list.findIndex((lane) => lane.key === this.selected);
    const next =
      at < 0 ? (step > 0 ? 0 : this.list.length - 1) : Math.max(0, Math.min(this.list.length - 1, at + step));
    this.selected = this.list[next]?.key ?? null;
    this.reveal(next);
    return this.list[next] ?? null;
  }

  get selectedLane() {
    return this.list.find((lane) => lane.key === this.selected) ?? null;
  }

  reveal(index) {
    if (!this.list[index]) return;
    const top = this.top(index);
    const bottom = top + this.heightOf(this.list[index]);
    if (top < 0) this.scrollBy(top);
    else if (bottom > this.height) this.scrollBy(bottom - this.height);
  }

  /**
   * Finds a rank by its number, or a node by its name, and shows it.
   * @returns {boolean} whether it was found
   */
  find(text, now) {
    const number = /^\s*(?:rank\s*)?(\d+)\s*$/i.exec(text);
    const rank = number ? Number(number[1]) : null;
    if (rank !== null && this.isFolding) {
      const node = this.model.holders.get(rank)?.node;
      if (node) this.byHand.set(node, false);
    }
    this.refresh(now);
    const wanted = text.trim().toLowerCase();
    const index =
      rank !== null
        ? this.list.findIndex((lane) => lane.rank === rank)
        : this.list.findIndex((lane) => wanted && lane.name.toLowerCase().includes(wanted));
    if (index < 0) return false;
    this.selected = this.list[index].key;
    this.flash = { key: this.selected, until: performance.now() + 2000 };
    this.reveal(index);
    return true;
  }
}

/** The number of a shard's replicas, as text. */
function replicasOf({ ranks }) {
  return ranks.length === 1 ? "no replica" : `${ranks.length} replicas`;
}

/**
 * Assigns each spare process to one of the spares' lanes. A lane shows several processes one after the other. If all
 * lanes are taken, a new process gets the lane that becomes free first.
 */
function assignSlots(spares, slots) {
  const freeFrom = new Array(slots).fill(-1);
  spares.sort((a, b) => (a.until === b.until ? a.from - b.from || a.worker - b.worker : a.until - b.until));
  for (const spare of spares) {
    let slot = freeFrom.findIndex((free) => free <= spare.from);
    if (slot < 0) slot = freeFrom.indexOf(Math.min(...freeFrom));
    spare.slot = slot;
    // The start of an old process may be unknown; it is shown from when its lane became free.
    spare.shownFrom = Math.max(spare.from, freeFrom[slot]);
    freeFrom[slot] = spare.until;
  }
}
