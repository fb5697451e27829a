"""The simulated network: single packets between controller and nodes, and reachability between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.protocol.messages import NodeEvicted, NodeLeft, Packet
from keepstep.sim.cluster.layout import NetworkLayout
from keepstep.sim.cluster.schedule import Event

if TYPE_CHECKING:
    from keepstep.sim.world import World

CONTROLLER = "controller"


class Network:
    """Transmits packets between controller and nodes, and tells which node can reach which."""

    def __init__(self, world: World, layout: NetworkLayout) -> None:
        self._world = world
        self._layout = layout
        self._cuts: dict[tuple[str, str], int] = {}
        """(from, to) -> number of faults that keep this direction closed."""
        self._connection: dict[str, int] = {}
        """node -> number of its connection to the controller. Packets on an older connection are lost."""
        self.extra_loss = 0.0

    # ---- the control network ----------------------------------------------------------------------------------------

    def send(self, source: str, destination: str, packet: Packet | NodeEvicted | NodeLeft) -> None:
        """Transmits one packet, which may be lost, duplicated or late."""
        layout = self._layout
        if isinstance(packet, NodeEvicted):
            self._world.oracle.evicted(packet.node, packet.incarnation)
        if self.is_cut(source, destination) or self._happens(max(layout.loss, self.extra_loss)):
            return
        copies = 2 if self._happens(layout.duplication) else 1
        for _ in range(copies):
            delay_s = self._world.rng.uniform(layout.min_delay_s, layout.max_delay_s)
            if self._happens(layout.straggling):
                delay_s += self._world.rng.random() * layout.straggling_s
            connection = self._connection.get(packet.node, 0)
            event = Event("network", "arrive", (source, destination, packet, connection))
            self._world.schedule.after(delay_s, event)

    def _happens(self, probability: float) -> bool:
        return probability > 0.0 and self._world.rng.random() < probability

    def arrive(self, source: str, destination: str, packet: Packet | NodeEvicted | NodeLeft, connection: int) -> None:
        """Delivers a packet, if its connection still exists and the direction is open."""
        if connection == self._connection.get(packet.node, 0) and not self.is_cut(source, destination):
            if destination == CONTROLLER and self._world.relays.all:
                self._world.relays.hear(packet)
                return
            if destination == CONTROLLER and self._world.controller.is_up and isinstance(packet, Packet):
                self._world.oracle.arrives(packet)
            self._world.happen(Event(destination, "hear", (packet,)))

    def break_connection(self, node: str) -> None:
        """Breaks the connection of a node, with all packets in transit, and opens another one."""
        self.drop_connection(node)
        if self._world.relays.all:
            self._world.relays.routes.pop(node, None)
            self._world.relays.connect(node)
            return
        self._world.part(node).reconnected()
        self._world.controller.reconnected(node)

    def drop_connection(self, node: str) -> None:
        """Drops all packets in transit between a node and the controller."""
        self._connection[node] = self._connection.get(node, 0) + 1

    # ---- who can reach whom -----------------------------------------------------------------------------------------

    def is_cut(self, source: str, destination: str) -> bool:
        """Returns whether the direction from one place to the other is closed."""
        return bool(self._cuts) and self._cuts.get((source, destination), 0) > 0

    def cut(self, pairs: tuple[tuple[str, str], ...]) -> None:
        """Closes directions, each a pair (from, to)."""
        for pair in pairs:
            self._cuts[pair] = self._cuts.get(pair, 0) + 1

    def heal(self, pairs: tuple[tuple[str, str], ...]) -> None:
        """Opens directions that `cut` has closed."""
        for pair in pairs:
            self._cuts[pair] -= 1
            if not self._cuts[pair]:
                del self._cuts[pair]
        self._world.collectives.look_again()

    def all_reach(self, sources: set[str], destination: str) -> bool:
        """Returns whether every one of ``sources`` can reach the destination."""
        return not self._cuts or not any(self.is_cut(source, destination) for source in sources)
