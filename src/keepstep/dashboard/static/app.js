/** The page's entry point: the connection to the server, the drawing of frames, the theme, the keyboard commands. */

import { Overview, Tooltip, View, hitTest, listenToTimeline } from "./gestures.js";
import { Lanes } from "./lanes.js";
import { Model } from "./model.js";
import { $, Panels } from "./panels.js";
import { source } from "./source.js";
import { tellStory } from "./story.js";
import { AXIS, Timeline } from "./timeline.js";
import { drawWeights } from "./weights.js";

const SILENT_AFTER = 3000; // milliseconds without a message; the server sends one every second
const RECONNECT_AFTER = 10000;
const RETRY = [300, 1000, 2000, 4000];

/** The connection to the server. It reconnects by itself; the page keeps its data meanwhile. */
class Feed {
  constructor(model, onNewRun) {
    Object.assign(this, {
      model,
      onNewRun,
      state: "connecting",
      tries: 0,
      heard: performance.now(),
      offset: 0,
      isAsking: false,
    });
    this.connect();
    if (!source.isLive) return;
    setInterval(() => this.watch(), 500);
    setInterval(() => this.askOverview(), 2000);
  }

  connect() {
    this.heard = performance.now();
    source.listen({
      snapshot: (message) => {
        this.hear(message);
        if (this.model.snapshot(message)) this.onNewRun();
        this.askOverview();
      },
      update: (message) => {
        this.hear(message);
        this.model.update(message);
      },
      error: () => this.lose(),
    });
  }

  hear(message) {
    const offset = message.now - performance.now() * 1000;
    // The delay of messages varies. The page's clock follows their average, so that it does not stutter.
    const isFar = this.state !== "live" || Math.abs(offset - this.offset) > 1e6;
    this.offset = isFar ? offset : this.offset + (offset - this.offset) * 0.1;
    this.heard = performance.now();
    this.tries = 0;
    this.state = source.isLive ? "live" : "report";
  }

  async lose() {
    source.close();
    if (this.state !== "denied") this.state = this.model.run ? "reconnecting" : "connecting";
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.connect(), RETRY[Math.min(this.tries++, RETRY.length - 1)]);
    // EventSource does not report why it failed, so another request finds out.
    const { status } = await source.overview();
    if (status === 401) this.state = "denied";
    else if (this.state === "denied") this.state = "reconnecting";
  }

  watch() {
    if (this.state === "live" && performance.now() - this.heard > RECONNECT_AFTER) this.lose();
  }

  /** @returns {{state: string, silentFor: number}} the state of the connection; `silentFor` is in seconds */
  get shown() {
    const silent = performance.now() - this.heard;
    if (this.state !== "denied" && this.model.run?.ended) return { state: "over", silentFor: 0 };
    if (this.state === "live" && silent > SILENT_AFTER)
      return { state: "silent", silentFor: Math.round(silent / 1000) };
    return { state: this.state, silentFor: 0 };
  }

  /** @returns {number} the run's time, 120 ms late, so that the data at its end has arrived */
  now() {
    const { ended } = this.model.run ?? {};
    if (ended) return ended.at;
    if (!source.isLive) return this.model.now;
    // Without a connection time stands still, because the end of the last phases is not known.
    const most = this.model.now + (this.state === "live" ? 1e6 : 0);
    const ahead = Math.min(most, performance.now() * 1000 + this.offset);
    this.last = Math.max(0, ahead - 120e3, Math.min(this.last ?? 0, ahead));
    return this.last;
  }

  async askOverview() {
    if (document.hidden || !this.model.run) return;
    const { data } = await source.overview();
    if (data) this.model.overview = data;
  }

  /** Requests older phases, one request at a time. */
  async askPhases([begin, end]) {
    if (this.isAsking || this.state !== "live") return;
    this.isAsking = true;
    const run = this.model.run.id;
    const most = this.model.mostAtOnce;
    const margin = Math.min(Math.max(1e6, (end - begin) / 2), Math.max(0, (most - (end - begin)) / 2));
    const from = Math.floor(Math.max(0, begin - margin, end - most));
    const { data } = await source.phases(from, Math.ceil(end + margin));
    if (data && this.model.run.id === run) this.model.addWindow(data);
    // After a failed request, wait longer before the next one.
    setTimeout(() => (this.isAsking = false), data ? 100 : 2000);
  }
}

