"""A simulated rank's state: the history of its updates, and the table of all ranks' own values.

Every rank sends its own value to all others with its gradients, and keeps the received values as a table, together with
its parameters. A replacement starts with its rank's row.
"""

from __future__ import annotations

History = tuple[int, ...]
"""The parameters: the step of each update that was applied to them."""
INCOMPLETE = -1
"""Stands in a history for an update whose parts do not fit together."""
Rows = tuple[int, ...]
"""Of each rank, by rank."""

_RANK = 1 << 32
"""More than any job has steps, so that a value tells whose it is."""


def right_value(rank: int, step: int) -> int:
    """What a rank has when it stands at a step."""
    return rank * _RANK + step


class LocalValue:
    """One process's own value, and the table of all ranks' that belongs to its parameters."""

    def __init__(self) -> None:
        self.value = 0
        self.rows: Rows = ()
        self._value_before = 0
        self._rows_before: Rows = ()

    def start(self, rank: int | None) -> None:
        """The script has come to its first step, together with those of the other ranks."""
        assert rank is not None
        self.value = right_value(rank, 0)

    def begin_step(self) -> None:
        """An attempt at a step begins: it changes the value before its gradient barrier."""
        self._value_before, self._rows_before = self.value, self.rows
        self.value += 1

    def gathered(self, rows: Rows) -> None:
        """Every rank's has come, before the barrier."""
        self.rows = rows

    def undo(self) -> None:
        """The attempt is undone."""
        self.value, self.rows = self._value_before, self._rows_before

    def restored(self, rank: int | None, rows: Rows) -> None:
        """The state of another rank, or of a checkpoint, has come, with its table."""
        assert rank is not None
        self.value, self.rows = rows[rank], rows
