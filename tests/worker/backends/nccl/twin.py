"""A device whose operations run on streams, and an NCCL group on it, as a test on the CPU moves them.

Nothing is complete before the test says so. Like torch's, an aborted group completes everything, without an error.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import ErrorType, Store

CPU = torch.device("cpu")


class TwinWork(dist.Work):
    """Torch's handle of an operation."""

    def __init__(self, group: "TwinGroup", outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._group, self._outputs = group, outputs
        self.num_synchronized = 0
        self.is_done = False
        self.error: Exception | None = None
        self.raises: Exception | None = None

    def is_completed(self) -> bool:
        if self.raises is not None:
            raise self.raises
        return self.error is not None or self.is_done

    def exception(self) -> Exception | None:
        return self.error

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def synchronize(self) -> None:
        self.num_synchronized += 1

    def wait(self, timeout: timedelta | None = None) -> bool:
        raise AssertionError("WorkNCCL::wait aborts the communicator where there is an error")

    def get_future(self) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class TwinGroup:
    """Torch's ProcessGroupNCCL."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.works: list[TwinWork] = []
        self.num_aborts = 0
        self.error = ErrorType.SUCCESS
        self.may_abort = threading.Event()
        self.may_abort.set()
        self.completes_at_abort = True
        self.cannot_abort: Exception | None = None

    def allreduce(self, tensors: list[torch.Tensor], opts: object) -> dist.Work:
        return self._begun(tensors)

    def barrier(self, opts: object = None) -> dist.Work:
        return self._begun([])

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> dist.Work:
        return self._begun(tensors)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        return self._begun(tensors)

    def _begun(self, tensors: list[torch.Tensor]) -> TwinWork:
        self.works.append(TwinWork(self, tensors))
        return self.works[-1]

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def get_error(self) -> ErrorType:
        return self.error

    def abort(self) -> None:
        assert self.may_abort.wait(60.0)
        if self.cannot_abort is not None:
            raise self.cannot_abort
        self.num_aborts += 1
        if self.completes_at_abort:
            for work in self.works:
                work.is_done = True

    def give_up(self) -> None:
        """What the watchdog does when an operation's timeout has passed."""
        self.error = ErrorType.TIMEOUT
        self.abort()


class TwinEnd:
    """A place behind some operations."""

    def __init__(self, works: Sequence[TwinWork]) -> None:
        self._works = works

    def query(self) -> bool:
        return all(work.is_done for work in self._works)


class TwinDevice:
    """Implements `StreamDevice`."""

    def __init__(self, build: Callable[[Store], None] = lambda store: None) -> None:
        """``build``: what connecting does with the store, and for how long."""
        self.device = CPU
        self.group: TwinGroup | None = None
        self.is_recording = False
        self.ends: list[TwinEnd] = []
        self._build = build

    def build(self, store: Store, rank: int, size: int, name: str, timeout: timedelta) -> Any:
        self._build(store)
        self.group = TwinGroup(timeout)
        return self.group

    def is_capturing(self) -> bool:
        return self.is_recording

    def end_of(self, works: Sequence[Any]) -> TwinEnd:
        self.ends.append(TwinEnd(works))
        return self.ends[-1]
