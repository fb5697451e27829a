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
    """Sets ``asyncOp`` in the options of a collective, and returns them, so that NCCL returns a handle.

    With ``asyncOp=False``, which torch sets for ``async_op=False``, NCCL returns None
    (``ProcessGroupNCCL::collective``). Nothing could tell then whether the operation has ended, or whether an abort has
    ended it.
    """
    options.asyncOp = True
    return options


class EchoedWork(dist.Work):
    """The handle of a collective that a group has echoed or replayed."""

    def __init__(self, outputs: Outputs, rank: int, size: int) -> None:
        """Args:
        outputs: result of its future.
        rank: this process's rank in the group.
        size: size of the group. A message from any source counts as sent by the next rank.
        """
        super().__init__()
        self._outputs = outputs
        self._next_rank = (rank + 1) % size

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns at once."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a completed future."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        if futures.needs_type(self._outputs):
            return futures.typed(future, self._outputs)  # type: ignore[arg-type]  # seen just now
        return future

    def result(self) -> Outputs:
        """The outputs of the collective."""
        return self._outputs

    def is_completed(self) -> bool:
        """Always True."""
        return True

    def is_success(self) -> bool:
        """Always True."""
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
        """Waits until all operations have ended. Raises the error of the first one that has failed."""
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
            future.value()  # raises its error
        return self._outputs

    def result(self) -> Outputs:
        """The outputs."""
        return self._outputs

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all have ended without an error."""
        return all(work.is_success() for work in self._works)
