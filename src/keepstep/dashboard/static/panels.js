/** The elements around the canvas: header, cards, the sentence about the last incident, lists and notes. */

import { SPAN_LABELS } from "./bars.js";
import { clock, duration } from "./model.js";
import { source } from "./source.js";
import {
  PARTS,
  capital,
  causeOf,
  milliseconds,
  originsOf,
  plural,
  sentenceOf,
  where,
  whoWasLost,
} from "./words.js";

const LEVELS = { info: 0, warning: 1, error: 2 };
const SIGNS = { info: "·", warning: "▲", error: "✕" };
const NUM_ROWS = 300;

export const $ = (id) => document.getElementById(id);

/** Creates an element. Texts are always set as text, never as markup. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Sets a text only if it has changed, to avoid announcements of screen readers and layout work. */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** All panels. `actions` must have jump(recovery) and find(text). */
export class Panels {
  constructor(model, view, lanes, actions) {
    Object.assign(this, { model, view, lanes, actions });
    this.drawn = {};
    this.rows = new Map();
    this.level = "info";
    this.cards = new Map();
    this.makeCards();
    for (const button of document.querySelectorAll(".filter")) {
      button.addEventListener("click", () => {
        this.level = button.dataset.level;
        document.querySelectorAll(".filter").forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
        this.drawEvents();
      });
    }
    $("incident-show").addEventListener("click", () => actions.jump(model.recoveries.at(-1)));
  }

  makeCards() {
    const kinds = [
      ["step", "Step", "The step that the ranks compute, or compute next"],
      ["steps-per-s", "Steps per second", "Completed steps per second, recently"],
      [
        "goodput",
        "Goodput so far",
        "The share of the time since the first step that went into committed steps",
      ],
      ["failures", "Failures", "Ranks that were lost"],
      ["recoveries", "Recoveries", "Several failures may share one recovery"],
      ["spares", "Spares ready", "Warm processes that can take a rank at once, and the wanted number"],
      ["gap", "Last gap", "From the last failure until the first step after it was completed"],
    ];
    for (const [id, name, title] of kinds) {
      const value = element("span", {}, "–");
      const unit = element("span", { class: "unit" });
      const card = element(
        "div",
        { class: "card", "data-testid": `card-${id}`, title },
        element("div", { class: "name" }, name),
        element("div", { class: "value" }, value, unit),
      );
      $("cards").append(card);
      this.cards.set(id, { card, value, unit });
    }
  }

  setCard(id, text, unit = "", tone = "") {
    const { card, value, unit: unitNode } = this.cards.get(id);
    setText(value, text);
    setText(unitNode, unit);
    card.className = `card ${tone}`;
  }

  /** Draws the changed panels. Called a few times a second. */
  draw(now) {
    const { changed } = this.model;
    this.drawHead();
    this.drawCards();
    this.drawIncident(now);
    const parts = { recoveries: this.drawRecoveries, events: this.drawEvents, stragglers: this.drawStragglers };
    for (const [part, paint] of Object.entries(parts)) {
      if (this.drawn[part] === changed[part]) continue;
      this.drawn[part] = changed[part];
      paint.call(this);
    }
    for (const [number, row] of this.rows) row.node.classList.toggle("shown", this.lanes.focus?.number === number);
    this.drawLive(now);
  }

  drawHead() {
    const { run, job } = this.model;
    if (!run) return;
    setText($("command"), run.command);
    $("command").title = `${run.command} (keepstep ${run.version}, ${plural(run.world_size, "rank")})`;
    setText($("run-id"), `run ${run.id.slice(0, 12)}`);
    const stage = run.ended
      ? run.ended.exit_code === 0
        ? "finished"
        : `ended, exit code ${run.ended.exit_code}`
      : (job?.stage ?? "starting");
    setText($("stage"), run.ended ? stage : `${stage} · generation ${job?.generation ?? 1}`);
    $("stage").className = `pill ${run.ended ? (run.ended.exit_code ? "failed" : "training") : stage}`;
    document.title = `${this.model.activeRecovery ? "⚡ " : ""}step ${job?.step ?? 0} · ${run.command.split(" ")[0]} · keepstep`;
  }

