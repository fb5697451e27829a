"""Finished recoveries, each reported once, for counters and exporters that cannot revise values."""

from __future__ import annotations

from keepstep.protocol.recovery import Stage
from keepstep.trace.timeline.run import Run
from keepstep.trace.timeline.scene import Scene


class FinishedScenes:
    """Returns each recovery once: when training has resumed, another failure has superseded it, or the job has ended.

    Until then its cause may still change, because the controller learns late how a process has ended.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._num_told = 0
        self._was_dead = False

    def take(self, is_over: bool = False) -> list[Scene]:
        """Returns the recoveries that have finished since the last call, oldest first. Call it after each poll.

        Args:
            is_over: whether the caller knows that the job has ended.
        """
        scenes, is_over = self._run.scenes, is_over or self._is_over()
        first = self._num_told
        while self._num_told < len(scenes) and (is_over or scenes[self._num_told].end_s is not None):
            self._num_told += 1
        return scenes[first : self._num_told]

    def _is_over(self) -> bool:
        """Whether the job has ended. If the launcher died, only after one more poll, which reads its last entries."""
        was_dead, self._was_dead = self._was_dead, not self._run.is_alive
        return self._run.info.ended is not None or self._run.job.stage is Stage.ENDED or was_dead
