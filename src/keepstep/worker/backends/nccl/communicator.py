"""One NCCL group of one generation, which can be aborted at any time.

``ProcessGroupNCCL::abort`` ends NCCL's kernels. Kernels that are queued after them on the streams then run, on garbage.
The call blocks until NCCL's kernels have ended, so a separate thread makes it. NCCL itself does not detect a lost peer
if the data travels through memory: the agents detect it, and keepstep aborts the group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import ErrorType, Store

from keepstep.errors import UsageError
from keepstep.protocol.kept_groups import GroupClaim
from keepstep.protocol.waiting.operations import ALL_MEMBERS, Operation
from keepstep.systemcalls import start_thread
from keepstep.worker.backends.building import built
from keepstep.worker.backends.communicator import (
    CommunicatorAborted,
    FailureCause,
    OnError,
    OperationObserver,
    Outputs,
    first_tensor,
)
from keepstep.worker.backends.in_flight import PEEK_S, OperationsInFlight
from keepstep.worker.backends.nccl import errors
from keepstep.worker.backends.nccl.connecting import ConnectingStore
from keepstep.worker.backends.nccl.device import NcclBackend, StreamDevice
from keepstep.worker.backends.nccl.errors import CommunicatorBroken, OperationTimedOut
from keepstep.worker.backends.nccl.work import NcclWork
from keepstep.worker.backends.own_traffic import Issue, OwnTraffic, is_raised

ISSUING_S = 0.2
"""How long an abort waits for a thread that is in a call of NCCL. Such a call takes microseconds, and NCCL's abort
frees memory that the call uses. A call that waits in NCCL for a peer is released only by the abort."""
ABORT_DEADLINE = timedelta(minutes=10)
"""Timeout of torch's abort, instead of that of operations: the abort raises after its end if it took longer."""


