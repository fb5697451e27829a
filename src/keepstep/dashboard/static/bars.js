/**
 * The shapes inside the lanes: phases, parts of a recovery, a bolt where a rank was lost, and an arrow from the spare
 * that takes its rank. No meaning depends on colour alone: backward is hatched, the optimizer step has round corners,
 * waiting is a dotted line, and each bar that is wide enough has a label.
 */

import { BACKWARD, FORWARD, OPTIMIZER, STARTING, SYNCED, UPDATED } from "./model.js";

/** Names of the parts of a recovery: in full, and for narrow bars. */
export const SPAN_LABELS = {
  stop: ["Stop + Clean", "Stop"],
  decide: ["Wait for the decision", "Wait"],
  reset: ["Reset", "Reset"],
  restore: ["Restoration + Rollback", "Restore"],
  send: ["Send state", "Send"],
  advance: ["Advance", "Adv"],
  rewind: ["Rewind", "Rew"],
  rollback: ["Rollback", "Roll"],
  wait: ["Ready, waits", "Ready"],
};
/** The labels for a part of a recovery, the longest first; for a rewind they name the source of the state. */
export function spanTexts({ kind, rank }, { origins, resume_step: step }) {
  const names = SPAN_LABELS[kind] ?? [kind, kind];
  const origin = kind === "rewind" ? origins?.[rank] : null;
  return origin ? [`${names[0]}: ${origin}, step ${step}`, `${names[0]} to step ${step}`, ...names] : names;
}
const WAITING = new Set(["decide", "wait"]);
const NAMES = { [FORWARD]: ["Forward", "F"], [BACKWARD]: ["Backward", "B"], [OPTIMIZER]: ["Optimizer", "Opt"] };
const MIN_LABEL = 15;
export const FONT =
  '11px ui-sans-serif, system-ui, -apple-system, "Segoe UI", "Liberation Sans", Helvetica, Arial, sans-serif';
export const BOLD = FONT.replace("11px", "600 11px");

/** Collects bars by style and paints each style at once, because style changes are expensive on a canvas. */
export class Bars {
  /**
   * @param {CanvasRenderingContext2D} context
   * @param {object} colors from the style sheet
   */
  constructor(context, colors) {
    this.context = context;
    this.colors = colors;
    this.hatch = hatching(context, colors.hatch);
    this.batches = new Map();
    this.labels = [];
    this.widths = new Map();
  }

  /** Begins a frame. The hatching moves with the content, which has moved `shift` pixels to the left. */
  begin(shift) {
    this.batches.clear();
    this.labels.length = 0;
    this.hatch.setTransform(new DOMMatrix().translateSelf(-(shift % 8), 0));
  }

  batch(style) {
    let batch = this.batches.get(style);
    if (!batch) this.batches.set(style, (batch = []));
    return batch;
  }

  /** Adds a phase of a step from x0 to x1, in a lane whose bars extend from y to y + h. */
  phase(phase, step, isUndone, x0, x1, y, h) {
    const width = x1 - x0;
    if (width <= 0) return;
    if (phase === UPDATED) {
      // Between two steps the script loads data or evaluates. If that takes long, it should not look empty.
      if (width > 8 && !isUndone) this.batch("between").push(x0 + 1, y + h / 2 - 1, width - 3, 2);
      return;
    }
    if (phase === SYNCED) {
      if (width > 5) this.batch(isUndone ? "synced undone" : "synced").push(x0 + 1, y, width - 3, h);
      return;
    }
    const name =
      phase === STARTING ? "starting" : phase === OPTIMIZER ? "optimizer" : phase === FORWARD ? "forward" : "backward";
    const gap = width > 4 ? 1 : 0;
    this.batch(isUndone ? `${name} undone` : name).push(x0, y, width - gap, h);
    if (width < MIN_LABEL) return;
    if (phase === STARTING) {
      this.label(["starting"], x0, x1, y + h / 2, this.colors.quiet);
      return;
    }
    const [longest, letter] = NAMES[phase];
    // All bars of a frame shorten their names equally, so that the row looks even.
    const texts = [`${longest} ${step}`, `${letter} ${step}`, letter].slice(phase === OPTIMIZER ? 0 : this.detail);
    if (isUndone && this.detail === 0) texts.unshift(`${longest} ${step} · undone`);
    this.label(texts, x0, x1, y + h / 2, isUndone ? this.colors.text : this.colors.onBar);
  }

