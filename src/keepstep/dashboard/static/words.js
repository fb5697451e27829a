/** A recovery in words and numbers, for the sentence about the last incident, the list, and the report. */

import { duration } from "./model.js";

export const PARTS = ["detect", "stop", "decide", "reset", "restore", "resume"];

export const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
export const causeOf = ({ failures, detail }) => failures[0]?.detail ?? detail;
export const milliseconds = (value) =>
  value === null || value === undefined
    ? "–"
    : value >= 1000
      ? Math.round(value).toLocaleString("en")
      : value.toFixed(1);

/** The lost ranks as text: "rank 3", "ranks 8 to 15", "ranks 1, 5". */
export function whoWasLost({ failures, cause }) {
  const ranks = failures.map(({ rank }) => rank).sort((a, b) => a - b);
  if (ranks.length === 0) return cause;
  if (ranks.length === 1) return `rank ${ranks[0]}`;
  const isRun = ranks.at(-1) - ranks[0] === ranks.length - 1;
  return isRun
    ? `ranks ${ranks[0]} to ${ranks.at(-1)}`
    : `ranks ${ranks.slice(0, 4).join(", ")}${ranks.length > 4 ? " …" : ""}`;
}

/** The sources of some ranks' state as text: "snapshot in memory", "replica and own copy". */
export function originsOf({ origins }, ranks) {
  return [...new Set(ranks.map((rank) => origins?.[rank]).filter(Boolean))].join(" and ") || "…";
}

/** The place in a step at which the first rank was lost, as text. */
export function where({ failures }) {
  const [first] = failures;
  if (!first || first.phase === null || first.phase === undefined) return "";
  const places = {
    forward: "in forward",
    backward: "in backward",
    synced: "at the gradient barrier",
    optimizer: "in the optimizer",
    updated: "after the update",
    starting: "while starting",
  };
  return ` ${places[first.phase] ?? `in ${first.phase}`} of step ${first.step}`;
}

/** A sentence about a recovery: the failure, the replacement, and the cost. */
export function sentenceOf(recovery) {
  const verb = recovery.failures.length > 1 ? "were" : "was";
  const isLoss = recovery.failures.length > 0;
  const who = isLoss
    ? `${capital(whoWasLost(recovery))} ${verb} lost${where(recovery)} (${causeOf(recovery)}).`
    : `${capital(recovery.detail.trim().replace(/\.$/, ""))}. No rank was lost: the groups were reconnected.`;
  return `${who} ${outcomeOf(recovery)}`;
}

/** The ranks that loaded a snapshot or checkpoint, as text. */
function loadedText({ origins = {}, resume_step: step }) {
  const texts = [
    ["snapshot in memory", `a snapshot of step ${step} in memory`, `their snapshots of step ${step} in memory`],
    ["checkpoint", `a checkpoint of step ${step}`, `their checkpoints of step ${step}`],
  ];
  return texts
    .map(([origin, one, many]) => {
      const ranks = Object.keys(origins).filter((rank) => origins[rank] === origin);
      if (ranks.length === 0) return "";
      if (ranks.length === 1) return `Rank ${ranks[0]} loaded ${one}. `;
      const isAll = ranks.length === Object.keys(origins).length;
      return `${isAll ? "All ranks" : `Ranks ${ranks.slice(0, 8).join(", ")}`} loaded ${many}. `;
    })
    .join("");
}

function outcomeOf({ replacements, sources, received_bytes: bytes, steps_recomputed: again, ...recovery }) {
  if (recovery.until === null) return "The recovery is not complete.";
  if (recovery.resumed === null) return "Another failure interrupted this recovery.";
  const took =
    replacements.length === 0
      ? ""
      : replacements.length < 5
        ? `${capital(replacements.map(({ rank, worker }) => `worker ${worker} took rank ${rank}`).join(", "))}. `
        : `${replacements.length} workers took over. `;
  const from = `rank${sources.length === 1 ? "" : "s"} ${sources.slice(0, 8).join(", ")}`;
  const size = bytes >= 1e5 ? `${(bytes / 2 ** 20).toFixed(1)} MiB of state` : "The state";
  const state = (replacements.length && sources.length ? `${size} came from ${from}. ` : "") + loadedText(recovery);
  const gap = recovery.milliseconds.gap;
  const after = gap === null ? duration(recovery.resumed - recovery.since) : `${milliseconds(gap)} ms`;
  const cost = `${after}, ${again ? plural(again, "step") : "no step"} recomputed`;
  return `${took}${state}Training resumed at step ${recovery.resume_step}. Cost: ${cost}.`;
}
