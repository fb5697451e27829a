"""The share of its time that a job has spent on committed steps."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.trace.timeline.pace import Pace
from keepstep.trace.timeline.scene import Scene

Stretch = tuple[float, float]
"""Beginning and end, in seconds on the controller's clock."""


class Ledger:
    """The time that recoveries have cost, as one stretch for each recovery together with those that it superseded.

    A stretch begins with the step that has to be recomputed, or with the failure if there is none. It ends where the
    first step after the recovery begins; that step itself counts as training.
    """

    def __init__(self, scenes: Sequence[Scene], pace: Pace) -> None:
        """Args:
        scenes: every recovery, oldest first. The list may grow, and a recovery may change until it has an end.
        pace: the pace of the same run.
        """
        self._scenes = scenes
        self._pace = pace
        self._closed: list[Stretch] = []
        """Completed stretches. They are stored, because ``pace`` drops the start times of old steps."""
        self._num_closed = 0
        """Number of scenes in the completed stretches."""
        self._closed_s = 0.0

    def lost(self, now_s: float) -> list[Stretch]:
        """Returns all stretches. An open one ends at ``now_s``."""
        open_since_s: float | None = None
        for number in range(self._num_closed, len(self._scenes)):
            scene = self._scenes[number]
            begin_s = self._begin_s(scene) if open_since_s is None else open_since_s
            if scene.overtaken_s is not None:
                open_since_s = begin_s
            elif not scene.has_resumed or scene.record.resumed_s is None:
                return [*self._closed, (begin_s, max(begin_s, now_s))]
            else:
                end_s = max(begin_s, scene.record.resumed_s - (scene.record.first_step_s or 0.0))
                self._closed.append((begin_s, end_s))
                self._closed_s += end_s - begin_s
                self._num_closed, open_since_s = number + 1, None
        return [*self._closed, *([(open_since_s, max(open_since_s, now_s))] if open_since_s is not None else [])]

    def _begin_s(self, scene: Scene) -> float:
        record = scene.record
        if record.steps_recomputed and record.resume_step is not None:
            begun_ns = self._pace.begun_ns.get((record.generation - 1, record.resume_step))
            if begun_ns is not None:
                return min(scene.since_s, begun_ns / 1e9)
        return scene.since_s

    def goodput(self, now_s: float) -> float | None:
        """Returns the share of the time since training began that was not lost; None before training."""
        begun_ns = self._pace.first_forward_ns
        if begun_ns is None or now_s <= begun_ns / 1e9:
            return None
        stretches = self.lost(now_s)
        lost_s = self._closed_s + sum(end_s - begin_s for begin_s, end_s in stretches[len(self._closed) :])
        return min(1.0, max(0.0, 1.0 - lost_s / (now_s - begun_ns / 1e9)))
