"""The interface of a backend: a communicator of one generation, which can be aborted.

Each backend is a folder next to this file. `keepstep.worker.backends.by_device` maps devices to backends.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import Store

from keepstep.protocol.kept_groups import GroupClaim
from keepstep.protocol.waiting.operations import ALL_MEMBERS, Operation
from keepstep.weights.channels.group import Carrier

LOOPBACK = "127.0.0.1"
"""The address at which a backend listens if the job has one node."""

Outputs = list[Tensor] | list[list[Tensor]]


def first_tensor(tensors: object) -> Tensor | None:
    """The first tensor in nested lists; None if there is none."""
    if isinstance(tensors, Tensor):
        return tensors
    if isinstance(tensors, list | tuple):
        for each in tensors:
            if (first := first_tensor(each)) is not None:
                return first
    return None


OnError = Callable[[Exception], Callable[[], None] | None]
"""Called with the error of an operation, from any thread. If it returns None, each waiting thread raises the error.
Else the error has been handled, and each waiting thread calls the returned function before it goes on."""


class CommunicatorAborted(RuntimeError):
    """The communicator was aborted; a RuntimeError, as errors of torch's own backends are."""


class FailureCause(enum.Enum):
    """Why an operation has failed."""

    CONNECTION = enum.auto()
    """A connection ended: the peer is gone, or has left the group."""
    DEADLINE = enum.auto()
    """The operation timed out: a peer did not take part. The backend has closed the connections of the group."""
    CALL = enum.auto()
    """The backend refuses the call itself, such as a bitwise reduction of floats."""


class OperationObserver(Protocol):
    """Is notified of the operations of groups, from any thread. ``peer``: as in `OperationCount`."""

    def entered(self, group: str, operation: Operation, peer: int) -> None:
        """Called when an operation has begun."""

    def awaited(self) -> None:
        """Called at most once per operation, when a caller waits for it, or polls it, while it is in flight."""

    def left(self, group: str, operation: Operation, peer: int, *, was_awaited: bool) -> None:
        """Called when an operation has ended; ``was_awaited``: whether `awaited` was called for it."""


