"""`Session.once`: what happens once in a job's life."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from keepstep.errors import UsageError

MAX_NAME = 200
"""Characters of a name: it stands in the journal."""
Ask = Callable[[str, str], bool]
"""Operation and name to whether it is this process that does it; waits for the answer."""


class Once:
    """Asked in a condition it is claimed at most once; as a context manager it is done by one process at a time until
    one has come to the end of its block.

    Made by `keepstep.Session.once`.
    """

    def __init__(self, name: str, ask: Ask, known: dict[str, bool]) -> None:
        """Args:
        name: of what happens.
        ask: the controller.
        known: what this process knows of names: True for those that it holds just now, False for those that are over.
        """
        if not name or len(name) > MAX_NAME:
            raise UsageError(f"once({name[:MAX_NAME]!r}): a name has from 1 to {MAX_NAME} characters")
        self._name = name
        self._ask = ask
        self._known = known
        self._claimed: bool | None = None

    def __bool__(self) -> bool:
        """Whether it is this process that does it; True for exactly one process of the job, and there for one call."""
        if self._claimed is None:
            self._claimed = self._name not in self._known and self._ask("claim", self._name)
            self._known.setdefault(self._name, False)
        return self._claimed

    def __enter__(self) -> bool:
        """Waits while another process is at it; True where this one is to do it."""
        if self._known.get(self._name):
            raise UsageError(f"once({self._name!r}) inside of itself: it would wait for its own end")
        is_mine = self._name not in self._known and self._ask("hold", self._name)
        self._known[self._name] = is_mine
        return is_mine

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """It is done; or, where an exception leaves the block, another process is to do it."""
        if not self._known[self._name]:
            return
        if kind is None:
            self._known[self._name] = False
        else:
            del self._known[self._name]
        self._ask("done" if kind is None else "give_up", self._name)
        if kind is None:  # the controller answers this one behind the other: from then on a kill repeats nothing
            self._ask("claim", self._name)
