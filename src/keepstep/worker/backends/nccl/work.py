"""Handles of operations in flight in an NCCL communicator.

Torch's handle is unreliable after an abort: the kernel of an aborted operation ends, so its event is complete and the
handle reports that (``WorkNCCL::isCompleted`` does not check an aborted communicator for errors), but the outputs are
garbage. So an operation counts as done only if it completed before the communicator was aborted.

Of torch's handle only `is_completed`, `block_current_stream`, `get_future` and `get_future_result` are used. `wait`
aborts the communicator where there is an error, `is_success` raises, `synchronize` and `exception` warn that they are
deprecated, and torch 2.11 cannot give the answer of `exception` to Python.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import WorkResult  # type: ignore[attr-defined]  # not in the stub

from keepstep.protocol.waiting.operations import Operation
from keepstep.worker.backends.communicator import OnError, Outputs
from keepstep.worker.backends.nccl.errors import RAISED, CommunicatorBroken

POLL_S = 0.0005
"""Interval at which a waiting host polls the device, in seconds. A poll costs microseconds."""


class NcclWork(dist.Work):
    """An operation in flight. It ends once, when a thread polls it: this class has no thread of its own.

    As with NCCL, `wait` blocks the current stream and not the host. A later call raises the error of an operation, or
    the gradient barrier, which waits for the device, finds it.
    """

    def __init__(
        self,
        operation: Operation,
        peer: int,
        outputs: Outputs,
        on_error: OnError,
        on_awaited: Callable[[], None],
        on_end: Callable[[NcclWork], None],
        judge: Callable[[NcclWork], Exception | None],
    ) -> None:
        """Args:
        operation: the kind of operation.
        peer: the other side of a send or recv.
        outputs: result of the future.
        on_error: see `OnError`.
        on_awaited: called at most once, when a caller waits for the operation, or polls it, before it has ended.
        on_end: called once, after these, by the thread that ends the operation.
        judge: returns the operation's error if the communicator is broken, else None. It is called before torch's
            handle is polled, since an abort holds a lock that the handle waits for, and again afterwards.
        """
        super().__init__()
        self.operation, self.peer = operation, peer
        self.was_awaited = False
        """Whether ``on_awaited`` was called. Final when ``on_end`` is called."""
        self.has_failed = False
        """Whether the operation has failed. Final when ``on_end`` is called."""
        self.was_told = False
        """Whether its error was raised."""
        self.begun_s = time.monotonic()
        self.issued: dist.Work | None = None
        """Torch's handle."""
        self._call: object = None
        self._outputs = outputs
        self._on_error = on_error
        self._on_awaited = on_awaited
        self._on_end = on_end
        self._judge = judge
        self._error: Exception | None = None
        self._before_going_on: Callable[[], None] | None = None
        self._ended = threading.Event()
        self._claimed = threading.Lock()
        self._changing = threading.Lock()

    def follow(self, issued: dist.Work, call: object) -> None:
        """Sets torch's handle.

        ``call`` holds the tensors, which must live as long as NCCL's kernel. Torch drops them after it has made a
        stream wait (``WorkNCCL::synchronizeStream``), and that may be another stream than the tensors' own.
        """
        self._call = call
        self.issued = issued

    def let_go(self) -> None:
        """Drops the tensors, when the device has finished the operation."""
        self._call = None

    # ---- its end --------------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Polls torch's handle, without waiting. Returns whether the operation has ended."""
        issued = self.issued
        if not self._ended.is_set() and issued is not None:
            error = self._judge(self)
            if error is not None:
                self._finish(error)
            else:
                try:
                    is_complete = issued.is_completed()
                except RAISED as raised:  # such as one of CUDA's, after which the process cannot go on
                    self._finish(raised)
                else:
                    if is_complete:
                        self._finish(self._judge(self) or _found_by(issued))
        return self._ended.is_set()

    @property
    def is_through(self) -> bool:
        """Whether the device has finished it, with or without an error. Calls no callback, so any thread may call it.

        A CUDA error counts as finished; the next call of `look` finds it.
        """
        if self._ended.is_set():
            return True
        try:
            return self.issued is not None and self.issued.is_completed()
        except RAISED:
            return True

    def fail(self, error: Exception) -> None:
        """Ends the operation with an error. The device may still run it."""
        self._finish(error)

    def _finish(self, error: Exception | None) -> None:
        if not self._claimed.acquire(blocking=False):
            return
        self.has_failed = error is not None
        try:
            if error is not None:
                self._before_going_on = self._on_error(error)
                self._error = error if self._before_going_on is None else None
            else:
                self.let_go()
        finally:
            with self._changing:
                self._on_end(self)
                self._ended.set()

    def _await(self) -> None:
        """Records that the program now depends on the end of this operation; see `GlooWork`."""
        with self._changing:
            if not (self.was_awaited or self._ended.is_set()):
                self.was_awaited = True
                self._on_awaited()

    # ---- what torch and the script ask ----------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Makes the current stream wait for the operation. With ``timeout``, and for a barrier, the host waits as well.

        Torch's `wait` is not used: it would raise an error that another thread has found, and break the communicator.

        Raises:
            RuntimeError: the operation has failed and the group does not echo; or ``timeout`` has passed.
        """
        if not self.look():
            self._await()
            if self.issued is not None:
                self.issued.block_current_stream()
            if timeout or self.operation is Operation.BARRIER:
                self._wait_on_host(timeout)
        if self._error is not None:
            self.was_told = True
            raise self._error
        if self._before_going_on is not None:
            self._before_going_on()
        return True

    def _wait_on_host(self, timeout: timedelta | None) -> None:
        until_s = time.monotonic() + timeout.total_seconds() if timeout else None
        while not self.look():
            if until_s is not None and time.monotonic() >= until_s:
                raise RuntimeError(f"the operation did not end within {timeout}")
            self._ended.wait(POLL_S)

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns torch's future of the outputs, which is complete at once and makes the streams that use it wait."""
        if not self.look():
            self._await()
        if self.issued is not None and not self.has_failed:
            return self.issued.get_future()
        future: torch.futures.Future[Any] = torch.futures.Future()
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._outputs)
        return future

    def is_completed(self) -> bool:
        """Whether the operation is complete on the device, or has failed."""
        if not self.look():
            self._await()
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether the operation is complete on the device, without an error."""
        return self.look() and self._error is None

    def exception(self) -> Exception | None:
        """The error that waiting raises, if the operation has failed."""
        return self._error

    def result(self) -> Outputs:
        """The outputs. The current stream may have to wait for them.

        Raises:
            RuntimeError: the operation has failed.
        """
        if self._error is not None:
            raise self._error
        return self._outputs

    def _source_rank(self) -> int:
        assert self.issued is not None
        return int(self.issued._source_rank())


def _found_by(issued: dist.Work) -> Exception | None:
    """Returns the error of a handle that is complete because of it, while the group does not know of one yet.

    Polling a handle asks NCCL for an error (``WorkNCCL::checkAndSetException``), and a handle that has one is complete.
    The watchdog, which informs the group, finds the same error up to 0.1 s later.
    """
    found = issued.get_future_result()  # type: ignore[attr-defined]  # not in the stub
    if not found.done() or found.value() == WorkResult.SUCCESS.value:
        return None
    return CommunicatorBroken(f"NCCL has failed: {WorkResult(found.value()).name}; see the log of torch's watchdog")