/** The browser's local storage; null where the browser forbids it, as it may for a report. */
function storage() {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
}

/** Sets up the light or dark theme: the system's, until the viewer chooses. Returns a function that switches it. */
function setUpTheme(onChange) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let here = null;
  const chosen = () => here ?? storage()?.getItem("keepstep-theme");
  const apply = (theme = chosen() ?? (system.matches ? "dark" : "light")) => {
    document.documentElement.dataset.theme = theme;
    const style = getComputedStyle(document.documentElement);
    onChange(
      new Proxy(
        {},
        {
          get: (known, name) =>
            (known[name] ??=
              style.getPropertyValue(`--c-${String(name).replace(/[A-Z]/g, (c) => `-${c.toLowerCase()}`)}`).trim() ||
              undefined),
        },
      ),
    );
  };
  system.addEventListener("change", () => apply());
  window.addEventListener("beforeprint", () => apply("light"));
  window.addEventListener("afterprint", () => apply());
  apply();
  return () => {
    here = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    storage()?.setItem("keepstep-theme", here);
    apply();
  };
}

/** Draws frames; on a slow machine, every second one. */
class Frames {
  constructor(paint) {
    this.times = [];
    this.cost = 0;
    let skip = 0;
    const frame = (time) => {
      requestAnimationFrame(frame);
      if (skip-- > 0) return;
      const begin = performance.now();
      paint(time);
      this.cost += (performance.now() - begin - this.cost) * 0.1;
      skip = this.cost > 14 ? 1 : 0;
      this.times.push(time);
      if (this.times.length > 120) this.times.shift();
    };
    requestAnimationFrame(frame);
  }

  /** @returns {{fps: number, draw_ms: number}} the recent frame rate, and the time to draw a frame */
  measured() {
    const seconds = (this.times.at(-1) - this.times[0]) / 1000;
    return { fps: seconds ? (this.times.length - 1) / seconds : 0, draw_ms: this.cost };
  }
}

const model = new Model();
const view = new View();
const lanes = new Lanes(model);
const timeline = new Timeline($("timeline"), model, lanes, view);
const overview = new Overview($("overview"), model, view);
const tooltip = new Tooltip($("tooltip"), model);
const panels = new Panels(model, view, lanes, { jump, find });
const switchTheme = setUpTheme((colors) => {
  timeline.recolor(colors);
  overview.colors = colors;
});
const feed = new Feed(model, () => {
  lanes.restart();
  view.restart();
  feed.last = undefined;
  panels.note("Another run has started in this folder. Showing it from its start.");
});

/** Shows a recovery, from shortly before the failure until shortly after training resumed. */
function jump(recovery) {
  if (!recovery) return panels.note("There has been no recovery so far.");
  const end = recovery.until ?? feed.now();
  const length = end - recovery.since;
  const margin = Math.max(0.5 * length, Math.min(1.3 * model.stepTime, 3 * length), 1000);
  view.show(recovery.since - margin, end + margin);
  lanes.focus = recovery;
  lanes.refresh(feed.now());
  const first = recovery.failures.map(({ rank }) => lanes.indexOfRank(rank)).filter((index) => index >= 0);
  if (first.length) lanes.reveal(Math.min(...first));
}

function jumpBy(step) {
  const { recoveries } = model;
  const at = lanes.focus ? recoveries.findIndex(({ number }) => number === lanes.focus.number) : recoveries.length;
  jump(recoveries[Math.max(0, Math.min(recoveries.length - 1, at + step))]);
}

function find(text) {
  if (!lanes.find(text, feed.now())) panels.note(`There is no rank or node “${text}”.`);
}

