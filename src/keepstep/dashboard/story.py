"""The data of a run's report."""

from __future__ import annotations

from typing import Any

from keepstep.dashboard.wire import describe_stragglers
from keepstep.trace.timeline.describe import describe, describe_recovery
from keepstep.trace.timeline.run import Run
from keepstep.trace.timeline.scene import Scene

CHECKPOINT_INTERVALS_S = (300, 1800)
"""Checkpoint intervals of the job with which a report compares: one that restarts from checkpoints."""


def story(run: Run) -> dict[str, Any]:
    """Returns all numbers of a report. Times are seconds since the start of the run.

    Args:
        run: the run, after its `Run.poll`.
    """
    info, started_s = run.info, run.info.started_ns / 1e9
    recoveries = [_recovery(scene, started_s) for scene in run.scenes]
    spares_used = sum(len(scene.replacements) for scene in run.scenes)
    found = describe(run.job)
    found |= {
        "run": info.run,
        "command": list(info.command),
        "version": info.version,
        "node": info.node,
        "started_unix_s": round(info.started_unix_ns / 1e9, 3),
        "duration_s": round(run.now_s - started_s, 3),
        "exit_code": info.ended.exit_code if info.ended else None,
        "reason": info.ended.reason if info.ended else None,
        "is_running": run.is_alive,
        "steps": max(run.pace.step, run.job.progress.trained_to or 0),
        "goodput": None if run.goodput is None else round(run.goodput, 6),
        "num_failures": sum(len(scene.record.failures) for scene in run.scenes),
        "spares_used": spares_used,
        "recoveries": recoveries,
        "stragglers": describe_stragglers(run.stragglers.found()),
        "steps_per_bucket": run.pace.buckets,
        "bucket_s": run.pace.bucket_ns / 1e9,
        "lost": [[round(begin_s - started_s, 6), round(end_s - started_s, 6)] for begin_s, end_s in _lost(run)],
        "restart": restart(run),
    }
    return found


def _recovery(scene: Scene, started_s: float) -> dict[str, Any]:
    found = describe_recovery(scene.record)
    taken = {str(rank): worker for rank, (worker, _) in scene.replacements.items()}
    sources = sorted({rank for transfer in scene.transfers for rank in transfer.sources})
    return found | {
        "number": scene.number,
        "at_s": round(scene.since_s - started_s, 6),
        "taken_by_worker": taken,
        "sources": sources,
        "overtaken": scene.overtaken_s is not None,
    }


def _lost(run: Run) -> list[tuple[float, float]]:
    return run.ledger.lost(run.now_s)


def startup_s(run: Run) -> float | None:
    """Returns the seconds from the start of the run to its first forward; None if there was none."""
    resumed_s = next((event.at_s for event in run.events if event.kind == "training resumed"), None)
    # The beginning of the phase log may have been removed. The journal is always complete.
    known = [] if resumed_s is None else [resumed_s]
    if run.pace.first_forward_ns is not None:
        known.append(run.pace.first_forward_ns / 1e9)
    return min(known) - run.info.started_ns / 1e9 if known else None


def restart(run: Run) -> dict[str, Any] | None:
    """Estimates the cost of the run's failures for a job that restarts from checkpoints.

    Each failure costs one start, as long as that of this run, and on average half a checkpoint interval, but no more
    than the run had trained by then. Everything else counts as free: detecting the failure, writing and loading
    checkpoints, and finding a replacement. Failures that one recovery has repaired count once.

    Returns:
        None if nothing failed, or if the run did not begin to train.
    """
    start_s, lost = startup_s(run), _lost(run)
    if start_s is None or not lost:
        return None
    kept_s = sum(end_s - begin_s for begin_s, end_s in lost)
    trained_s = [max(0.0, begin_s - run.info.started_ns / 1e9 - start_s) for begin_s, _ in lost]
    cases = []
    for interval_s in CHECKPOINT_INTERVALS_S:
        lost_s = sum(start_s + min(interval_s / 2, before_s) for before_s in trained_s)
        ratio = round(lost_s / kept_s, 1) if kept_s > 0 else None
        cases.append({"interval_s": interval_s, "lost_s": round(lost_s, 3), "ratio": ratio})
    return {"num_failures": len(lost), "startup_s": round(start_s, 3), "lost_s": round(kept_s, 6), "cases": cases}
