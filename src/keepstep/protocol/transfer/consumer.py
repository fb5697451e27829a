"""The state of a consumer's weights: empty, a complete version, being updated, or partially updated.

::

              begin           load, commit
    EMPTY ─┬────────► ... ─────────────────► READY
    READY ─┘            │
                        └─ fail ─► what it was (atomic: the new version was put aside),
                                   PARTIALLY_UPDATED (in place), until a whole version has arrived
"""

from __future__ import annotations

import enum

from keepstep.errors import InternalError, WeightsNotReady, WeightsPartiallyUpdated


class Condition(enum.StrEnum):
    """What the weights that a consumer uses are at the moment."""

    EMPTY = "empty"
    READY = "ready"
    UPDATING = "updating"
    PARTIALLY_UPDATED = "partially updated"


class ConsumerState:
    """One consumer's weights. Not for several threads."""

    def __init__(self, atomic: bool) -> None:
        """Args:
        atomic: a new version is put aside until it is whole; else it overwrites the old one piece by piece.
        """
        self.atomic = atomic
        self.condition = Condition.EMPTY
        self.version: int | None = None
        """The last whole version; what is used unless the weights are in between or partially updated."""
        self.coming: int | None = None
        """The version that is on its way."""
        self._reason = ""

    def begin(self, version: int) -> None:
        """A version begins to arrive. What was on its way before counts as failed."""
        if self.coming is not None:
            self.fail(f"version {version} came instead")
        self.coming = version
        if not self.atomic and self.condition is not Condition.PARTIALLY_UPDATED:
            self.condition = Condition.UPDATING

    def commit(self, version: int) -> None:
        """The version that was on its way is whole, and counts."""
        if self.coming != version:
            raise InternalError(f"version {version} is committed while {self.coming} is on its way")
        self.condition, self.version, self.coming = Condition.READY, version, None

    def fail(self, reason: str) -> None:
        """The version that was on its way does not come."""
        if self.coming is None:
            return
        if not self.atomic:
            self.condition = Condition.PARTIALLY_UPDATED
            self._reason = f"version {self.coming} broke off halfway ({reason})"
        self.coming = None

    def check_usable(self) -> int:
        """The version that may be used.

        Raises:
            WeightsPartiallyUpdated: an update in place broke off; half of the weights are new.
            WeightsNotReady: there is no version yet, or one is just being written over the old one.
        """
        match self.condition:
            case Condition.READY if self.version is not None:
                return self.version
            case Condition.PARTIALLY_UPDATED:
                raise WeightsPartiallyUpdated(f"{self._reason}; the next whole version makes them usable again")
            case Condition.UPDATING:
                raise WeightsNotReady(f"version {self.coming} is being written over version {self.version}")
            case _:
                raise WeightsNotReady("no version has arrived yet")
