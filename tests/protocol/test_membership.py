"""Who is in the job: what a message carries is the same on both sides, and what cannot be is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import Member, Membership, MembershipChange

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
        ((0, 1), (("a", ""),), (0,), ("x",), (0, 0)),
        ((0, 1), (("a", ""),), (0, 0), ("x",), (0, 0, 0)),
        ((0,), (("a", ""),), (1,), ("x",), (0,)),
        ((0,), (("a", ""),), (0,), ("x",), (-1,)),
        ((0,), (), (0,), ("x",), (0,)),
    ],
)
def test_what_cannot_be_a_membership_is_refused(fields: tuple[tuple[object, ...], ...]) -> None:
    with pytest.raises(msgspec.ValidationError, match="a membership of"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(("Membership", *fields)), type=Membership)


@given(MEMBERS.filter(bool), st.data())
def test_a_change_makes_the_same_membership_on_both_sides(members: list[Member], data: st.DataObject) -> None:
    before = Membership.of(msgspec.structs.replace(each, worker=number) for number, each in enumerate(members))
    after_members = [before.member(rank) for rank in range(before.world_size)]
    for rank in data.draw(st.sets(st.integers(0, len(members) - 1))):
        after_members[rank] = Member(
            1000 + rank,
            data.draw(st.sampled_from("abz")),
            data.draw(st.sampled_from("xyw")),
            data.draw(st.sampled_from(["", "rack"])),
        )
    after = Membership.of(after_members)
    change = msgspec.msgpack.decode(msgspec.msgpack.encode(before.change_to(after)), type=MembershipChange)
    assert before.changed(change) == after


def test_a_change_of_a_rank_that_is_not_there_is_refused() -> None:
    before = Membership.of([Member(0, "a", "x")])
    with pytest.raises(RemoteProtocolError, match=r"a change of ranks \[1\] in a membership of 1 ranks"):
        before.changed(MembershipChange(((1, Member(5, "a", "x")),)))
