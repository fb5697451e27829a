"""Where workers are, and the choice of a spare for a rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where a worker is: its node, and what else fails together with that."""

    node: str
    domain: str = ""
    penalty: int = 0
    """Its penalty, as in `Quarantine.penalty`."""


def choose_spare(lost: Placement, spares: Mapping[int, Placement], node_at_fault: bool) -> int | None:
    """The spare that takes a lost rank's place, or None if there is none.

    One in quarantine is the last to be taken. A software fault prefers the lost rank's own node, then its failure
    domain; a fault of the node prefers another domain. Among equals the lowest worker number, so that the choice is the
    same everywhere.

    Args:
        lost: where the lost worker was.
        spares: the warm spares and where they are.
        node_at_fault: whether the node itself failed.
    """

    def order(worker: int) -> tuple[int, int, int]:
        place = spares[worker]
        near = (place.node == lost.node) + (place.domain == lost.domain)
        return place.penalty, (near if node_at_fault else -near), worker

    return min(spares, key=order, default=None)


def choose_local_rank(before: int | None, taken: Collection[int], ranks_per_node: int) -> int:
    """The local rank of a rank that comes to a node, or comes back to it.

    Scripts have lists of ``LOCAL_WORLD_SIZE`` entries, and one rank of each node downloads and saves. So a replacement
    on the same node takes the number of the rank that was lost, and every other rank the smallest that is free. Only
    a node that holds more ranks than belong on it, because others were lost, has numbers beyond ``ranks_per_node``.

    Args:
        before: what the rank had on this node; None where it was on none or on another one.
        taken: the local ranks of the node's other ranks.
        ranks_per_node: how many ranks belong on a node; 0: as many as there is room for.
    """
    if before is not None and before not in taken and before < max(ranks_per_node, len(taken) + 1):
        return before
    return next(number for number in range(len(taken) + 1) if number not in taken)
