/** The panel of published weights: versions, consumers, speed and failures of each folder. */

import { duration } from "./model.js";
import { $, element } from "./panels.js";
import { plural } from "./words.js";

const NUM_FAILURES = 5;
let shown = -1;

/** Draws the panel if the weights have changed. Only jobs that publish weights have it. */
export function drawWeights({ changed, weights }) {
  if (shown === changed.weights) return;
  shown = changed.weights;
  $("weights-panel").hidden = weights.length === 0;
  $("weights").replaceChildren(...weights.map(publication));
}

function publication(one) {
  return element(
    "li",
    { "data-testid": "publication" },
    element("code", { title: one.folder }, one.folder),
    textLine(versionText(one)),
    textLine(consumersText(one), one.lag_versions > 1 ? "warning" : ""),
    textLine(speedText(one)),
    ...one.failures.slice(0, NUM_FAILURES).map((failure) => textLine(failureText(failure), "warning")),
  );
}

const textLine = (text, tone = "") => element("div", { class: tone }, text);
const ago = (seconds) => `${duration(seconds * 1e6)} ago`;

function versionText({ version, age_s: age, under_way: next, under_way_s: since }) {
  const last = version === null ? "no version yet" : `version ${version}, ${ago(age)}`;
  return next === null ? last : `${last} · ${next} under way for ${duration(since * 1e6)}`;
}

function consumersText({ consumers, nodes, lag_versions: versions, lag_s: seconds }) {
  if (consumers === 0) return "no consumer";
  const where = nodes.map((node) => `${node.consumers} on ${node.node}`).join(", ");
  const lag =
    versions === 0 ? "all have it" : `slowest ${plural(versions, "version")} behind, for ${duration(seconds * 1e6)}`;
  return `${plural(consumers, "consumer")} (${where}) · ${lag}`;
}

function speedText({ committed, broken_off: broken, lost_consumers: lost, bytes, bytes_per_s: rate, ...one }) {
  const counts = [plural(committed, "update")];
  if (broken) counts.push(`${broken} broken off`);
  if (lost) counts.push(`${plural(lost, "consumer")} left out`);
  const kept = one.unchanged_bytes ? `, ${size(one.unchanged_bytes)} unchanged` : "";
  const speed = rate ? `${size(bytes)} in ${duration(one.seconds * 1e6)}, ${size(rate)}/s${kept} · ` : "";
  return speed + counts.join(", ");
}

/** The text of a failure. The text of an aborted update already names its version. */
const failureText = ({ age_s: age, version, text }) =>
  `▲ ${ago(age)}, ${text.startsWith("version ") ? "" : `version ${version}: `}${text}`;

function size(bytes) {
  return bytes >= 1e8 ? `${(bytes / 1e9).toFixed(2)} GB` : `${Number((bytes / 1e6).toPrecision(3))} MB`;
}