  drawCards() {
    const { job, recoveries } = this.model;
    if (!job) return;
    this.setCard("step", job.step.toLocaleString("en"));
    this.cards.get("step").card.title = stepTitle(job.snapshots);
    $("legend-snapshot").hidden = !job.snapshots;
    this.setCard("steps-per-s", job.steps_per_s === null ? "–" : job.steps_per_s.toFixed(job.steps_per_s < 10 ? 2 : 1));
    this.setCard(
      "goodput",
      job.goodput === null ? "–" : (100 * job.goodput).toFixed(1),
      job.goodput === null ? "" : "%",
    );
    this.setCard("failures", job.failures.toLocaleString("en"));
    this.setCard("recoveries", job.recoveries.toLocaleString("en"));
    this.setCard(
      "spares",
      `${job.spares_ready}/${job.spares_wanted}`,
      "",
      job.spares_ready < job.spares_wanted ? "warn" : "",
    );
    const gap = recoveries.findLast((recovery) => recovery.milliseconds.gap !== null)?.milliseconds.gap;
    this.setCard("gap", gap === undefined ? "–" : milliseconds(gap), gap === undefined ? "" : "ms");
  }

  /** Shows the last incident in one sentence, for viewers who do not know this page. */
  drawIncident(now) {
    const { model } = this;
    const last = model.recoveries.at(-1);
    let [kind, sign, text] = ["", "…", "Waiting for the run's state."];
    if (!source.isLive && !model.run.ended) [kind, sign, text] = ["", "■", this.sentenceOfReport()];
    else if (model.activeRecovery) [kind, sign, text] = ["active", "⚡", this.sentenceOfActive(last, now)];
    else if (model.run?.ended) [kind, sign, text] = ["", "■", this.sentenceOfEnd()];
    else if (last) [kind, sign, text] = ["recovered", "✓", sentenceOf(last)];
    else if (model.job?.stage === "training") {
      const helper = model.job.spares_ready ? "a warm spare" : "a fresh process (no spare is warm)";
      [kind, sign, text] = [
        "calm",
        "✓",
        `No failure so far. If a rank is lost now, ${helper} takes over and training continues from the same step.`,
      ];
    } else if (model.run) {
      const { world_size: ranks, num_spares: spares } = model.run;
      text = `The job is starting with ${plural(ranks, "rank")} and ${plural(spares, "spare")}. Its first step has not begun.`;
    }
    $("incident").className = `incident ${kind}`;
    setText($("incident-sign"), sign);
    // The age changes every second, so it is outside of the element that screen readers announce.
    setText($("incident-ago"), kind === "recovered" ? `${this.agoOf(last, now)}: ` : "");
    setText($("incident-text"), text);
    $("incident-show").hidden = !last;
    setText($("incident-show"), model.run?.ended ? "Show the last recovery" : "Show it");
  }

  sentenceOfActive(recovery, now) {
    const kinds = recovery.spans.filter((span) => span.end === null).map((span) => span.kind);
    const doing = SPAN_LABELS[kinds.at(-1)]?.[0].toLowerCase() ?? "recovering";
    const so = `${capital(whoWasLost(recovery))} lost${where(recovery)}: ${causeOf(recovery)}.`;
    return `${so} The others keep their weights. Recovering for ${duration(Math.max(0, now - recovery.since))}: ${doing}.`;
  }

  sentenceOfReport() {
    const { run, now } = this.model;
    if (run.is_alive) return `The job still ran when this report was written, after ${duration(now)}.`;
    return `The job's launcher is gone and has not written how the run ended. The last event was after ${duration(now)}.`;
  }

  sentenceOfEnd() {
    const { run, job, recoveries } = this.model;
    const told = recoveries.length
      ? ` ${plural(recoveries.length, "recovery").replace("recoverys", "recoveries")} on the way.`
      : " Nothing failed on the way.";
    const { at, reason, exit_code: code } = run.ended;
    return `The job ended after ${duration(at)} at step ${job?.step ?? 0}: ${reason} (exit code ${code}).${told}`;
  }