  /** Adds one part of a recovery. */
  span(kind, texts, x0, x1, y, h) {
    const width = Math.max(x1 - x0, 1);
    this.batch(WAITING.has(kind) ? "span waiting" : `span ${kind}`).push(x0, y, width - (width > 4 ? 1 : 0), h);
    if (width < MIN_LABEL) return;
    const color = WAITING.has(kind) ? this.colors.text : this.colors.onBar;
    this.label(texts, x0, x1, y + h / 2, color);
  }

  /** Adds the first text that fits, in the middle of the visible part of the bar. */
  label(texts, x0, x1, y, color) {
    const left = Math.max(x0, this.left);
    const right = Math.min(x1, this.right);
    for (const text of texts) {
      if (text && this.measure(text) + 6 <= right - left) {
        this.labels.push(text, (left + right) / 2, y, color);
        return;
      }
    }
  }

  measure(text) {
    let width = this.widths.get(text);
    if (width === undefined) {
      if (this.widths.size > 4000) this.widths.clear();
      this.context.font = FONT;
      this.widths.set(text, (width = this.context.measureText(text).width));
    }
    return width;
  }

  /** Paints the collected bars and labels. */
  paint() {
    for (const [style, boxes] of this.batches) {
      const [name, isUndone] = style.endsWith(" undone") ? [style.slice(0, -7), true] : [style, false];
      this.context.globalAlpha = isUndone ? 0.35 : 1;
      this.paintBatch(name, boxes);
      this.context.globalAlpha = 1;
    }
    this.context.font = FONT;
    this.context.textAlign = "center";
    this.context.textBaseline = "middle";
    let color = null;
    for (let i = 0; i < this.labels.length; i += 4) {
      if (this.labels[i + 3] !== color) this.context.fillStyle = color = this.labels[i + 3];
      this.context.fillText(this.labels[i], this.labels[i + 1], this.labels[i + 2] + 0.5);
    }
  }

  paintBatch(name, boxes) {
    const { context, colors } = this;
    if (name === "synced" || name === "span waiting") {
      if (name !== "synced") {
        context.fillStyle = colors.waitingFill;
        each(boxes, (x, y, w, h) => context.fillRect(x, y, w, h));
      }
      this.dots(boxes, name === "synced" ? colors.synced : colors.waiting, name !== "synced");
    } else if (name === "starting") {
      context.strokeStyle = colors.waiting;
      context.setLineDash([3, 3]);
      each(boxes, (x, y, w, h) => context.strokeRect(x + 0.5, y + 0.5, Math.max(0, w - 1), h - 1));
      context.setLineDash([]);
    } else {
      context.fillStyle = colors[name.replace("span ", "")] ?? colors.reset;
      const isRound = name === "optimizer";
      each(boxes, (x, y, w, h) => {
        if (isRound && w > 5) rounded(context, x, y, w, h, Math.min(6, w / 2));
        else context.fillRect(x, y, w, h);
      });
      if (name !== "backward" && name !== "span rollback" && name !== "span rewind") return;
      context.fillStyle = this.hatch;
      each(boxes, (x, y, w, h) => w > 7 && context.fillRect(x, y, w, h));
    }
  }

  dots(boxes, color, hasEdge) {
    const { context } = this;
    context.strokeStyle = color;
    context.lineWidth = 2;
    context.setLineDash([2, 3]);
    context.beginPath();
    each(boxes, (x, y, w, h) => {
      context.moveTo(x, y + h - (hasEdge ? 1 : h / 2));
      context.lineTo(x + w, y + h - (hasEdge ? 1 : h / 2));
    });
    context.stroke();
    context.setLineDash([]);
    context.lineWidth = 1;
  }

  /** Paints a bolt, which marks the loss of a rank. */
  bolt(x, y, size) {
    const { context } = this;
    const points = [0.15, -1, -0.55, 0.18, -0.08, 0.18, -0.22, 1, 0.55, -0.28, 0.06, -0.28, 0.42, -1];
    context.beginPath();
    for (let i = 0; i < points.length; i += 2) context.lineTo(x + points[i] * size, y + points[i + 1] * size);
    context.closePath();
    context.lineJoin = "round";
    context.lineWidth = 4;
    context.strokeStyle = this.colors.surface;
    context.stroke();
    context.fillStyle = this.colors.bolt;
    context.fill();
    context.lineWidth = 1.25;
    context.strokeStyle = this.colors.boltEdge;
    context.stroke();
    context.lineWidth = 1;
  }

