/** The timeline: time axis, lanes with their names, gradient barriers, and the state of the parameters. */

import { drawBand, drawShardBand } from "./band.js";
import {
  BOLD,
  Bars,
  FONT,
  SPAN_LABELS,
  drawFailures,
  eachFoldedPhase,
  eachPhase,
  foldSpans,
  spanTexts,
} from "./bars.js";
import { OPTIMIZER, PHASES, UPDATED, clock, duration } from "./model.js";
import { drawSnapshots } from "./snapshots.js";
import { source } from "./source.js";

export const GUTTER = 192; // for the lanes' names, at the left
export const AXIS = 40;
const BAND = 34;
const COARSE = 7; // below this many pixels per step, single phases cannot be distinguished
const SECOND = 1e6;
const TICKS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400].map(
  (s) => s * SECOND,
);

function tickStep(perPixel) {
  const least = perPixel * 96;
  if (least > SECOND) return TICKS.find((tick) => tick >= least) ?? Math.ceil(least / 86400e6) * 86400e6;
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((tick) => tick >= least);
}

const isHeading = ({ kind }) => kind === "node" || kind === "shard";

/** Fits a canvas to its box and to the screen's pixels. */
function fit(canvas, context) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return [width, height];
}

/** Draws the timeline on its canvas. */
export class Timeline {
  constructor(canvas, model, lanes, view) {
    Object.assign(this, { canvas, model, lanes, view });
    this.context = canvas.getContext("2d", { alpha: false });
    this.hover = null; // {x, y} of the pointer
    this.missing = null; // a time window whose phases must be requested
  }

  recolor(colors) {
    this.colors = colors;
    this.bars = new Bars(this.context, colors);
  }

  /** @returns {number} the height of the parameters' band; 0 with shards, because each shard has its own band */
  get band() {
    return this.lanes.hasShards ? 0 : BAND;
  }

  /** @returns {number} the preferred height, at most `most` */
  wantedHeight(most) {
    return AXIS + this.band + this.lanes.wanted(most - AXIS - this.band);
  }

  x(time) {
    return GUTTER + ((time - this.view.begin) / (this.view.end - this.view.begin)) * (this.width - GUTTER);
  }

  time(x) {
    return this.view.begin + ((x - GUTTER) / (this.width - GUTTER)) * (this.view.end - this.view.begin);
  }

  get pixelsPerStep() {
    return this.model.stepTime
      ? (this.model.stepTime / (this.view.end - this.view.begin)) * (this.width - GUTTER)
      : 100;
  }

  draw(now) {
    [this.width, this.height] = fit(this.canvas, this.context);
    this.now = now;
    const { context, colors, lanes, view } = this;
    lanes.refresh(now);
    lanes.layout(this.height - AXIS - this.band);
    this.fill(colors.surface, 0, 0, this.width, this.height);
    if (!this.model.live) return;
    const { parts, missing } = this.model.parts(view.begin, Math.min(view.end, now));
    // Single phases are not drawn if they would be too thin, or if too many would have to be requested.
    this.isCoarse = this.pixelsPerStep < COARSE || view.length > 4 * this.model.mostAtOnce;
    this.missing = this.isCoarse ? null : missing;
    this.seen = this.model.recoveries.filter((r) => r.since <= view.end && (r.until ?? now) >= view.begin);
    this.clip(GUTTER, AXIS, this.width - GUTTER, this.height - AXIS - this.band, () => {
      this.drawBackground();
      this.drawLanes(parts);
      if (this.pixelsPerStep > 44) this.drawBarriers(parts);
      drawFailures(this, AXIS, this.height - this.band);
    });
    const bottom = this.height - this.band;
    this.clip(GUTTER, bottom, this.width - GUTTER, this.band, () => drawBand(this, parts, bottom, this.band));
    this.drawGutter();
    this.drawAxis();
    this.drawCrosshair();
  }

  clip(x, y, w, h, paint) {
    this.context.save();
    this.context.beginPath();
    this.context.rect(x, y, w, h);
    this.context.clip();
    paint();
    this.context.restore();
  }

