/** The band with the state of the parameters over time: of the job below the lanes, or of each shard in its heading. */

import { eachState } from "./bars.js";
import { originsOf } from "./words.js";

/** Draws the step of the parameters over time, and when they are being updated. */
export function drawBand(timeline, parts, top, height) {
  const [y, h] = [top + 7, height - 13];
  timeline.fill(timeline.colors.surface, timeline.bars.left, top, timeline.width, height);
  if (timeline.isCoarse) drawConsistent(timeline, y, h);
  else for (const { store, from, to } of parts) drawFold(timeline, store.job, from, to, y, h);
  for (const recovery of timeline.seen) {
    const at = recovery.resume_step;
    const texts = at === null ? ["recovering"] : [`recovering, goes on from step ${at}`, `→ step ${at}`, `${at}`];
    drawRecovery(timeline, recovery, recovery.begun, y, h, timeline.colors.recovering, texts);
  }
}

/** Draws the same for one shard. If all its ranks are lost, it has no live copy until a snapshot is loaded. */
export function drawShardBand(timeline, { shard, ranks }, parts, top, height) {
  const { colors } = timeline;
  const [y, h] = [top + 5, height - 11];
  if (timeline.isCoarse) drawConsistent(timeline, y, h);
  else {
    for (const { store, from, to } of parts) {
      if (store.shards.has(shard)) drawFold(timeline, store.shards.get(shard), from, to, y, h);
    }
  }
  for (const recovery of timeline.seen) {
    const { resume_step: at, failures } = recovery;
    const lost = failures.filter(({ rank }) => ranks.includes(rank));
    const isGone = new Set(lost.map(({ rank }) => rank)).size === ranks.length;
    const since = isGone ? Math.max(...lost.map((failure) => failure.at)) : recovery.begun;
    const from = originsOf(recovery, ranks);
    const texts = at === null ? [] : [`step ${at}: ${from}`, `→ step ${at}`, `${at}`];
    if (isGone) texts.unshift(...texts.slice(0, 1).map((text) => `no live copy → ${text}`));
    drawRecovery(timeline, recovery, since, y, h, isGone ? colors.gone : colors.recovering, texts);
  }
}

function drawConsistent(timeline, y, h) {
  timeline.fill(timeline.colors.consistent, timeline.x(0), y, timeline.x(timeline.now) - timeline.x(0), h);
}

function drawRecovery(timeline, recovery, since, y, h, fill, texts) {
  const [x0, x1] = [timeline.x(since), timeline.x(recovery.until ?? timeline.now)];
  drawPiece(timeline, x0, x1, y, h, { fill, color: timeline.colors.onBar, texts });
}

function drawFold(timeline, fold, from, to, y, h) {
  const { colors, model, now } = timeline;
  eachState(model, fold, from, to, now, (state, begin, end, step) => {
    const texts =
      state === "consistent"
        ? [`consistent at step ${step}`, `step ${step}`, `${step}`]
        : state === "updating"
          ? ["updating"]
          : [`updated: step ${step + 1}`, "updated"];
    const isRound = state === "updating";
    for (const [from, to] of besideRecoveries(timeline, begin, end)) {
      const [x0, x1] = [timeline.x(from), timeline.x(to)];
      drawPiece(timeline, x0, x1, y, h, {
        fill: colors[state],
        color: isRound ? colors.onBar : colors.text,
        texts,
        isRound,
      });
    }
  });
}

/** The parts of a time window outside of recoveries: in a recovery, the band shows the recovery instead. */
function besideRecoveries({ seen, now }, begin, end) {
  let pieces = [[begin, end]];
  for (const { begun, until } of seen) {
    const over = until ?? now;
    pieces = pieces.flatMap(([from, to]) =>
      over <= from || to <= begun
        ? [[from, to]]
        : [
            [from, begun],
            [over, to],
          ].filter(([a, b]) => a < b),
    );
  }
  return pieces;
}

function drawPiece(timeline, x0, x1, y, h, { fill, color, texts, isRound = false }) {
  const { context, bars } = timeline;
  if (x1 <= x0 || x1 < bars.left || x0 > bars.right) return;
  context.fillStyle = fill;
  if (isRound && x1 - x0 > 5) {
    context.beginPath();
    context.roundRect(x0, y, x1 - x0, h, Math.min(5, (x1 - x0) / 2));
    context.fill();
  } else context.fillRect(x0, y, Math.max(x1 - x0 - (x1 - x0 > 4 ? 1 : 0), 0.5), h);
  const [left, right] = [Math.max(x0, bars.left), Math.min(x1, bars.right)];
  const text = texts.find((long) => bars.measure(long) + 8 <= right - left);
  if (text) timeline.text(text, (left + right) / 2, y + h / 2 + 0.5, color, "center");
}