  agoOf(recovery, now) {
    const seconds = Math.max(0, Math.floor((now - (recovery.resumed ?? recovery.begun)) / 1e6));
    return seconds < 2
      ? "Just now"
      : seconds < 90
        ? `${seconds} s ago`
        : seconds < 5400
          ? `${Math.round(seconds / 60)} min ago`
          : `${(seconds / 3600).toFixed(1)} h ago`;
  }

  drawRecoveries() {
    const shown = this.model.recoveries.slice(-NUM_ROWS);
    const kept = new Set(shown.map(({ number }) => number));
    for (const [number, row] of this.rows) {
      if (!kept.has(number)) {
        row.node.remove();
        this.rows.delete(number);
      }
    }
    for (const recovery of shown) {
      const row = this.rows.get(recovery.number);
      if (row?.recovery === recovery) continue;
      const node = this.recoveryRow(recovery);
      if (row) {
        const hadFocus = row.node.contains(document.activeElement);
        row.node.replaceWith(node);
        if (hadFocus) node.querySelector("button").focus();
      } else $("recoveries").prepend(node);
      this.rows.set(recovery.number, { recovery, node });
    }
    $("no-recovery").hidden = shown.length > 0;
    $("recoveries").parentElement.hidden = shown.length === 0;
    setText($("recoveries-note"), shown.length ? "parts in milliseconds · click a row to see it" : "");
  }

  recoveryRow(recovery) {
    const { number, milliseconds: parts } = recovery;
    const step = recovery.failures[0]?.step;
    const phase = recovery.failures[0]?.phase;
    const wall = new Date(this.model.run.started_unix_ms + recovery.since / 1000).toLocaleTimeString([], {
      hour12: false,
    });
    const what = [whoWasLost(recovery), [phase, step].filter((x) => x !== undefined && x !== null).join(" ")]
      .filter(Boolean)
      .join(" · ");
    const state = recovery.superseded
      ? "superseded"
      : recovery.resumed === null
        ? "going on"
        : recovery.resume_step === null
          ? ""
          : `step ${recovery.resume_step}`;
    const allRanks = Object.keys(recovery.origins);
    const jump = () => this.actions.jump(recovery);
    const row = element(
      "tr",
      { "data-testid": "recovery-row", "data-number": number, onclick: jump },
      element("td", {}, element("button", { type: "button", "aria-label": `Show recovery ${number}` }, String(number))),
      element("td", {}, clock(recovery.since, 1e5), element("br"), element("small", {}, wall)),
      element(
        "td",
        { class: "what", title: recovery.detail },
        element("div", {}, what),
        element("div", {}, element("small", {}, causeOf(recovery))),
      ),
      element(
        "td",
        {},
        state,
        element("br"),
        element("small", { title: originsOf(recovery, allRanks) }, recovery.resumed === null ? "" : againText(recovery)),
      ),
      element("td", { class: "parts" }, stack(parts)),
      ...[...PARTS, "gap"].map((part) =>
        element("td", { class: `ms ${part}`, "data-testid": `recovery-ms-${part}` }, milliseconds(parts[part])),
      ),
    );
    if (recovery.superseded) row.classList.add("superseded");
    return row;
  }

  drawStragglers() {
    const rows = this.model.stragglers.map((one) => {
      const find = element(
        "button",
        { type: "button", onclick: () => this.actions.find(String(one.rank)) },
        `▲ rank ${one.rank}`,
      );
      const text = `${one.phase} ${one.ratio.toFixed(1)}×: ${one.own_ms.toFixed(1)} ms, others ${one.typical_ms.toFixed(1)}`;
      return element("li", { "data-testid": "straggler-row" }, find, element("span", {}, text));
    });
    $("stragglers").replaceChildren(
      ...(rows.length ? rows : [element("li", { class: "quiet" }, "No rank is slower than the others.")]),
    );
  }

