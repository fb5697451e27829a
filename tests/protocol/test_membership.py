"""Who is in the job: what a message carries is the same on both sides, and what cannot be is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.protocol.messages import Member, Membership

MEMBERS = st.lists(st.builds(Member, st.integers(0, 99), st.sampled_from("abc"), st.sampled_from("xyz")), max_size=9)


@given(MEMBERS)
def test_every_rank_has_its_member_on_both_sides(members: list[Member]) -> None:
    membership = Membership.of(members)
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(membership), type=Membership)
    assert travelled == membership
    assert [travelled.member(rank) for rank in range(travelled.world_size)] == members
    replicas = travelled.replicas
    assert sorted(rank for ranks in replicas.values() for rank in ranks) == list(range(len(members)))
    for rank, member in enumerate(members):
        assert rank in replicas[member.shard]
        assert travelled.is_first_replica(rank) == (member.shard not in {each.shard for each in members[:rank]})


@pytest.mark.parametrize(
    "fields",
    [
        ((0, 1), ("a",), (0,), ("x",), (0, 0)),
        ((0, 1), ("a",), (0, 0), ("x",), (0, 0, 0)),
        ((0,), ("a",), (1,), ("x",), (0,)),
        ((0,), ("a",), (0,), ("x",), (-1,)),
        ((0,), (), (0,), ("x",), (0,)),
    ],
)
def test_what_cannot_be_a_membership_is_refused(fields: tuple[tuple[object, ...], ...]) -> None:
    with pytest.raises(msgspec.ValidationError, match="a membership of"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Membership)
