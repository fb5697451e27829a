/**
 * Snapshots below the bars of a rank's lane: a line from the start of a snapshot to a diamond at its completion, and a
 * dotted line from a snapshot that a recovery used to the time at which it was loaded.
 */

import { BEGUN, COMPLETE, LOADED } from "./model.js";

/** Visits the snapshots of one rank between two times. A snapshot that is not complete, or was cut off, has no end. */
export function eachSnapshot(ring, from, to, visit) {
  for (let i = Math.max(0, ring.before(from) - 1); i < ring.length; i++) {
    const slot = ring.slot(i);
    if (ring.t[slot] > to) return;
    if (ring.p[slot] !== BEGUN) continue;
    const next = i + 1 < ring.length ? ring.slot(i + 1) : -1;
    const isComplete = next >= 0 && ring.p[next] === COMPLETE && ring.s[next] === ring.s[slot];
    visit({ step: ring.s[slot], begin: ring.t[slot], end: isComplete ? ring.t[next] : null, worker: ring.w[slot] });
  }
}

/** Visits the snapshots that were loaded between two times, each with the time of its completion, if known. */
export function eachLoad(ring, from, to, visit) {
  for (let i = Math.max(0, ring.before(from)); i < ring.length; i++) {
    const slot = ring.slot(i);
    if (ring.p[slot] !== LOADED || ring.t[slot] < from) continue;
    let taken = null;
    for (let j = i - 1; j >= 0 && taken === null; j--) {
      const earlier = ring.slot(j);
      if (ring.p[earlier] === COMPLETE && ring.s[earlier] === ring.s[slot]) taken = ring.t[earlier];
    }
    visit({ step: ring.s[slot], loaded: ring.t[slot], taken });
    if (taken !== null && taken > to) return;
  }
}

/** Draws the snapshots of a lane into the strip below its bars, which begins at y. */
export function drawSnapshots(timeline, lane, parts, y, height) {
  const { context, colors, view, now } = timeline;
  const middle = Math.round(y + height / 2) + 0.5;
  const size = Math.min(4, height / 2 + 0.5);
  context.strokeStyle = context.fillStyle = colors.snapshot;
  for (const { store, from, to } of parts) {
    const ring = store.snapshots.get(lane.rank);
    if (!ring) continue;
    context.lineWidth = 1.5;
    context.setLineDash([1.5, 3]);
    eachLoad(ring, from, Infinity, ({ loaded, taken }) => {
      if (taken === null || taken > view.end) return;
      const [x0, x1] = [timeline.x(taken), timeline.x(loaded)];
      line(context, x0 + size + 2, x1, middle);
      tip(context, x1, middle, y - 1);
      ringOf(context, x0, middle, size + 2);
    });
    context.setLineDash([]);
    context.lineWidth = 2;
    eachSnapshot(ring, from, to, ({ begin, end, worker }) => {
      const x0 = timeline.x(begin);
      const x1 = timeline.x(end ?? Math.min(now, timeline.model.cutAfter(begin, worker)));
      line(context, x0, x1, middle);
      context.fillRect(x0 - 0.5, middle - size + 1, 1.5, 2 * size - 2);
      if (end !== null) diamond(context, x1, middle, size);
    });
  }
  context.lineWidth = 1;
}

function line(context, x0, x1, y) {
  if (x1 <= x0) return;
  context.beginPath();
  context.moveTo(x0, y);
  context.lineTo(x1, y);
  context.stroke();
}

function diamond(context, x, y, size) {
  context.beginPath();
  context.moveTo(x - size, y);
  context.lineTo(x, y - size);
  context.lineTo(x + size, y);
  context.lineTo(x, y + size);
  context.fill();
}

/** Around the snapshot that was used. */
function ringOf(context, x, y, size) {
  context.setLineDash([]);
  context.beginPath();
  context.arc(x, y, size, 0, 7);
  context.stroke();
  context.setLineDash([1.5, 3]);
}

/** Up into the bar in which it was loaded. */
function tip(context, x, from, to) {
  context.beginPath();
  context.moveTo(x, to - 4);
  context.lineTo(x - 3.5, to + 1);
  context.lineTo(x + 3.5, to + 1);
  context.fill();
  context.fillRect(x - 0.75, to, 1.5, from - to);
}
