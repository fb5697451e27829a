"""Handles of collectives that a surviving group completes itself, or composes of several."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from keepstep.worker.backends import futures
from keepstep.worker.backends.communicator import Outputs

Options = TypeVar("Options", bound=Any)


def asynchronous(options: Options) -> Options:
    """``options`` of a collective, with which NCCL hands out a handle.

    With ``asyncOp=False``, which torch makes of ``async_op=False``, it returns None (``ProcessGroupNCCL::collective``):
    nothing could tell then whether the operation has ended, or whether an abort has ended it.
    """
    options.asyncOp = True
    return options


class EchoedWork(dist.Work):
    """A collective that a group which is down has answered by itself."""

    def __init__(self, outputs: Outputs, rank: int, size: int) -> None:
        """Args:
        outputs: what its future holds.
        rank: of this process in the group.
        size: of the group; a message from any source came from the next rank.
        """
        super().__init__()
        self._outputs = outputs
        self._next_rank = (rank + 1) % size

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns at once."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is done."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        if futures.needs_type(self._outputs):
            return futures.typed(future, self._outputs)  # type: ignore[arg-type]  # seen just now
        return future

    def result(self) -> Outputs:
        """What the group has answered."""
        return self._outputs

    def is_completed(self) -> bool:
        """Always."""
        return True

    def is_success(self) -> bool:
        """Always."""
        return True

    def _source_rank(self) -> int:
        return self._next_rank


class JoinedWork(dist.Work):
    """Several operations as one: what a coalesced collective returns."""

    def __init__(self, outputs: Outputs, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works
        self._outputs = outputs
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until all have ended; raises what the first that failed raises."""
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the outputs."""
        if self._future is None:
            self._future = torch.futures.collect_all([work.get_future() for work in self._works]).then(self._joined)
        return self._future

    def _joined(self, all_done: torch.futures.Future[list[torch.futures.Future[Any]]]) -> Outputs:
        for future in all_done.value():
            future.value()  # raises what it ended with
        return self._outputs

    def result(self) -> Outputs:
        """The outputs."""
        return self._outputs

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether waiting would end without an error."""
        return all(work.is_success() for work in self._works)
