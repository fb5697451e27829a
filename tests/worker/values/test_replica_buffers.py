"""Buffers that differ between replicas are found in the second step of a generation."""

import pytest
import torch

from keepstep.errors import ConfigurationError
from keepstep.protocol.messages import Member, Membership
from keepstep.worker.parallel.layout import Replicated
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.values.replica_buffers import ReplicaBuffers

TWO_SHARDS = Membership.of(Member(rank, "n", str(rank % 2)) for rank in range(4))
"""Ranks 0 and 2 hold the one, 1 and 3 the other."""


class Sharded(Replicated):
    """As FSDP2 is."""

    is_sharded = True


class Rank:
    """A module with a statistic of its own, and one that is the same everywhere."""

    def __init__(self, rank: int, membership: Membership = TWO_SHARDS, *, is_sharded: bool = True) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.model.register_buffer("mean", torch.zeros(3))
        self.model.register_buffer("calls", torch.tensor(0))
        layout = Sharded() if is_sharded else Replicated()
        self.buffers = ReplicaBuffers(ProtectedState({"model": self.model}, layout))
        self.buffers.resumed(7, rank, membership)

    def step(self, step: int, mean: float) -> tuple[int, ...]:
        self.buffers.hand_out(step)
        said = self.buffers.contribution()
        self.model.mean.fill_(mean)
        self.model.calls += 1
        return said


def second_barrier(*means: float, **options: bool) -> list[Rank | str]:
    """Each rank, or the error that it ended with."""
    ranks = [Rank(rank, **options) for rank in range(len(means))]
    assert [rank.step(7, mean) for rank, mean in zip(ranks, means, strict=True)] == [()] * len(means)
    said = [rank.step(8, mean) for rank, mean in zip(ranks, means, strict=True)]
    greatest = [max(numbers) for numbers in zip(*said, strict=True)]
    assert all(abs(number) <= 1 << 62 for numbers in said for number in numbers), "they fit into 64 bits"
    found: list[Rank | str] = []
    for rank in ranks:
        try:
            rank.buffers.reduced(greatest)
            found.append(rank)
        except ConfigurationError as error:
            found.append(str(error))
    return found


def test_shards_may_differ_and_replicas_may_not() -> None:
    assert not any(isinstance(each, str) for each in second_barrier(1.0, 2.0, 1.0, 2.0))
    found = second_barrier(1.0, 2.0, 1.0, 3.0)
    assert [isinstance(each, str) for each in found] == [False, True, False, True]
    assert str(found[3]).startswith("step 7 has changed buffers (model.mean, model.calls) in another way on rank 3 ")


def test_it_is_asked_once_in_a_generation() -> None:
    rank = Rank(0)
    assert [bool(rank.step(step, 1.0)) for step in (7, 8, 9, 10)] == [False, True, False, False]
    rank.buffers.resumed(9, 0, TWO_SHARDS)
    assert [bool(rank.step(step, 1.0)) for step in (9, 10, 11)] == [False, True, False]
    rank.buffers.reduced(())


@pytest.mark.parametrize("case", ["no replicas", "all replicas"])
def test_it_is_not_asked_where_there_is_nothing_to_compare_or_ddp_sees_to_it(case: str) -> None:
    alone = Membership.of(Member(rank, "n", str(rank)) for rank in range(2))
    rank = Rank(0, alone) if case == "no replicas" else Rank(0, is_sharded=False)
    assert [rank.step(step, 1.0) for step in (7, 8)] == [(), ()]
