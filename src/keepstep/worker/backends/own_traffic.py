"""keepstep's own operations on a communicator: they do not echo, and raise their errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, BarrierOptions

from keepstep.protocol.waiting.operations import ALL_MEMBERS, Operation
from keepstep.worker.backends.communicator import OnError, Outputs, TorchBackend

Issue = Callable[[TorchBackend], dist.Work]
"""Issues an operation on torch's backend."""


class OwnTraffic(ABC):
    """The part of a `Communicator` that needs only `begin`, for all backends."""

    @abstractmethod
    def begin(
        self,
        operation: Operation,
        call: Issue,
        outputs: Outputs,
        on_error: OnError,
        peer: int = ALL_MEMBERS,
        *,
        is_held: bool = False,
    ) -> dist.Work:
        """See `Communicator.begin`."""

    @abstractmethod
    def begin_unobserved(self, operation: Operation, call: Issue, tensors: list[Tensor], peer: int) -> dist.Work:
        """Begins an operation that is independent of the training thread; see `Communicator.background`.

        Args:
            operation, call, peer: as in `begin`.
            tensors: result of its future.
        """

    @property
    def background(self) -> Background:
        """See `Communicator.background`."""
        return Background(self)

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> dist.Work:
        """Begins to send to one rank. Waiting raises RuntimeError if the rank is gone or the group was aborted."""
        return self.begin(
            Operation.SEND, lambda inner: inner.send(tensors, destination, tag), tensors, is_raised, destination
        )

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """Begins to receive from one rank. Waiting raises RuntimeError if the rank is gone or the group was aborted."""
        return self.begin(Operation.RECV, lambda inner: inner.recv(tensors, source, tag), tensors, is_raised, source)

    def barrier(self, greatest: Tensor | None = None) -> dist.Work:
        """Begins a barrier of all members. Waiting raises RuntimeError if one is gone or the group was aborted."""
        if greatest is None:
            return self.begin(Operation.BARRIER, lambda inner: inner.barrier(BarrierOptions()), [], is_raised)
        return self.begin(Operation.BARRIER, lambda inner: self._reduce_to_greatest(inner, greatest), [], is_raised)

    def _reduce_to_greatest(self, inner: TorchBackend, greatest: Tensor) -> dist.Work:
        """Begins the operation of a barrier that gives all members the greatest numbers."""
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        return inner.allreduce([greatest], options)


class Background:
    """Sends and receives of a communicator beside the training thread; see `Communicator.background`."""

    def __init__(self, communicator: OwnTraffic) -> None:
        self._begin = communicator.begin_unobserved

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> dist.Work:
        """Begins to send; see `Carrier`."""
        return self._begin(Operation.SEND, lambda inner: inner.send(tensors, destination, tag), tensors, destination)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """Begins to receive; see `Carrier`."""
        return self._begin(Operation.RECV, lambda inner: inner.recv(tensors, source, tag), tensors, source)


def is_raised(_error: Exception) -> None:
    """An `OnError`: each thread that waits raises the error."""