  drawEvents() {
    const least = LEVELS[this.level];
    const shown = this.model.events
      .filter((event) => LEVELS[event.level] >= least)
      .reverse();
    const rows = shown.map((event) =>
      element(
        "li",
        { class: event.level, "data-testid": "event-row", title: `${event.kind}, generation ${event.generation}` },
        element("time", {}, clock(event.at, 1e5)),
        element("b", { "aria-label": event.level }, SIGNS[event.level]),
        element("span", {}, event.text),
      ),
    );
    $("events").replaceChildren(
      ...(rows.length
        ? rows
        : [
            element(
              "li",
              { class: "quiet" },
              element("span"),
              element("b"),
              element("span", {}, "No such events."),
            ),
          ]),
    );
  }

  drawLive(now) {
    const { view } = this;
    const isOver = Boolean(this.model.run?.ended) || !source.isLive;
    const behind = Math.max(0, now - view.end);
    const text = view.following ? (isOver ? "■ End" : "● Live") : `▶ Go ${isOver ? "to end" : "live"}`;
    setText($("live"), text);
    $("live").title = view.following
      ? "Following. Pause (space)"
      : `Paused, ${duration(behind)} behind. Follow again (L)`;
    $("live").classList.toggle("away", !view.following);
    $("live").setAttribute("aria-pressed", String(view.following));
    $("fold").hidden = new Set(this.model.workers.map(({ node }) => node)).size < 2;
    $("fold").setAttribute("aria-pressed", String(this.lanes.isFolding));
  }

  /** Shows the state of the connection. */
  drawConnection({ state, silentFor }) {
    const texts = {
      connecting: "connecting …",
      live: "live",
      reconnecting: "reconnecting …",
      silent: `no contact for ${silentFor} s`,
      over: "job ended",
      denied: "not allowed",
      report: this.model.run?.is_alive ? "job still ran" : "launcher is gone",
    };
    setText($("connection"), texts[state]);
    $("connection").className =
      `connection ${{ live: "live", over: "over", reconnecting: "lost", silent: "lost", denied: "lost" }[state] ?? ""}`;
    if (state === "denied") {
      setText($("gate-title"), "This page needs the run's key");
      setText(
        $("gate-text"),
        "The server answered 401: this browser has not shown the key, or the key is that of an earlier run.\n\n" +
          "Open the address that keepstep printed when the job started; it ends in ?token=… " +
          "Once it was opened, this page works without it.",
      );
    }
    $("gate").hidden = state !== "denied";
  }

  /** Shows a short note over the timeline. */
  note(text) {
    setText($("note"), text);
    $("note").hidden = false;
    clearTimeout(this.noteTimer);
    this.noteTimer = setTimeout(() => ($("note").hidden = true), 4000);
  }
}

/** The number of recomputed steps, and whether a rank loaded a snapshot, as text. */
function againText({ steps_recomputed: again, origins }) {
  const loaded = Object.values(origins).includes("snapshot in memory") ? " · snapshot" : "";
  return (again ? `${plural(again, "step")} recomputed` : "none recomputed") + loaded;
}

function stepTitle(snapshots) {
  const title = "The step that the ranks compute, or compute next";
  if (!snapshots) return title;
  const { step, every, bytes, without_second_copy: lone } = snapshots;
  const newest = step === null ? "" : `, the newest of all of step ${step}`;
  const missing = lone ? `; ${plural(lone, "rank")} without a second copy, for want of memory` : "";
  const size = `together ${(bytes / 1e6).toFixed(1)} MB`;
  return `${title}. Snapshots every ${plural(every ?? 1, "step")}${newest}, ${size}${missing}`;
}

function stack(parts) {
  const total = PARTS.reduce((sum, part) => sum + (parts[part] ?? 0), 0);
  const box = element("div", {
    class: "stack",
    role: "img",
    "aria-label": PARTS.map((part) => `${part} ${milliseconds(parts[part])} ms`).join(", "),
  });
  for (const part of PARTS) {
    if (!parts[part]) continue;
    const piece = element("div", { class: `part ${part}`, title: `${part}: ${milliseconds(parts[part])} ms` });
    piece.style.width = `${(100 * parts[part]) / total}%`;
    box.append(piece);
  }
  return box;
}
