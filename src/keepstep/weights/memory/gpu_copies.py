"""Copies between a slot on a GPU and tensors, on separate streams, and a checksum that is fast on a GPU.

Everything in this module except the streams works on any torch device.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch

from keepstep.protocol.transfer.plan import Bucket
from keepstep.weights.memory.pieces import CHECKSUM_BYTES, Held, as_tensor, blocks_of

_LANE_BYTES = 4
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 by the golden ratio, which spreads small numbers over all bits (Knuth, TAOCP 3, 6.4), as a signed number."""
_kept_factors: dict[torch.device, torch.Tensor] = {}
_streams = threading.local()


@contextlib.contextmanager
def on_stream(device: torch.device) -> Iterator[None]:
    """Runs the block's kernels on a stream of this thread. On exit it waits until they have completed."""
    if device.type != "cuda":
        yield
        return
    by_device: dict[torch.device, torch.cuda.Stream] = _streams.__dict__.setdefault("by_device", {})
    if device not in by_device:
        by_device[device] = torch.cuda.Stream(device)
    stream = by_device[device]
    with on_device_of(stream):
        yield
        done = torch.cuda.Event(blocking=True)  # a wait for it leaves the core to others
        done.record(stream)
    done.synchronize()


@contextlib.contextmanager
def on_device_of(stream: torch.cuda.Stream) -> Iterator[None]:
    """Runs the block's kernels on a stream, whatever the current device of this thread is.

    The current device of a new thread is the first GPU. On exit, ``torch.cuda.stream`` alone would call
    ``cudaSetDevice`` for that GPU, which opens a context there since CUDA 12. ``torch.cuda.device`` does not open one.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


class GpuCopy:
    """Copies between one bucket's slot on a GPU and the local tensors. The methods are those of `HostCopy`."""

    def __init__(self, slot: torch.Tensor, bucket: Bucket, held: Mapping[int, Sequence[Held]]) -> None:
        """Args:
        slot: uint8, memory of at least the bucket's size.
        bucket: whose pieces are copied.
        held: index of a tensor -> its local blocks.
        """
        self._content = slot[: bucket.num_bytes]
        self._pairs = [(as_tensor(slot, piece, dtype), own) for piece, dtype, own in blocks_of(bucket, held)]

    def gather(self) -> bytes:
        """Tensors to slot; the checksum."""
        with on_stream(self._content.device):
            for in_slot, own in self._pairs:
                in_slot.copy_(own, non_blocking=True)
            return checksum(self._content)

    def scatter(self) -> bytes:
        """Slot to tensors; the checksum of what was in the slot."""
        with on_stream(self._content.device):
            for in_slot, own in self._pairs:
                own.copy_(in_slot, non_blocking=True)
            return checksum(self._content)


def checksum(content: torch.Tensor) -> bytes:
    """The checksum of a bucket: the sum of its 4-byte lanes, each multiplied by its own odd number, modulo 2**64.

    The sum is twice as wide as a lane, so that the highest bits of different lanes have different weights. A change of
    a single lane always changes the checksum. It detects accidents, not attacks.

    Args:
        content: uint8 [n], aligned to four bytes.
    """
    size = content.numel() // _LANE_BYTES * _LANE_BYTES
    lanes, rest = content[:size].view(torch.int32), content[size:]
    factors = _factors(content.device, lanes.numel() + _LANE_BYTES)
    total = (lanes * factors[: lanes.numel()]).sum() + (rest * factors[lanes.numel() :][: rest.numel()]).sum()
    return int(total.item()).to_bytes(CHECKSUM_BYTES, "little", signed=True)


def _factors(device: torch.device, num_lanes: int) -> torch.Tensor:
    """Odd numbers, int64 [num_lanes or more]. The cache on a device takes twice the memory of its largest bucket."""
    kept = _kept_factors.get(device)
    if kept is None or kept.numel() < num_lanes:
        kept = _kept_factors[device] = (torch.arange(num_lanes, dtype=torch.int64, device=device) * 2 + 1) * _ODD
        _await_everything(device)  # other threads' streams use the factors next
    return kept


def _await_everything(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
