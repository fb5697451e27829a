"""Waiting for nodes, until there is room for what the job starts with."""

from __future__ import annotations

from keepstep.protocol.recovery.placement.processes import Processes
from keepstep.protocol.recovery.stages import Course, RecoverySettings


class Gathering:
    """Says when the ranks can be given to nodes: at once when there is room for the spares too, else after a while."""

    def __init__(self, settings: RecoverySettings, course: Course, processes: Processes) -> None:
        self._settings = settings
        self._course = course
        self._processes = processes
        self._all_ranks_fit = False
        """Whether only nodes that bring room for spares are still waited for."""
        self._may_be_oversubscribed = False
        """Whether only nodes that make the sharing of devices needless are still waited for."""
        self.is_over = False
        """Whether the ranks have been given to nodes."""

    def joined(self, now_s: float) -> bool:
        """A node has joined; returns whether nothing else is to be waited for."""
        course = self._course
        if course.deadline_s is None:
            course.deadline_s = now_s + self._settings.start_deadline_s
        if not self._all_ranks_fit and self._processes.all_ranks_fit():
            self._all_ranks_fit = True
            self._hurry(now_s)
        elif not self._may_be_oversubscribed and self._settings.most_per_node:
            self._may_be_oversubscribed = self._processes.room_for_ranks() >= self._settings.world_size
            if self._may_be_oversubscribed:
                self._hurry(now_s)
        return self._all_ranks_fit and self._processes.all_spares_fit()

    def _hurry(self, now_s: float) -> None:
        course = self._course
        assert course.deadline_s is not None
        course.deadline_s = min(course.deadline_s, now_s + self._settings.spares_grace_s)

    def lost(self, now_s: float) -> None:
        """A node is gone again."""
        if (self._all_ranks_fit or self._may_be_oversubscribed) and not self.is_over:
            self._all_ranks_fit = self._may_be_oversubscribed = False
            self._course.deadline_s = now_s + self._settings.start_deadline_s
