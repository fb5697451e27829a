"""Protected objects that differ from rank to rank: ``protect(per_rank={...})``.

All ranks hold the state of all ranks' objects, as with rank-local values (`keepstep.worker.values.declared`). Such a
state may be large, as a log is, and is mostly as it was in the step before. So a rank sends the runs of bytes that have
changed, and nothing if nothing has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from keepstep.errors import ConfigurationError, RemoteProtocolError, StateMismatch
from keepstep.worker.groups.group import alone
from keepstep.worker.state import tree
from keepstep.worker.state.layout import NOT_RESTORED
from keepstep.worker.values.attributes import Constants, from_bytes

MAX_BYTES = 64 << 20
"""Limit for the state of all ranks' objects in bytes, which every rank holds."""
_BLOCK = 64
"""Bytes in which two states are compared; a run of changed ones is sent with some 4 bytes more."""


class _Change(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How the state of one object differs from what it was."""

    name: str
    num_bytes: int
    """Its size now."""
    runs: tuple[tuple[int, bytes], ...]
    """The bytes that have changed, each run with its place."""


class _Object:
    """One object of this rank."""

    def __init__(self, name: str, thing: Any) -> None:
        self.label = f"per_rank['{name}']"
        self._thing = thing
        self._constants = Constants()
        self._read: tuple[dict[str, bytes], bytes] = {}, b""
        """The values that it had last, and how they were encoded."""

    def encoded(self) -> bytes:
        """Its current state.

        Raises:
            ConfigurationError: it is no dict of texts, or a value cannot be sent to another process.
            UsageError: ``state_dict()`` communicates with other ranks.
        """
        with alone(f"{self.label}.state_dict()"):
            state = self._thing.state_dict()
        if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
            raise ConfigurationError(f"{self.label}: its state_dict() must be a dict with texts as keys")
        values = {key: self._constants.to_bytes(key, state[key], f"{self.label}[{key!r}]") for key in state}
        if values != self._read[0]:
            self._read = values, msgspec.msgpack.encode(values)
        return self._read[1]

    def load(self, encoded: bytes) -> None:
        """Restores what `encoded` has returned, here or on another rank.

        Raises:
            RemoteProtocolError: `encoded` did not produce these bytes.
            StateMismatch: the object does not have this state then.
        """
        wanted, own = self._values(encoded), self._values(self.encoded())
        if tree.difference(own, wanted) is None:
            return
        self._thing.load_state_dict(wanted)
        if (place := tree.difference(self._values(self.encoded()), wanted)) is not None:
            raise StateMismatch(f"{self.label}{place} {NOT_RESTORED}")

    def _values(self, encoded: bytes) -> dict[str, Any]:
        try:
            values = msgspec.msgpack.decode(encoded, type=dict[str, bytes])
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"the state of {self.label} does not parse: {error}") from error
        return {key: from_bytes(content, f"{self.label}[{key!r}]") for key, content in values.items()}


class RankObjects:
    """This rank's objects, and the state of all ranks' at one step. Use it from the training thread."""

    def __init__(self) -> None:
        self._objects: dict[str, _Object] = {}
        self._rows: dict[str, list[bytes]] = {}
        """The state of each rank's object, by the object's name."""
        self._packed: dict[str, bytes] | None = None
        """The rows of each object as one value, until one changes."""
        self._sealed: dict[str, bytes] = {}

    def add(self, name: str, thing: Any) -> None:
        """Adds an object, before the first step.

        Raises:
            ConfigurationError: it cannot be protected so; the message says what to do.
        """
        if isinstance(thing, torch.nn.Module | torch.optim.Optimizer):
            raise ConfigurationError(
                f"protect(per_rank={{'{name}': {type(thing).__name__}}}): what ranks train or compute with together "
                f"belongs among the other arguments, {name}=...; if its parts differ, say shard=..., too"
            )
        if not all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
            raise ConfigurationError(
                f"protect(per_rank={{'{name}': {type(thing).__name__}}}): it has no state_dict() and "
                "load_state_dict(); give it both, or keep its values in session.state(per_rank=True, ...)"
            )
        self._objects[name] = _Object(name, thing)

    def __bool__(self) -> bool:
        return bool(self._objects)

    @property
    def names(self) -> list[str]:
        """The objects' names."""
        return list(self._objects)

    def changes(self, rank: int) -> bytes:
        """What has changed on this rank since the state of all was last put together; empty if nothing has.

        Raises:
            ConfigurationError: as in `_Object.encoded`.
        """
        found = []
        for name, thing in self._objects.items():
            former = self._rows[name][rank] if self._rows else b""
            self._sealed[name] = now = thing.encoded()
            if now is not former and now != former:
                found.append(_Change(name, len(now), _runs(former, now)))
        return msgspec.msgpack.encode(found) if found else b""

    def put_together(self, messages: Sequence[bytes]) -> None:
        """Puts the state of all ranks together.

        Args:
            messages: what `changes` has returned, of each rank.

        Raises:
            StateMismatch: another rank has an object that this one has not.
            ConfigurationError: the objects of all ranks are too large together.
        """
        rows = {name: self._rows.get(name) or [b""] * len(messages) for name in self._objects}
        for rank, message in enumerate(messages):
            for change in msgspec.msgpack.decode(message, type=list[_Change]) if message else ():
                if change.name not in rows:
                    raise StateMismatch(
                        f"protect(per_rank=...) has '{change.name}' on rank {rank}, and not here: every rank must "
                        "name the same objects"
                    )
                rows[change.name][rank] = _changed(rows[change.name][rank], change)
        self._rows, self._packed = rows, None
        self._check_size()

    def _check_size(self) -> None:
        sizes = {(name, rank): len(row) for name, rows in self._rows.items() for rank, row in enumerate(rows)}
        if (total := sum(sizes.values())) > MAX_BYTES:
            name, rank = max(sizes, key=lambda place: sizes[place])
            raise ConfigurationError(
                f"protect(per_rank=...): the objects of all ranks take {total} bytes, and {MAX_BYTES} are allowed: "
                f"every rank holds them all. The largest is '{name}' of rank {rank} with {sizes[name, rank]} bytes"
            )

    def changed(self) -> str | None:
        """The first object, as the script writes it, that is not as it was in `changes`; None if all are."""
        return next(
            (thing.label for name, thing in self._objects.items() if thing.encoded() != self._sealed.get(name)), None
        )

    def own(self) -> dict[str, bytes]:
        """The present state of this rank's objects, by name, which it does not share by this."""
        return {name: thing.encoded() for name, thing in self._objects.items()}

    def load_own(self, own: dict[str, bytes]) -> None:
        """Restores what `own` has returned.

        Raises:
            StateMismatch: an object does not have its state then.
        """
        for name, encoded in own.items():
            self._objects[name].load(encoded)

    # ---- as protected state -----------------------------------------------------------------------------------------

    def packed(self) -> dict[str, bytes]:
        """The state of all ranks' objects, by the object's name; the same bytes on every rank."""
        if self._packed is None:
            self._packed = {name: msgspec.msgpack.encode(rows) for name, rows in self._rows.items()}
        return self._packed

    def load(self, packed: dict[str, bytes], rank: int) -> None:
        """Restores the state of all, and with it this rank's objects.

        Raises:
            RemoteProtocolError: `packed` did not produce these bytes.
            StateMismatch: an object does not have its state then.
        """
        try:
            self._rows = {name: msgspec.msgpack.decode(each, type=list[bytes]) for name, each in packed.items()}
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"the state of protect(per_rank=...) does not parse: {error}") from error
        self._packed = dict(packed)
        for name, thing in self._objects.items():
            thing.load(self._rows[name][rank])
            self._sealed[name] = thing.encoded()


def _runs(former: bytes, now: bytes) -> tuple[tuple[int, bytes], ...]:
    """The runs of blocks in which ``now`` differs from ``former``."""
    num_common = min(len(former), len(now)) // _BLOCK
    one, other = (np.frombuffer(each, np.uint8, num_common * _BLOCK).reshape(-1, _BLOCK) for each in (former, now))
    blocks = np.flatnonzero((one != other).any(axis=1)).tolist()
    blocks += range(num_common, -(-len(now) // _BLOCK))
    known = set(blocks)
    starts = [block for block in blocks if block - 1 not in known]
    ends = [block + 1 for block in blocks if block + 1 not in known]
    return tuple((start * _BLOCK, now[start * _BLOCK : end * _BLOCK]) for start, end in zip(starts, ends, strict=True))


def _changed(former: bytes, change: _Change) -> bytes:
    """The state after a change. While the group is broken, ``former`` may be of another rank: then it is no state."""
    content = bytearray(former[: change.num_bytes].ljust(change.num_bytes, b"\0"))
    for place, run in change.runs:
        content[place : place + len(run)] = run
    return bytes(content[: change.num_bytes])
