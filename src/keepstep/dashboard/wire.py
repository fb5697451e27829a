"""The data of the dashboard's page: a run as plain data. Times are whole microseconds since the run's start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keepstep.protocol.recovery.placement.roster import Worker
from keepstep.trace.record.phaselog import PhaseArray
from keepstep.trace.timeline.describe import describe_recovery
from keepstep.trace.timeline.events import ControlEvent
from keepstep.trace.timeline.run import Run
from keepstep.trace.timeline.scene import Scene
from keepstep.trace.timeline.stragglers import Straggler
from keepstep.trace.weights.publications import describe_publication

MAX_EVENTS = 200
MAX_GONE = 2048
"""Maximum number of ended workers: enough for a job of 1,024 ranks that has lost each of them once."""


def micros(run: Run, at_s: float | None) -> int | None:
    """Converts a time from seconds on the job's clock to microseconds since the run's start."""
    return None if at_s is None else round((at_s - run.info.started_ns / 1e9) * 1e6)


def describe_run(run: Run) -> dict[str, Any]:
    """Describes the run: its constant data, and how it ended."""
    ended = run.info.ended
    return {
        "id": run.info.run,
        "command": " ".join(run.info.command),
        "world_size": run.info.settings.world_size,
        "num_spares": run.info.settings.num_spares,
        "version": run.info.version,
        "started_unix_ms": run.info.started_unix_ns // 1_000_000,
        "is_alive": run.is_alive,
        "ended": ended and {"exit_code": ended.exit_code, "reason": ended.reason, "at": micros(run, ended.at_ns / 1e9)},
    }


def describe_job(run: Run) -> dict[str, Any]:
    """Describes the state of the job, for the cards at the top of the page."""
    now_s, goodput = run.now_s, run.goodput
    rate = run.pace.steps_per_s(round(now_s * 1e9))
    return {
        "stage": str(run.job.stage),
        "generation": run.job.generation,
        "step": max(run.pace.step, 0),
        "steps_per_s": None if rate is None else round(rate, 2),
        "goodput": None if goodput is None else round(goodput, 4),
        "failures": sum(len(scene.record.failures) for scene in run.scenes),
        "recoveries": len(run.scenes),
        "shards": run.shards,
        "snapshots": _describe_snapshots(run),
        "spares_ready": run.job.roster.num_ready_spares,
        "spares_wanted": run.info.settings.num_spares,
    }


def _describe_snapshots(run: Run) -> dict[str, int | None] | None:
    """Describes the snapshots in memory; None if no rank has taken one. ``step`` is the newest that all ranks have."""
    taken = run.snapshots
    if not taken.num_taken:
        return None
    newest = taken.newest(run.info.settings.world_size)
    return {
        "step": newest,
        "every": taken.every,
        "bytes": sum(taken.num_bytes.values()),
        "without_second_copy": len(taken.undoubled),
    }


def describe_workers(run: Run) -> list[dict[str, Any]]:
    """Describes the live workers by rank, then the spares, then the ended ones, newest first."""
    roster = run.job.roster
    living = sorted(roster.holders(), key=lambda worker: worker.rank or 0)
    spares = sorted(roster.spares(), key=lambda worker: worker.worker)
    gone = [worker for worker in reversed(roster.workers.values()) if worker.lost or worker.done]
    return [_describe_worker(run, worker) for worker in (*living, *spares, *gone[:MAX_GONE])]


def _describe_worker(run: Run, worker: Worker) -> dict[str, Any]:
    life = run.lives.of(worker.worker)
    return {
        "worker": worker.worker,
        "rank": worker.rank,
        "node": worker.node,
        "pid": worker.pid,
        "state": _state(worker),
        "started": micros(run, life.started_s),
        "warm": micros(run, life.warm_s),
        "ended": micros(run, life.ended_s),
    }


def _state(worker: Worker) -> str:
    if worker.lost:
        return "lost"
    if worker.done:
        return "done"
    if worker.rank is not None:
        return "holder"
    return "spare" if worker.ready is not None or worker.awaits_rank else "starting"


def describe_scene(run: Run, scene: Scene) -> dict[str, Any]:
    """Describes one recovery, with the numbers of the report."""
    record = scene.record
    failures = [
        {
            "rank": failure.rank,
            "worker": scene.places.get(failure.rank, (None, None))[0],
            "node": scene.places.get(failure.rank, (None, None))[1],
            "at": micros(run, at_s),
            "cause": str(failure.cause),
            "detail": failure.detail,
            "step": failure.step,
            "phase": failure.phase,
        }
        for failure, at_s in scene.failures()
    ]
    replacements = [
        {"rank": rank, "worker": worker, "node": node} for rank, (worker, node) in sorted(scene.replacements.items())
    ]
    return describe_recovery(record) | {
        "number": scene.number,
        "since": micros(run, scene.since_s),
        "begun": micros(run, record.begun_s),
        "decided": micros(run, record.decided_s),
        "resumed": micros(run, record.resumed_s if scene.has_resumed else None),
        "sources": sorted({rank for transfer in scene.transfers for rank in transfer.sources}),
        "failures": failures,
        "replacements": replacements,
        "spans": _describe_spans(run, scene),
    }


def _describe_spans(run: Run, scene: Scene) -> list[dict[str, Any]]:
    """Describes the spans of a recovery. Ranks with equal spans, usually those of a node, share an entry."""
    together: dict[tuple[str, int | None, int | None], list[int]] = {}
    for span in scene.spans():
        when = (micros(run, span.begin_s), micros(run, span.end_s))
        together.setdefault((str(span.kind), *when), []).append(span.rank)
    return [
        {"ranks": ranks, "kind": kind, "begin": begin, "end": end} for (kind, begin, end), ranks in together.items()
    ]


def describe_stragglers(stragglers: list[Straggler]) -> list[dict[str, Any]]:
    """Describes the stragglers, the slowest first."""
    return [
        {
            "rank": each.rank,
            "phase": each.phase,
            "own_ms": each.own_ms,
            "typical_ms": each.typical_ms,
            "ratio": round(each.ratio, 3),
        }
        for each in stragglers
    ]


def describe_weights(run: Run) -> list[dict[str, Any]]:
    """Describes the published weights of each folder."""
    return [describe_publication(each, run.now_s) for each in run.publications.found.values()]


def describe_state(run: Run, events: Sequence[ControlEvent]) -> dict[str, Any]:
    """Describes everything that a page shows when it opens, except the phases.

    Args:
        run: the run, after its `Run.poll`.
        events: the events that the page lists, oldest first.
    """
    return {
        "run": describe_run(run),
        "now": micros(run, run.now_s),
        "job": describe_job(run),
        "workers": describe_workers(run),
        "recoveries": [describe_scene(run, scene) for scene in run.scenes],
        "stragglers": describe_stragglers(run.stragglers.found()),
        "weights": describe_weights(run),
        "events": [describe_event(run, event) for event in events],
    }


def describe_event(run: Run, event: ControlEvent) -> dict[str, Any]:
    """Describes one event of the log."""
    return {**event._asdict(), "at": micros(run, event.at_s)}


def describe_phases(run: Run, changes: PhaseArray) -> dict[str, list[int]]:
    """Returns phase changes and moments as columns: time, rank (-1: a spare), worker, generation, step, phase."""
    return {
        "t": ((changes["at_ns"] - np.int64(run.info.started_ns)) // 1000).tolist(),
        "r": changes["rank"].tolist(),
        "w": changes["worker"].tolist(),
        "g": changes["generation"].tolist(),
        "s": changes["step"].tolist(),
        "p": changes["phase"].tolist(),
    }


def describe_overview(run: Run) -> dict[str, Any]:
    """Describes the completed steps in each time bucket since the start."""
    return {"bucket": run.pace.bucket_ns // 1000, "steps": run.pace.buckets}