class Communicator(Carrier, Protocol):
    """The connections of one group, for one generation or, if `reopen` is called, for more.

    The training thread begins operations; any thread may call the other methods.
    """

    @property
    def is_up(self) -> bool:
        """Whether it is connected, and neither closed nor aborted."""
        ...

    @property
    def num_begun(self) -> int:
        """Number of operations that this rank has begun since it was connected."""
        ...

    def connect(self, store: Store, rank: int, size: int, connect_deadline: timedelta, timeout: timedelta) -> None:
        """Connects to all other members, who do the same.

        Args:
            store: where the members find each other; used by this generation alone.
            rank: this process's rank in the group.
            size: number of members.
            connect_deadline: how long to wait for the other members.
            timeout: timeout of each operation, as in ``new_group(timeout=...)``.

        Raises:
            RuntimeError: a member did not connect in time, or `abort` was called meanwhile.
            PeerLost: from ``store``.
        """
        ...

    def abort(self) -> None:
        """Aborts the communicator, at any moment and any number of times.

        Threads that wait in it are released within milliseconds.
        """
        ...

    def close(self) -> None:
        """Lets no operation begin any more. Aborts the communicator if one is in flight, else keeps its connections.

        At any moment and any number of times; it does not block.
        """
        ...

    def claim(self, generation: int) -> GroupClaim | None:
        """Returns this rank's claim on its connections, which were made in ``generation``.

        None: they cannot stay. Either the communicator is not closed, an operation is in flight or has failed, or a
        message was received from any source, so that its sender is not known.
        """
        ...

    def reopen(self) -> None:
        """Lets operations begin again, after all members have claimed that the connections can stay."""
        ...

    def leave(self) -> None:
        """Closes this rank's connections, so that no other member waits for it. Called after a timeout."""
        ...

    def wait_until_quiet(self, deadline_s: float) -> bool:
        """Waits until no operation is in flight, so that nothing writes into a tensor later on.

        Returns:
            False: an operation did not end in time.
        """
        ...

    def look(self) -> None:
        """Finds operations that have ended, without waiting, and notifies their owners. From the training thread.

        Raises:
            RuntimeError: an operation has failed and its `OnError` has not handled the error. The thread that waited
                for it has only blocked a stream, and gone on.
        """
        ...

    def release(self) -> None:
        """Releases the resources of an aborted communicator, when it is quiet."""
        ...

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later operations."""
        ...

    def begin(
        self,
        operation: Operation,
        call: Callable[[TorchBackend], dist.Work],
        outputs: Outputs,
        on_error: OnError,
        peer: int = ALL_MEMBERS,
        *,
        is_held: bool = False,
    ) -> dist.Work:
        """Begins an operation.

        Args:
            operation: the kind of operation.
            call: issues it.
            outputs: result of the returned handle's future.
            on_error: see `OnError`.
            peer: the other side of a send or recv.
            is_held: whether it is a send or recv of a batch of which others follow. If the backend's single operations
                wait for each other, it is issued together with the last one; nothing waits for it before.

        Raises:
            CommunicatorAborted: the communicator was aborted already.
            RuntimeError, ValueError, TypeError: from ``call``; no operation is in flight.
        """
        ...

    def cause_of(self, error: Exception) -> FailureCause:
        """Returns why an operation has failed."""
        ...

    @property
    def background(self) -> Carrier:
        """Transfers tensors beside the training thread, from any thread.

        Its operations are not counted and the observer is not notified of them, because no rank is blocked in them.
        They end with the communicator, as all do.
        """
        ...

    def barrier(self, greatest: Tensor | None = None) -> dist.Work:
        """Begins a barrier of all members. Waiting raises RuntimeError if one is gone or the communicator was aborted.

        With ``greatest``, each of its numbers becomes the maximum over all members. That is a barrier as well: no
        member has the result of a reduction before all have taken part.

        Like `send` and `recv`, it is keepstep's own traffic: it raises its errors and does not echo.
        """
        ...


CommunicatorFactory = Callable[[str, OperationObserver, str], Communicator]
"""Creates a communicator from the group's name, its observer, and the address at which members reach this rank."""


class TorchBackend(Protocol):
    """The methods of torch's own backends, such as ProcessGroupGloo, which torch's stubs do not show.

    Each returns a handle at once; waiting for it may raise RuntimeError.
    """

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """See the method of this name in `SurvivingGroup`."""
        ...

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """See the method of this name in `SurvivingGroup`."""
        ...

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """See the method of this name in `SurvivingGroup`."""
        ...

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """See the method of this name in `SurvivingGroup`."""
        ...

    def barrier(self, opts: Any = ...) -> dist.Work:
        """See the method of this name in `SurvivingGroup`."""
        ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        """See the method of this name in `SurvivingGroup`."""
        ...

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        """See the method of this name in `SurvivingGroup`."""
        ...

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Blocks until the barrier has ended."""
        ...

    def _set_default_timeout(self, timeout: timedelta) -> None: ...

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any) -> dist.Work:
        """See the method of this name in `SurvivingGroup`."""
        ...

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        """See the method of this name in `SurvivingGroup`."""
        ...

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        """See the method of this name in `SurvivingGroup`."""
        ...

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        """See the method of this name in `SurvivingGroup`."""
        ...

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any) -> dist.Work:
        """See the method of this name in `SurvivingGroup`."""
        ...

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        """See the method of this name in `SurvivingGroup`."""
        ...

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any
    ) -> dist.Work:
        """See the method of this name in `SurvivingGroup`."""
        ...

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """See the method of this name in `SurvivingGroup`."""
        ...

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> dist.Work:
        """See the method of this name in `SurvivingGroup`."""
        ...

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """See the method of this name in `SurvivingGroup`."""
        ...
