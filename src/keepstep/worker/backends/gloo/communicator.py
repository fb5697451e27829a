"""One gloo group of one generation, which can be aborted at any time.

All operations in flight end soon after `GlooCommunicator.abort`. Gloo itself would not end all of them before their
deadline. When a connection ends, it notifies the operations that wait for the connection, but not the one whose message
is partly transmitted (``Pair::signalException`` passes over unbound buffers in ``tx_`` and ``rx_``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import msgspec
import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from keepstep.protocol.kept_groups import GroupClaim
from keepstep.protocol.waiting.operations import ALL_MEMBERS, Operation
from keepstep.systemcalls import check_threads, start_thread
from keepstep.worker.backends.building import built
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
from keepstep.worker.backends.gloo.connections import Address, Connections, listening_since, socket_inodes
from keepstep.worker.backends.gloo.scattering import ScatteringGloo, greatest_of_all
from keepstep.worker.backends.gloo.threads import GlooThreads
from keepstep.worker.backends.gloo.work import GlooWork
from keepstep.worker.backends.in_flight import OperationsInFlight
from keepstep.worker.backends.own_traffic import Issue, OwnTraffic, is_raised

FREED_S = 0.003
"""Time in which gloo ends the operations that it notifies, measured on 2 cores. Slower ones end a little later."""
POLL_INTERVAL_S = 0.01
"""Interval of polling gloo's threads. Longer than the 5 ms after which a thread that waits for the GIL wakes up."""

_NUM_THREADS = 4
"""The threads that building a communicator starts: two that run collectives, one of gloo's device, and keepstep's own.
Where one of the first two cannot be started, torch calls `std::terminate` (2.13 to 2.15)."""
_UNUSED_TAG = 0x7FFF_FFFF
"""A tag that no message carries."""


