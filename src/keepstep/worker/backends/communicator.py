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
"""The address that a backend listens at on a job's only node."""

Outputs = list[Tensor] | list[list[Tensor]]


def first_tensor(tensors: object) -> Tensor | None:
    """The first tensor in nested lists of them; None where there is none."""
    if isinstance(tensors, Tensor):
        return tensors
    if isinstance(tensors, list | tuple):
        for each in tensors:
            if (first := first_tensor(each)) is not None:
                return first
    return None


OnError = Callable[[Exception], Callable[[], None] | None]
"""Told of the error that an operation has ended with, from any thread. None: each thread that waits raises the error.
Else the error has been dealt with, and each thread that waits calls the result before it goes on."""


class CommunicatorAborted(RuntimeError):
    """The communicator was aborted; a RuntimeError, as errors of torch's own backends are."""


class FailureCause(enum.Enum):
    """Why an operation has failed."""

    CONNECTION = enum.auto()
    """A connection ended: the peer is gone, or has left the group."""
    DEADLINE = enum.auto()
    """Its timeout has passed: a peer did not come. The backend has closed the connections of the group."""
    CALL = enum.auto()
    """Neither: the backend refuses what it was asked to do, such as a bitwise reduction of floats."""


class OperationObserver(Protocol):
    """Is told of the operations of groups, from any thread. ``peer``: as in `OperationCount`."""

    def entered(self, group: str, operation: Operation, peer: int) -> None:
        """An operation was begun."""

    def awaited(self) -> None:
        """Something waits for an operation in flight, or asks after it: told once for each operation at most."""

    def left(self, group: str, operation: Operation, peer: int, *, was_awaited: bool) -> None:
        """An operation has ended; ``was_awaited``: `awaited` was told of it."""


class Communicator(Carrier, Protocol):
    """The connections of one group, for one generation or, where `reopen` is called, for more.

    The training thread begins operations; the rest may come from any thread.
    """

    @property
    def is_up(self) -> bool:
        """Whether it is connected, and was neither closed nor aborted."""
        ...

    @property
    def num_begun(self) -> int:
        """How many operations this rank has begun since it was connected."""
        ...

    def connect(self, store: Store, rank: int, size: int, connect_deadline: timedelta, timeout: timedelta) -> None:
        """Connects to all other members, who do the same.

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
        ...

    def abort(self) -> None:
        """Breaks the communicator, at any moment and any number of times.

        What waits in it is freed within milliseconds.
        """
        ...

    def close(self) -> None:
        """Has no operation begin any more. Where one is under way it is aborted, else its connections stay.

        At any moment and any number of times; it waits for nothing.
        """
        ...

    def claim(self, generation: int) -> GroupClaim | None:
        """What this rank can say of its connections, which were made in ``generation``.

        None, where they cannot stay: it is not closed, something is under way or has failed, or a message was received
        from any source, so that it is not known whose it was.
        """
        ...

    def reopen(self) -> None:
        """All members have claimed that the connections can stay: operations may begin again."""
        ...

    def leave(self) -> None:
        """Ends this rank's connections, so that no other member waits for it. It is called after a deadline."""
        ...

    def wait_until_quiet(self, deadline_s: float) -> bool:
        """Waits until no operation is under way, so that nothing writes into a tensor later on.

        Returns:
            False: one did not end in time.
        """
        ...

    def look(self) -> None:
        """Checks which operations have ended, without waiting, and notifies their owners. From the training thread.

        Raises:
            RuntimeError: the error that one has ended in, which its `OnError` has not dealt with, where the thread that
                waited for it has held up a stream alone and gone on.
        """
        ...

    def release(self) -> None:
        """Gives up an aborted communicator's resources, when it is quiet."""
        ...

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of operations to come."""
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
            operation: what it is.
            call: issues it.
            outputs: what the future of the returned handle holds in the end.
            on_error: see `OnError`.
            peer: the other side of a send or recv.
            is_held: it is a send or recv of a batch of which others follow. Where operations that are issued one by one
                wait for each other it is issued with the last one, and nothing waits for it before.

        Raises:
            CommunicatorAborted: it was aborted already.
            RuntimeError, ValueError, TypeError: from ``call``; nothing is under way.
        """
        ...

    def cause_of(self, error: Exception) -> FailureCause:
        """Why an operation has failed."""
        ...

    @property
    def background(self) -> Carrier:
        """Moves tensors beside what the training thread does, from any thread.

        These operations are not counted, and the observer is told of none: no rank stands still in one of them. They
        end with the communicator, as all do.
        """
        ...

    def barrier(self, greatest: Tensor | None = None) -> dist.Work:
        """Meets all members. Waiting raises RuntimeError when one is gone or the communicator was aborted.

        With ``greatest``, numbers that every member gives, each becomes the greatest of all: no member has the result
        of a reduction before all have come.

        As `send` and `recv` it is keepstep's own traffic: its errors are raised, and it does not echo.
        """
        ...


CommunicatorFactory = Callable[[str, OperationObserver, str], Communicator]
"""Makes one: the group's name, for messages; its observer; the address at which other members reach this rank."""


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
        """It ends in this call."""
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
