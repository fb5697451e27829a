"""Decides which process groups a recovery keeps, and which it rebuilds.

A group stays if its connections are intact on every member and no byte is in transit on them. No member can see that
alone: a root leaves a broadcast before the others have entered it. So each member claims what it knows, and all of them
reach the same decision from the same claims. docs/PROTOCOL.md explains why this is correct.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class GroupClaim(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one member says of a group: all that it has begun has ended, without an error, and nothing begins any more.

    A member that cannot say so makes no claim. Operations are counted since the connections were made.
    """

    generation: int
    """In which the connections were made."""
    collectives: int
    sent: dict[int, int]
    """Messages, by the rank in the group of the member that they were sent to."""
    received: dict[int, int]
    """Messages, by the rank in the group of the member that they came from."""


def why_rebuilt(claims: Sequence[GroupClaim | None]) -> str | None:
    """Decides whether a group stays.

    Args:
        claims: of all its members, by rank in the group. None: a member that makes none.

    Returns:
        why it is rebuilt; None if it stays.
    """
    made = [claim for claim in claims if claim is not None]
    if len(made) < len(claims):
        return f"members {[rank for rank, claim in enumerate(claims) if claim is None]} have no whole connections"
    if len({claim.generation for claim in made}) > 1:
        return f"its connections are of generations {[claim.generation for claim in made]}"
    if len({claim.collectives for claim in made}) > 1:
        return f"its members have entered {[claim.collectives for claim in made]} collectives"
    sent = {(source, to): number for source, claim in enumerate(made) for to, number in claim.sent.items()}
    received = {(source, to): number for to, claim in enumerate(made) for source, number in claim.received.items()}
    if sent != received:
        source, to = next(pair for pair in sent | received if sent.get(pair) != received.get(pair))
        return (
            f"member {source} has sent {sent.get((source, to), 0)} messages to member {to}, "
            f"which has received {received.get((source, to), 0)}"
        )
    return None