  drawBackground() {
    const { colors, lanes } = this;
    const bottom = this.height - this.band;
    const [first, last] = lanes.visible();
    for (let i = first; i <= last; i++) {
      const lane = lanes.list[i];
      const isMarked =
        lane.key === lanes.selected || (lane.key === lanes.flash.key && performance.now() < lanes.flash.until);
      const [top, h] = [AXIS + lanes.top(i), lanes.heightOf(lane)];
      const color = isMarked ? colors.selected : isHeading(lane) ? colors.nodeLane : colors.lane;
      if (isMarked || isHeading(lane)) this.fill(color, GUTTER, top, this.width, h);
      this.fill(colors.rail, GUTTER, top + h - 1, this.width, 1);
    }
    for (const recovery of this.seen) {
      const [x0, x1] = [this.x(recovery.since), this.x(recovery.until ?? this.now)];
      this.fill(colors.recoveryTint, x0, AXIS, Math.max(1.5, x1 - x0), bottom - AXIS);
    }
    if (this.now < this.view.end) {
      this.fill(colors.future, this.x(this.now), AXIS, this.width, bottom - AXIS);
    }
    if (this.missing) {
      const [x0, x1] = this.missing.map((time) => this.x(time));
      this.fill(colors.future, x0, AXIS, x1 - x0, bottom - AXIS);
      this.text(
        source.isLive ? "loading older phases …" : "no phases recorded for this time",
        (Math.max(x0, GUTTER) + Math.min(x1, this.width)) / 2,
        AXIS + 14,
        colors.quiet,
        "center",
      );
    }
  }

  text(text, x, y, color, align = "left", font = FONT) {
    const { context } = this;
    context.font = font;
    context.textAlign = align;
    context.textBaseline = "middle";
    context.fillStyle = color;
    context.fillText(text, x, y);
  }

  drawLanes(parts) {
    const { lanes, bars, model } = this;
    const [first, last] = lanes.visible();
    bars.detail = this.pixelsPerStep > 240 ? 0 : this.pixelsPerStep > 92 ? 1 : 2;
    bars.left = GUTTER;
    bars.right = this.width;
    bars.begin(this.view.begin / ((this.view.end - this.view.begin) / (this.width - GUTTER)));
    const inset = lanes.laneHeight > 30 ? 7 : lanes.laneHeight > 25 ? 4 : 3;
    const h = lanes.laneHeight - 2 * inset - 1;
    for (let i = first; i <= last; i++) {
      const lane = lanes.list[i];
      const y = AXIS + lanes.top(i) + inset;
      if (lane.kind === "shard") continue;
      if (lane.kind === "spare") this.drawSpare(lane, y, h);
      else if (this.isCoarse) this.drawCoarse(lane, y, h);
      else this.drawPhases(lane, parts, y, h);
    }
    bars.paint();
    bars.begin(0);
    for (let i = first; i <= last; i++) {
      const lane = lanes.list[i];
      if (lane.kind === "spare" || lane.kind === "shard") continue;
      for (const recovery of this.seen) this.drawSpans(lane, recovery, AXIS + lanes.top(i) + inset, h, model);
    }
    bars.paint();
    for (let i = first; i <= last; i++) {
      const lane = lanes.list[i];
      const top = AXIS + lanes.top(i);
      if (lane.kind === "shard") drawShardBand(this, lane, parts, top, lanes.heightOf(lane));
      if (lane.kind === "rank" && !this.isCoarse) drawSnapshots(this, lane, parts, top + inset + h, inset);
    }
  }

  drawPhases(lane, parts, y, h) {
    const { model, bars } = this;
    let undoneOf = [-1, -1, false];
    const visit = (begin, end, phase, step, generation) => {
      if (undoneOf[0] !== generation || undoneOf[1] !== step)
        undoneOf = [generation, step, model.isUndone(generation, step)];
      bars.phase(phase, step, undoneOf[2], this.x(begin), this.x(end), y, h);
    };
    for (const { store, from, to } of parts) {
      if (lane.kind === "node") {
        if (store.nodes.has(lane.key)) eachFoldedPhase(model, store.nodes.get(lane.key), from, to, this.now, visit);
      } else if (store.ranks.has(lane.rank)) eachPhase(model, store.ranks.get(lane.rank), from, to, this.now, visit);
    }
  }

  /** Draws a lane at low zoom: only that it was training. Recoveries are drawn over it. */
  drawCoarse(lane, y, h) {
    const { steps, bucket } = this.model.overview ?? {};
    const begin = steps
      ? Math.max(
          0,
          steps.findIndex((step) => step > 0),
        ) * bucket
      : 0;
    this.bars.batch("training").push(this.x(begin), y, this.x(this.now) - this.x(begin), h);
  }

