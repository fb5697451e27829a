"""Relays between the nodes and the simulated controller, with their bundles and failures.

They run on the controller's host as its children: a relay's packets are lost with it, its nodes reconnect to another
one, and relays end with the controller. The network between nodes and controller does not change.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from keepstep.protocol import messages as msg
from keepstep.protocol.relay.bundle import Item, NodeConnected, NodeSaid, PacketBundle
from keepstep.protocol.relay.gathering import Gathering
from keepstep.sim.cluster.control.network import CONTROLLER
from keepstep.sim.cluster.schedule import Event

if TYPE_CHECKING:
    from keepstep.sim.world import World

PIPE_S = 0.002
"""Time from a relay to the controller, or back. It is longer than on a real host, so that a relay gathers more."""
RECONNECT_S = 0.1
"""Time until an agent tries again to connect."""
RESTART_S = 0.5
"""Time until a relay that has ended runs again."""

FromNode = msg.Packet | msg.NodeEvicted | msg.NodeLeft


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """A frame from a relay to the controller."""

    relay: int
    relay_life: int
    controller_life: int
    items: tuple[Item, ...]
    originals: tuple[FromNode, ...]
    """The messages in this frame as the nodes have sent them, for the oracle."""


class SimulatedRelay:
    """One relay."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.name = f"relay {number}"
        self.is_up = True
        self.life = 0
        """How often it has ended. Messages in transit to or from an earlier life are lost."""
        self._gathering = Gathering()
        self._originals: list[FromNode] = []
        """The gathered messages as the nodes have sent them, for the oracle."""

    def connected(self, node: str) -> None:
        """Tells the controller that a node's agent has opened a connection."""
        self._gathering.add(NodeConnected(node))
        self._pass_on()

    def hear(self, message: FromNode, life: int) -> None:
        """Gathers a message that a node has sent in this life of the relay."""
        if self.is_up and life == self.life:
            self._gathering.add(NodeSaid(message.node, message))
            self._originals.append(message)
            self._pass_on()

    def transmit(self, life: int, sent: tuple[PacketBundle | FromNode, ...], has_taken: bool) -> None:
        """Passes on the controller's packets to nodes.

        Args:
            life: the life of the relay to which the controller has sent them.
            sent: packets and bundles.
            has_taken: whether the controller has accepted this relay's last frame, so that it may send the next.
        """
        if not self.is_up or life != self.life:
            return
        for each in sent:
            for packet in each.packets() if isinstance(each, PacketBundle) else (each,):
                if self.world.relays.routes.get(packet.node) == self.number:
                    self.world.network.send(CONTROLLER, packet.node, packet)
        if has_taken:
            self._gathering.taken()
            self._pass_on()

    def refuse(self, life: int, node: str) -> None:
        """Ends the connection to a node, on the controller's order."""
        if self.is_up and life == self.life and self.world.relays.routes.get(node) == self.number:
            self.world.relays.disconnect(node)

    def _pass_on(self) -> None:
        items = self._gathering.take()
        if items is not None:
            originals, self._originals = tuple(self._originals), []
            frame = Frame(self.number, self.life, self.world.controller.life, items, originals)
            self.world.schedule.after(PIPE_S, Event("relays", "arrive", (frame,)))

    def end(self) -> None:
        """Ends the relay, as SIGKILL does."""
        self.is_up = False
        self.life += 1
        self._gathering, self._originals = Gathering(), []

    def start(self) -> None:
        """Restarts the relay, if the controller runs."""
        self.is_up = self.world.controller.is_up


class Relays:
    """All relays of a run, with the connections of nodes that they hold."""

    def __init__(self, world: World, num_relays: int) -> None:
        self.world = world
        self.all = [SimulatedRelay(world, number) for number in range(num_relays)]
        self.routes: dict[str, int] = {}
        """node -> the relay that holds its connection. A node without a connection is missing."""
        self._num_connected = 0

    def connect(self, node: str) -> None:
        """Connects a node's agent to the next relay that runs, in turns. If that is not possible, tries again later."""
        if node in self.routes:
            return
        network, up = self.world.network, [relay for relay in self.all if relay.is_up]
        is_cut = network.is_cut(node, CONTROLLER) or network.is_cut(CONTROLLER, node)
        if not up or is_cut:
            self.world.schedule.after(RECONNECT_S, Event("relays", "connect", (node,)))
            return
        relay = up[self._num_connected % len(up)]
        self._num_connected += 1
        self.routes[node] = relay.number
        relay.connected(node)
        self.world.part(node).reconnected()

    def hear(self, message: FromNode) -> None:
        """Hands a node's message, which has reached the controller's host, to the relay of the node."""
        number = self.routes.get(message.node)
        if number is not None:
            relay = self.all[number]
            self.world.happen(Event(relay.name, "hear", (message, relay.life)))

    def arrive(self, frame: Frame) -> None:
        """Delivers a frame to the controller, also if the relay has died since. A paused controller takes it later."""
        controller = self.world.controller
        if not controller.is_up or controller.life != frame.controller_life:
            return
        for packet in frame.originals:
            if isinstance(packet, msg.Packet):
                self.world.oracle.arrives(packet)
        self.world.happen(Event(CONTROLLER, "take", (frame,)))

    def crash(self, number: int) -> None:
        """Kills a relay, and restarts it later. Its nodes connect again."""
        relay = self.all[number]
        if not relay.is_up:
            return
        self.world.kill(relay.name)
        relay.end()
        for node in [node for node, at in self.routes.items() if at == number]:
            self.disconnect(node)
        self.world.schedule.after(PIPE_S, Event(CONTROLLER, "relay_lost", (number,)))
        self.world.schedule.after(RESTART_S, Event(relay.name, "start"))

    def end_all(self) -> None:
        """Ends all relays, because the controller has died."""
        for relay in self.all:
            self.world.kill(relay.name)
            relay.end()
        for node in list(self.routes):
            self.disconnect(node)

    def start_all(self) -> None:
        """Starts all relays, because the controller is back."""
        for relay in self.all:
            relay.start()

    def disconnect(self, node: str) -> None:
        """Ends the connection of a node. Its agent opens another one."""
        del self.routes[node]
        self.world.network.drop_connection(node)
        self.world.schedule.after(RECONNECT_S, Event("relays", "connect", (node,)))
