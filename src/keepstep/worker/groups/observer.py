"""The events that groups report to their session."""

from __future__ import annotations

from typing import Protocol

from keepstep.worker.backends.communicator import OperationObserver, Outputs


class GroupObserver(OperationObserver, Protocol):
    """What a group tells its session. All calls may come from any thread."""

    def failed(self, group: str, error: Exception) -> bool:
        """A connection of the group has ended. True: the group shall echo; False: the error is raised."""

    def is_over(self, generation: int) -> bool:
        """Whether the generation is over, and its groups are taken down or about to be."""

    def knows_failure(self, within_s: float) -> bool:
        """Whether a failure of this generation is known, now or ``within_s`` seconds, for which the caller waits."""

    def echoed(self, group: str) -> None:
        """A collective was answered by echo."""

    def missing(self, group: str, received: Outputs) -> None:
        """The program is about to get tensors that an echoed collective would have written, in the thread that gets
        them."""
