"""Bundles: packets that many nodes send at the same moment, merged into one and split again.

After an order to all ranks, every agent sends the same answer. A packet costs the controller tens of microseconds,
mostly for work that is equal for all: decode the answer, change the job's state, write the journal. A bundle contains
the answer once, and the numbers and workers of each node. In the other direction it contains an order to all ranks
once, and the numbers of each node.

A bundle has the same content as its packets: numbers, incarnations and leases are those of the agents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec

from keepstep.protocol.messages import AgentOrder, AnyMessage, GroupAnswer, Packet, Report

Row: TypeAlias = tuple[str, int, int, int, tuple[int, ...]]
"""What a packet of a bundle has of its own: node, incarnation, first number, received, workers."""


class PacketBundle(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Packets of several nodes with the same messages; the first five fields have one entry for each node.

    No node occurs twice. In answers (`GroupAnswer`) the field ``workers`` is left empty; ``workers`` of the bundle
    holds by node those for which it answers. In a bundle of other messages these entries are empty.
    """

    nodes: tuple[str, ...]
    incarnations: tuple[int, ...]
    firsts: tuple[int, ...]
    received: tuple[int, ...]
    workers: tuple[tuple[int, ...], ...]
    messages: tuple[Report | AgentOrder, ...]

    @classmethod
    def of(cls, rows: Iterable[Row], messages: tuple[Report | AgentOrder, ...]) -> PacketBundle:
        """The bundle of these nodes, at least one."""
        nodes, incarnations, firsts, received, workers = zip(*rows, strict=True)
        return cls(nodes, incarnations, firsts, received, workers, messages)

    def packet(self, index: int) -> Packet:
        """The packet of one of the nodes."""
        workers, messages = self.workers[index], self.messages
        if workers:
            messages = tuple(msgspec.structs.replace(each, workers=workers) for each in messages)
        numbers = (self.incarnations[index], self.firsts[index], self.received[index])
        return Packet(self.nodes[index], *numbers, messages, misses=False)

    def packets(self) -> Iterator[Packet]:
        """All its packets."""
        return map(self.packet, range(len(self.nodes)))


class NodeConnected(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """A node's agent has opened a connection to this relay: what it sent or was sent before may have been lost."""

    node: str


class NodeSaid(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """A message that is not bundled."""

    node: str
    message: AnyMessage


Item: TypeAlias = PacketBundle | NodeConnected | NodeSaid


def bundled(items: Iterable[NodeConnected | NodeSaid]) -> list[Item]:
    """Bundles the packets that say the same. What one node said stays in its order.

    Args:
        items: what came from the agents, in the order in which it came.
    """
    found: list[Item] = []
    open_bundles: dict[tuple[GroupAnswer, ...], list[Row]] = {}
    seen: set[str] = set()
    for item in items:
        if item.node in seen:
            found += _closed(open_bundles)
            seen.clear()
        seen.add(item.node)
        common = _common(item.message) if isinstance(item, NodeSaid) else None
        if common is None:
            found.append(item)
            continue
        assert isinstance(item, NodeSaid)
        assert isinstance(item.message, Packet)
        workers, messages = common
        packet = item.message
        row = packet.node, packet.incarnation, packet.first, packet.received, workers
        open_bundles.setdefault(messages, []).append(row)
    return found + _closed(open_bundles)


def _common(message: AnyMessage) -> tuple[tuple[int, ...], tuple[GroupAnswer, ...]] | None:
    """What a packet shares with those of other nodes: nothing, or answers for the same workers of its node."""
    if not isinstance(message, Packet) or message.misses:
        return None
    workers: tuple[int, ...] = ()
    answers: list[GroupAnswer] = []
    for each in message.messages:
        if not isinstance(each, GroupAnswer) or not each.workers or (answers and each.workers != workers):
            return None
        workers = each.workers
        answers.append(msgspec.structs.replace(each, workers=()))
    return workers, tuple(answers)


def _closed(open_bundles: dict[tuple[GroupAnswer, ...], list[Row]]) -> list[PacketBundle]:
    bundles = [PacketBundle.of(rows, messages) for messages, rows in open_bundles.items()]
    open_bundles.clear()
    return bundles
