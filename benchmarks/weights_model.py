"""Time of an update to many nodes, computed with a model of links: without processes, in the model's own time.

    python benchmarks/weights_model.py                            1 to 1,000 nodes; seconds
    python benchmarks/weights_model.py --gib 140 --gbit 100       one case

keepstep's own functions decide the buckets of the weights (`plan_transfer`), the feeder of a node that joins
(`choose_feeder`), and how many nodes each node feeds (`choose_fanout`). As in keepstep a node has some slots, passes a
bucket on when it has all of it, and receives the next one into a slot when all have released it. `assumptions` lists
the assumptions of the model. `weights_nodes.py` adds the tables to its page.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from page import Section
from rich.console import Console
from weights_cast import architecture_of

from keepstep.protocol.transfer.boxes import whole
from keepstep.protocol.transfer.plan import Limits, Part, Reader, TensorForm, plan_transfer
from keepstep.protocol.transfer.topology import ROOT, FedNode, choose_fanout, choose_feeder
from keepstep.weights.publisher import DEFAULT_BUCKET_BYTES
from keepstep.weights.remote.node import HOP_S
from keepstep.weights.remote.switch import NUM_SLOTS

GIB, MIB = 1 << 30, 1 << 20
NODES = (1, 4, 16, 100, 1000)
CASES = ((16.0, 25.0), (1 / 16, 25.0))
"""GiB of weights (8 billion parameters in bf16; a LoRA), and Gbit/s of each link."""
CONSUMER_S = 0.0007
"""Measured on 2026-11-25 on two cores: `publish()` of 300 tensors by one proxy took 0.5 to 0.8 s of the publishing
process for 1,000 consumers that all want everything, and 0.004 s for one. Most of it is for the layout, which contains
each consumer."""


TIMES = ("latency_s", "hop_s", "announce_s", "consumer_s", "say_s")
"""The times of a `Network` that a flag can set."""


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """Equal nodes on a switch with unlimited bandwidth. Times are in seconds.

    Attributes:
        gbit_per_s: bandwidth of each node's link, in each direction.
        latency_s: latency from node to node.
        hop_s: time from the last byte of a bucket until the node passes it on.
        announce_s: processor time on the publishers' node for the messages of a bucket, for any number of consumers.
        consumer_s: processor time there for all messages about a consumer in an update: which tensors it wants, that
            it has the version, that it uses it. See `CONSUMER_S` for its source.
        say_s: time of a message through a node, without the latency.
        num_slots: number of slots of each node.
        reload_bytes_per_s: how fast a consumer copies a bucket out of a slot.
    """

    gbit_per_s: float = 25.0
    latency_s: float = 0.0001
    hop_s: float = HOP_S
    announce_s: float = 0.0001
    consumer_s: float = CONSUMER_S
    say_s: float = 0.0002
    num_slots: int = NUM_SLOTS
    reload_bytes_per_s: float = 5e9

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of a link in one direction."""
        return self.gbit_per_s * 1e9 / 8


def assumptions(network: Network) -> list[str]:
    """Returns the assumptions of the model."""
    return [
        "A model, not a measurement. Links are equal, full duplex, and lose nothing; their latency is "
        f"{_ms(network.latency_s)}. Headers are not counted.",
        "A link carries one bucket at a time, in stripes on all of its streams. Where a node feeds several, each has "
        "an equal share of its bandwidth all the time, whether the others use theirs or not.",
        f"A node passes a bucket on {_ms(network.hop_s)} after its last byte. It has {network.num_slots} slots. One is "
        f"free when the node's consumer has copied it, at {network.reload_bytes_per_s / 1e9:g} GB/s, and all nodes "
        "that it feeds have it. One consumer a node; no node is lost. Processors keep up with the links.",
        f"The publishers' node takes {_ms(network.announce_s)} of one processor for the messages of each bucket, and "
        f"in an update {_ms(network.consumer_s)} for each consumer, at the end. Then three messages for each consumer "
        f"go through all nodes between it and the publishers, in {_ms(network.say_s)} each.",
        "bound: the bytes by the bandwidth of one link. chain, tree: with `--fanout` 1 and 2. chosen: the fanout is "
        "chosen whenever a node comes, from the true bandwidth. Nodes that come before anything was measured make a "
        "chain.",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:g} ms"