function goLive() {
  view.follow();
  lanes.focus = null;
}

const COMMANDS = {
  " ": () => (view.following ? view.pause() : goLive()),
  l: goLive,
  End: goLive,
  Home: () => view.whole(),
  "+": () => view.zoom(0.7),
  "=": () => view.zoom(0.7),
  "-": () => view.zoom(1 / 0.7),
  ArrowLeft: () => view.pan(-0.12 * view.length),
  ArrowRight: () => view.pan(0.12 * view.length),
  ArrowUp: () => lanes.select(-1),
  ArrowDown: () => lanes.select(1),
  Enter: () => lanes.toggle(lanes.selectedLane),
  n: () => jumpBy(1),
  p: () => jumpBy(-1),
  f: () => lanes.toggleFolding(),
  t: switchTheme,
  "/": () => $("find").focus(),
  "?": () => $("help").showModal(),
  Escape: () => (lanes.selected = null),
};

document.addEventListener("keydown", (event) => {
  const { target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (target.matches("input")) {
    if (event.key === "Escape") target.blur();
    return;
  }
  const isControl = target.matches("button, a, summary") && [" ", "Enter"].includes(event.key);
  const scrolls = target.matches(".scroll") && /^(Arrow|Home|End)/.test(event.key);
  const command = COMMANDS[event.key] ?? COMMANDS[event.key.toLowerCase()];
  if (isControl || scrolls || !command) return;
  event.preventDefault();
  command();
});
$("find").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  find(event.target.value);
  $("timeline").focus();
});
const BUTTONS = {
  live: " ",
  "zoom-in": "+",
  "zoom-out": "-",
  whole: "Home",
  previous: "p",
  next: "n",
  fold: "f",
  theme: "t",
  "help-button": "?",
};
for (const [id, key] of Object.entries(BUTTONS)) $(id).addEventListener("click", COMMANDS[key]);
listenToTimeline($("timeline"), timeline, lanes, view, (hit) => {
  if (hit?.lane.kind === "node" && hit.isName) lanes.toggle(hit.lane);
  else if (hit) lanes.selected = hit.lane.key;
});

/** Gives the timeline the height that it can use; the panels below it get the rest. */
function resize() {
  lanes.highest = Math.max(54, Math.min(76, Math.round(window.innerHeight * 0.068)));
  const most = Math.max(240, window.innerHeight - ($("timeline").getBoundingClientRect().top + window.scrollY) - 250);
  const height = `${Math.round(timeline.wantedHeight(most))}px`;
  if ($("timeline").style.height !== height) $("timeline").style.height = height;
}

if (!source.isLive) {
  model.mostWindows = Infinity;
  source.page.windows.forEach((piece) => model.addWindow(piece));
  view.tick(feed.now(), model.stepTime);
  if (model.recoveries.length) jump(model.recoveries.at(-1));
  else view.whole();
  tellStory(source, model);
  $("report-link").hidden = true;
}

let drawn = 0;
const frames = new Frames((time) => {
  const now = feed.now();
  view.tick(now, model.stepTime);
  if (time - drawn > 200) {
    drawn = time;
    panels.drawConnection(feed.shown);
    panels.draw(now);
    drawWeights(model);
    resize();
    overview.draw();
  }
  timeline.isStale = !["live", "over"].includes(feed.shown.state);
  timeline.draw(now);
  if (timeline.missing && !view.target) feed.askPhases(timeline.missing);
  const { hover } = timeline;
  tooltip.draw(hover ? hitTest(timeline, hover.x, hover.y) : null, hover, timeline.width);
});

window.keepstep = {
  view: () => ({ begin: view.target?.[0] ?? view.begin, end: view.target?.[1] ?? view.end, following: view.following }),
  lanes: () =>
    lanes.list.map((lane, i) => {
      const { name, rank, kind, folded } = lane;
      return { name, rank, kind, folded, top: AXIS + lanes.top(i), height: lanes.heightOf(lane) };
    }),
  frames: () => frames.measured(),
  model,
};
