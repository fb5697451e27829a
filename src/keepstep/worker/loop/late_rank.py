"""Objects that need the rank but are created on a spare, before its rank is known: a sampler, Accelerate's state."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch.utils.data.distributed import DistributedSampler


def have_samplers_wait(rank: Callable[[], int]) -> None:
    """Has every ``DistributedSampler`` that is made from now on ask for its rank when it is used, and not before.

    On a spare: the rank is not known yet, and asking for it where the sampler is made would hold up the script there.

    Args:
        rank: gives this process's rank, and waits for it.
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
    """The attribute ``rank``: where it is None, the one that this process gets."""

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
    """What this needs of a `keepstep.Session`."""

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
    """Has what Accelerate makes of a process and of its loaders ask for the rank when it is used, and not before.

    On a spare; else nothing changes. Transformers makes the state of a process for its arguments, before the model is
    built. What shares out the samples of a loader is made with the loader; see `Session.pretending`.

    Args:
        session: gives that of this process, if there is one.
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
            os.environ.pop(name, None)  # environ: Accelerate has made them up
        vars(state).update(process_index=None, local_process_index=None)

    PartialState.__init__ = made
    for kind in (PartialState, AcceleratorState):
        kind.process_index = _LateIndex("process_index", session, lambda present: present.rank)
        kind.local_process_index = _LateIndex("local_process_index", session, lambda present: present.local_rank)
    BatchSamplerShard.process_index = _LateIndex("process_index", session, lambda present: present.rank)


class _LateIndex:
    """The attribute of Accelerate's that says which process this is. It is None where it was set while a spare
    pretends, and is asked for when it is used."""

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
                return 1  # not the first one, which writes
            held = vars(state)[self._name] = self._ask(present)
        return held

    def __set__(self, state: Any, value: int | None) -> None:
        present = self._session()
        is_pretending = present is not None and present.is_pretending
        vars(state)[self._name] = None if is_pretending else value
