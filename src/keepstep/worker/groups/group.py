"""A process group that outlives its members.

DDP, FSDP2, a DeviceMesh and the user hold a `SurvivingGroup`. Inside are ordinary groups of torch's backends, one for
each type of device, which are closed at a failure, and replaced or reopened in the next generation, transparently to
the script. In between the group is *down* and echoes (`keepstep.worker.groups.echo`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    Backend,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
)

from keepstep.errors import UsageError
from keepstep.protocol.kept_groups import GroupClaim
from keepstep.protocol.waiting.operations import ALL_MEMBERS, ANY_MEMBER, Operation
from keepstep.worker.backends.communicator import (
    LOOPBACK,
    Communicator,
    CommunicatorAborted,
    FailureCause,
    Outputs,
    TorchBackend,
)
from keepstep.worker.groups import echo, native, objects
from keepstep.worker.groups.communicators import Communicators
from keepstep.worker.groups.observer import GroupObserver
from keepstep.worker.groups.startup_operations import StartUpOperations
from keepstep.worker.groups.work import EchoedWork, JoinedWork, asynchronous

Tensors = list[Tensor]
_CPU = torch.device("cpu")

SHUTDOWN_S = 5.0
"""How long to wait for operations in a destroyed group. They end within milliseconds, or at gloo's own deadline."""


_alone: dict[int, str] = {}
"""Thread -> what it does; see `alone`."""


@contextmanager
def alone(what: str) -> Iterator[None]:
    """A context in which operations of a group that this thread begins fail: other ranks do not take part in them.

    Args:
        what: this thread does, for the message.
    """
    thread = threading.get_ident()
    _alone[thread] = what
    try:
        yield
    finally:
        del _alone[thread]


