"""Prometheus metrics of a run. Every poll of the run updates the collector, and every scrape reads it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from keepstep.dashboard.weights_metrics import about_weights
from keepstep.protocol.messages import Cause
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import Stage
from keepstep.shared.tagpage import PHASES
from keepstep.trace.record.phaselog import PhaseArray
from keepstep.trace.timeline.describe import PARTS
from keepstep.trace.timeline.finished import FinishedScenes
from keepstep.trace.timeline.pace import DurationArray
from keepstep.trace.timeline.run import News, Run
from keepstep.trace.timeline.scene import Scene
from keepstep.trace.timeline.stragglers import NAMES

MAX_RANK_SERIES = 64
"""In a larger world, only stragglers have time series of their own."""
PHASE_BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
)
"""From 0.1 ms, the optimizer's time for a small model, to longer than any phase should take."""
RECOVERY_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)

_NAMES = dict(NAMES) | {Phase.SYNCED: "synced"}
"""Names of the phases of a step. `Phase.STARTING` is not part of a step."""
_OWN = tuple(NAMES.values())
"""Names of the phases in which a rank computes; in the others it waits for its peers."""


class Buckets:
    """Histograms of one metric, one for each value of its label. They take whole arrays of observations."""

    def __init__(self, labels: Sequence[str], bounds_s: Sequence[float]) -> None:
        self._labels = labels
        self._bounds_s = np.array(bounds_s)
        self._counts = np.zeros((len(labels), len(bounds_s) + 1), np.int64)
        self._sums_s = np.zeros(len(labels))

    def add(self, labels: NDArray[np.intp], seconds: NDArray[np.float64]) -> None:
        """Adds observations.

        Args:
            labels: index of each observation's label.
            seconds: the observed durations.
        """
        num_labels, num_buckets = self._counts.shape
        places = labels * num_buckets + np.searchsorted(self._bounds_s, seconds)
        self._counts += np.bincount(places, minlength=self._counts.size).reshape(self._counts.shape)
        self._sums_s += np.bincount(labels, weights=seconds, minlength=num_labels)

    def family(self, name: str, text: str, label: str) -> HistogramMetricFamily:
        """Returns the histograms for a scrape. Empty ones are included, so that a rate begins at zero."""
        family = HistogramMetricFamily(name, text, labels=[label])
        bounds = [*map(str, self._bounds_s.tolist()), "+Inf"]
        totals = self._counts.cumsum(axis=1).tolist()
        for value, counts, sum_s in zip(self._labels, totals, self._sums_s.tolist(), strict=True):
            family.add_metric([value], list(zip(bounds, counts, strict=True)), sum_s)
        return family


