"""Objects that need the rank but are created on a spare, before its rank is known: a sampler, Accelerate's state."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch.utils.data.distributed import DistributedSampler


def have_samplers_wait(rank: Callable[[], int]) -> None:
    """Makes every ``DistributedSampler`` created from now on read the rank at its first use, not at its creation.

    A spare has no rank when its script creates the sampler. Reading the rank there would block the script.

    Args:
        rank: waits until this process has a rank, and returns it.
    """
    make = DistributedSampler.__init__

    def made(
        self: Any, dataset: Any, num_replicas: int | None = None, rank: int | None = None, *more: Any, **options: Any
    ) -> None:
        make(self, dataset, num_replicas, 0 if rank is None else rank, *more, **options)
        if rank is None:
            self.rank = None

    for name, value in (("__init__", made), ("rank", _LateRank(rank))):
        setattr(DistributedSampler, name, value)


class _LateRank:
    """The attribute ``rank`` of a sampler. If its value is None, reading it waits for this process's rank."""

    def __init__(self, wait: Callable[[], int]) -> None:
        self._wait = wait

    def __get__(self, sampler: Any, owner: type) -> int:
        if sampler is None or "rank" not in vars(sampler):
            raise AttributeError(f"{owner.__name__} has no rank yet")
        held: int | None = vars(sampler)["rank"]
        if held is None:
            held = vars(sampler)["rank"] = self._wait()
        return held

    def __set__(self, sampler: Any, value: int | None) -> None:
        vars(sampler)["rank"] = value


class Joined(Protocol):
    """The part of `keepstep.Session` that this module uses."""

    @property
    def is_waiting_spare(self) -> bool:
        """See there."""

    @property
    def is_pretending(self) -> bool:
        """See there."""

    @property
    def rank(self) -> int:
        """See there."""

    @property
    def local_rank(self) -> int:
        """See there."""

    def pretending(self) -> AbstractContextManager[None]:
        """See there."""


def have_accelerate_wait(session: Callable[[], Joined | None]) -> None:
    """Makes Accelerate's process state and batch sampler shards read the rank at their first use.

    It has an effect on spares only. Transformers creates the process state for its ``TrainingArguments``, before the
    script builds the model. Accelerate creates the batch sampler shard with the loader; see `Session.pretending`.

    Args:
        session: returns the session of this process, or None.
    """
    from accelerate.data_loader import BatchSamplerShard
    from accelerate.state import AcceleratorState, PartialState

    if isinstance(vars(PartialState).get("process_index"), _LateIndex):
        return
    make = PartialState.__init__

    def made(state: Any, *arguments: Any, **options: Any) -> None:
        present = session()
        if present is None or not present.is_waiting_spare or vars(state):
            make(state, *arguments, **options)
            return
        with present.pretending():
            make(state, *arguments, **options)
        for name in ("RANK", "LOCAL_RANK"):
            os.environ.pop(name, None)  # environ: Accelerate has set them to its own defaults
        vars(state).update(process_index=None, local_process_index=None)

    PartialState.__init__ = made
    for kind in (PartialState, AcceleratorState):
        kind.process_index = _LateIndex("process_index", session, lambda present: present.rank)
        kind.local_process_index = _LateIndex("local_process_index", session, lambda present: present.local_rank)
    BatchSamplerShard.process_index = _LateIndex("process_index", session, lambda present: present.rank)


class _LateIndex:
    """An attribute of Accelerate with the index of this process.

    A value that is set inside `Session.pretending` is stored as None. Reading it later waits for the rank.
    """

    def __init__(self, name: str, session: Callable[[], Joined | None], ask: Callable[[Joined], int]) -> None:
        self._name, self._session, self._ask = name, session, ask

    def __get__(self, state: Any, owner: type) -> Any:
        if state is None:
            return self
        if self._name not in vars(state):
            raise AttributeError(self._name)
        held, present = vars(state)[self._name], self._session()
        if held is None and present is not None:
            if present.is_pretending:
                return 1  # not 0: the process with index 0 writes files
            held = vars(state)[self._name] = self._ask(present)
        return held

    def __set__(self, state: Any, value: int | None) -> None:
        present = self._session()
        is_pretending = present is not None and present.is_pretending
        vars(state)[self._name] = None if is_pretending else value
