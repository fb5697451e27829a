"""One gloo group of one generation, which can be aborted at any time.

Everything that is under way in it ends soon after `GlooCommunicator.abort`, also what gloo itself would let sleep
until its deadline: when a connection ends, gloo tells the operations that wait for it, but not the one whose message
is half-way through it (``Pair::signalException`` passes over unbound buffers in ``tx_`` and ``rx_``).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import BarrierOptions, ProcessGroupGloo, Store

from keepstep.protocol.kept_groups import GroupClaim
from keepstep.protocol.waiting.operations import ALL_MEMBERS, ANY_MEMBER, Operation
from keepstep.worker.backends.communicator import (
    LOOPBACK,
    CommunicatorAborted,
    FailureCause,
    OnError,
    OperationObserver,
    Outputs,
    TorchBackend,
)
from keepstep.worker.backends.gloo import errors
from keepstep.worker.backends.gloo.background import in_background
from keepstep.worker.backends.gloo.connections import Connections
from keepstep.worker.backends.gloo.scattering import ScatteringGloo
from keepstep.worker.backends.gloo.threads import GlooThreads
from keepstep.worker.backends.gloo.work import GlooWork

FREED_S = 0.003
"""Within so much gloo frees what it does not forget, measured on 2 cores; what takes longer is freed a little later."""
POLL_INTERVAL_S = 0.01
"""Between two looks at gloo's threads. Longer than the 5 ms in which a thread that waits for Python's lock stirs."""

PEEK_S = 0.001
"""How often `wait_until_quiet` looks at operations that the script does not wait for."""

Issue = Callable[[TorchBackend], dist.Work]
"""Issues an operation on torch's backend."""

_UNUSED_TAG = 0x7FFF_FFFF
"""A tag that no message carries."""


