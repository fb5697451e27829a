"""Which node feeds which: a chain, or a tree, below the publishers' node.

In a chain every node passes each bucket on once, so no link carries a bucket twice, and the time hardly depends on the
number of nodes as long as there are many buckets: a bucket moves on while the next one comes. In a tree where each
node feeds ``fanout`` others, a node's link carries each bucket so many times, and the last node is fewer steps away.
The first is better for much data, the second for many nodes and little data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

ROOT = 0
"""The publishers' node."""
MAX_FANOUT = 16


@dataclasses.dataclass(frozen=True, slots=True)
class FedNode:
    """A node that is fed.

    Attributes:
        number: ascending in the order in which nodes came; above 0.
        address: where it can feed others; None: nowhere.
        feeder: number of the node that feeds it.
    """

    number: int
    address: str | None
    feeder: int


def choose_feeder(present: Sequence[FedNode], fanout: int, avoid: Collection[str]) -> int:
    """Who feeds a node that comes now: the one nearest to the publishers that has room, the oldest of those.

    A feeder always joined before the nodes that it feeds, so there are no cycles. If none has room, the root feeds it.

    Args:
        present: the nodes that are there.
        fanout: how many others a node feeds.
        avoid: addresses that did not answer the one that comes.

    Returns:
        A node's number, or ROOT.
    """
    by_feeder: dict[int, list[FedNode]] = {}
    for node in sorted(present, key=lambda each: each.number):
        by_feeder.setdefault(node.feeder, []).append(node)
    layer = [ROOT]
    while layer:
        for number in layer:
            if len(by_feeder.get(number, [])) < fanout:
                return number
        below = [node for number in layer for node in by_feeder.get(number, [])]
        layer = [node.number for node in below if node.address is not None and node.address not in avoid]
    return ROOT


def update_s(num_nodes: int, fanout: int, num_bytes: int, bucket_bytes: int, bytes_per_s: float, hop_s: float) -> float:
    """How long an update takes, by a model: links are equal, full duplex, and the only limit.

    The root's link carries ``fanout`` copies of everything; the last bucket then goes down the tree, in each step
    ``fanout`` times in turn.

    Args:
        num_nodes: that are fed.
        fanout: how many others a node feeds.
        num_bytes: of the weights.
        bucket_bytes: of a bucket.
        bytes_per_s: of a link, one way.
        hop_s: that a bucket takes from node to node besides: latency, and the time to pass it on.
    """
    width = min(fanout, num_nodes)
    depth, reached, layer = 0, 0, 1
    while reached < num_nodes:
        layer *= width
        reached += layer
        depth += 1
    return width * num_bytes / bytes_per_s + (depth - 1) * (width * bucket_bytes / bytes_per_s) + depth * hop_s


def choose_fanout(num_nodes: int, num_bytes: int, bucket_bytes: int, bytes_per_s: float, hop_s: float) -> int:
    """The fanout with the shortest `update_s`, the smallest of those; 1, a chain, while nothing was measured."""
    if num_nodes <= 1 or num_bytes <= 0 or bytes_per_s <= 0:
        return 1
    fanouts = range(1, min(num_nodes, MAX_FANOUT) + 1)
    return min(fanouts, key=lambda fanout: update_s(num_nodes, fanout, num_bytes, bucket_bytes, bytes_per_s, hop_s))
