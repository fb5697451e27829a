/**
 * The visible time window, the gestures that change it (on the timeline and on the overview strip of the whole run),
 * and the tooltip.
 */

import { SPAN_LABELS, eachFoldedPhase, eachPhase, foldSpans } from "./bars.js";
import { PHASES, SYNCED, clock, duration } from "./model.js";
import { element } from "./panels.js";
import { eachSnapshot } from "./snapshots.js";
import { AXIS, GUTTER } from "./timeline.js";
import { originsOf } from "./words.js";

const SHORTEST = 200; // microseconds
const RIGHT_MARGIN = 0.03; // of the view, empty to the right of now

/** The visible time window. While it follows the run, its right end stays slightly ahead of now. */
export class View {
  constructor() {
    this.begin = 0;
    this.end = 10e6;
    this.now = 0;
    this.restart();
  }

  /** Follows the run. The length adapts to the steps as soon as there are some. */
  restart() {
    this.following = true;
    this.isChosen = false; // whether the viewer has chosen the length
    this.isShown = false; // whether `show` has set the length
    this.target = null;
  }

  get length() {
    return this.end - this.begin;
  }

  /** Moves the window with time. */
  tick(now, stepTime) {
    this.now = now;
    if (this.target) this.glide();
    if (!this.following) return;
    if (!this.isChosen) {
      const wanted = stepTime ? Math.max(1e6, Math.min(30e6, 11 * stepTime)) : 10e6;
      this.begin = this.end - (this.length + (wanted - this.length) * 0.15);
    }
    const length = this.length;
    this.end = now + length * RIGHT_MARGIN;
    this.begin = this.end - length;
  }

  glide() {
    const [begin, end] = this.target;
    const part = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1 : 0.3;
    this.begin += (begin - this.begin) * part;
    this.end += (end - this.end) * part;
    if (Math.abs(begin - this.begin) + Math.abs(end - this.end) > (end - begin) / 2000) return;
    [this.begin, this.end] = this.target;
    this.target = null;
  }

  /** Shows this time window and stops following. */
  show(begin, end) {
    this.following = false;
    this.isShown = true;
    this.target = this.limited(begin, end);
  }

  limited(begin, end) {
    const longest = Math.max(10e6, this.now * 1.06);
    const length = Math.max(SHORTEST, Math.min(longest, end - begin));
    const middle = (begin + end) / 2;
    const from = Math.max(-0.02 * length, Math.min(middle - length / 2, this.now + length * RIGHT_MARGIN - length));
    return [from, from + length];
  }

  /** Zooms around the point at this fraction of the view. A following view continues to follow. */
  zoom(factor, fraction = 0.5) {
    this.target = null;
    this.isChosen = true;
    this.isShown = false;
    const about = this.following ? this.now : this.begin + fraction * this.length;
    const [begin, end] = [about - (about - this.begin) * factor, about + (this.end - about) * factor];
    if (this.following) {
      const length = Math.max(SHORTEST, Math.min(Math.max(10e6, this.now * 1.06), this.length * factor));
      this.begin = this.end - length;
    } else [this.begin, this.end] = this.limited(begin, end);
  }

  /** Moves the window by this much time. Going back in time stops following. */
  pan(time) {
    this.target = null;
    this.isChosen = true;
    this.following = false;
    [this.begin, this.end] = this.limited(this.begin + time, this.end + time);
  }

  pause() {
    this.following = false;
  }

  follow() {
    this.target = null;
    this.following = true;
    // The length for a recovery or for the whole run is not useful for following.
    if (this.isShown || this.length > 120e6) this.isChosen = false;
    this.isShown = false;
  }

  /** Shows the whole run. */
  whole() {
    this.show(0, Math.max(1e6, this.now * 1.02));
  }
}

/**
 * Finds the objects under the pointer.
 * @returns {object|null} the lane and the time; and the span, phase, recovery and failure there, if any
 */
