"""The events that groups report to their session."""

from __future__ import annotations

from typing import Protocol

from keepstep.worker.backends.communicator import OperationObserver, Outputs


class GroupObserver(OperationObserver, Protocol):
    """Receives the events of a session's groups, from any thread."""

    def failed(self, group: str, error: Exception) -> bool:
        """Reports that a connection of the group has ended. True: the group must echo; False: it raises the error."""

    def is_over(self, generation: int) -> bool:
        """Whether the generation is over, so that its groups are or will be taken down."""

    def knows_failure(self, within_s: float) -> bool:
        """Waits up to ``within_s`` seconds for a failure of this generation. Returns whether one is known."""

    def echoed(self, group: str) -> None:
        """Reports that a collective was answered by echo."""

    def missing(self, group: str, received: Outputs, *, is_decided: bool = False) -> None:
        """Reports tensors that an echoed collective has not written. Called in the thread that is about to get them.

        ``is_decided``: the script gets objects instead, which cannot be tracked.
        """
