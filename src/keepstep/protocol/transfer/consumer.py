"""The state of a consumer's weights: empty, a complete version, being updated, or partially updated.

::

              begin           load, commit
    EMPTY ─┬────────► ... ─────────────────► READY
    READY ─┘            │
                        └─ fail ─► the former state (atomic: the new version was staged),
                                   PARTIALLY_UPDATED (in place), until a complete version has arrived
"""

from __future__ import annotations

import enum

from keepstep.errors import InternalError, WeightsNotReady, WeightsPartiallyUpdated


class Condition(enum.StrEnum):
    """The state of the weights that a consumer uses."""

    EMPTY = "empty"
    READY = "ready"
    UPDATING = "updating"
    PARTIALLY_UPDATED = "partially updated"


class ConsumerState:
    """The state of one consumer's weights. Not thread-safe."""

    def __init__(self, atomic: bool) -> None:
        """Args:
        atomic: the consumer stages a new version until it is complete; else it overwrites the old one in place.
        """
        self.atomic = atomic
        self.condition = Condition.EMPTY
        self.version: int | None = None
        """The last complete version; None if there is none. The consumer uses it if `condition` is READY."""
        self.coming: int | None = None
        """The version that is arriving; None if there is none."""
        self._reason = ""

    def begin(self, version: int) -> None:
        """Records that a version begins to arrive. A version that was arriving counts as failed."""
        if self.coming is not None:
            self.fail(f"version {version} came instead")
        self.coming = version
        if not self.atomic and self.condition is not Condition.PARTIALLY_UPDATED:
            self.condition = Condition.UPDATING

    def commit(self, version: int) -> None:
        """Records that the arriving version is complete, and is used from now on.

        Raises:
            InternalError: another version is arriving, or none.
        """
        if self.coming != version:
            raise InternalError(f"version {version} is committed while {self.coming} is on its way")
        self.condition, self.version, self.coming = Condition.READY, version, None

    def fail(self, reason: str) -> None:
        """Records that the arriving version has failed. Does nothing if none is arriving."""
        if self.coming is None:
            return
        if not self.atomic:
            self.condition = Condition.PARTIALLY_UPDATED
            self._reason = f"version {self.coming} broke off halfway ({reason})"
        self.coming = None

    def check_usable(self) -> int:
        """Returns the version that the consumer may use.

        Raises:
            WeightsPartiallyUpdated: an update in place has failed, and only a part of the weights is new.
            WeightsNotReady: there is no version yet, or a new one is overwriting the old one.
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