  /** Paints the failures of one lane as bolts, or as thin marks if they are too close to each other. */
  failures(xs, middle, half) {
    const isDense = xs.some((x, i) => i > 0 && x - xs[i - 1] > 1 && x - xs[i - 1] < 14);
    let last = -Infinity;
    for (const x of xs) {
      if (x - last < 2) continue;
      last = x;
      this.context.fillStyle = this.colors.failure;
      if (isDense) this.context.fillRect(x - 0.75, middle - half + 4, 1.5, 2 * half - 9);
      else this.bolt(x, middle, Math.min(15, half * 0.85));
    }
  }

  /** Paints the time in which no worker held the rank. */
  vacant(x0, x1, y) {
    const { context } = this;
    if (x1 - x0 < 1) return;
    context.strokeStyle = this.colors.failure;
    context.lineWidth = 2;
    context.setLineDash([1, 3]);
    context.beginPath();
    context.moveTo(x0, y);
    context.lineTo(x1, y);
    context.stroke();
    context.setLineDash([]);
    context.lineWidth = 1;
  }

  /** Paints an arrow from the lane of a spare to the lane of the rank that it takes. */
  takeover(x, from, to, text) {
    const { context, colors } = this;
    const head = to < from ? 5 : -5;
    for (const [width, color] of [
      [5, colors.surface],
      [2, colors.takes],
    ]) {
      context.strokeStyle = color;
      context.lineWidth = width;
      context.beginPath();
      context.moveTo(x, from);
      context.lineTo(x, to + head);
      context.stroke();
    }
    context.fillStyle = colors.takes;
    context.beginPath();
    context.moveTo(x, to);
    context.lineTo(x - 5, to + 2 * head);
    context.lineTo(x + 5, to + 2 * head);
    context.fill();
    context.beginPath();
    context.arc(x, from, 4, 0, 7);
    context.fill();
    context.lineWidth = 1;
    if (!text) return;
    context.font = BOLD;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.lineWidth = 3;
    context.strokeStyle = colors.surface;
    context.strokeText(text, x + 9, from - 10);
    context.fillText(text, x + 9, from - 10);
    context.lineWidth = 1;
  }
}

function each(boxes, paint) {
  for (let i = 0; i < boxes.length; i += 4) paint(boxes[i], boxes[i + 1], boxes[i + 2], boxes[i + 3]);
}

function rounded(context, x, y, w, h, radius) {
  context.beginPath();
  context.roundRect(x, y, w, h, radius);
  context.fill();
}

function hatching(context, color) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.strokeStyle = color;
  pen.lineWidth = 1.5;
  for (const shift of [-8, 0, 8]) {
    pen.beginPath();
    pen.moveTo(shift - 1, 9);
    pen.lineTo(shift + 9, -1);
    pen.stroke();
  }
  return context.createPattern(tile, "repeat");
}

/**
 * Visits the phases of one rank or spare between two times. Its worker's death or a recovery cuts a phase off.
 * @param {(begin: number, end: number, phase: number, step: number, generation: number, worker: number) => void} visit
 */
export function eachPhase(model, ring, from, to, now, visit) {
  for (let i = Math.max(0, ring.before(from)); i < ring.length; i++) {
    const slot = ring.slot(i);
    const begin = ring.t[slot];
    if (begin > to) break;
    const next = i + 1 < ring.length ? ring.t[ring.slot(i + 1)] : now;
    const end = Math.min(next, model.cutAfter(begin, ring.w[slot]), to);
    if (end > from) visit(Math.max(begin, from), end, ring.p[slot], ring.s[slot], ring.g[slot], ring.w[slot]);
  }
}

