"""`Session.once` and `Session.agree`: actions that happen once per job, and values that are the same in all of it."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

import msgspec
import torch

from keepstep.errors import ConfigurationError, UsageError
from keepstep.protocol.messages import MAX_AGREED_BYTES
from keepstep.worker.state import tree

MAX_NAME = 200
"""Maximum number of characters of a name, because the journal contains it."""


class Ask(Protocol):
    """Asks the controller; see `Link.ask_once`. Blocks until it answers."""

    def __call__(self, operation: str, name: str, value: bytes = b"") -> tuple[bool, bytes]: ...


def agreed(name: str, value: Any, ask: Ask) -> Any:
    """Proposes a value for a name. Returns the one that was proposed first; see `Session.agree`.

    Raises:
        UsageError: the name is empty or too long.
        ConfigurationError: the value is too large, has a tensor in it, or cannot be sent to another process.
    """
    _check("agree", name)
    tensors: list[torch.Tensor] = []
    packed = msgspec.msgpack.encode(tree.pack(value, tensors, f"agree({name!r})"))
    if tensors:
        raise ConfigurationError(f"agree({name!r}): the value has a tensor in it: give it as a list, with tolist()")
    if len(packed) > MAX_AGREED_BYTES:
        raise ConfigurationError(
            f"agree({name!r}): a value of {len(packed)} bytes, and at most {MAX_AGREED_BYTES} are allowed: the "
            "controller's journal contains it. Agree on the name of a file"
        )
    _, first = ask("agree", name, packed)
    return tree.unpack(msgspec.msgpack.decode(first), [])


def _check(what: str, name: str) -> None:
    if not name or len(name) > MAX_NAME:
        raise UsageError(f"{what}({name[:MAX_NAME]!r}): a name has from 1 to {MAX_NAME} characters")


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
        _check("once", name)
        self._name = name
        self._ask = ask
        self._known = known
        self._claimed: bool | None = None

    def __bool__(self) -> bool:
        """Whether this process performs the action; True for exactly one call in the job."""
        if self._claimed is None:
            self._claimed = self._name not in self._known and self._ask("claim", self._name)[0]
            self._known.setdefault(self._name, False)
        return self._claimed

    def __enter__(self) -> bool:
        """Waits while another process performs the action. Returns True if this process must perform it."""
        if self._known.get(self._name):
            raise UsageError(f"once({self._name!r}) inside of itself: it would wait for its own end")
        is_mine = self._name not in self._known and self._ask("hold", self._name)[0]
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
