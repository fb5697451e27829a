"""A simulated rank's state: the history of its updates, and the table of all ranks' own values.

Every rank sends its own value to all others with its gradients, and keeps the received values as a table, together with
its parameters. A replacement starts with its rank's row.
"""

from __future__ import annotations

import enum

History = tuple[int, ...]
"""The parameters, as the steps of the updates that were applied to them."""
INCOMPLETE = -1
"""In a history: an update with incomplete gradients, or with gradients of another step."""
Rows = tuple[int, ...]
"""The values of all ranks, ordered by rank."""


class LostValue(enum.Enum):
    """What becomes of a value that a failure has cut off after the update."""

    NOWHERE = enum.auto()
    """It does no harm."""
    WRITTEN = enum.auto()
    """It gets into the state."""
    DECIDED = enum.auto()
    """The script decides something by it, as it would without a failure."""
    DECIDED_ALONE = enum.auto()
    """The script decides something else by it than on any other rank."""


_RANK = 1 << 32
"""More than the number of steps of any job, so that a value identifies its rank."""


def right_value(rank: int, step: int) -> int:
    """Returns the correct value of a rank at a step."""
    return rank * _RANK + step


class LocalValue:
    """One process's own value, and the table of all ranks' values that belongs to its parameters."""

    def __init__(self) -> None:
        self.value = 0
        self.rows: Rows = ()
        self._value_before = 0
        self._rows_before: Rows = ()

    def start(self, rank: int | None) -> None:
        """Sets the value of step 0."""
        assert rank is not None
        self.value = right_value(rank, 0)

    def begin_step(self) -> None:
        """Begins an attempt at a step. It changes the value before its gradient barrier."""
        self._value_before, self._rows_before = self.value, self.rows
        self.value += 1

    def gathered(self, rows: Rows) -> None:
        """Takes over the table of all ranks' values, before the barrier."""
        self.rows = rows

    def undo(self) -> None:
        """Undoes the attempt."""
        self.value, self.rows = self._value_before, self._rows_before

    def restored(self, rank: int | None, rows: Rows) -> None:
        """Takes over the table of another rank, a snapshot or a checkpoint, and the rank's own value from it."""
        assert rank is not None
        self.value, self.rows = rows[rank], rows
