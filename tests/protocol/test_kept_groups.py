"""Which groups stay in a recovery: decided from the claims of their members, and right for all that they can have done.

The model below is what a group does to its connections: a collective leaves bytes on the way until all have entered it,
and some members may leave it before, as the root of a broadcast does; a message is on its way until it is received.
"""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.protocol.kept_groups import GroupClaim, why_rebuilt


def claim(generation: int = 1, collectives: int = 3, **messages: dict[int, int]) -> GroupClaim:
    return GroupClaim(generation, collectives, messages.get("sent", {}), messages.get("received", {}))


def test_a_group_whose_members_claim_the_same_stays() -> None:
    assert why_rebuilt([claim()]) is None
    assert why_rebuilt([claim(), claim(), claim()]) is None
    assert why_rebuilt([claim(sent={1: 2}), claim(received={0: 2})]) is None


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ([claim(), None, None], "members [1, 2] have no whole connections"),
        ([None], "members [0] have no whole connections"),
        ([claim(generation=4), claim(generation=5)], "its connections are of generations [4, 5]"),
        ([claim(collectives=7), claim(collectives=6)], "its members have entered [7, 6] collectives"),
        ([claim(sent={1: 1}), claim()], "member 0 has sent 1 messages to member 1, which has received 0"),
        (
            [claim(received={1: 3}), claim(sent={0: 2})],
            "member 1 has sent 2 messages to member 0, which has received 3",
        ),
        (
            [claim(sent={1: 1, 2: 1}), claim(received={0: 2}), claim()],
            "member 0 has sent 1 messages to member 1, which has received 2",
        ),
    ],
)
def test_any_other_is_rebuilt(claims: list[GroupClaim | None], reason: str) -> None:
    assert why_rebuilt(claims) == reason


@dataclasses.dataclass(eq=False)
class Member:
    """What one member has begun and ended. Each collective and message ends at its members one after the other."""

    entered: int = 0
    left: int = 0
    sent: Counter[int] = dataclasses.field(default_factory=Counter)
    received: Counter[int] = dataclasses.field(default_factory=Counter)
    is_closed: bool = False
    is_whole: bool = True

    def close(self) -> None:
        self.is_closed = True
        self.is_whole = self.entered == self.left

    def claim(self) -> GroupClaim | None:
        return GroupClaim(1, self.left, dict(self.sent), dict(self.received)) if self.is_whole else None


Action = tuple[str, int, int]
ACTIONS = st.lists(st.tuples(st.sampled_from(["enter", "leave", "send", "receive"]), *[st.integers(0, 2)] * 2))


def act(members: list[Member], what: str, member: Member, peer: int) -> None:
    """One thing that a member can do, if it can now."""
    number, rank = member.left + 1, members.index(member)
    all_have_entered = all(other.entered >= number for other in members)
    if what == "enter" and member.entered == member.left:
        member.entered += 1
    elif what == "leave" and member.entered > member.left and (all_have_entered or number % 3 == rank):
        member.left += 1  # every third one has this member as its root, which needs no process
    elif what == "send" and members[peer] is not member:
        member.sent[peer] += 1
    elif what == "receive" and members[peer].sent[rank] > member.received[peer]:
        member.received[peer] += 1


@given(st.integers(2, 3), ACTIONS, st.lists(st.integers(0, 40), min_size=3, max_size=3))
def test_a_group_that_stays_has_nothing_under_way(size: int, done: list[Action], closes_at: list[int]) -> None:
    members = [Member() for _ in range(size)]
    for index, (what, rank, peer) in enumerate(done):
        for member, when in zip(members, closes_at, strict=False):
            if index == when:
                member.close()
        if not members[rank % size].is_closed:
            act(members, what, members[rank % size], peer % size)
    for member in members:
        if not member.is_closed:
            member.close()
    in_collectives = len({member.entered for member in members} | {member.left for member in members}) > 1
    in_messages = any(
        member.sent[to] != other.received[rank]
        for rank, member in enumerate(members)
        for to, other in enumerate(members)
    )
    assert (why_rebuilt([member.claim() for member in members]) is None) == (not in_collectives and not in_messages)
