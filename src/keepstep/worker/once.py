"""`Session.once`: what happens once per job."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from keepstep.errors import UsageError

MAX_NAME = 200
"""Characters of a name: it stands in the journal."""
Ask = Callable[[str, str], bool]
"""Operation and name to whether it is this process that does it; waits for the answer."""


class Once:
    """In a condition the action is claimed at most once. As a context manager one process at a time performs it, until
    one has completed its block.

    Created by `keepstep.Session.once`.
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
        """Whether this process performs the action; True for exactly one call in the job."""
        if self._claimed is None:
            self._claimed = self._name not in self._known and self._ask("claim", self._name)
            self._known.setdefault(self._name, False)
        return self._claimed

    def __enter__(self) -> bool:
        """Waits while another process performs it; returns True if this process must perform it."""
        if self._known.get(self._name):
            raise UsageError(f"once({self._name!r}) inside of itself: it would wait for its own end")
        is_mine = self._name not in self._known and self._ask("hold", self._name)
        self._known[self._name] = is_mine
        return is_mine

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Marks it as done; after an exception in the block, releases it for another process."""
        if not self._known[self._name]:
            return
        if kind is None:
            self._known[self._name] = False
        else:
            del self._known[self._name]
        self._ask("done" if kind is None else "give_up", self._name)
        if kind is None:  # the controller answers this one behind the other: from then on a kill repeats nothing
            self._ask("claim", self._name)
