"""`Session.once`: actions that happen once per job."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from keepstep.errors import UsageError

MAX_NAME = 200
"""Maximum number of characters of a name, because the journal contains it."""
Ask = Callable[[str, str], bool]
"""(operation, name) -> whether this process performs the action. Blocks until the controller answers."""


class Once:
    """Guards an action that happens once per job. Created by `keepstep.Session.once`.

    As a condition, it is True at most once in the job. As a context manager, it lets one process at a time perform the
    action, until one has completed its block.
    """

    def __init__(self, name: str, ask: Ask, known: dict[str, bool]) -> None:
        """Args:
        name: name of the action.
        ask: asks the controller.
        known: names that this process knows: True while it holds the name, False for a name that is over.
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
        """Waits while another process performs the action. Returns True if this process must perform it."""
        if self._known.get(self._name):
            raise UsageError(f"once({self._name!r}) inside of itself: it would wait for its own end")
        is_mine = self._name not in self._known and self._ask("hold", self._name)
        self._known[self._name] = is_mine
        return is_mine

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Marks the action as done. After an exception in the block, releases it for another process."""
        if not self._known[self._name]:
            return
        if kind is None:
            self._known[self._name] = False
        else:
            del self._known[self._name]
        self._ask("done" if kind is None else "give_up", self._name)
        if kind is None:  # the controller answers it after it has recorded `done`: a kill then repeats nothing
            self._ask("claim", self._name)