class NcclCommunicator(OwnTraffic):
    """One generation's communicator, on one device. The training thread begins operations.

    Any thread may call the other methods. All members must begin their operations in the same order, including those of
    `background`, because one stream carries all. For that reason keepstep's own traffic uses the CPU's communicator.
    """

    def __init__(self, name: str, observer: OperationObserver, device: StreamDevice) -> None:
        """Args:
        name: name of the surviving group, for messages.
        observer: is notified of operations.
        device: the device whose tensors it carries.
        """
        self._name = name
        self._observer = observer
        self._device = device
        self._backend: NcclBackend | None = None
        self._is_down = self._is_closed = self._has_left = False
        self._num_aborting = self._num_issuing = 0
        self._cannot_abort: Exception | None = None
        self._timeout = timedelta(0)
        self._changed = threading.Condition()
        self._in_flight: OperationsInFlight[NcclWork] = OperationsInFlight(self._changed)
        self._held: list[tuple[NcclWork, Issue]] = []
        """The held operations of the current batch. Only the training thread uses them."""
        self._failed: list[NcclWork] = []
        """Operations that have failed. The device may still run their kernels."""
        self._untold: list[NcclWork] = []
        """Failed operations of the training thread whose error was not raised yet."""

    # ---- life -----------------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether it is connected, and neither closed nor aborted."""
        return self._backend is not None and not (self._is_down or self._is_closed)

    @property
    def num_begun(self) -> int:
        """Number of operations that this rank has begun."""
        return self._in_flight.num_begun

    def connect(self, store: Store, rank: int, size: int, connect_deadline: timedelta, timeout: timedelta) -> None:
        """Builds the communicator, together with all other members; see `Communicator.connect`.

        A thread that waits in NCCL for another member cannot be woken, so the building thread is abandoned after the
        deadline or an abort.

        Args:
            store, rank, size, connect_deadline, timeout: as there.

        Raises:
            RuntimeError: a member did not connect in time, or `abort` was called meanwhile.
            PeerLost: from ``store``.
        """
        connecting = ConnectingStore(store)
        try:
            backend = built(
                lambda: self._device.build(connecting, rank, size, self._name, timeout),
                _in_a_thread,
                (self._name, rank, size),
                connect_deadline,
                self._changed,
                lambda: self._is_down,
            )
        finally:
            connecting.close()
        with self._changed:
            self._timeout = timeout
            self._backend = backend
            if self._is_down:  # aborted before there was a backend to abort
                self._begin_to_abort(backend)

    def abort(self) -> None:
        """Aborts the communicator. Does not block. Any number of times."""
        with self._changed:
            first = not self._is_down
            self._is_down = True
            self._changed.notify_all()
            if first and self._backend is not None:
                self._begin_to_abort(self._backend)

    def _begin_to_abort(self, backend: NcclBackend) -> None:
        self._num_aborting += 1
        start_thread(self._abort, backend, name="keepstep-abort")

    def _abort(self, backend: NcclBackend) -> None:
        """Ends NCCL's kernels. This thread keeps the group alive: its last owner waits for torch's watchdog to end."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_issuing, ISSUING_S)
        try:
            backend._set_default_timeout(ABORT_DEADLINE)
            backend.abort()
        except errors.RAISED as error:
            self._cannot_abort = error
        with self._changed:
            self._num_aborting -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Lets no operation begin any more. Aborts the communicator if one is in flight, else keeps its connections.

        The check calls no callback; see `GlooCommunicator.close`.
        """
        with self._changed:
            self._is_closed = True
            is_quiet = self._backend is not None and self._is_whole() and self._in_flight.may_stay
        if not is_quiet:
            self.abort()

    def _is_whole(self) -> bool:
        """Whether this rank has not left, and torch's watchdog has found no error."""
        return self._backend is not None and not self._has_left and self._backend.get_error() == ErrorType.SUCCESS

    def claim(self, generation: int) -> GroupClaim | None:
        """Returns this rank's claim on its connections. None: they cannot stay; see `Communicator.claim`."""
        with self._changed:
            may_stay = self._is_closed and not self._is_down and self._is_whole()
            return self._in_flight.claim(generation) if may_stay else None

    def reopen(self) -> None:
        """Lets operations begin again."""
        with self._changed:
            self._is_closed = False

    def leave(self) -> None:
        """Closes this rank's connections. NCCL does not notify a member whose data travels through memory: that member
        waits for its own deadline, or until the agents detect the failure."""
        with self._changed:
            if self._backend is not None and not (self._is_down or self._has_left):
                self._has_left = True
                self._begin_to_abort(self._backend)

    def wait_until_quiet(self, deadline_s: float) -> bool:
        """Waits until no operation is in flight, on the device too, so that nothing writes into a tensor later on.

        Returns:
            False: an operation did not end in time, or NCCL could not be aborted.
        """
        until_s = time.monotonic() + deadline_s
        if self._is_down:  # an operation that was not complete before counts as failed
            for work in self._in_flight.all():
                work.fail(self._aborted())
        if not self._in_flight.end_within(deadline_s):
            return False
        with self._changed:
            self._changed.wait_for(lambda: not self._num_aborting, max(0.0, until_s - time.monotonic()))
            if self._num_aborting or self._cannot_abort is not None:
                return False
        return self._is_device_through_by(until_s)

    def _is_device_through_by(self, until_s: float) -> bool:
        """Waits until the kernels of failed operations have ended. Returns whether they have by ``until_s``."""
        with self._changed:
            failed = list(self._failed)
        if not failed:
            return True
        end = self._device.end_of([work.issued for work in failed if work.issued is not None])
        while not end.query():
            left_s = until_s - time.monotonic()
            if left_s <= 0.0:
                return False
            with self._changed:
                self._changed.wait(min(left_s, PEEK_S))
        with self._changed:
            for work in failed:
                work.let_go()
                self._failed.remove(work)
        return True

    def look(self) -> None:
        """Finds operations that have ended; see `Communicator.look`.

        It raises each error once, but never that of an abort, since the code that aborts a group knows of it.

        Raises:
            RuntimeError: an error that was not raised yet.
        """
        self._in_flight.end_within(0.0)
        while self._untold:
            work = self._untold.pop(0)
            error = work.exception()
            if error is not None and not work.was_told and not isinstance(error, CommunicatorAborted):
                work.was_told = True
                raise error

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later operations."""
        if self._backend is not None:
            self._backend._set_default_timeout(timeout)
            self._timeout = timeout

    def release(self) -> None:
        """Releases the communicator, when no operation is in flight. An intact communicator is aborted in the
        background, which needs no other member."""
        self.abort()
        with self._changed:
            backend, self._backend = self._backend, None
        if backend is not None:
            _in_a_thread(_drop, backend)

    def cause_of(self, error: Exception) -> FailureCause:
        """Returns why an operation has failed."""
        return errors.cause_of(error)

    # ---- operations -----------------------------------------------------------------------------------------------

    def begin(
        self,
        operation: Operation,
        call: Issue,
        outputs: Outputs,
        on_error: OnError,
        peer: int = ALL_MEMBERS,
        *,
        is_held: bool = False,
    ) -> NcclWork:
        """Begins an operation on the current stream; see `Communicator.begin`.

        One stream carries all operations, so a send waits in it for the peer's receive: two ranks that both send first
        would wait for ever. NCCL executes the operations of a batch together.

        Args:
            operation, call, outputs, on_error, peer, is_held: as there.

        Raises:
            CommunicatorAborted, CommunicatorBroken, OperationTimedOut: the communicator is broken already.
            UsageError: a CUDA graph captures the current stream, or the tensors are on another device.
            RuntimeError, ValueError, TypeError: from ``call``; no operation is in flight.
        """
        self._refuse(outputs)
        self._in_flight.look_at_the_oldest()
        work = NcclWork(operation, peer, outputs, on_error, self._observer.awaited, self._ended, self._judge)
        batch, self._held = [*self._held, (work, call)], []
        try:
            backend = self._enter(work, in_background=False, is_held=is_held)
        except CommunicatorAborted as error:
            _fail_all(batch[:-1], error)
            raise
        self._observer.entered(self._name, operation, peer)
        if is_held:
            self._held = batch
            return work
        return self._issue(batch, backend, self._ended)

    def _refuse(self, outputs: Outputs) -> None:
        if self._device.is_capturing():
            raise UsageError(
                f"group {self._name}: a CUDA graph captures a collective; NCCL cannot be aborted while a graph holds "
                "one of its operations, so a lost rank would hang this one. Keep collectives out of the captured part"
            )
        first = first_tensor(outputs)
        if first is not None and first.device != self._device.device:
            raise UsageError(
                f"group {self._name} carries tensors on {self._device.device}, this process's own device, and this one "
                f"is on {first.device}: use session.device, or call torch.cuda.set_device(session.device) first"
            )

    def begin_unobserved(self, operation: Operation, call: Issue, tensors: list[Tensor], peer: int) -> NcclWork:
        """Begins an operation that is independent of the training thread; see `OwnTraffic.begin_unobserved`."""
        work = NcclWork(operation, peer, tensors, is_raised, _nothing, self._left, self._judge)
        return self._issue([(work, call)], self._enter(work, in_background=True), self._left)

    def _enter(self, work: NcclWork, *, in_background: bool, is_held: bool = False) -> NcclBackend:
        with self._changed:
            backend = self._backend
            if backend is None or not self.is_up:
                raise CommunicatorAborted(f"group {self._name} is down")
            self._in_flight.enter(work, in_background=in_background)
            self._num_issuing += not is_held
        return backend

    def _issue(
        self, batch: Sequence[tuple[NcclWork, Issue]], backend: NcclBackend, on_end: Callable[[NcclWork], None]
    ) -> NcclWork:
        """Issues the operations of a batch together. Returns the last one, which the caller of `begin` gets."""
        work = batch[-1][0]
        try:
            issued = _issued(backend, [call for _work, call in batch])
        except errors.RAISED as error:
            cause = self._judge(work)  # the call may fail because the communicator is broken
            _fail_all(batch[:-1], cause or error)
            work.has_failed = True
            on_end(work)
            if cause is not None:
                raise cause from error
            raise
        finally:
            with self._changed:
                self._num_issuing -= 1
                self._changed.notify_all()
        for each, call in batch:
            each.follow(issued, call)
        return work

    def _judge(self, work: NcclWork) -> Exception | None:
        """Returns the error of an operation if the communicator is broken: the operation may be complete only for that.

        The cause is known before the communicator breaks: this class's flags, or the watchdog's error. So an operation
        that is complete while neither is set has succeeded, if its own handle has no error.
        """
        backend = self._backend
        if self._is_down or backend is None:
            return self._aborted()
        found = backend.get_error()
        if found == ErrorType.SUCCESS and not self._has_left:
            return None
        if self._has_left:
            return CommunicatorBroken(f"group {self._name}: this rank has left it, after a deadline")
        late_s = time.monotonic() - work.begun_s
        if found == ErrorType.TIMEOUT:
            return OperationTimedOut(
                f"group {self._name}: {work.operation.name.lower()} did not end within "
                f"{self._timeout.total_seconds():g} s (began {late_s:.1f} s ago)"
            )
        return CommunicatorBroken(f"group {self._name}: NCCL has failed ({found}); see the log of torch's watchdog")

    def _aborted(self) -> CommunicatorAborted:
        return CommunicatorAborted(f"group {self._name} was aborted")

    def _ended(self, work: NcclWork) -> None:
        if work.exception() is not None:
            self._untold.append(work)
        self._observer.left(self._name, work.operation, work.peer, was_awaited=work.was_awaited)
        self._left(work)

    def _left(self, work: NcclWork) -> None:
        with self._changed:
            if work.has_failed and work.issued is not None:
                self._failed.append(work)
            self._in_flight.leave(work)


def _issued(backend: NcclBackend, calls: Sequence[Issue]) -> dist.Work:
    """Issues one or several operations. Returns torch's handle of all of them.

    It always closes the batch that it opens. Otherwise NCCL would hold back all that this thread issues later.
    """
    if len(calls) == 1:
        return calls[0](backend)
    backend._start_coalescing()
    try:
        for call in calls:
            call(backend)
    finally:
        issued = backend._end_coalescing()
    return issued


def _fail_all(held: Sequence[tuple[NcclWork, Issue]], error: Exception) -> None:
    """Ends operations that were not issued, with the error that another one of their batch raises."""
    for work, _call in held:
        work.was_told = True
        work.fail(error)


def _in_a_thread(function: Callable[..., None], *arguments: object) -> None:
    start_thread(function, *arguments, name="keepstep-connect")


def _drop(_backend: NcclBackend) -> None:
    """Drops the last reference to a group, which waits for the threads that torch has started for it."""


def _nothing() -> None:
    return None