class RunCollector(Collector):
    """Collects the metrics of one run. The caller polls the run and passes the news to `observe`, on one thread."""

    def __init__(self, run: Run) -> None:
        """Args:
        run: a run that has not been polled yet, because the collector counts only the news that it gets.
        """
        self._run = run
        self._finished = FinishedScenes(run)
        # Every cause has a counter from the start, because Prometheus sees no increase if a counter begins at 1.
        self._recoveries = Counter({str(cause): 0 for cause in Cause})
        self._failures = self._recoveries.copy()
        self._num_recomputed = 0
        self._recomputed_of_late = 0
        """The maximum of `steps_recomputed` over the recoveries since training last resumed."""
        self._restored_bytes = 0
        self._last_s = run.info.started_ns / 1e9
        self._rank_steps = np.full(min(run.info.settings.world_size, MAX_RANK_SERIES), -1, np.int64)
        self._recovery_s = Buckets(PARTS, RECOVERY_BOUNDS_S)
        self._phase_s = Buckets(list(_NAMES.values()), PHASE_BOUNDS_S)
        self._own_s = Buckets(_OWN, PHASE_BOUNDS_S)
        self._index = _index_of_phases(list(_NAMES.values()))
        self._own_index = _index_of_phases(_OWN)

    # ---- in ---------------------------------------------------------------------------------------------------------

    def observe(self, news: News) -> None:
        """Counts the news of a poll."""
        if news.events:
            self._last_s = max(self._last_s, *(event.at_s for event in news.events))
        if len(news.changes):
            self._last_s = max(self._last_s, float(news.changes["at_ns"].max()) / 1e9)
            self._note_steps(news.changes)
        if len(news.durations):
            self._count_phases(news.durations)
        for scene in self._finished.take():
            self._count_recovery(scene)

    def _note_steps(self, changes: PhaseArray) -> None:
        if self._run.info.settings.world_size <= MAX_RANK_SERIES:
            ranked = changes[(changes["rank"] >= 0) & (changes["rank"] < len(self._rank_steps))]
            ranked = ranked[np.argsort(ranked["at_ns"], kind="stable")]
            self._rank_steps[ranked["rank"]] = ranked["step"]

    def _count_phases(self, durations: DurationArray) -> None:
        for buckets, index, field in (
            (self._phase_s, self._index, "whole_ns"),
            (self._own_s, self._own_index, "own_ns"),
        ):
            labels = index[durations["phase"]]
            counted = labels >= 0
            buckets.add(labels[counted], durations[field][counted] / 1e9)

    def _count_recovery(self, scene: Scene) -> None:
        record = scene.record
        self._recoveries[str(record.cause)] += 1
        self._failures.update(str(failure.cause) for failure in record.failures)
        self._restored_bytes += record.received_bytes
        reached = {name: end - begin for name, begin, end in record.parts() if begin is not None and end is not None}
        places = np.array([PARTS.index(name) for name in reached], np.intp)
        self._recovery_s.add(places, np.array(list(reached.values())))
        # A superseded recovery has recomputed nothing; the recovery that superseded it starts from the same step.
        self._recomputed_of_late = max(self._recomputed_of_late, record.steps_recomputed or 0)
        if record.resumed_s is not None:
            self._num_recomputed += self._recomputed_of_late
            self._recomputed_of_late = 0

    # ---- out --------------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics with their current values."""
        yield from self._about_the_run()
        yield from self._about_steps()
        yield from self._about_snapshots()
        yield from about_weights(self._run)
        yield from self._about_recoveries()
        yield from self._about_stragglers()

    def _about_the_run(self) -> Iterator[Metric]:
        run, job = self._run, self._run.job
        info = InfoMetricFamily("keepstep_run", "The run: its random identifier, the version of keepstep, its node.")
        info.add_metric([], {"run": run.info.run, "version": run.info.version, "node": run.info.node})
        yield info
        yield GaugeMetricFamily(
            "keepstep_running", "1 while the process of the job's launcher lives, else 0.", float(run.is_alive)
        )
        stage = GaugeMetricFamily(
            "keepstep_stage", "1 for the stage that the job is in, 0 for all others.", labels=["stage"]
        )
        for each in Stage:
            stage.add_metric([str(each)], float(job.stage is each))
        yield stage
        yield GaugeMetricFamily(
            "keepstep_generation",
            "The generation: 1 at first, and 1 more with each recovery that begins.",
            job.generation,
        )
        yield GaugeMetricFamily(
            "keepstep_world_size", "How many ranks the job was started with; it never changes.", job.settings.world_size
        )
        spares = GaugeMetricFamily(
            "keepstep_spares",
            "Spare workers: ready are those that stand at their first step, wanted is what --spares asks for.",
            labels=["state"],
        )
        spares.add_metric(["ready"], job.roster.num_ready_spares)
        spares.add_metric(["wanted"], job.settings.num_spares)
        yield spares
        yield GaugeMetricFamily(
            "keepstep_last_event_age_seconds",
            "Time since the newest event or phase change that was recorded of the run; it grows while nothing moves.",
            self._age_s(),
        )
        errors = GaugeMetricFamily(
            "keepstep_clock_error_seconds",
            "How far the phase times of a node may be from the controller's clock, either way.",
            labels=["node"],
        )
        for node, error_ns in sorted(run.history.error_ns.items()):
            errors.add_metric([node], error_ns / 1e9)
        yield errors

    def _age_s(self) -> float:
        run = self._run
        now_s = run.now_s if run.is_alive else (time.time_ns() - run.info.unix_ns(0.0)) / 1e9
        return max(0.0, now_s - self._last_s)

    def _about_steps(self) -> Iterator[Metric]:
        run = self._run
        yield CounterMetricFamily(
            "keepstep_steps",
            "Steps that this run has completed, each counted once however often it was computed, when the first rank "
            "has completed it.",
            sum(run.pace.buckets),
        )
        yield GaugeMetricFamily(
            "keepstep_step",
            "The step that the job is in, from 0: as many have been completed, those before a checkpoint that it began "
            "from included.",
            run.pace.step,
        )
        ranks = GaugeMetricFamily(
            "keepstep_rank_step",
            f"The step that a rank is in, or has completed last; only in worlds of up to {MAX_RANK_SERIES} ranks.",
            labels=["rank"],
        )
        for rank, step in enumerate(self._rank_steps.tolist()):
            if step >= 0:
                ranks.add_metric([str(rank)], step)
        yield ranks
        if (goodput := run.goodput) is not None:
            yield GaugeMetricFamily(
                "keepstep_goodput_ratio",
                "The share of the time since training began that went into steps that count: 1 less the time that "
                "recoveries took, and that of the steps that broke off.",
                goodput,
            )
        yield self._phase_s.family(
            "keepstep_phase_seconds",
            "How long phases of a step took, over all ranks, waits for peers included; phases that broke off are "
            "not counted.",
            "phase",
        )
        yield self._own_s.family(
            "keepstep_phase_own_seconds",
            "How long phases of a step took the ranks themselves, over all ranks: a backward up to the beginning of "
            "its last collective. Being synced is nothing but waiting and is left out.",
            "phase",
        )

    def _about_snapshots(self) -> Iterator[Metric]:
        taken = self._run.snapshots
        if not taken.num_taken:
            return
        yield CounterMetricFamily(
            "keepstep_snapshots", "Snapshots in memory that ranks have completed, each rank's counted.", taken.num_taken
        )
        yield CounterMetricFamily(
            "keepstep_second_copies_refused",
            "Snapshots that have no copy on a second node, for it had no memory for one.",
            taken.num_refused,
        )
        yield GaugeMetricFamily(
            "keepstep_ranks_without_second_copy", "Ranks of which that is so of the newest one.", len(taken.undoubled)
        )
        if (newest := taken.newest(self._run.info.settings.world_size)) is not None:
            yield GaugeMetricFamily(
                "keepstep_snapshot_step", "The newest step of which every rank has a snapshot in memory.", newest
            )
        if taken.every is not None:
            yield GaugeMetricFamily(
                "keepstep_snapshot_interval_steps", "Steps between the newest two snapshots of a rank.", taken.every
            )
        yield GaugeMetricFamily(
            "keepstep_snapshot_bytes",
            "The newest snapshots of all ranks together; each rank's memory has room for two.",
            sum(taken.num_bytes.values()),
        )
        if self._run.info.settings.world_size <= MAX_RANK_SERIES:
            ranks = GaugeMetricFamily(
                "keepstep_rank_snapshot_step",
                f"The step of a rank's newest snapshot; only in worlds of up to {MAX_RANK_SERIES} ranks.",
                labels=["rank"],
            )
            for rank, step in sorted(taken.steps.items()):
                ranks.add_metric([str(rank)], step)
            yield ranks

    def _about_recoveries(self) -> Iterator[Metric]:
        recoveries = CounterMetricFamily(
            "keepstep_recoveries",
            "Recoveries, by the cause of the first failure; counted once each, when training has resumed, another "
            "failure has overtaken it, or the job has ended.",
            labels=["cause"],
        )
        for cause, num in sorted(self._recoveries.items()):
            recoveries.add_metric([cause], num)
        yield recoveries
        failures = CounterMetricFamily(
            "keepstep_failures",
            "Ranks that were lost, by cause; counted together with the recovery that they belong to. Spares that were "
            "lost are not among them.",
            labels=["cause"],
        )
        for cause, num in sorted(self._failures.items()):
            failures.add_metric([cause], num)
        yield failures
        yield self._recovery_s.family(
            "keepstep_recovery_seconds",
            "How long the parts of a recovery took. The gap is the whole, from the failure to the first step completed "
            "by all ranks. A recovery that did not get so far has none; of the other parts it has those that it "
            "completed.",
            "part",
        )
        yield CounterMetricFamily(
            "keepstep_steps_recomputed",
            "Steps that were recomputed because of failures, 0 or 1 for each recovery unless a checkpoint or "
            "snapshot was loaded; counted when training has resumed.",
            self._num_recomputed,
        )
        yield CounterMetricFamily(
            "keepstep_restored_bytes",
            "State that ranks have received from their peers in recoveries that have been counted.",
            self._restored_bytes,
        )

    def _about_stragglers(self) -> Iterator[Metric]:
        found = self._run.stragglers.found()
        yield GaugeMetricFamily(
            "keepstep_stragglers",
            "Ranks that stand out at present, in one phase or several, by their own time in their last steps.",
            len({each.rank for each in found}),
        )
        ratios = GaugeMetricFamily(
            "keepstep_straggler_ratio",
            "How many times as long as its peers a straggler takes for a phase, by medians of its own time; only ranks "
            "that are stragglers at present have one.",
            labels=["rank", "phase"],
        )
        for each in found:
            ratios.add_metric([str(each.rank), each.phase], each.ratio)
        yield ratios


def _index_of_phases(names: Sequence[str]) -> NDArray[np.intp]:
    """Returns, for each phase by its number, the index of its name; -1 if it is not among the names."""
    return np.array([names.index(_NAMES[phase]) if _NAMES.get(phase) in names else -1 for phase in PHASES], np.intp)
