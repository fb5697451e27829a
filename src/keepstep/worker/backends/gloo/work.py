"""Handles of operations in flight in a gloo communicator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from keepstep.protocol.waiting.operations import Operation
from keepstep.worker.backends import futures
from keepstep.worker.backends.communicator import OnError, Outputs, TorchBackend, first_tensor
from keepstep.worker.backends.gloo.background import in_background
from keepstep.worker.backends.gloo.errors import RAISED
from keepstep.worker.backends.gloo.scattering import CopyingWork

SHORT = timedelta(milliseconds=10)
"""How long a thread waits in gloo itself, where only gloo can wake it. The timeout is an exception in C++ and takes a
tenth of a millisecond."""

_SILENT = frozenset({Operation.SEND, Operation.RECV})
"""Gloo has no future for these: only a thread that waits learns of their end."""


class GlooWork(dist.Work):
    """An operation in flight in the inner group. It ends once: with gloo's result, or by `forget`.

    A thread that waits for it first waits in gloo itself, since a small collective ends within microseconds. After
    that, gloo's own thread reports the end, so that `forget` can release the waiting thread.
    """

    def __init__(
        self,
        operation: Operation,
        peer: int,
        outputs: Outputs,
        timeout: timedelta,
        on_error: OnError,
        on_awaited: Callable[[], None],
        on_end: Callable[[GlooWork], None],
    ) -> None:
        """Args:
        operation: the kind of operation.
        peer: the other side of a send or recv.
        outputs: result of the future.
        timeout: timeout of the group. For a send and a recv gloo would use that of connecting.
        on_error: see `OnError`.
        on_awaited: called at most once, when a caller waits for the operation, or polls it, before it has ended.
        on_end: called once, after these, from any thread.
        """
        super().__init__()
        self.operation, self.peer = operation, peer
        self.was_awaited = False
        """Whether ``on_awaited`` was called. Final when ``on_end`` is called."""
        self.has_failed = False
        """Whether the operation has failed. Final when ``on_end`` is called."""
        self._outputs = outputs
        self._device = _gpu_of(outputs)
        self._timeout = timeout
        self._on_error = on_error
        self._on_awaited = on_awaited
        self._on_end = on_end
        self._issued: dist.Work | None = None
        self._error: Exception | None = None
        self._before_going_on: Callable[[], None] | None = None
        self._ending = self._ended = False
        self._is_silent = operation in _SILENT
        self._is_followed = False
        self._asked_by: int | None = None
        """The thread that is registering a callback on gloo's future at this moment."""
        self._answered_by: int | None = None
        """Gloo's thread that has reported the end. Gloo's future is complete then; its handle completes a little later,
        after that thread has notified torch's profiler. The profiler must not be notified of an operation of a profile
        that has ended."""
        self._claimed = threading.Lock()
        self._running = threading.Lock()
        """Held until the operation has ended. Waiting for a lock costs a fraction of waiting for a future."""
        self._running.acquire()
        self._changing = threading.Lock()
        self._end: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None
        """Created on demand."""

    def follow(self, issued: dist.Work, communicator: TorchBackend) -> None:
        """Sets gloo's handle, which may be complete already."""
        self._issued = issued
        if self._is_silent:
            in_background(self._wait_for_gloo, issued, communicator)
        elif self._ended and not issued.is_completed():  # it was forgotten while it was being issued
            in_background(_outlive, issued, communicator)

    def look(self) -> bool:
        """Polls gloo's handle, without waiting. Returns whether the operation has ended."""
        issued = self._issued
        if not self._ended and not self._is_silent and issued is not None and issued.is_completed():
            self._conclude(issued.wait)
        return self._ended

    @property
    def is_through(self) -> bool:
        """Whether gloo has finished it, with or without an error. Calls no callback, so any thread may call it."""
        issued = self._issued
        return self._ended or (not self._is_silent and issued is not None and issued.is_completed())

    def _have_gloo_tell(self) -> None:
        """Makes gloo's thread report the end, once: from here on a caller depends on it that does not wait in gloo."""
        if self._is_silent or self._issued is None:
            return
        with self._changing:
            if self._is_followed:
                return
            self._is_followed = True
        self._asked_by = threading.get_ident()
        self._issued.get_future().add_done_callback(self._told)
        self._asked_by = None

    def _told(self, future: torch.futures.Future[Any]) -> None:
        if self._issued is not None and self._asked_by == threading.get_ident():  # it was complete already
            self._conclude(self._issued.wait)
            return
        self._answered_by = threading.get_ident()
        self._conclude(future.value)

    def _wait_for_gloo(self, issued: dist.Work, _kept_alive: TorchBackend) -> None:
        self._conclude(lambda: issued.wait(self._timeout))

    def _conclude(self, ask: Callable[[], object]) -> None:
        try:
            ask()
        except RAISED as error:
            self._finish(error)
        else:
            self._finish(None)

    def forget(self, error: Exception, communicator: TorchBackend) -> None:
        """Ends the operation although gloo, whose threads sleep, does not. The communicator lives until they end."""
        if self._issued is not None:
            in_background(_outlive, self._issued, communicator)
        self._finish(error)

    def _finish(self, error: Exception | None) -> None:
        if not self._claimed.acquire(blocking=False):
            return
        self.has_failed = error is not None
        try:
            if error is None and isinstance(self._issued, CopyingWork):
                self._issued.copy()
            if error is None and self._device is not None:
                self._complete_on_device(self._device)
            elif error is not None:
                self._before_going_on = self._on_error(error)
                self._error = error if self._before_going_on is None else None
        finally:
            with self._changing:
                self._ending = True
            self._on_end(self)
            with self._changing:
                self._ended = True
                end = self._end
            self._running.release()
            if end is not None:
                end.set_result(None)

    def _complete_on_device(self, device: torch.device) -> None:
        """Waits until gloo's copies to a GPU are complete.

        Gloo's handle ends when the copies are queued on gloo's own streams (``AsyncAllreduceCUDAWork`` in torch's
        ProcessGroupGlooCuda.cpp), and waiting for it only blocks the current stream of the waiting thread. Here the
        host waits, so that every thread and every stream finds the tensors written afterwards.
        """
        if self._issued is not None:
            self._issued.wait()
        torch.cuda.current_stream(device).synchronize()

    def _await(self) -> None:
        """Records that the program now depends on the end of this operation. An operation that the program never waits
        for or polls cannot be the reason why its rank stands still."""
        with self._changing:
            if not (self.was_awaited or self._ending):
                self.was_awaited = True
                self._on_awaited()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the operation has ended.

        Raises:
            RuntimeError: the operation has failed and the group does not echo; or ``timeout`` has passed.
        """
        if not self._ended:
            self._await()
            if not timeout:
                self._wait_in_gloo()
            if not self._ended:
                self._wait_for_end(timeout)
        if self._answered_by is not None:
            self._wait_for_handle()
        if self._error is not None:
            raise self._error
        if self._before_going_on is not None:
            self._before_going_on()
        return True

    def _wait_in_gloo(self) -> None:
        """Waits for a short time in gloo, which wakes the thread itself."""
        issued = self._issued
        if self._is_silent or issued is None:
            return
        try:
            issued.wait(SHORT)
        except RAISED:
            self.look()  # not the error: it may be the timeout of this wait
        else:
            self._finish(None)

    def _wait_for_end(self, timeout: timedelta | None) -> None:
        self._have_gloo_tell()
        if not self._running.acquire(timeout=timeout.total_seconds() if timeout else -1):
            raise RuntimeError(f"the operation did not end within {timeout}")
        self._running.release()

    def _wait_for_handle(self) -> None:
        if self._issued is not None and self._answered_by != threading.get_ident():  # gloo's thread must not wait here
            with suppress(*RAISED):  # the error is known, and raised elsewhere
                self._issued.wait()
            self._answered_by = None

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future of the outputs. C++ may wait for it without a call to this class."""
        self._await()
        with self._changing:
            if self._future is None:
                self._end = torch.futures.Future()
                self._future = self._end.then(self._result)
                if futures.needs_type(self._outputs):
                    self._future = futures.typed(self._future, self._outputs)  # type: ignore[arg-type]  # seen just now
                if self._ended:
                    self._end.set_result(None)
            future = self._future
        self._have_gloo_tell()
        return future

    def _result(self, _end: torch.futures.Future[None]) -> Outputs:
        if self._error is not None:
            raise self._error
        return self._outputs

    def is_completed(self) -> bool:
        """Whether the operation has ended. A program that polls may wait for it in this way."""
        if not self._ended:
            self._await()
            self.look()
        if self._answered_by is not None and self._issued is not None:
            return self._issued.is_completed()
        return self._ended

    def is_success(self) -> bool:
        """Whether waiting would end without an error."""
        return self.look() and self._error is None

    def exception(self) -> Exception | None:
        """The error that waiting raises, if the operation has failed."""
        return self._error

    def result(self) -> Outputs:
        """The outputs.

        Raises:
            RuntimeError: the operation has not ended, or has failed.
        """
        if not self.look():
            raise RuntimeError(
                "Work needs to be completed before calling result(). Should call wait() before result()."
            )
        if self._error is not None:
            raise self._error
        return self._outputs

    def synchronize(self) -> None:
        """Same as `wait`, as with gloo: there is no stream."""
        self.wait()

    def _source_rank(self) -> int:
        assert self._issued is not None
        return int(self._issued._source_rank())


def _gpu_of(outputs: Outputs) -> torch.device | None:
    """The GPU of the outputs; None if they are on the CPU."""
    first = first_tensor(outputs)
    return first.device if first is not None and first.is_cuda else None


def _outlive(issued: dist.Work, _kept_alive: TorchBackend) -> None:
    """Keeps the communicator alive until gloo's own deadline. Destroying it earlier would block until then."""
    with suppress(*RAISED):
        issued.wait()
