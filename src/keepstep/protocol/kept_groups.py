"""Decides which process groups a recovery keeps, and which it rebuilds.

A recovery keeps a group if its connections are intact on every member and no byte is in transit on them. No member can
see that alone: a root leaves a broadcast before the others have entered it. So each member claims what it knows, and
all members reach the same decision from the same claims. docs/PROTOCOL.md explains why this is correct.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class GroupClaim(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The claim of one member of a group: all its operations have ended without an error, and it begins no more.

    A member for which this is false makes no claim. Counts start when the connections were made.
    """

    generation: int
    """The generation in which the connections were made."""
    collectives: int
    sent: dict[int, int]
    """Receiver's rank in the group -> number of messages sent to it."""
    received: dict[int, int]
    """Sender's rank in the group -> number of messages received from it."""


def why_rebuilt(claims: Sequence[GroupClaim | None]) -> str | None:
    """Decides whether a recovery must rebuild a group.

    Args:
        claims: the claims of all members, by rank in the group; None for a member without a claim.

    Returns:
        why it must be rebuilt; None if it is kept.
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