class GlooCommunicator(OwnTraffic):
    """One generation's communicator. The training thread begins collectives; any thread may call the other methods."""

    def __init__(self, name: str, observer: OperationObserver, host: str = LOOPBACK) -> None:
        """Args:
        name: name of the surviving group, for messages.
        observer: is notified of operations.
        host: the address of this machine at which the other members reach it.
        """
        self._name = name
        self._host = host
        self._observer = observer
        self._communicator: TorchBackend | None = None
        self._connections = Connections(host)
        self._threads = GlooThreads()
        self._rank, self._size = 0, 1
        self._is_down = self._is_closed = False
        self._timeout = timedelta(0)
        self._changed = threading.Condition()
        self._in_flight: OperationsInFlight[GlooWork] = OperationsInFlight(self._changed)

    # ---- life -----------------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether it is connected, and neither closed nor aborted."""
        return self._communicator is not None and not (self._is_down or self._is_closed)

    @property
    def num_begun(self) -> int:
        """Number of operations that this rank has begun."""
        return self._in_flight.num_begun

    def connect(self, store: Store, rank: int, size: int, connect_deadline: timedelta, timeout: timedelta) -> None:
        """Builds the communicator, together with all other members.

        Args:
            store: where the members find each other; used by this generation alone.
            rank: this process's rank in the group.
            size: number of members.
            connect_deadline: how long to wait for the other members.
            timeout: timeout of each operation, as in ``new_group(timeout=...)``.

        Raises:
            RuntimeError: a member did not connect in time, or `abort` was called meanwhile.
            PeerLost: from ``store``.
            LimitReached: no further threads can be started.
        """
        self._rank, self._size = rank, size
        check_threads(_NUM_THREADS)
        with self._connections.recording(), self._threads.recording():
            communicator = self._built(store, connect_deadline)
        self._threads.check()
        communicator._set_default_timeout(timeout)
        self._timeout = timeout
        self._communicator = communicator

    def _built(self, store: Store, connect_deadline: timedelta) -> TorchBackend:
        """Builds the communicator in another thread, and waits for it no longer than the deadline or `abort`.

        Of each two members one connects to the other. If it dies before that, gloo waits in the other one for five
        times its timeout (``Pair::waitUntilConnected``), and there is no connection yet that could be cut.
        """
        return built(
            lambda: _build(store, self._rank, self._size, self._host, connect_deadline, self._connections),
            in_background,
            (self._name, self._rank, self._size),
            connect_deadline,
            self._changed,
            lambda: self._is_down,
        )

    def abort(self) -> None:
        """Aborts the communicator: a thread that waits in it is released within milliseconds. Any number of times."""
        with self._changed:
            first = not self._is_down
            self._is_down = True
            self._changed.notify_all()
            communicator = self._communicator if self._in_flight.all() else None
        self._connections.cut()
        if first and communicator is not None:
            start_thread(self._free_all, communicator, name="keepstep-free")

    def close(self) -> None:
        """Lets no operation begin any more. Aborts the communicator if one is in flight, else keeps its connections.

        The check calls no callback: a callback may run code of the script, which must not run in the thread that
        receives orders.
        """
        with self._changed:
            self._is_closed = True
            is_quiet = self._communicator is not None and self._in_flight.may_stay
        if not is_quiet:
            self.abort()

    def claim(self, generation: int) -> GroupClaim | None:
        """Returns this rank's claim on its connections. None: they cannot stay; see `Communicator.claim`."""
        with self._changed:
            is_open = self._communicator is None or not self._is_closed
            return None if is_open or self._is_down else self._in_flight.claim(generation)

    def reopen(self) -> None:
        """Lets operations begin again."""
        with self._changed:
            self._is_closed = False

    def _free_all(self, communicator: TorchBackend) -> None:
        """Ends operations that gloo does not end, after its connections are closed and while its threads sleep.

        Only their deadline can wake these threads then, so they do not write into the tensors any more.
        """
        if self._in_flight.end_within(FREED_S):
            return
        self._close_pairs(communicator)
        self._threads.have_rested()  # the first look
        while not self._in_flight.end_within(POLL_INTERVAL_S) and not self._threads.have_rested():
            pass
        for work in self._in_flight.all():
            work.forget(CommunicatorAborted(f"group {self._name} was aborted"), communicator)

    def _close_pairs(self, communicator: TorchBackend) -> None:
        """Makes gloo close every connection itself, as it does when an operation times out.

        Otherwise an ended connection stays open in gloo while the buffer of a half-read message is gone. Its thread
        then spins, and takes a core.
        """
        for peer in range(self._size):
            if peer == self._rank:
                continue
            with suppress(RuntimeError):  # it timed out; or this connection is closed already
                communicator.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))

    def leave(self) -> None:
        """Lets the other members notice that gloo has closed this rank's connections, as it does after a timeout.

        The copies of the connections that are held here keep the other members from noticing.
        """
        self._connections.cut()

    def wait_until_quiet(self, deadline_s: float) -> bool:
        """Waits until no operation is in flight, so that nothing writes into a tensor later on.

        Returns:
            False: an operation did not end in time.
        """
        return self._in_flight.end_within(deadline_s)

    def look(self) -> None:
        """Finds operations that have ended. A thread that waits for one gets its error."""
        self._in_flight.end_within(0.0)

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later operations."""
        if self._communicator is not None:
            self._communicator._set_default_timeout(timeout)
            self._timeout = timeout

    def release(self) -> None:
        """Releases the communicator, when no operation is in flight."""
        self._connections.cut()
        self._communicator = None
        self._connections.close()

    def cause_of(self, error: Exception) -> FailureCause:
        """Returns why an operation has failed."""
        return errors.cause_of(error)

    # ---- operations -------------------------------------------------------------------------------------------------

    def begin(
        self,
        operation: Operation,
        call: Callable[[TorchBackend], dist.Work],
        outputs: Outputs,
        on_error: OnError,
        peer: int = ALL_MEMBERS,
        *,
        is_held: bool = False,
    ) -> GlooWork:
        """Begins an operation.

        Args:
            operation: the kind of operation.
            call: issues it.
            outputs: result of its future.
            on_error: called with its error, from any thread; see `GlooWork`.
            peer: the other side of a send or recv.
            is_held: makes no difference: operations of gloo do not wait for each other.

        Raises:
            CommunicatorAborted: the communicator is aborted already.
            RuntimeError, ValueError, TypeError: from ``call``; no operation is in flight.
        """
        self._in_flight.look_at_the_oldest()
        work = GlooWork(operation, peer, outputs, self._timeout, on_error, self._observer.awaited, self._ended)
        communicator = self._enter(work, in_background=False)
        self._observer.entered(self._name, operation, peer)
        return self._issue(work, communicator, call, self._ended)

    def begin_unobserved(self, operation: Operation, call: Issue, tensors: list[Tensor], peer: int) -> GlooWork:
        """Begins an operation that is independent of the training thread; see `Communicator.background`.

        Args:
            operation, call, peer: as in `begin`.
            tensors: result of its future.
        """
        work = GlooWork(operation, peer, tensors, self._timeout, is_raised, _nothing, self._in_flight.leave)
        return self._issue(work, self._enter(work, in_background=True), call, self._in_flight.leave)

    def _reduce_to_greatest(self, inner: TorchBackend, greatest: Tensor) -> dist.Work:
        return greatest_of_all(inner, greatest, self._size)

    def _enter(self, work: GlooWork, *, in_background: bool) -> TorchBackend:
        with self._changed:
            communicator = self._communicator
            if communicator is None or not self.is_up:
                raise CommunicatorAborted(f"group {self._name} is down")
            self._in_flight.enter(work, in_background=in_background)
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

    def _ended(self, work: GlooWork) -> None:
        self._observer.left(self._name, work.operation, work.peer, was_awaited=work.was_awaited)
        self._in_flight.leave(work)


def _build(
    store: Store, rank: int, size: int, host: str, connect_deadline: timedelta, connections: Connections
) -> TorchBackend:
    """Builds a gloo group together with its other members, and tells which connections are its own."""
    before = socket_inodes()
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stub
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = connect_deadline
    keys = [f"listener {member}" for member in range(size)]
    store.set(keys[rank], msgspec.json.encode(listening_since(before)))  # type: ignore[arg-type]  # torch's takes bytes
    store.wait(keys, connect_deadline)
    told = [msgspec.json.decode(store.get(key), type=list[Address]) for key in keys]
    if all(told):  # else gloo has opened its port in another moment
        connections.restrict(address for each in told for address in each)
    communicator: TorchBackend = cast(Any, ScatteringGloo(store, rank, size, options))
    return communicator


def _nothing() -> None:
    return None
