"""What a user's callbacks and a derived trainer keep as their attributes, as an object of each rank's own.

Ranks know each other's values as they were before the gradient barrier of the last unit. What may have changed them
since are events behind that barrier, which `KeepstepMixin` passes to the callbacks of a replacement, too.
"""

from __future__ import annotations

import dis
import types
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState, TrainerCallback

from keepstep.errors import ConfigurationError
from keepstep.worker.state import tree
from keepstep.worker.values.own_attributes import CONSTANTS, CONTAINERS, OwnAttributes

MAX_RANK_BYTES = 1 << 20
"""Limit for the values of one rank, because every rank holds those of all ranks."""
MAX_BYTES = 16 << 20
"""Limit for those of all ranks."""
_BEHIND_UPDATE = ("on_optimizer_step", "on_step_end")
"""Events between a step's gradient barrier and its end."""
_OF_WORK = ("on_evaluate", "on_save")
"""Events of the work behind a step."""
Encoded = list[dict[str, bytes]]
"""For each owner, values as bytes by the attribute's name."""


class KeptAttributes:
    """The attributes of a trainer and of the user's callbacks."""

    def __init__(self, trainer: Trainer, not_the_users: Iterable[str], protected: Iterable[object]) -> None:
        """Args:
        trainer: the trainer, before its first step.
        not_the_users: names of the trainer's attributes that are not the user's, besides those of ``Trainer``.
        protected: objects that are protected by themselves.
        """
        known = [id(each) for each in protected]
        callbacks = [each for each in trainer.callback_handler.callbacks if _is_bare(each) and id(each) not in known]
        left_out = {*set_by(Trainer), *not_the_users}
        self._own = OwnAttributes([trainer, *callbacks], [left_out, *([()] * len(callbacks))])
        self._is_begun = False
        self._refused: set[tuple[int, str]] = set()
        self._first: Encoded = [{} for _ in self._own.owners]
        self._lengths: dict[tuple[int, str], int] = {}
        """Numbers of elements of containers before the training."""
        self._first, self._lengths = self._encoded(), self._present_lengths()
        self._is_begun = True
        self._shared = b""
        self._taken_at = -1
        """The unit at whose beginning the values were saved in this process."""

    @property
    def change_behind_update(self) -> bool:
        """Whether a callback that keeps values hears of events between the barrier of a step and its end."""
        return any(_hears(each, _BEHIND_UPDATE) for each in self._own.owners[1:] if _keeps_values(each))

    # ---- as each rank's own object ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The values that were shared last."""
        return {"attributes": self._shared}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Gets the values that `put` sets."""
        self._shared = state["attributes"]

    def share(self, world_size: int) -> None:
        """Protects the values as they are. Call it before a unit's barrier."""
        encoded, limit = self._changed(), min(MAX_RANK_BYTES, MAX_BYTES // world_size)
        sizes = {(owner, name): len(each) for owner, named in enumerate(encoded) for name, each in named.items()}
        while (total := sum(sizes.values())) > limit:
            largest = max(sizes, key=lambda place: sizes[place])
            self._refuse(*largest, f"has {sizes.pop(largest)} of {total} bytes, and {limit} are allowed")
            del encoded[largest[0]][largest[1]]
        shared = msgspec.msgpack.encode(encoded)
        if shared != self._shared:  # an object that stays the same is not compared
            self._shared = shared

    # ---- in the course of a unit ------------------------------------------------------------------------------------

    def take(self, unit: int) -> None:
        """Saves the values with which a unit begins in this process."""
        self._own.take()
        self._taken_at = unit

    def put(self, unit: int) -> bool:
        """Restores the values with which a unit begins.

        Returns:
            False if they were not saved in this process: they are now those at the last barrier.
        """
        if unit == self._taken_at:
            self._own.put_back()
            return True
        shared = _decoded(self._shared)
        self._put(
            [
                {name: first[name] for name in named if name in first} | values
                for first, named, values in zip(self._first, self._changed(), shared or self._changed(), strict=True)
            ]
        )
        return False

    def put_back(self) -> None:
        """Restores the values that were saved last."""
        self._own.put_back()

    def changes_by(self, call: Callable[[], Any]) -> bytes:
        """Calls a function. Returns the values that it has changed; empty if it has changed none."""
        before = self._encoded()
        call()
        changes = [
            {name: value for name, value in now.items() if former.get(name) != value}
            for former, now in zip(before, self._encoded(), strict=True)
        ]
        return msgspec.msgpack.encode(changes) if any(changes) else b""

    def put_changes(self, changes: bytes) -> None:
        """Sets what `changes_by` has returned, here or in another process."""
        if changes:
            self._put(_decoded(changes))

    # -----------------------------------------------------------------------------------------------------------------

    def _put(self, values: Encoded) -> None:
        different = [
            {name: value for name, value in named.items() if own.get(name) != value}
            for own, named in zip(self._encoded(), values, strict=True)  # of others the containers keep their objects
        ]
        self._own.put_changed([{name: _value_of(each) for name, each in named.items()} for named in different])

    def _changed(self) -> Encoded:
        """The values that differ from those before the training."""
        return [
            {name: value for name, value in named.items() if first.get(name) != value}
            for first, named in zip(self._first, self._encoded(), strict=True)
        ]

    def _encoded(self) -> Encoded:
        encoded: Encoded = [{} for _ in self._own.owners]
        for owner, named in enumerate(self._own.of(CONSTANTS | CONTAINERS)):
            for name, value in named.items():
                if (owner, name) in self._refused:
                    continue
                try:
                    encoded[owner][name] = _bytes_of(value)
                except ConfigurationError as error:
                    num_elements = len(value) if type(value) in CONTAINERS else 0
                    if self._is_begun and self._lengths.get((owner, name)) != num_elements:
                        self._refuse(owner, name, f"holds something else than plain values ({error})")
        return encoded

    def _present_lengths(self) -> dict[tuple[int, str], int]:
        containers = enumerate(self._own.of(CONTAINERS))
        return {(owner, name): len(each) for owner, named in containers for name, each in named.items()}

    def _refuse(self, owner: int, name: str, why: str) -> None:
        self._refused.add((owner, name))
        warnings.warn(
            f"keepstep: {type(self._own.owners[owner]).__name__}.{name} {why}: on a replacement it starts over. If "
            "training changes it, keep it in session.state(), or, in a callback where it is the same on all ranks, "
            "in the state() of an ExportableState",
            RuntimeWarning,
            stacklevel=2,
        )


def _decoded(encoded: bytes) -> Encoded:
    values: Encoded = msgspec.msgpack.decode(encoded, type=Encoded) if encoded else []
    return values


def set_by(kind: type) -> set[str]:
    """Names of the attributes that the methods of a class set."""
    functions = [each for each in vars(kind).values() if isinstance(each, types.FunctionType)]
    return {line.argval for each in functions for line in dis.get_instructions(each) if line.opname == "STORE_ATTR"}


def hear_of_work(callbacks: Iterable[object]) -> bool:
    """Whether a callback of the user's hears of evaluations or checkpoints."""
    return any(_hears(each, _OF_WORK) for each in callbacks if not _is_of_transformers(type(each)))


def _hears(callback: object, events: Iterable[str]) -> bool:
    return any(getattr(type(callback), event) is not getattr(TrainerCallback, event) for event in events)


def _is_bare(callback: object) -> bool:
    """Whether a callback is the user's and has no state of its own that is protected."""
    return not isinstance(callback, ExportableState) and not _is_of_transformers(type(callback))


def _is_of_transformers(kind: type) -> bool:
    return kind.__module__.startswith("transformers.")


def _keeps_values(callback: object) -> bool:
    """Whether a callback has attributes, of its own or of its class, that `KeptAttributes` protects."""
    users = [kind for kind in type(callback).__mro__ if kind is not object and not _is_of_transformers(kind)]
    named = [vars(callback), *map(vars, users)]
    values = [value for each in named for name, value in each.items() if not name.startswith("__")]
    return any(type(value) in CONSTANTS | CONTAINERS for value in values)


def _bytes_of(value: Any) -> bytes:
    """Raises:
    ConfigurationError: the value contains something else than plain values, or itself.
    """
    if type(value) is deque:
        value = list(value)
    elif type(value) is defaultdict:
        value = dict(value)
    tensors: list[torch.Tensor] = []
    try:
        packed = tree.pack(value, tensors, "it")
    except RecursionError:
        raise ConfigurationError("it contains itself") from None
    if tensors:
        raise ConfigurationError("tensors")
    return msgspec.msgpack.encode(packed)


def _value_of(encoded: bytes) -> Any:
    return tree.unpack(msgspec.msgpack.decode(encoded), [])