export function hitTest(timeline, x, y) {
  const { model, view, now } = timeline;
  const lane = timeline.lanes.at(y - AXIS);
  if (!lane || !model.live) return null;
  const time = timeline.time(x);
  const found = { lane, time, isName: x < GUTTER };
  if (found.isName || time > now) return found;
  if (lane.kind === "shard") return found;
  const tolerance = (3 * view.length) / timeline.width;
  found.recovery = timeline.seen.find((r) => r.since - tolerance <= time && time <= (r.until ?? now) + tolerance);
  if (found.recovery) {
    const spans =
      lane.kind === "node" ? foldSpans(lane.ranks, found.recovery) : (found.recovery.byRank.get(lane.rank) ?? []);
    found.span = spans.find((span) => span.begin <= time && time < (span.end ?? now));
    found.failure = found.recovery.failures.find((failure) => failure.rank === lane.rank);
  }
  const visit = (begin, end, phase, step, generation, worker) => {
    if (begin <= time && time < end) found.phase = { begin, end, phase, step, generation, worker };
  };
  if (timeline.isCoarse || lane.kind === "spare") return found;
  if (lane.kind === "rank") found.snapshot = snapshotAt(timeline, lane, time);
  const [from, to] = [time - 60e6, Math.max(view.end, time + 1)];
  for (const { store } of model.parts(time, time + 1).parts) {
    if (lane.kind === "node" && store.nodes.has(lane.key))
      eachFoldedPhase(model, store.nodes.get(lane.key), from, to, now, visit);
    if (lane.kind === "rank" && store.ranks.has(lane.rank))
      eachPhase(model, store.ranks.get(lane.rank), from, to, now, visit);
  }
  return found;
}

/** The snapshot of a rank that was being taken at this time, or was completed shortly before. */
function snapshotAt({ model, view, width }, { rank }, time) {
  let found = null;
  for (const { store } of model.parts(time, time + 1).parts) {
    const ring = store.snapshots.get(rank);
    if (!ring) continue;
    eachSnapshot(ring, time - 60e6, time, (snapshot) => {
      const end = snapshot.end ?? model.cutAfter(snapshot.begin, snapshot.worker);
      if (time <= end + (5 * view.length) / width) found = snapshot;
    });
  }
  return found;
}

/** Handles wheel, drag and touch on the timeline. */
export function listenToTimeline(canvas, timeline, lanes, view, onClick) {
  const fraction = (event) => (event.offsetX - GUTTER) / Math.max(1, canvas.clientWidth - GUTTER);
  const perPixel = () => view.length / Math.max(1, canvas.clientWidth - GUTTER);
  canvas.addEventListener(
    "wheel",
    (event) => {
      const amount = event.deltaMode === 1 ? 30 : 1;
      const scrolled = lanes.scroll;
      if (event.ctrlKey || event.metaKey) view.zoom(Math.exp(event.deltaY * amount * 0.0022), fraction(event));
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        view.pan((event.deltaX || event.deltaY) * amount * perPixel());
      } else {
        lanes.scrollBy(event.deltaY * amount);
        if (lanes.scroll === scrolled) return; // at the last lane, the wheel scrolls the page
      }
      event.preventDefault();
    },
    { passive: false },
  );

  const pointers = new Map();
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    timeline.hover = { x: event.offsetX, y: event.offsetY };
    const before = pointers.get(event.pointerId);
    if (!before) return;
    const [dx, dy] = [event.offsetX - before.x, event.offsetY - before.y];
    moved += Math.abs(dx) + Math.abs(dy);
    if (moved < 4) return;
    const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other) {
      const distance = (a) => Math.max(20, Math.abs(a.x - other.x));
      view.zoom(distance(before) / distance({ x: event.offsetX }), fraction(event));
    } else {
      if (dx) view.pan(-dx * perPixel());
      lanes.scrollBy(-dy);
      canvas.classList.add("dragging");
    }
    pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
  });
  const release = (event) => {
    if (pointers.delete(event.pointerId) && moved < 4 && event.type === "pointerup")
      onClick(hitTest(timeline, event.offsetX, event.offsetY));
    canvas.classList.remove("dragging");
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => {
    timeline.hover = null;
  });
  canvas.addEventListener("dblclick", (event) => view.zoom(event.shiftKey ? 2 : 0.5, fraction(event)));
}