class SurvivingGroup(dist.ProcessGroup):
    """One process group of the user, in every generation."""

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        timeout: timedelta,
        observer: GroupObserver,
        host: str = LOOPBACK,
        device: torch.device = _CPU,
    ) -> None:
        """Args:
        name: the same on every member, and no other group's.
        rank: this process's rank in the group; on a spare a provisional one.
        size: number of members.
        timeout: timeout of each collective.
        observer: is notified of operations and errors.
        host: the address of this machine at which the other members reach it.
        device: this process's own device; the group carries its tensors beside those on the CPU.
        """
        super().__init__(rank, size)
        self.keepstep_name = name
        self.await_rank: Callable[[], int] = lambda: self._rank
        """Returns this process's rank to the user's code; on the world group of a spare it blocks."""
        self.make_group: Callable[[tuple[int, ...], timedelta], SurvivingGroup | None] = lambda ranks, timeout: None
        """On the world group: creates a group of some of its ranks, for `new_group`."""
        self._is_destroyed = False
        self.start_up: StartUpOperations | None = None
        """Until the first step: records the results of operations, or replays recorded ones."""
        self._observer = observer
        self._rank, self._size = rank, size
        self._name = self._description = name
        self._timeout = timeout
        self._host, self._device = host, device
        self._communicators = Communicators(name, observer, host, device)
        self._echoing = 0

    # ---- life -----------------------------------------------------------------------------------------------------

    @property
    def is_down(self) -> bool:
        """Whether collectives are echoed."""
        return self._echoing > 0 or not self._communicators.is_up

    def connect(self, store: Store, rank: int, connect_deadline: timedelta, is_over: Callable[[], bool]) -> None:
        """Connects the communicators, together with all other members; see `Communicator.connect`.

        Args:
            store, rank, connect_deadline: as there.
            is_over: whether the groups must be taken down. It becomes true before `take_down` is called.

        Raises:
            RuntimeError: a member did not connect, or `take_down` was called meanwhile.
            PeerLost: from ``store``.
        """
        self._communicators.release()
        self._rank, self._is_destroyed = rank, False
        self._communicators = Communicators(self.keepstep_name, self._observer, self._host, self._device)
        if is_over():  # `take_down` may have closed only the previous communicators
            self._communicators.abort()
        self._communicators.connect(store, rank, self._size, connect_deadline, self._timeout)

    def claims(self, generation: int, rank: int) -> dict[str, GroupClaim]:
        """Returns this rank's claims on the connections of ``generation``, by device type. Empty: they cannot stay.

        ``rank``: this process's rank in the group from now on.
        """
        return self._communicators.claims(generation) if rank == self._rank else {}

    def reopen(self) -> None:
        """Lets operations begin again: the connections stay, on all members."""
        self._communicators.reopen()

    def take_down(self) -> None:
        """Closes all communicators and releases waiting threads at once. From any thread, any number of times."""
        self._communicators.close()

    def drain(self, deadline_s: float) -> bool:
        """Waits until no collective is in flight; see `Communicator.wait_until_quiet`."""
        return self._communicators.wait_until_quiet(deadline_s)

    def look(self) -> None:
        """Finds operations that have ended; see `Communicator.look`."""
        self._communicators.look()

    @contextmanager
    def echoing(self) -> Iterator[None]:
        """Makes the group echo all collectives inside the block."""
        self._echoing += 1
        try:
            yield
        finally:
            self._echoing -= 1

    @property
    def inner(self) -> Communicator | None:
        """The CPU communicator for keepstep's own traffic, which does not echo. None while the group is down."""
        own = self._communicators.own
        return own if own.is_up else None

    # ---- what torch asks --------------------------------------------------------------------------------------------

    def rank(self) -> int:
        """The rank as the user's code sees it: a spare waits here until it has one."""
        if self.start_up is not None and (rank := self.start_up.rank_for_torch()) is not None:
            return rank
        return self.await_rank()

    def getRank(self) -> int:  # noqa: N802 - the name that torch's C++ calls
        """The rank as torch's C++ sees it: on a spare a provisional one."""
        return self._rank

    def size(self) -> int:
        """Number of members."""
        return self._size

    def getSize(self) -> int:  # noqa: N802 - the name that torch's C++ calls
        """Number of members, for torch's C++."""
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 - the name that torch's C++ calls
        """The name under which this class is registered."""
        return "keepstep"

    def getGroupName(self) -> str:  # noqa: N802 - the name that torch's C++ calls
        """The name that torch gave."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - the name that torch's C++ calls
        """Sets the name that torch gives."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - the name that torch's C++ calls
        """The description that torch gave."""
        return self._description

    @property
    def options(self) -> Backend.Options:
        """The backend's name and the timeout of collectives, read-only."""
        return Backend.Options(self.getBackendName(), self._timeout)

    @property
    def timeout(self) -> timedelta:
        """The timeout of collectives."""
        return self._timeout

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device_type) for device_type in self._communicators.device_types]

    def _get_backend(self, device: torch.device) -> SurvivingGroup:
        """Returns this group, because no backend below it lasts longer than a generation.

        Raises:
            RuntimeError: the group does not carry tensors on ``device``.
        """
        carried = self._communicators.device_types
        if device.type in carried:
            return self
        raise RuntimeError(
            f"No backend type associated with device type {device.type}: group {self.keepstep_name} is keepstep's and "
            f"carries tensors on {' and '.join(carried)}"
        )

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - the name that torch's C++ calls
        """Sets the description that torch gives."""
        self._description = description

    def new_group(
        self,
        ranks: list[int],
        *,
        timeout: timedelta,
        backend: object = None,
        pg_options: object = None,
        group_name: str = "",
        group_desc: str | None = None,
    ) -> SurvivingGroup | None:
        """Creates a surviving group. `torch.distributed.new_group` calls this on the world group for any backend.

        Args:
            ranks: members of the new group.
            timeout: timeout of its collectives.
            backend: the requested backend, if torch passes it (2.15 does); it makes no difference.
            pg_options, group_name, group_desc: as torch passes them.

        Returns:
            the group; None if this rank is not in it.
        """
        group = self.make_group(tuple(ranks), timeout)
        if group is not None:
            group._set_group_name(group_name)  # type: ignore[arg-type]  # a new type of torch's
            group._set_group_desc(group_desc or "undefined")
        return group

    def shutdown(self) -> None:
        """Releases connections and threads. `torch.distributed.destroy_process_group` calls this.

        After a recovery the group is connected again with all others: a replacement may not have destroyed it yet.
        """
        self._is_destroyed = True
        self._communicators.abort()
        if self._communicators.wait_until_quiet(SHUTDOWN_S):
            self._communicators.release()

    def abort(self) -> None:
        """Same as `shutdown`."""
        self.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later collectives."""
        self._timeout = timeout
        self._communicators.set_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: the numbers of all members begin at 0 when they connect."""

    def _get_sequence_number_for_group(self) -> int:
        """Number of operations that this rank has begun since it connected."""
        return self._communicators.num_begun

    # ---- collectives ------------------------------------------------------------------------------------------------

    def _issue(
        self,
        operation: Operation,
        outputs: Outputs,
        call: Callable[[TorchBackend], dist.Work],
        fill: Callable[[], None] | None,
        peer: int = ALL_MEMBERS,
        *,
        is_read: bool = False,
        inputs: Tensors | None = None,
    ) -> dist.Work:
        """Begins one collective in the communicator of its tensors' device, or echoes it with ``fill``.

        ``is_read``: this rank only sends its ``outputs``, and receives nothing. ``inputs``: they select the device if
        there are no outputs.
        """
        if _alone and (what := _alone.get(threading.get_ident())) is not None:
            raise UsageError(f"{what} began {operation.value}, which the other ranks do not take part in")
        communicators = self._communicators
        inner = communicators.of(outputs, inputs or [])
        if self._echoing:
            if fill is not None:
                fill()
            return EchoedWork(outputs, self._rank, self._size)
        start_up = self.start_up
        if start_up is not None and start_up.answer(self.keepstep_name, operation, outputs, peer):
            return EchoedWork(outputs, self._rank, self._size)

        def echo_it() -> Callable[[], None]:
            self._observer.echoed(self.keepstep_name)
            if fill is not None:
                fill()
            return tell_of_it

        def tell_of_it() -> None:
            gets_objects = objects.gather_own()
            received = [] if is_read or gets_objects is not None else outputs
            self._observer.missing(self.keepstep_name, received, is_decided=bool(gets_objects))
            objects.refuse_unpickling(self.keepstep_name, "a failure cut the group off before all was received")

        def on_error(error: Exception) -> Callable[[], None] | None:
            if inner.is_up and not communicators.is_of_a_failure(inner, error):
                return None
            return echo_it()

        try:
            is_held = inner is not communicators.own and peer != ALL_MEMBERS and objects.more_follow()
            work = inner.begin(operation, call, outputs, on_error, peer, is_held=is_held)
            return work if start_up is None else start_up.follow(work)
        except CommunicatorAborted:
            if self._is_destroyed and not self._observer.knows_failure(0.0):
                raise RuntimeError(
                    f"group {self.keepstep_name} was destroyed: it has no collectives any more"
                ) from None
            echo_it()()
        except RuntimeError as error:
            if inner.cause_of(error) is FailureCause.CALL or (tell := on_error(error)) is None:
                raise
            tell()
        return EchoedWork(outputs, self._rank, self._size)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """See `torch.distributed.all_reduce`; echo leaves the tensors unchanged."""
        is_kept = opts is not None and opts.asyncOp
        options = asynchronous(opts or AllreduceOptions())
        work = self._issue(Operation.ALL_REDUCE, tensors, lambda inner: inner.allreduce(tensors, options), None)
        return native.for_reducer(work) if is_kept else work

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Several all_reduce in one; echo leaves the tensors unchanged."""
        options = asynchronous(opts or AllreduceCoalescedOptions())
        return self._issue(
            Operation.ALL_REDUCE, tensors, lambda inner: inner.allreduce_coalesced(tensors, options), None
        )

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """See `torch.distributed.broadcast`; echo leaves the tensors unchanged."""
        objects.clear_for_receiver(tensors)
        options = asynchronous(opts or BroadcastOptions())
        is_root = options.rootRank == self._rank
        return self._issue(
            Operation.BROADCAST, tensors, lambda inner: inner.broadcast(tensors, options), None, is_read=is_root
        )

    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """See `torch.distributed.reduce`; echo leaves the tensors unchanged."""
        options = asynchronous(opts or ReduceOptions())
        is_root = options.rootRank == self._rank
        return self._issue(
            Operation.REDUCE, tensors, lambda inner: inner.reduce(tensors, options), None, is_read=not is_root
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        """See `torch.distributed.barrier`."""
        return self._issue(Operation.BARRIER, [], lambda inner: inner.barrier(opts or BarrierOptions()), None)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """See `torch.distributed.monitored_barrier`, which torch allows on groups of backend "gloo" only.

        Raises:
            RuntimeError: some ranks did not come in time, and no failure is known; it names them.
        """

        def meet(inner: TorchBackend) -> dist.Work:
            inner.monitored_barrier(self._timeout if timeout is None else timeout, wait_all_ranks)
            return EchoedWork([], self._rank, self._size)

        self._issue(Operation.BARRIER, [], meet, None).wait()

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """See `torch.distributed.all_gather`; echo puts this rank's tensor in every place."""
        return self._issue(
            Operation.ALL_GATHER,
            outputs,
            lambda inner: inner.allgather(outputs, inputs, asynchronous(opts or AllgatherOptions())),
            lambda: echo.to_all(outputs, inputs),
        )

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        return self._issue(
            Operation.ALL_GATHER,
            [output],
            lambda inner: inner._allgather_base(output, source, asynchronous(opts or AllgatherOptions())),
            lambda: echo.to_all_flat(output, source),
        )

    all_gather_single = _allgather_base  # type: ignore[assignment]  # the stub names arguments otherwise
    """The name since torch 2.12."""

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Several all_gather into one tensor each; echo as for `allgather`."""
        pairs = zip(outputs, inputs, strict=True)
        return JoinedWork(outputs, [self._allgather_base(output, source, opts) for output, source in pairs])

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]  # the stub names arguments otherwise

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """See `torch.distributed.all_gather_coalesced`; echo puts this rank's tensors in every list."""
        return self._issue(
            Operation.ALL_GATHER,
            outputs,
            lambda inner: inner.allgather_coalesced(outputs, inputs, asynchronous(opts or AllgatherOptions())),
            lambda: echo.lists_to_all(outputs, inputs),
        )

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """See `torch.distributed.gather`; echo as for `allgather`, on the root."""
        return self._issue(
            Operation.GATHER,
            outputs,
            lambda inner: inner.gather(outputs, inputs, asynchronous(opts or GatherOptions())),
            lambda: echo.to_all(outputs, inputs),
            inputs=inputs,
        )

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        """See `torch.distributed.scatter`; echo gives the root its own part. On other ranks it changes nothing."""
        objects.clear_for_receiver(outputs)
        return self._issue(
            Operation.SCATTER,
            outputs,
            lambda inner: inner.scatter(outputs, inputs, asynchronous(opts or ScatterOptions())),
            lambda: echo.own_of(outputs, inputs, self._rank),
        )

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        """See `torch.distributed.reduce_scatter`; echo gives this rank its own part."""
        return self._issue(
            Operation.REDUCE_SCATTER,
            outputs,
            lambda inner: inner.reduce_scatter(outputs, inputs, asynchronous(opts or ReduceScatterOptions())),
            lambda: echo.own_of(outputs, inputs, self._rank),
        )

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        return self._issue(
            Operation.REDUCE_SCATTER,
            [output],
            lambda inner: inner._reduce_scatter_base(output, source, asynchronous(opts or ReduceScatterOptions())),
            lambda: echo.own_of_flat(output, source, self._rank),
        )

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]  # the stub names arguments otherwise

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Several reduce_scatter from one tensor each; echo as for `reduce_scatter`."""
        pairs = zip(outputs, inputs, strict=True)
        return JoinedWork(outputs, [self._reduce_scatter_base(output, source, opts) for output, source in pairs])

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]  # the stub names arguments otherwise

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """See `torch.distributed.all_to_all`; echo sends this rank's own part to every place."""
        return self._issue(
            Operation.ALL_TO_ALL,
            outputs,
            lambda inner: inner.alltoall(outputs, inputs, asynchronous(opts or AllToAllOptions())),
            lambda: echo.own_to_all(outputs, inputs, self._rank),
        )

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        """See `torch.distributed.all_to_all_single`."""
        options = asynchronous(opts or AllToAllOptions())
        return self._issue(
            Operation.ALL_TO_ALL,
            [output],
            lambda inner: inner.alltoall_base(output, source, output_splits, input_splits, options),
            lambda: echo.own_to_all_flat(output, source),
        )

    all_to_all_single = alltoall_base  # type: ignore[assignment]  # the stub names arguments otherwise

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> dist.Work:
        """See `torch.distributed.send`; echo drops the message."""
        return self._issue(
            Operation.SEND,
            tensors,
            lambda inner: inner.send(tensors, destination, tag),
            None,
            destination,
            is_read=True,
        )

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        """See `torch.distributed.recv`; echo leaves the tensors unchanged."""
        return self._issue(Operation.RECV, tensors, lambda inner: inner.recv(tensors, source, tag), None, source)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """See `torch.distributed.recv` without a source; echo leaves the tensors unchanged."""
        return self._issue(Operation.RECV, tensors, lambda inner: inner.recv_anysource(tensors, tag), None, ANY_MEMBER)
