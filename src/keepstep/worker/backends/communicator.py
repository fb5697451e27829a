"""What keepstep needs of the group inside a surviving group; torch's gloo group is the one there is today.

torch's stubs do not show these methods of its backends, so they are written down here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor
from torch import distributed as dist

from keepstep.weights.lines.group import Carrier


class Communicator(Carrier, Protocol):
    """One communicator of one generation. All calls return a handle at once; waiting on it may raise RuntimeError."""

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """See the collective of this name in `SurvivingGroup`."""
        ...

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """See the collective of this name in `SurvivingGroup`."""
        ...

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """See the collective of this name in `SurvivingGroup`."""
        ...

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """See the collective of this name in `SurvivingGroup`."""
        ...

    def barrier(self, opts: Any = ...) -> dist.Work:
        """See the collective of this name in `SurvivingGroup`."""
        ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        """See the collective of this name in `SurvivingGroup`."""
        ...

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        """See the collective of this name in `SurvivingGroup`."""
        ...

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """See the collective of this name in `SurvivingGroup`; it ends in this call."""
        ...

    def _set_default_timeout(self, timeout: timedelta) -> None: ...

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any) -> dist.Work:
        """See the collective of this name in `SurvivingGroup`."""
        ...

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        """See the collective of this name in `SurvivingGroup`."""
        ...

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        """See the collective of this name in `SurvivingGroup`."""
        ...

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        """See the collective of this name in `SurvivingGroup`."""
        ...

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any) -> dist.Work:
        """See the collective of this name in `SurvivingGroup`."""
        ...

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        """See the collective of this name in `SurvivingGroup`."""
        ...

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any
    ) -> dist.Work:
        """See the collective of this name in `SurvivingGroup`."""
        ...

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """See the collective of this name in `SurvivingGroup`."""
        ...
