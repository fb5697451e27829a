"""Module buffers, compared between the ranks that hold the same shard.

A forward may change buffers, and a replacement gets the buffers of a replica. DDP keeps buffers equal on all ranks.
FSDP2, and scripts that average gradients themselves, do not: statistics of each rank's own samples would differ after a
recovery, and so would the results.

So the ranks compare the buffers after their first step in a generation. They do it in the gradient barrier of the
second step, which takes a maximum over all ranks anyway. Each rank contributes a digest and its negation, which gives
the maximum and the minimum of the digests of a shard. They are equal only if all digests are.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.errors import ConfigurationError
from keepstep.protocol.messages import Membership
from keepstep.weights.memory.blocks import local_of
from keepstep.weights.memory.bytes_of import digest_of
from keepstep.worker.state.protected import ProtectedState

_DIGITS = 15
"""Hexadecimal digits of a digest: 60 bits, so that the digest and its negation fit into 64 bits."""
_NOTHING = -(1 << 62)
"""A rank's contribution for shards that it does not hold: less than any digest."""


class ReplicaBuffers:
    """One rank's part. All methods are called by the training thread."""

    def __init__(self, state: ProtectedState) -> None:
        """Args:
        state: the protected objects.
        """
        self._state = state
        self._first = -1
        self._membership: Membership | None = None
        self._rank = -1
        self._before: dict[str, str] = {}
        """Name -> digest of each buffer at the first step."""
        self._now: dict[str, str] | None = None
        """Name -> digest of each buffer at the second step; set only in that step."""

    def resumed(self, step: int, rank: int, membership: Membership | None) -> None:
        """Call it when all ranks of a generation are at the same step.

        Args:
            step: the step.
            rank: this rank.
            membership: membership of the generation.
        """
        has_replicas = membership is not None and len(membership.shards) < membership.world_size
        self._membership = membership if has_replicas and self._state.is_sharded else None
        self._first, self._rank, self._now = step, rank, None

    def hand_out(self, step: int) -> None:
        """Records the buffers that the forward of a step will read. Call it when the step is yielded."""
        self._now = None
        if self._membership is None or step > self._first + 1:
            return
        digests = {name: digest_of([("", local_of(buffer))], b"") for name, buffer in self._state.buffers()}
        if step == self._first:
            self._before = digests
        else:
            self._now = digests

    def contribution(self) -> tuple[int, ...]:
        """This rank's numbers in the gradient barrier of the second step; none in other steps."""
        if self._now is None or self._membership is None:
            return ()
        own, num_shards = self._membership.shard_numbers[self._rank], len(self._membership.shards)
        digest = int(digest_of([], repr(self._now).encode())[:_DIGITS], 16)
        said = [_NOTHING] * (2 * num_shards)
        said[own], said[num_shards + own] = digest, -digest
        return tuple(said)

    def reduced(self, greatest: Sequence[int]) -> None:
        """Evaluates the maxima over all ranks of each number in `contribution`.

        Raises:
            ConfigurationError: this rank's buffers differ from those of a replica.
        """
        if self._now is None or self._membership is None or not greatest:
            return
        own = self._membership.shard_numbers[self._rank]
        if greatest[own] == -greatest[len(self._membership.shards) + own]:
            return
        changed = [name for name, digest in self._now.items() if self._before.get(name) != digest] or list(self._now)
        raise ConfigurationError(
            f"step {self._first} has changed buffers ({', '.join(changed[:3])}) in another way on rank {self._rank} "
            "than on ranks that hold the same shard, and a lost rank would get theirs: have all of these compute the "
            "same (torch.nn.SyncBatchNorm and an all_reduce do), or keep it in an attribute that is no buffer"
        )
