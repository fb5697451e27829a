/** The parts that only a report has: the run in one line, each recovery in words, the cost of checkpoint-restart. */

import { duration } from "./model.js";
import { $, element } from "./panels.js";
import { PARTS, plural, sentenceOf } from "./words.js";

const MEANINGS = {
  detect: "until the controller learned of it",
  stop: "until all survivors had stopped and the lost processes were gone",
  decide: "until the step to resume at and the replacements were fixed",
  reset: "until the process groups were reconnected",
  restore: "until every rank was at that step",
  resume: "until that step was completed, including its computation",
  gap: "all of it",
};

/** Writes the story below the panels. */
export function tellStory({ numbers, page }, model) {
  document.documentElement.classList.add("report");
  $("story").hidden = false;
  const { run } = model;
  const begun = new Date(run.started_unix_ms).toISOString().replace("T", " ").slice(0, 19);
  const parts = [
    `Run ${run.id}: ${plural(run.world_size, "rank")} and ${plural(run.num_spares, "spare")} on ${numbers.node}`,
    `started ${begun} UTC`,
    `${duration(numbers.duration_s * 1e6)} long`,
    `${plural(numbers.spares_used, "rank")} taken by another worker`,
    `written by keepstep ${run.version}`,
  ];
  $("story-run").textContent = `${parts.join(" · ")}.`;
  const meanings = [...PARTS, "gap"].flatMap((part) => ["; ", element("b", {}, part), ` ${MEANINGS[part]}`]);
  $("story-parts").append("Parts of a recovery, from the failure on: ", ...meanings.slice(1), ".");
  $("story-recoveries").append(...model.recoveries.map((recovery) => element("li", {}, sentenceOf(recovery))));
  if (page.num_hidden_events) $("events-note").textContent = `, ${page.num_hidden_events} in the middle left out`;
  if (numbers.restart) tellRestart(numbers.restart);
}

function tellRestart({ num_failures: failures, startup_s: startup, lost_s: lost, cases }) {
  const row = (name, seconds, ratio) =>
    element(
      "tr",
      {},
      element("td", {}, name),
      element("td", { class: "ms" }, duration(seconds * 1e6)),
      element("td", { class: "ms" }, ratio === null ? "–" : Math.round(ratio).toLocaleString("en")),
    );
  $("restart-rows").append(
    row("keepstep, as measured in this run", lost, 1),
    ...cases.map((one) =>
      row(`restart from a checkpoint every ${duration(one.interval_s * 1e6)}`, one.lost_s, one.ratio),
    ),
  );
  $("restart-sum").textContent =
    `Estimated, not measured: ${plural(failures, "failure")} × (start of the job + interval / 2, at most what it had trained by then). ` +
    `The start of this job took ${duration(startup * 1e6)}, from its launch to its first forward.`;
  $("restart").hidden = false;
}