/** Visits the common phases of a node's ranks. A common phase begins when the last rank has entered it. */
export function eachFoldedPhase(model, fold, from, to, now, visit) {
  let open = null;
  const close = (end) => {
    if (!open) return;
    const stop = Math.min(end, model.cutAfter(open[0], -1), to);
    if (stop > Math.max(open[0], from)) visit(Math.max(open[0], from), stop, open[1], open[2], open[3], -1);
  };
  for (let n = fold.from(from); n <= fold.newest; n++) {
    const i = n % fold.capacity;
    const needed = fold.needed(n);
    for (let p = 0; p < 6; p++) {
      if (fold.count[i * 6 + p] < needed) continue;
      const begin = fold.last[i * 6 + p];
      close(begin);
      if (begin > to) return;
      open = [begin, p, fold.s[i], fold.g[i]];
    }
  }
  close(now);
}

/** Returns the common parts of a recovery for a node's ranks: from the first start to the last end. */
export function foldSpans(ranks, recovery) {
  const kinds = new Map();
  for (const rank of ranks) {
    for (const { kind, begin, end } of recovery.byRank.get(rank) ?? []) {
      const known = kinds.get(kind);
      if (!known) kinds.set(kind, { kind, begin, end });
      else {
        known.begin = Math.min(known.begin, begin);
        known.end = known.end === null || end === null ? null : Math.max(known.end, end);
      }
    }
  }
  const spans = [...kinds.values()].sort((a, b) => a.begin - b.begin);
  spans.forEach((span, i) => {
    if (i > 0) span.begin = Math.max(span.begin, Math.min(spans[i - 1].end ?? span.begin, span.end ?? Infinity));
  });
  return spans;
}

/**
 * Visits the states of the parameters between two times.
 * @param {(state: "consistent"|"updating"|"updated", begin: number, end: number, step: number) => void} visit
 */
export function eachState(model, fold, from, to, now, visit) {
  const at = (n, table, p) => {
    const i = (n % fold.capacity) * 6 + p;
    return fold.count[i] ? table[i] : Infinity;
  };
  for (let n = fold.from(from); n <= fold.newest; n++) {
    const step = fold.s[n % fold.capacity];
    const begin = at(n, fold.first, FORWARD);
    if (begin === Infinity) continue;
    if (begin > to) return;
    const next = n < fold.newest ? at(n + 1, fold.first, FORWARD) : Infinity;
    const isDone = fold.count[(n % fold.capacity) * 6 + UPDATED] >= fold.needed(n);
    const limit = (time) => Math.min(time, now, to, model.cutAfter(begin, -1));
    const change = limit(at(n, fold.first, OPTIMIZER));
    const done = isDone ? limit(at(n, fold.last, UPDATED)) : limit(next);
    visit("consistent", begin, change, step);
    visit("updating", change, done, step);
    visit("updated", done, limit(next), step);
  }
}

/** Draws the lost ranks and the spares that took over, over the lanes between top and bottom. */
export function drawFailures(timeline, top, bottom) {
  const { lanes, bars, seen, now } = timeline;
  const half = lanes.laneHeight / 2;
  const middle = (i) => top + lanes.top(i) + half;
  const clamp = (y) => Math.max(top - 8, Math.min(bottom + 8, y));
  const marks = new Map();
  for (const recovery of seen) {
    const width = timeline.x(recovery.until ?? now) - timeline.x(recovery.since);
    const firstSpan = (rank) => recovery.byRank.get(rank)?.[0]?.begin;
    for (const { rank, worker } of width > 24 ? recovery.replacements : []) {
      const [from, to] = [lanes.indexOfSpare(worker), lanes.indexOfRank(rank)];
      if (from < 0 || to < 0) continue;
      const text = width > 110 && recovery.replacements.length < 3 ? `worker ${worker} takes rank ${rank}` : "";
      // Keeps a distance between the arrow and the bolt, which may be only a pixel away.
      const x = Math.max(timeline.x(firstSpan(rank) ?? recovery.begun), timeline.x(recovery.since) + 12);
      bars.takeover(x, clamp(middle(from)), clamp(middle(to) + (to < from ? half - 6 : 6 - half)), text);
    }
    for (const { rank, at } of recovery.failures) {
      const index = lanes.indexOfRank(rank);
      if (index < 0) continue;
      bars.vacant(timeline.x(at), timeline.x(firstSpan(rank) ?? recovery.until ?? now), middle(index));
      if (!marks.has(index)) marks.set(index, []);
      marks.get(index).push(timeline.x(at));
    }
  }
  for (const [index, xs] of marks) bars.failures(xs, middle(index), half);
}
