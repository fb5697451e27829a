"""Bundles: packets of many nodes with the same messages, merged into one and split again.

After an order to all ranks, every agent sends the same answer. A packet costs the controller tens of microseconds,
mostly for work that is the same for all: decode the answer, change the job's state, write the journal. A bundle
contains the answer once, and the numbers and workers of each node. In the other direction it contains an order to all
ranks once, and the numbers of each node.

A bundle has the same content as its packets: the numbers and incarnations are those of the agents, and each agent keeps
its own lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec

from keepstep.protocol.messages import AgentOrder, AnyMessage, GroupAnswer, Packet, Report

Row: TypeAlias = tuple[str, int, int, int, tuple[int, ...]]
"""The part of a packet that is not shared in its bundle: node, incarnation, first number, received, workers."""


class PacketBundle(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Packets of several nodes with the same messages. The first five fields have one entry for each node.

    No node occurs twice. In answers (`GroupAnswer`) the field ``workers`` is empty; ``workers`` of the bundle has, for
    each node, the workers that answer. In a bundle of other messages these entries are empty.
    """

    nodes: tuple[str, ...]
    incarnations: tuple[int, ...]
    firsts: tuple[int, ...]
    received: tuple[int, ...]
    workers: tuple[tuple[int, ...], ...]
    messages: tuple[Report | AgentOrder, ...]

    @classmethod
    def of(cls, rows: Iterable[Row], messages: tuple[Report | AgentOrder, ...]) -> PacketBundle:
        """Returns the bundle of these rows, at least one, with the given messages."""
        nodes, incarnations, firsts, received, workers = zip(*rows, strict=True)
        return cls(nodes, incarnations, firsts, received, workers, messages)

    def packet(self, index: int) -> Packet:
        """Returns the packet of one node, by its index."""
        workers, messages = self.workers[index], self.messages
        if workers:
            messages = tuple(msgspec.structs.replace(each, workers=workers) for each in messages)
        numbers = (self.incarnations[index], self.firsts[index], self.received[index])
        return Packet(self.nodes[index], *numbers, messages, misses=False)

    def packets(self) -> Iterator[Packet]:
        """Returns the packets of all nodes."""
        return map(self.packet, range(len(self.nodes)))


class NodeConnected(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """A node's agent has opened a connection to this relay. Messages before that, in either direction, may be lost."""

    node: str


class NodeSaid(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """A message that is not bundled."""

    node: str
    message: AnyMessage


Item: TypeAlias = PacketBundle | NodeConnected | NodeSaid


def bundled(items: Iterable[NodeConnected | NodeSaid]) -> list[Item]:
    """Bundles packets with the same messages. The messages of one node stay in order.

    Args:
        items: messages of the agents, in the order of their arrival.
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
    """Returns the part of a packet that a bundle can share: its workers, and its answers without workers.

    Returns None if the packet cannot be bundled: it contains other messages, or answers of different workers.
    """
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