  drawSpare(lane, y, h) {
    const { bars, colors } = this;
    for (const spare of this.model.spares.values()) {
      const until = Math.min(spare.until, this.now);
      if (spare.slot !== lane.slot || spare.shownFrom > this.view.end || until < this.view.begin) continue;
      const warm = Math.max(spare.shownFrom, Math.min(spare.warm ?? until, until));
      const [x0, x1, x2] = [this.x(spare.shownFrom), this.x(warm), this.x(until)];
      if (x1 - x0 > 2) bars.batch("starting").push(x0, y, x1 - x0, h);
      bars.label([`worker ${spare.worker} starts`, "starts"], x0, x1, y + h / 2, colors.quiet);
      if (x2 - x1 > 2) bars.batch("spare").push(x1, y + h / 2 - 2, x2 - x1, 4);
    }
  }

  drawSpans(lane, recovery, y, h) {
    const { bars } = this;
    const end = recovery.until ?? this.now;
    if (this.x(end) - this.x(recovery.since) < 10) return;
    const spans = lane.kind === "node" ? foldSpans(lane.ranks, recovery) : (recovery.byRank.get(lane.rank) ?? []);
    if (spans.length === 0) bars.span("wait", SPAN_LABELS.wait, this.x(recovery.begun), this.x(end), y, h);
    for (const span of spans) {
      const [x0, x1] = [this.x(span.begin), this.x(Math.min(span.end ?? this.now, end))];
      if (x1 > GUTTER && x0 < this.width && x1 > x0) bars.span(span.kind, spanTexts(span, recovery), x0, x1, y, h);
    }
  }

  drawBarriers(parts) {
    const { context, colors } = this;
    const bottom = this.height - this.band;
    const xs = [];
    for (const { store, from, to } of parts) {
      const fold = store.job;
      for (let n = fold.from(from); n <= fold.newest; n++) {
        const i = (n % fold.capacity) * PHASES.length + OPTIMIZER;
        if (fold.count[i] && fold.first[i] >= from && fold.first[i] <= to) xs.push(this.x(fold.first[i]));
      }
    }
    context.fillStyle = colors.barrier;
    for (const x of xs) {
      context.fillRect(Math.round(x) - 1, AXIS, this.pixelsPerStep > 150 ? 2 : 1, bottom - AXIS);
      context.beginPath();
      context.moveTo(x - 5, AXIS);
      context.lineTo(x + 5, AXIS);
      context.lineTo(x, AXIS + 6);
      context.fill();
    }
  }

  fill(color, x, y, w, h) {
    this.context.fillStyle = color;
    this.context.fillRect(x, y, w, h);
  }

  drawGutter() {
    const { context, colors, lanes } = this;
    this.fill(colors.surface, 0, 0, GUTTER, this.height);
    this.clip(0, AXIS, GUTTER, this.height - AXIS - this.band, () => {
      const [first, last] = lanes.visible();
      for (let i = first; i <= last; i++) this.drawName(lanes.list[i], AXIS + lanes.top(i));
    });
    if (this.band) this.text("Parameters", 12, this.height - this.band / 2, colors.text, "left", BOLD);
    this.fill(colors.line, GUTTER - 1, 0, 1, this.height);
    context.fillRect(0, AXIS - 1, this.width, 1);
    context.fillRect(0, this.height - this.band, this.width, 1);
    const most = lanes.total;
    if (most > lanes.height + 1) {
      const size = Math.max(24, (lanes.height / most) * lanes.height);
      const top = AXIS + (lanes.scroll / (most - lanes.height)) * (lanes.height - size);
      context.fillStyle = colors.scrollbar;
      context.beginPath();
      context.roundRect(this.width - 7, top + 2, 5, size - 4, 2.5);
      context.fill();
    }
  }

  drawName(lane, top) {
    const { colors, lanes } = this;
    const h = lanes.heightOf(lane);
    const isMarked =
      lane.key === lanes.selected || (lane.key === lanes.flash.key && performance.now() < lanes.flash.until);
    this.fill(
      isMarked ? colors.selected : isHeading(lane) ? colors.nodeLane : colors.surface,
      0,
      top,
      GUTTER - 1,
      h - 1,
    );
    if (lane.key === lanes.selected) {
      this.fill(colors.accent, 0, top, 3, h - 1);
    }
    const left = 12 + lane.indent * 14;
    const isTall = h >= 36;
    const y = isTall ? top + h / 2 - 8 : top + h / 2;
    const name = lane.kind === "node" ? `${lane.folded ? "▸" : "▾"} ${lane.name}` : lane.name;
    this.text(name, left, y, colors.text, "left", BOLD);
    const { state, tone, detail, warning } = lanes.words(lane, Math.min(this.view.end, this.now), this.view.following);
    if (isTall) {
      this.text(state, GUTTER - 10, y, colors[tone], "right");
      this.text(
        warning || detail,
        left,
        y + 16,
        warning ? colors.warning : colors.quiet,
        "left",
        warning ? BOLD : FONT,
      );
      return;
    }
    const reason = lane.reason && lane.reason !== "straggler" && tone === "quiet" ? lane.reason : state;
    this.text(
      warning ? warning.replace("slow ", "") : reason,
      GUTTER - 10,
      y,
      warning ? colors.warning : colors[tone],
      "right",
    );
  }

