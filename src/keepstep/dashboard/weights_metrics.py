"""Prometheus metrics of published weights, with the folder as a label."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from keepstep.trace.timeline.run import Run
from keepstep.trace.weights.publications import Publication

FOLDER = ["folder"]


def about_weights(run: Run) -> Iterator[Metric]:
    """Yields all metrics with their current values; none if no weights are published."""
    publications = list(run.publications.found.values())
    if not publications:
        return
    yield from _about_versions(publications, run.now_s)
    yield from _about_consumers(publications, run.now_s)
    yield from _about_updates(publications)


def _about_versions(publications: list[Publication], now_s: float) -> Iterator[Metric]:
    version = GaugeMetricFamily(
        "keepstep_weights_version", "The last version that all its consumers were given.", labels=FOLDER
    )
    age = GaugeMetricFamily("keepstep_weights_version_age_seconds", "Time since that version.", labels=FOLDER)
    under_way = GaugeMetricFamily(
        "keepstep_weights_version_under_way", "The version that is under way; absent while none is.", labels=FOLDER
    )
    for each in publications:
        if each.version is not None:
            version.add_metric([each.folder], each.version)
            age.add_metric([each.folder], max(0.0, now_s - each.commits[-1][1]))
        if each.under_way is not None:
            under_way.add_metric([each.folder], each.under_way[0])
    yield from (version, age, under_way)


def _about_consumers(publications: list[Publication], now_s: float) -> Iterator[Metric]:
    by_node = [*FOLDER, "node"]
    consumers = GaugeMetricFamily("keepstep_weights_consumers", "Consumers that are attached, by node.", labels=by_node)
    versions = GaugeMetricFamily(
        "keepstep_weights_lag_versions",
        "How many versions the slowest consumer of a node is behind the last one.",
        labels=by_node,
    )
    seconds = GaugeMetricFamily(
        "keepstep_weights_lag_seconds",
        "For how long the slowest consumer of a node has not had the version that follows its own; 0 where it has all.",
        labels=by_node,
    )
    for each in publications:
        for node, there in sorted(each.consumers().items()):
            lag_versions, lag_s = each.worst_lag(there, now_s)
            consumers.add_metric([each.folder, node], len(there))
            versions.add_metric([each.folder, node], lag_versions)
            seconds.add_metric([each.folder, node], lag_s)
    yield from (consumers, versions, seconds)


def _about_updates(publications: list[Publication]) -> Iterator[Metric]:
    updates = CounterMetricFamily(
        "keepstep_weights_updates", "Updates that have ended, by how.", labels=[*FOLDER, "outcome"]
    )
    lost = CounterMetricFamily(
        "keepstep_weights_lost_consumers", "Consumers that were left out of an update that counts.", labels=FOLDER
    )
    took = SummaryMetricFamily(
        "keepstep_weights_update_seconds",
        "What updates took that count, on the device that had each first, until its consumers had switched.",
        labels=FOLDER,
    )
    sent = CounterMetricFamily(
        "keepstep_weights_sent_bytes",
        "What sources have sent in updates that count, each byte once however many consumers it went to.",
        labels=FOLDER,
    )
    unchanged = CounterMetricFamily(
        "keepstep_weights_unchanged_bytes", "What did not travel, since consumers had it.", labels=FOLDER
    )
    size = GaugeMetricFamily("keepstep_weights_update_bytes", "Sent in the last update that counts.", labels=FOLDER)
    rate = GaugeMetricFamily(
        "keepstep_weights_update_bytes_per_second",
        "The same by the time from the first device's begin to the last one's end.",
        labels=FOLDER,
    )
    for each in publications:
        updates.add_metric([each.folder, "committed"], each.num_committed)
        updates.add_metric([each.folder, "broken off"], each.num_broken_off)
        lost.add_metric([each.folder], each.num_lost_consumers)
        took.add_metric([each.folder], each.num_committed, each.seconds)
        sent.add_metric([each.folder], each.sent_bytes)
        unchanged.add_metric([each.folder], each.unchanged_bytes)
        size.add_metric([each.folder], each.last_bytes)
        if each.last_bytes_per_s is not None:
            rate.add_metric([each.folder], each.last_bytes_per_s)
    yield from (updates, lost, took, sent, unchanged, size, rate)
