"""Buckets as messages of a process group, for peers without shared memory: other nodes, and GPUs that NCCL connects.

It has the same two sides as `keepstep.weights.channels.flow`. A message is the content of a slot: bucket and checksum.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import distributed as dist

from keepstep.protocol.transfer.plan import Bucket
from keepstep.weights.memory.pieces import CHECKSUM_BYTES

BUCKET_TAG = 0x4B531
"""Tag of messages with buckets. Each side sends and receives them in the order of the plan."""


class Carrier(Protocol):
    """Sends and receives tensors between two ranks."""

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> dist.Work:
        """Begins to send; waiting for the handle may raise RuntimeError."""
        ...

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        """Begins to receive; waiting for the handle may raise RuntimeError."""
        ...


class GroupOutlet:
    """The sending side of one transfer. Waiting raises RuntimeError where a receiver is gone."""

    def __init__(self, group: Carrier, buckets: Sequence[Bucket], slots: Sequence[torch.Tensor]) -> None:
        """Args:
        group: a connected group.
        buckets: the buckets that this rank sends.
        slots: the slots into which buckets are gathered, uint8.
        """
        self._group, self._slots = group, slots
        self._buckets = {bucket.index: bucket for bucket in buckets}
        self._under_way: list[list[dist.Work]] = [[] for _ in slots]

    def announce(self, bucket: int, slot: int, readers: Collection[int]) -> None:
        """Begins to send a bucket to ranks."""
        message = self._slots[slot][: self._buckets[bucket].num_bytes + CHECKSUM_BYTES]
        self._under_way[slot] += [self._group.send([message], reader, BUCKET_TAG) for reader in readers]

    def wait_until_free(self, slot: int) -> None:
        """Waits until what was sent from the slot is through."""
        works, self._under_way[slot] = self._under_way[slot], []
        for work in works:
            work.wait()

    def wait_until_all_free(self) -> None:
        """Waits until everything is through."""
        for slot in range(len(self._slots)):
            self.wait_until_free(slot)


class GroupInlet:
    """The receiving side of one transfer, from one source. It prefetches the next bucket while the caller uses one."""

    def __init__(self, group: Carrier, source: int, buckets: Sequence[Bucket], slots: Sequence[torch.Tensor]) -> None:
        """Args:
        group: a connected group.
        source: rank of the source.
        buckets: all buckets from this source, in its order.
        slots: the slots to receive into, uint8.
        """
        self._group, self._source, self._slots = group, source, slots
        self._due = iter(enumerate(buckets))
        self._coming: list[tuple[torch.Tensor, dist.Work]] = []
        for _ in slots:
            self._begin_next()

    def take(self, bucket: Bucket) -> torch.Tensor:
        """Waits for the next bucket; its slot, uint8, valid until `release`."""
        slot, work = self._coming[0]
        work.wait()
        return slot

    def release(self) -> None:
        """The bucket is done with."""
        self._coming.pop(0)
        self._begin_next()

    def _begin_next(self) -> None:
        number, bucket = next(self._due, (0, None))
        if bucket is not None:
            slot = self._slots[number % len(self._slots)]
            message = slot[: bucket.num_bytes + CHECKSUM_BYTES]
            self._coming.append((slot, self._group.recv([message], self._source, BUCKET_TAG)))