/** The strip that shows the whole run: drawing it, and dragging the visible window along it. */
export class Overview {
  constructor(canvas, model, view) {
    Object.assign(this, { canvas, model, view, colors: {} });
    this.context = canvas.getContext("2d");
    let grip = null;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      grip = this.gripAt(event.offsetX);
      if (grip.part === "outside") {
        view.pan(this.time(event.offsetX) - (view.begin + view.end) / 2);
        grip = this.gripAt(event.offsetX);
      }
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!grip) {
        canvas.style.cursor = { left: "ew-resize", right: "ew-resize", inside: "grab", outside: "pointer" }[
          this.gripAt(event.offsetX).part
        ];
        return;
      }
      const time = this.time(event.offsetX);
      if (grip.part === "inside") view.pan(time - grip.offset - view.begin);
      else if (grip.part === "left")
        [view.begin, view.end] = view.limited(Math.min(time, view.end - SHORTEST), view.end);
      else [view.begin, view.end] = view.limited(view.begin, Math.max(time, view.begin + SHORTEST));
      view.following = false;
      view.isChosen = true;
    });
    const release = () => {
      grip = null;
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
  }

  get whole() {
    return Math.max(10e6, this.model.now);
  }

  x(time) {
    return GUTTER + (time / this.whole) * (this.width - GUTTER - 1);
  }

  time(x) {
    return ((x - GUTTER) / (this.width - GUTTER - 1)) * this.whole;
  }

  brush() {
    const left = Math.max(GUTTER, this.x(this.view.begin));
    const right = Math.min(this.width, Math.max(this.x(this.view.end), left + 6));
    return [Math.min(left, right - 6), right];
  }

  gripAt(x) {
    const [left, right] = this.brush();
    const offset = this.time(x) - this.view.begin;
    if (right - left > 24 && Math.abs(x - left) < 6) return { part: "left", offset };
    if (right - left > 24 && Math.abs(x - right) < 6) return { part: "right", offset };
    return { part: x >= left - 5 && x <= right + 5 ? "inside" : "outside", offset };
  }

  draw() {
    const { canvas, context, colors, model } = this;
    const ratio = window.devicePixelRatio || 1;
    [this.width, this.height] = [canvas.clientWidth, canvas.clientHeight];
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(this.height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const base = this.height - 5;
    this.drawSteps(base);
    context.fillStyle = colors.line;
    context.fillRect(GUTTER, base, this.width, 1);
    let last = -9;
    const isDense = model.recoveries.length > this.width / 8;
    for (const recovery of model.recoveries) {
      const x = this.x(recovery.since);
      if (x - last < 3) continue;
      last = x;
      context.fillStyle = colors.failure;
      context.fillRect(x - 1, isDense ? base - 10 : 6, isDense ? 1 : 2, isDense ? 10 : base - 6);
      if (isDense) continue;
      context.beginPath();
      context.arc(x, 6, 3, 0, 7);
      context.fill();
    }
    const [left, right] = this.brush();
    context.fillStyle = colors.brush;
    context.fillRect(left, 1, right - left, this.height - 2);
    context.strokeStyle = colors.accent;
    context.lineWidth = 1.5;
    context.strokeRect(left + 0.75, 1.75, right - left - 1.5, this.height - 3.5);
  }

  drawSteps(base) {
    const { context, colors } = this;
    const { steps, bucket } = this.model.overview ?? { steps: [] };
    if (steps.length < 2) return;
    const mean = Math.max(0.01, steps.reduce((sum, count) => sum + count, 0) / steps.length);
    // With few steps per bucket the curve would be noisy, so several buckets are drawn as one.
    const group = Math.ceil(Math.max(6 / mean, (2 * steps.length) / this.width));
    const full = [];
    for (let i = 0; i < steps.length - 1; i += group) {
      const some = steps.slice(i, Math.min(i + group, steps.length - 1)); // the last bucket is not complete yet
      full.push(some.reduce((sum, count) => sum + count, 0) / some.length);
    }
    const most = Math.max(1, ...full);
    const width = bucket * group;
    context.fillStyle = colors.area;
    context.beginPath();
    context.moveTo(this.x(0), base);
    full.forEach((count, i) => {
      const y = base - (count / most) * (base - 12);
      context.lineTo(this.x(i * width), y);
      context.lineTo(this.x(Math.min((i + 1) * width, (steps.length - 1) * bucket)), y);
    });
    context.lineTo(this.x((steps.length - 1) * bucket), base);
    context.fill();
  }
}