class GlooCommunicator:
    """One generation's communicator. Collectives are begun by the training thread; the rest is for any thread."""

    def __init__(self, name: str, observer: OperationObserver, host: str = LOOPBACK) -> None:
        """Args:
        name: of the surviving group, for messages.
        observer: told of operations.
        host: the address of this machine at which the other members reach it.
        """
        self._name = name
        self._host = host
        self._observer = observer
        self._communicator: TorchBackend | None = None
        self._connections = Connections(host)
        self._threads = GlooThreads()
        self._rank, self._size = 0, 1
        self._is_down = self._is_closed = self._has_failed = False
        self._timeout = timedelta(0)
        self._begun: Counter[tuple[int, bool]] = Counter()
        """Operations by peer, and whether it was a recv."""
        self._under_way: dict[GlooWork, None] = {}
        """In the order in which they were begun. `begin` looks at those that the script does not wait for."""
        self._in_background: dict[GlooWork, None] = {}
        """Those of `begin_unobserved`."""
        self._has_background = False
        """Whether there was one. What its thread does next cannot be known, so the communicator does not stay."""
        self._changed = threading.Condition()

    # ---- life -----------------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether it is connected, and neither closed nor aborted."""
        return self._communicator is not None and not (self._is_down or self._is_closed)

    @property
    def num_begun(self) -> int:
        """How many operations this rank has begun."""
        return self._begun.total()

    def connect(self, store: Store, rank: int, size: int, connect_deadline: timedelta, timeout: timedelta) -> None:
        """Builds the communicator, together with all other members.

        Args:
            store: where the members find each other; used by this generation alone.
            rank: this process's rank in the group.
            size: number of members.
            connect_deadline: for the others to come.
            timeout: for each operation, as in ``new_group(timeout=...)``.

        Raises:
            RuntimeError: a member did not come in time, or `abort` was called meanwhile.
            PeerLost: from ``store``.
        """
        self._rank, self._size = rank, size
        with self._connections.recording(), self._threads.recording():
            communicator = self._built(store, connect_deadline)
        communicator._set_default_timeout(timeout)
        self._timeout = timeout
        self._communicator = communicator

    def _built(self, store: Store, connect_deadline: timedelta) -> TorchBackend:
        """Has another thread build the communicator, and waits for it no longer than the deadline or `abort`.

        Of each two members one connects to the other. If it dies before it does, gloo waits in the other, where there
        is no connection yet that could be cut, for five times its timeout (``Pair::waitUntilConnected``). That thread
        is left to itself then: it ends when gloo gives up, and drops what it may have built.
        """
        if self._is_down:
            raise CommunicatorAborted(f"group {self._name} was aborted before it was connected")
        building: Future[TorchBackend] = Future()
        building.add_done_callback(lambda _: self._notify())
        in_background(_build, building, store, self._rank, self._size, self._host, connect_deadline)
        deadline_s = connect_deadline.total_seconds()
        with self._changed:
            self._changed.wait_for(lambda: self._is_down or building.done(), deadline_s)
            if self._is_down:
                raise CommunicatorAborted(f"group {self._name} was aborted while it was being connected")
        if not building.done():
            raise RuntimeError(
                f"group {self._name}, rank {self._rank}: not all {self._size} members connected in {deadline_s:g} s"
            )
        return building.result()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def abort(self) -> None:
        """Breaks the communicator: a thread that waits in it is freed within milliseconds. Any number of times."""
        with self._changed:
            first = not self._is_down
            self._is_down = True
            self._changed.notify_all()
            communicator = self._communicator if self._under_way or self._in_background else None
        self._connections.cut()
        if first and communicator is not None:
            threading.Thread(target=self._free_all, args=[communicator], name="keepstep-free", daemon=True).start()

    def close(self) -> None:
        """Has no operation begin any more, and aborts it where one is under way; else its connections stay.

        It looks whether one is under way, and calls no callback: what follows when it has ended may be code of the
        script, which must not run in the thread that brings an order.
        """
        with self._changed:
            self._is_closed = True
            is_quiet = not self._has_background and all(work.is_through for work in self._under_way)
            is_quiet &= self._communicator is not None
        if not is_quiet:
            self.abort()

    def claim(self, generation: int) -> GroupClaim | None:
        """What this rank can say of its connections. None, where they cannot stay; see `Communicator.claim`."""
        with self._changed:
            is_open = self._communicator is None or not self._is_closed
            if is_open or self._is_down or self._has_failed or self._under_way or (ANY_MEMBER, True) in self._begun:
                return None
            begun = dict(self._begun)
        collectives = begun.pop((ALL_MEMBERS, False), 0)
        sent, received = ({peer: n for (peer, is_recv), n in begun.items() if is_recv is by} for by in (False, True))
        return GroupClaim(generation, collectives, sent, received)

    def reopen(self) -> None:
        """Operations may begin again."""
        with self._changed:
            self._is_closed = False

    def _free_all(self, communicator: TorchBackend) -> None:
        """Ends what gloo does not end: operations under way when its connections are closed and its threads sleep.

        Nothing can wake them then but their deadline, so what they hold is not written any more.
        """
        if self._is_quiet_within(FREED_S):
            return
        self._close_pairs(communicator)
        self._threads.have_rested()  # the first look
        while not self._is_quiet_within(POLL_INTERVAL_S) and not self._threads.have_rested():
            pass
        for work in [*self._under_way, *self._in_background]:
            work.forget(CommunicatorAborted(f"group {self._name} was aborted"), communicator)

    def _close_pairs(self, communicator: TorchBackend) -> None:
        """Has gloo close every connection by itself, as it does when the deadline of any operation has passed.

        A connection that has ended stays open in gloo while the buffer of a half-read message is gone: its thread then
        turns in circles, and takes a core.
        """
        for peer in range(self._size):
            if peer == self._rank:
                continue
            with suppress(RuntimeError):  # the deadline; or this one is closed already
                communicator.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))

    def leave(self) -> None:
        """Lets the other members know that gloo has closed this one's connections, as it does after a deadline.

        What they wait for never comes, and the copies that are held here keep them from noticing.
        """
        self._connections.cut()

    def wait_until_quiet(self, deadline_s: float) -> bool:
        """Waits until nothing is under way any more, so that nothing writes into a tensor later on.

        Returns:
            False: something did not end in time.
        """
        return self._is_quiet_within(deadline_s)

    def _is_quiet_within(self, deadline_s: float) -> bool:
        """Whether nothing is under way any more, now or soon."""
        until = time.monotonic() + deadline_s
        while True:
            with self._changed:
                under_way = [*self._under_way, *self._in_background]
            ended = [work.look() for work in under_way]  # not under the lock: what has ended is told to others
            left = until - time.monotonic()
            with self._changed:
                if not (self._under_way or self._in_background):
                    return True
                if left <= 0.0:
                    return False
                if not any(ended):
                    self._changed.wait(min(left, PEEK_S))

    def set_timeout(self, timeout: timedelta) -> None:
        """For operations to come."""
        if self._communicator is not None:
            self._communicator._set_default_timeout(timeout)
            self._timeout = timeout

    def release(self) -> None:
        """Gives up the communicator, when nothing is under way."""
        self._connections.cut()
        self._communicator = None
        self._connections.close()

    def cause_of(self, error: Exception) -> FailureCause:
        """Why an operation has failed."""
        return errors.cause_of(error)

    # ---- operations -------------------------------------------------------------------------------------------------

    def begin(
        self,
        operation: Operation,
        call: Callable[[TorchBackend], dist.Work],
        outputs: Outputs,
        on_error: OnError,
        peer: int = ALL_MEMBERS,
    ) -> GlooWork:
        """Begins an operation.

        Args:
            operation: what it is.
            call: issues it.
            outputs: what its future holds in the end.
            on_error: told of the error it ended with, from any thread; see `GlooWork`.
            peer: the other side of a send or recv.

        Raises:
            CommunicatorAborted: the communicator is broken already.
            RuntimeError, ValueError, TypeError: from ``call``; nothing is under way.
        """
        self._look_at_the_oldest()
        work = GlooWork(operation, peer, outputs, self._timeout, on_error, self._observer.awaited, self._ended)
        communicator = self._enter(work, self._under_way)
        self._observer.entered(self._name, operation, peer)
        return self._issue(work, communicator, call, self._ended)

    def begin_unobserved(self, operation: Operation, call: Issue, tensors: list[Tensor], peer: int) -> GlooWork:
        """Begins an operation that belongs to nothing the training thread does; see `Communicator.background`.

        Args:
            operation, call, peer: as in `begin`.
            tensors: what its future holds in the end.
        """
        work = GlooWork(operation, peer, tensors, self._timeout, _is_raised, _nothing, self._is_through)
        return self._issue(work, self._enter(work, self._in_background), call, self._is_through)

    def _enter(self, work: GlooWork, those: dict[GlooWork, None]) -> TorchBackend:
        with self._changed:
            communicator = self._communicator
            if communicator is None or not self.is_up:
                raise CommunicatorAborted(f"group {self._name} is down")
            those[work] = None
            if those is self._under_way:
                self._begun[work.peer, work.operation is Operation.RECV] += 1
            else:
                self._has_background = True
        return communicator

    def _issue(
        self, work: GlooWork, communicator: TorchBackend, call: Issue, on_end: Callable[[GlooWork], None]
    ) -> GlooWork:
        try:
            issued = call(communicator)
        except (RuntimeError, ValueError, TypeError):
            work.has_failed = True
            on_end(work)
            raise
        work.follow(issued, communicator)
        return work

    @property
    def background(self) -> Background:
        """See `Communicator.background`."""
        return Background(self)

    def _look_at_the_oldest(self) -> None:
        """Notices operations that have ended though the script does not wait for them. They end nearly in order."""
        while self._under_way:
            with self._changed:
                work = next(iter(self._under_way), None)
            if work is None or not work.look():
                return

    def _ended(self, work: GlooWork) -> None:
        self._observer.left(self._name, work.operation, work.peer, was_awaited=work.was_awaited)
        self._is_through(work)

    def _is_through(self, work: GlooWork) -> None:
        with self._changed:
            self._has_failed |= work.has_failed
            self._under_way.pop(work, None)
            self._in_background.pop(work, None)
            self._changed.notify_all()

    # ---- keepstep's own traffic: it does not echo, its errors are raised --------------------------------------------

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> dist.Work:
        """Sends to one rank; waiting raises RuntimeError when it is gone or the group was aborted."""
        return self.begin(
            Operation.SEND, lambda inner: inner.send(tensors, destination, tag), tensors, _is_raised, destination
        )

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """Receives from one rank; waiting raises RuntimeError when it is gone or the group was aborted."""
        return self.begin(Operation.RECV, lambda inner: inner.recv(tensors, source, tag), tensors, _is_raised, source)

    def barrier(self, greatest: torch.Tensor | None = None) -> dist.Work:
        """Meets all members; waiting raises RuntimeError when one is gone or the group was aborted."""
        if greatest is None:
            return self.begin(Operation.BARRIER, lambda inner: inner.barrier(BarrierOptions()), [], _is_raised)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        return self.begin(Operation.BARRIER, lambda inner: inner.allreduce([greatest], options), [], _is_raised)


class Background:
    """A communicator's sends and receives beside what the training thread does; see `Communicator.background`."""

    def __init__(self, communicator: GlooCommunicator) -> None:
        self._begin = communicator.begin_unobserved

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> dist.Work:
        """Begins to send; see `Carrier`."""
        return self._begin(Operation.SEND, lambda inner: inner.send(tensors, destination, tag), tensors, destination)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """Begins to receive; see `Carrier`."""
        return self._begin(Operation.RECV, lambda inner: inner.recv(tensors, source, tag), tensors, source)


def _build(
    building: Future[TorchBackend], store: Store, rank: int, size: int, host: str, connect_deadline: timedelta
) -> None:
    """Builds a gloo group together with its other members, and tells ``building`` of it, or of the error."""
    try:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stub
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = connect_deadline
        communicator: Any = ScatteringGloo(store, rank, size, options)
    except BaseException as error:  # of any kind: it is raised where the result is awaited
        building.set_exception(error)
        del building  # the error's traceback holds this frame, and would keep gloo's listening socket open with it
    else:
        building.set_result(communicator)


def _is_raised(_error: Exception) -> None:
    return None


def _nothing() -> None:
    return None
