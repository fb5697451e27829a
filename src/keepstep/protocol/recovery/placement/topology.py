"""The placement of workers, and the choice of a spare and a local rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """The node of a worker, and the node's failure domain."""

    node: str
    domain: str = ""
    penalty: int = 0
    """The penalty of the worker's device, as in `Quarantine.penalty`."""


def choose_spare(lost: Placement, spares: Mapping[int, Placement], node_at_fault: bool) -> int | None:
    """Chooses the spare that takes a lost rank, and returns its worker number; None if there is no spare.

    Spares in quarantine come last. After a software fault, a spare on the lost rank's own node comes first, then one in
    its failure domain. After a fault of the node, a spare in another domain comes first. Among equals the lowest worker
    number wins, so that the choice is deterministic.

    Args:
        lost: where the lost worker was.
        spares: worker number of each warm spare -> its placement.
        node_at_fault: whether the node itself failed.
    """

    def order(worker: int) -> tuple[int, int, int]:
        place = spares[worker]
        near = (place.node == lost.node) + (place.domain == lost.domain)
        return place.penalty, (near if node_at_fault else -near), worker

    return min(spares, key=order, default=None)


def choose_local_rank(before: int | None, taken: Collection[int], ranks_per_node: int) -> int:
    """Returns the local rank for a rank that is placed on a node.

    Scripts use local ranks as indices below ``LOCAL_WORLD_SIZE``, and one rank of each node downloads and saves. So a
    replacement on the same node takes the local rank of the lost worker, and any other rank takes the smallest free
    one. A local rank of ``ranks_per_node`` or more occurs only if a node holds more ranks than belong on it, because
    other nodes were lost.

    Args:
        before: the rank's former local rank on this node; None if it was not on this node.
        taken: the local ranks of the node's other ranks.
        ranks_per_node: how many ranks belong on a node; 0: as many as there is room for.
    """
    if before is not None and before not in taken and before < max(ranks_per_node, len(taken) + 1):
        return before
    return next(number for number in range(len(taken) + 1) if number not in taken)
