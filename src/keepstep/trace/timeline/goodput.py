"""How much of its time a job has spent on steps that count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from keepstep.trace.timeline.pace import Pace
from keepstep.trace.timeline.scene import Scene


def lost_intervals(scenes: Iterable[Scene], pace: Pace, now_s: float) -> Iterator[tuple[float, float]]:
    """The stretches of time that recoveries cost, one for each that was not overtaken by another one.

    A stretch begins with the step that was computed for nothing, or with the failure where no step was. It ends where
    the first step afterwards begins; the step itself counts as training.
    """
    begin_s: float | None = None
    for scene in scenes:
        record = scene.record
        if begin_s is None:
            begin_s = scene.since_s
            for (generation, step), begun_ns in pace.begun_ns.items():
                if record.steps_recomputed and step == record.resume_step and generation < record.generation:
                    begin_s = min(begin_s, max(begun_ns / 1e9, scene.since_s - (record.first_step_s or 0.0) * 10))
        if scene.overtaken_s is not None:
            continue
        end_s = now_s if record.resumed_s is None else record.resumed_s - (record.first_step_s or 0.0)
        yield begin_s, max(begin_s, end_s)
        begin_s = None


def goodput(scenes: Iterable[Scene], pace: Pace, now_s: float) -> float | None:
    """The share of the time since training began that was not lost; None before."""
    if pace.first_forward_ns is None or now_s <= pace.first_forward_ns / 1e9:
        return None
    lost_s = sum(end_s - begin_s for begin_s, end_s in lost_intervals(scenes, pace, now_s))
    return max(0.0, 1.0 - lost_s / (now_s - pace.first_forward_ns / 1e9))