def buckets_of(num_bytes: int, bucket_bytes: int) -> list[int]:
    """Returns the sizes of the buckets of Llama-style weights of about this size, in the order in which they move."""
    forms = [
        TensorForm((name,), str(dtype).removeprefix("torch."), shape, dtype.itemsize)
        for name, (dtype, shape) in architecture_of(num_bytes).forms().items()
    ]
    parts = tuple(Part(index, whole(form.shape)) for index, form in enumerate(forms))
    limits = Limits(bucket_bytes, bucket_bytes // 2)
    return [bucket.num_bytes for bucket in plan_transfer(forms, {0: parts}, [Reader(0, parts)], limits).buckets]


def come(num_nodes: int, fanout: int | None, num_bytes: int, bucket_bytes: int, network: Network) -> dict[int, int]:
    """Returns the feeder of each node, if the nodes join one after the other.

    Args:
        num_nodes: number of nodes.
        fanout: how many others each node feeds; None: chosen by keepstep whenever a node joins.
        num_bytes, bucket_bytes: sizes of the weights and of a bucket, for this choice.
        network: the network, for this choice.
    """
    present: list[FedNode] = []
    for number in range(1, num_nodes + 1):
        width = fanout or choose_fanout(number, num_bytes, bucket_bytes, network.bytes_per_s, HOP_S)
        present.append(FedNode(number, f"node-{number}", choose_feeder(present, width, ())))
    return {node.number: node.feeder for node in present}


def update_s(feeders: Mapping[int, int], buckets: Sequence[int], network: Network) -> float:
    """Returns the time from the first byte until the last consumer has switched to the version.

    Args:
        feeders: node -> its feeder, ordered by node.
        buckets: bytes of each bucket, in their order.
        network: the network.
    """
    fed: dict[int, list[int]] = {node: [] for node in (ROOT, *feeders)}
    depth = {ROOT: 0}
    for node, feeder in feeders.items():
        fed[feeder].append(node)
        depth[node] = depth[feeder] + 1
    order = sorted(fed, key=lambda node: (depth[node], node))
    link_free = dict.fromkeys(feeders, 0.0)
    free = {node: [0.0] * network.num_slots for node in fed}
    came = dict.fromkeys(fed, 0.0)
    announced_s = 0.0
    for bucket, num_bytes in enumerate(buckets):
        slot = bucket % network.num_slots
        came[ROOT] = announced_s = max(announced_s, free[ROOT][slot]) + network.announce_s
        for node in order:
            sent_s = came[node]
            for other in fed[node]:
                begin_s = max(came[node], free[other][slot], link_free[other])
                link_free[other] = end_s = begin_s + num_bytes * len(fed[node]) / network.bytes_per_s
                sent_s = max(sent_s, end_s)
                came[other] = end_s + network.latency_s + network.hop_s
            taken_s = came[node] + (num_bytes / network.reload_bytes_per_s if node != ROOT else 0.0)
            free[node][slot] = max(sent_s, taken_s)
    last_s = buckets[-1] / network.reload_bytes_per_s
    said_s = max(came[node] + 3 * depth[node] * (network.latency_s + network.say_s) for node in feeders)
    return said_s + last_s + network.consumer_s * len(feeders)


WAYS: dict[str, int | None] = {"chain": 1, "tree": 2, "chosen": None}


def section(num_bytes: int, bucket_bytes: int, network: Network, nodes: Sequence[int] = NODES) -> Section:
    """Returns a table of times by number of nodes, for weights of one size."""
    buckets = buckets_of(num_bytes, bucket_bytes)
    total = sum(buckets)
    bound_s = total / network.bytes_per_s
    without = dataclasses.replace(network, announce_s=0.0, consumer_s=0.0)
    rows = []
    for num_nodes in nodes:
        ways = {way: come(num_nodes, fanout, total, bucket_bytes, network) for way, fanout in WAYS.items()}
        seconds = {way: update_s(ways[way], buckets, network) for way in ("chain", "tree")}
        like = next((way for way in seconds if ways[way] == ways["chosen"]), None)
        seconds["chosen"] = seconds[like] if like else update_s(ways["chosen"], buckets, network)
        seconds["links"] = update_s(ways["chain"], buckets, without)
        rows.append(
            [f"{num_nodes:,}", f"{bound_s:.3f}", *(f"{each:.3f} ({each / bound_s:.2f} ×)" for each in seconds.values())]
        )
    title = (
        f"By a model: {total / GIB:.3g} GiB in {len(buckets):,} buckets of {bucket_bytes / MIB:g} MiB at most, "
        f"{network.gbit_per_s:g} Gbit/s"
    )
    columns = ["nodes", "bound, s", *WAYS, "chain, if messages took the publishers' node no time"]
    return Section(title, columns, rows, [])


def sections(
    cases: Sequence[tuple[float, float]] = CASES,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    network: Network = Network(),
    nodes: Sequence[int] = NODES,
) -> list[Section]:
    """Returns a table for each case. The last one has the assumptions as notes."""
    found = [
        section(round(gib * GIB), bucket_bytes, dataclasses.replace(network, gbit_per_s=gbit), nodes)
        for gib, gbit in cases
    ]
    found[-1].notes = assumptions(network)
    return found


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, action="append", help="size of the weights; repeatable")
    parser.add_argument("--gbit", type=float, action="append", help="of each link; repeatable")
    parser.add_argument("--nodes", type=int, action="append", help="repeatable (default: 1, 4, 16, 100, 1000)")
    parser.add_argument("--bucket-mib", type=float, default=DEFAULT_BUCKET_BYTES / MIB, help="default: %(default)g")
    defaults = Network()
    for name in TIMES:
        value = getattr(defaults, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value, help="default: %(default)g")
    args = parser.parse_args()
    cases = list(itertools.product(args.gib or [16.0], args.gbit or [25.0])) if args.gib or args.gbit else CASES
    given = {name: getattr(args, name) for name in TIMES}
    network = Network(**given)
    for each in sections(cases, round(args.bucket_mib * MIB), network, args.nodes or NODES):
        each.show(Console())


if __name__ == "__main__":
    main()
