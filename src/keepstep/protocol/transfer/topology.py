"""The topology of nodes that receive weights: a chain, or a tree, whose root is the publishers' node.

In a chain, every node forwards each bucket once, so no link carries a bucket twice. With many buckets, the time hardly
depends on the number of nodes, because a node forwards a bucket while the next one arrives. In a tree, each node feeds
``fanout`` others, so its link carries each bucket so many times, but the last node is fewer hops away. A chain is
better for much data, a tree for many nodes and little data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

ROOT = 0
"""The publishers' node."""
MAX_FANOUT = 16


@dataclasses.dataclass(frozen=True, slots=True)
class FedNode:
    """A node that receives weights from another node.

    Attributes:
        number: number of the node, above 0 and ascending in the order in which nodes joined.
        address: address at which other nodes can connect to it; None: it feeds no others.
        feeder: number of the node that feeds it.
    """

    number: int
    address: str | None
    feeder: int


def choose_feeder(present: Sequence[FedNode], fanout: int, avoid: Collection[str]) -> int:
    """Chooses the node that feeds a new node: of those with room, the one nearest to the root, and of these the oldest.

    A feeder always joined before the nodes that it feeds, so there are no cycles. If no node has room, the root feeds
    the new one.

    Args:
        present: the nodes that have joined.
        fanout: how many others a node feeds.
        avoid: addresses that the new node could not reach.

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
    """Returns the duration of an update in seconds, by a model: links are equal, full duplex, and the only limit.

    The root's link carries ``fanout`` copies of all weights. Then the last bucket goes down the tree, and each node
    sends it ``fanout`` times in turn.

    Args:
        num_nodes: number of nodes below the root.
        fanout: how many others a node feeds.
        num_bytes: size of the weights.
        bucket_bytes: size of a bucket.
        bytes_per_s: bandwidth of a link in one direction.
        hop_s: extra time of a bucket at each hop: latency, and the time to forward it.
    """
    width = min(fanout, num_nodes)
    depth, reached, layer = 0, 0, 1
    while reached < num_nodes:
        layer *= width
        reached += layer
        depth += 1
    return width * num_bytes / bytes_per_s + (depth - 1) * (width * bucket_bytes / bytes_per_s) + depth * hop_s


def choose_fanout(num_nodes: int, num_bytes: int, bucket_bytes: int, bytes_per_s: float, hop_s: float) -> int:
    """Returns the smallest fanout with the least `update_s`. Returns 1, a chain, if nothing was measured yet."""
    if num_nodes <= 1 or num_bytes <= 0 or bytes_per_s <= 0:
        return 1
    fanouts = range(1, min(num_nodes, MAX_FANOUT) + 1)
    return min(fanouts, key=lambda fanout: update_s(num_nodes, fanout, num_bytes, bucket_bytes, bytes_per_s, hop_s))