/** The tooltip about the object under the pointer. */
export class Tooltip {
  constructor(box, model) {
    Object.assign(this, { box, model, stamp: "" });
  }

  /** Shows the object under the pointer, or hides the tooltip. */
  draw(hit, hover, width) {
    const { box } = this;
    const content = hit && !hit.isName ? this.describe(hit) : null;
    box.hidden = !content;
    if (!content) return;
    const [title, alarm, rows] = content;
    const stamp = JSON.stringify(content);
    if (stamp !== this.stamp) {
      this.stamp = stamp;
      const list = rows
        .filter(([, value]) => value !== null)
        .flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
      box.replaceChildren(
        element("b", {}, title),
        ...(alarm ? [element("div", { class: "alarm" }, alarm)] : []),
        element("dl", {}, ...list),
      );
    }
    const isLeft = hover.x + box.offsetWidth + 24 > width;
    box.style.left = `${isLeft ? hover.x - box.offsetWidth - 14 : hover.x + 14}px`;
    box.style.top = `${hover.y + 16}px`;
  }

  describe({ lane, time, span, phase, failure, recovery, snapshot }) {
    const { model } = this;
    const worker =
      phase && phase.worker >= 0
        ? model.byWorker.get(phase.worker)
        : lane.rank !== null
          ? model.holders.get(lane.rank)
          : null;
    const alarm = failure ? `⚡ lost at ${clock(failure.at)}: ${failure.detail}` : "";
    const rows = [
      ["worker", worker ? `${worker.worker} (pid ${worker.pid})` : null],
      ["node", worker?.node ?? lane.node],
    ];
    if (snapshot) rows.unshift(["snapshot", snapshotText(snapshot)]);
    if (lane.kind === "shard") return [lane.name, "", [["held by", who(lane.ranks)]]];
    if (lane.kind === "node") rows.unshift(["ranks", `${lane.ranks.length}, of which the last is shown`]);
    if (span) {
      const end = span.end ?? model.now;
      const to = span.end === null ? "going on" : duration(end - span.begin);
      return [
        `${lane.name} · ${SPAN_LABELS[span.kind]?.[0] ?? span.kind}`,
        alarm,
        [
          ["recovery", String(recovery.number)],
          ["began", clock(span.begin)],
          ["took", to],
          ["state from", originsOf(recovery, lane.ranks ?? [lane.rank])],
          ...rows,
        ],
      ];
    }
    if (phase) {
      const name = phase.phase === SYNCED ? "waits at the gradient barrier" : PHASES[phase.phase];
      const undone = model.isUndone(phase.generation, phase.step) ? "undone, recomputed later" : null;
      return [
        `${lane.name} · ${name}, step ${phase.step}`,
        alarm,
        [
          ["took", duration(phase.end - phase.begin)],
          ["began", clock(phase.begin)],
          ["generation", String(phase.generation)],
          ["result", undone],
          ...rows,
        ],
      ];
    }
    if (lane.kind === "spare") {
      const spare = [...model.spares.values()].find(
        (one) => one.slot === lane.slot && one.shownFrom <= time && time <= one.until,
      );
      if (!spare) return null;
      const row = model.byWorker.get(spare.worker);
      return [
        `${lane.name} · worker ${spare.worker}`,
        "",
        [
          ["state", time < (spare.warm ?? Infinity) ? "starts" : "warm, waits for a rank"],
          ["node", row?.node ?? null],
          ["pid", row ? String(row.pid) : null],
        ],
      ];
    }
    return alarm || lane.kind === "node" ? [lane.name, alarm, rows] : null;
  }
}

function snapshotText({ step, begin, end }) {
  return `of step ${step}, ${end === null ? "not complete" : `complete after ${duration(end - begin)}`}`;
}

const who = (ranks) => `rank${ranks.length === 1 ? "" : "s"} ${ranks.join(", ")}`;
