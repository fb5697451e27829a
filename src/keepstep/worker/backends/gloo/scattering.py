"""Torch's gloo backend, with two additions: a reduce_scatter whose handle has a future, and messages of a GPU.

Torch's handle has no future, so a separate thread would have to wait for each. Like torch 2.13's, these methods reduce
a copy of the inputs and then copy this rank's part; the bits are the same
(`tests/worker/groups/test_as_torch_has_it.py`).

Gloo sends and receives only host memory: ``ProcessGroupGloo::send`` passes on the tensor's address, wherever that is.
So a message of a GPU goes through a copy in host memory. Not tested on a GPU.

`greatest_of_all` is a reduction of a few numbers that takes no longer than gloo's barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, AllToAllOptions, ProcessGroupGloo, ReduceOptions

from keepstep.worker.backends.communicator import TorchBackend


def _gloo(backend: object) -> TorchBackend:
    return cast(TorchBackend, backend)


class ScatteringGloo(ProcessGroupGloo):
    """Torch's gloo backend, except for reduce_scatter, and sends and receives of tensors on a GPU."""

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        """Reduces each of ``inputs[0]`` to the rank of its place. Torch itself refuses invalid arguments."""
        if len(outputs) != 1 or len(inputs) != 1 or len(inputs[0]) != self.size():
            return _gloo(super()).reduce_scatter(outputs, inputs, opts)
        parts = [part.clone() for part in inputs[0]]
        works = []
        for root, part in enumerate(parts):
            options = ReduceOptions()
            options.reduceOp, options.rootRank, options.timeout = opts.reduceOp, root, opts.timeout
            works.append(_gloo(self).reduce([part], options))
        return CopyingWork(works, parts[self.rank()], outputs[0])

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any) -> dist.Work:
        """Reduces all of ``source`` on every rank, and copies this rank's part."""
        if not _is_part(output, source, self.size()):
            return _gloo(super())._reduce_scatter_base(output, source, opts)
        whole = source.clone()
        options = AllreduceOptions()
        options.reduceOp, options.timeout = opts.reduceOp, opts.timeout
        work = _gloo(self).allreduce([whole], options)
        return CopyingWork([work], whole.chunk(self.size())[self.rank()], output)

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> dist.Work:
        """Sends tensors on a GPU through a copy in host memory. Gloo's handle keeps that copy alive."""
        return _gloo(super()).send([tensor.detach().cpu() for tensor in tensors], destination, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """Receives a tensor on a GPU through host memory."""
        return self._received(tensors, lambda hosts: _gloo(super(ScatteringGloo, self)).recv(hosts, source, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """Same as `recv`, from any rank."""
        return self._received(tensors, lambda hosts: _gloo(super(ScatteringGloo, self)).recv_anysource(hosts, tag))

    def _received(self, tensors: list[Tensor], receive: Callable[[list[Tensor]], dist.Work]) -> dist.Work:
        if len(tensors) != 1 or not tensors[0].is_cuda:
            return receive(tensors)
        (tensor,) = tensors
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        torch.cuda.current_stream(tensor.device).synchronize()  # what the script has queued may still read the tensor
        return CopyingWork([receive([host])], host, tensor)


def greatest_of_all(backend: TorchBackend, greatest: Tensor, size: int) -> dist.Work:
    """Makes each number of a tensor [numbers] the greatest of all members.

    Every member sends to every other, so it ends as soon as the last one has come. Gloo's allreduce passes the numbers
    around a ring, 2 (``size`` - 1) messages one after the other, and takes two to five times as long as its barrier.
    """
    own = greatest.cpu().numpy()  # NumPy takes a fraction of torch's time for a few numbers
    said, heard = np.empty((2, size, len(own)), own.dtype)
    said[:] = own
    work = backend.alltoall_base(torch.from_numpy(heard), torch.from_numpy(said), [], [], AllToAllOptions())
    return GreatestWork([work], torch.from_numpy(heard), greatest)


def _is_part(output: Tensor, source: Tensor, size: int) -> bool:
    """Whether an output is one of ``size`` equal parts along the first dimension."""
    return (
        output.dim() > 0
        and output.numel() > 0
        and source.dtype == output.dtype
        and source.shape == (output.shape[0] * size, *output.shape[1:])
    )


class CopyingWork(dist.Work):
    """The handle of operations after which a tensor is copied, once, by the thread that has waited for them."""

    def __init__(self, works: Sequence[dist.Work], source: Tensor, output: Tensor) -> None:
        """Args:
        works: gloo's handles.
        source: the tensor that they write, with as many elements as ``output``.
        output: the tensor that `copy` writes.
        """
        super().__init__()
        self._works = works
        self._source, self._output = source, output

    def copy(self) -> None:
        """Writes the output, after the operations have succeeded.

        The first thread that learns of their end calls it. Dispatch modes of that thread must not see the copy:
        selective activation checkpointing counts the operations that it sees, in the forward and in its repetition.
        """
        with torch._C._DisableTorchDispatch():
            self._output.copy_(self._source.view_as(self._output))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the operations have ended."""
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future that completes when the operations have ended, with the error of the first that failed."""
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(_raise_errors)

    def is_completed(self) -> bool:
        """Whether the operations have ended."""
        return all(work.is_completed() for work in self._works)

    def _source_rank(self) -> int:
        return int(self._works[0]._source_rank())


class GreatestWork(CopyingWork):
    """The handle of `greatest_of_all`: ``source`` [members, numbers], ``output`` [numbers]."""

    def copy(self) -> None:
        """Writes the greatest numbers."""
        self._source = torch.from_numpy(self._source.numpy().max(0))
        super().copy()


def _raise_errors(ended: torch.futures.Future[list[torch.futures.Future[Any]]]) -> None:
    for each in ended.value():
        each.value()