  drawAxis() {
    const { context, colors, view } = this;
    const step = tickStep((view.end - view.begin) / (this.width - GUTTER));
    this.fill(colors.surface, GUTTER, 0, this.width, AXIS - 1);
    const nowX = this.x(this.now);
    for (let tick = Math.max(0, Math.ceil(view.begin / step)); tick * step <= view.end; tick++) {
      const x = this.x(tick * step);
      if (x < GUTTER) continue;
      this.fill(colors.line, Math.round(x), AXIS - 6, 1, 6);
      const isFree = x > GUTTER + 20 && x < this.width - 24 && Math.abs(x - nowX) > 46;
      if (isFree) this.text(clock(tick * step, step), x, AXIS - 13, colors.quiet, "center");
    }
    let free = GUTTER;
    for (const recovery of this.seen.length > 40 ? [] : this.seen) {
      const [x0, x1] = [this.x(recovery.since), this.x(recovery.until ?? this.now)];
      const left = Math.max(free, GUTTER, Math.min(x0, this.width - 20));
      const { superseded, until, since } = recovery;
      const took = superseded ? "superseded" : until === null ? "going on" : duration(until - since);
      const texts = [`Recovery ${recovery.number} · ${took}`, `R${recovery.number}`];
      const room = Math.max(x1 - left, 90);
      const text = texts.find((one) => this.bars.measure(one) + 12 <= room);
      if (!text || x0 < free - 2) continue;
      const w = this.bars.measure(text) * 1.12 + 13;
      this.fill(
        superseded ? colors.quiet : colors.recovering,
        Math.max(x0, GUTTER),
        AXIS - 3,
        Math.max(2, x1 - Math.max(x0, GUTTER)),
        3,
      );
      context.beginPath();
      context.roundRect(left, 2, w, 17, [4, 4, 4, 0]);
      context.fill();
      this.text(text, left + 6, 11, colors.onBar, "left", BOLD);
      free = left + w + 3;
    }
    this.text("run time", 12, AXIS / 2, colors.quiet);
    this.drawNow();
  }

  drawNow() {
    const x = this.x(this.now);
    if (x < GUTTER || x > this.width) return;
    const { context, colors, model } = this;
    const isOver = Boolean(model.run?.ended);
    this.fill(
      isOver ? colors.quiet : this.isStale ? colors.failure : colors.accent,
      Math.round(x),
      AXIS - 6,
      2,
      this.height - AXIS + 6,
    );
    const text = isOver ? "end" : this.isStale ? "last news" : "now";
    const w = this.isStale && !isOver ? 62 : 31;
    const left = Math.min(x - w / 2, this.width - w - 1);
    context.beginPath();
    context.roundRect(left, AXIS - 20, w, 15, 4);
    context.fill();
    this.text(text, left + w / 2, AXIS - 12, isOver || this.isStale ? colors.surface : colors.onAccent, "center", BOLD);
  }

  drawCrosshair() {
    const { context, colors, hover } = this;
    if (!hover || hover.x < GUTTER) return;
    this.fill(colors.crosshair, Math.round(hover.x), AXIS, 1, this.height - AXIS);
    const unit = (this.view.end - this.view.begin) / (this.width - GUTTER);
    const wall = new Date(this.model.run.started_unix_ms + this.time(hover.x) / 1000);
    const digits = unit < 20000 ? `.${String(wall.getMilliseconds()).padStart(3, "0")}` : "";
    const time = clock(this.time(hover.x), Math.min(unit, 1e6));
    const text = `${time}  ·  ${wall.toLocaleTimeString([], { hour12: false })}${digits}`;
    const w = this.bars.measure(text) + 16;
    const left = Math.max(GUTTER, Math.min(hover.x - w / 2, this.width - w));
    context.fillStyle = colors.text;
    context.beginPath();
    context.roundRect(left, AXIS - 21, w, 17, 4);
    context.fill();
    this.text(text, left + 8, AXIS - 12, colors.surface);
  }
}
