"""A device whose operations run on streams, and an NCCL group on it, as a test on the CPU moves them.

Nothing is complete before the test says so. Like torch's, an aborted group completes everything, without an error, and
a collective that is not asynchronous has no handle. What keepstep must not call raises, or warns in torch.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import ErrorType, Store, WorkResult

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
        assert not self._group.is_aborting, "it would wait for the abort, with Python's lock (NCCLComm::isAborted)"
        if self.raises is not None:
            raise self.raises
        return self.error is not None or self.is_done

    def exception(self) -> Exception | None:
        raise TypeError("Unable to convert function return value to a Python type!")

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def block_current_stream(self) -> None:
        self.num_synchronized += 1

    def synchronize(self) -> None:
        raise AssertionError("Work::synchronize API is being deprecated")

    def get_future_result(self) -> torch.futures.Future[int]:
        """Done with an error as soon as a look at this handle finds one, else when the watchdog sees the end."""
        future: torch.futures.Future[int] = torch.futures.Future()
        if self.error is not None:
            future.set_result(WorkResult.COMM_ERROR.value)
        return future

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
        self.batches = [0]
        """Calls for each of them, and for the next one."""
        self.is_coalescing = False
        self.num_aborts = 0
        self.is_aborting = False
        self.abort_takes_s = 0.0
        self.has_begun_to_abort, self.is_aborted, self.never = (threading.Event() for _ in range(3))
        self.in_call: Callable[[], None] = lambda: None
        """What happens inside a call of torch's that issues an operation."""
        self.error = ErrorType.SUCCESS
        self.may_abort = threading.Event()
        self.may_abort.set()
        self.completes_at_abort = True
        self.cannot_abort: Exception | None = None

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> TwinWork | None:
        return self._begun(tensors, has_handle=opts.asyncOp)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> TwinWork | None:
        return self._begun(tensors, has_handle=opts.asyncOp)

    def barrier(self, opts: Any) -> TwinWork | None:
        return self._begun([], has_handle=opts.asyncOp)

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> TwinWork | None:
        return self._begun(tensors)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> TwinWork | None:
        return self._begun(tensors)

    def _begun(self, tensors: list[torch.Tensor], *, has_handle: bool = True) -> TwinWork | None:
        self.in_call()
        self.batches[-1] += 1
        if self.num_aborts:
            raise RuntimeError("NCCL communicator was aborted on rank 0.")
        if self.is_coalescing:
            return None
        self.works.append(TwinWork(self, tensors))
        self.batches.append(0)
        return self.works[-1] if has_handle else None

    def _start_coalescing(self) -> None:
        assert not self.is_coalescing
        self.is_coalescing = True

    def _end_coalescing(self) -> TwinWork | None:
        self.is_coalescing = False
        return self._begun([])

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def get_error(self) -> ErrorType:
        return self.error

    def abort(self) -> None:
        self.is_aborting = True
        self.has_begun_to_abort.set()
        assert self.may_abort.wait(60.0)
        self.never.wait(self.abort_takes_s)
        self.is_aborting = False
        if self.cannot_abort is not None:
            raise self.cannot_abort
        self.num_aborts += 1
        self.is_aborted.set()
        if self.completes_at_abort:
            for work in self.works:
                work.is_done = True
        if timedelta(seconds=self.abort_takes_s) > self.timeout:
            raise RuntimeError("Future for ProcessGroup abort timed out")

    def give_up(self) -> None:
        """What the watchdog does when an operation's timeout has passed."""
        self.error = ErrorType.TIMEOUT
        self.abort()


class TwinEnd:
    """A place after some operations."""

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
