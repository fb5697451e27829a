"""Connects devices on this node to devices on other nodes, through tunnels.

A device does not know the node of a rank. So this module asks every other node, and the node with the rank answers.
Therefore a rank may come back on another node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from keepstep.cancel import Cancelled, CancelToken
from keepstep.errors import BufferUnavailable, PeerLost, RemoteProtocolError
from keepstep.protocol.transfer.messages import AnyTransferMessage, FarCalled, PathLost, Refused, Welcomed
from keepstep.weights.channels.connection import Connection, wait, what_of
from keepstep.weights.channels.listener import Listener, far_path, make_private
from keepstep.weights.memory.buffers import Fill
from keepstep.weights.remote import messages as msg
from keepstep.weights.remote.bridge.mirrors import Mirror
from keepstep.weights.remote.devices import LOOK_S, SEND_S
from keepstep.weights.remote.link import NodeLink


@dataclasses.dataclass(slots=True, eq=False)
class FarNode:
    """Another node with publishers, while the link to it is open.

    Attributes:
        who: name of the node, for messages.
        link: the link to the node.
        mirrors: number -> mirror of a device's buffer on that node.
    """

    who: str
    link: NodeLink
    mirrors: dict[int, Mirror] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True, eq=False)
class _Caller:
    """A connection from a device on this node to a rank on another node."""

    called: FarCalled
    connection: Connection
    node: FarNode | None = None
    """The node of the rank, once that has answered."""
    mirror: int = 0
    queue: deque[tuple[AnyTransferMessage, Mirror | None, int, int]] = dataclasses.field(default_factory=deque)
    """Pending messages. Each has the mirror, number and slot of the shipment that must arrive first."""
    turn: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def tell(self, message: AnyTransferMessage, descriptors: Sequence[int] = ()) -> None:
        """Sends a message at once."""
        with self.turn:
            self._send(message, descriptors)

    def tell_in_turn(self, message: AnyTransferMessage, mirror: Mirror | None, shipment: int, slot: int) -> None:
        """Sends a message after all earlier ones, as soon as the shipment has arrived."""
        with self.turn:
            self.queue.append((message, mirror, shipment, slot))
            self._tell_what_is_due()

    def look_again(self) -> None:
        """Sends pending messages whose shipments have arrived."""
        with self.turn:
            self._tell_what_is_due()

    def _tell_what_is_due(self) -> None:
        while self.queue:
            message, mirror, shipment, slot = self.queue[0]
            if mirror is not None and not mirror.has(shipment, slot):
                return
            self.queue.popleft()
            self._send(message)

    def _send(self, message: AnyTransferMessage, descriptors: Sequence[int] = ()) -> None:
        try:
            self.connection.send(message, time.monotonic() + SEND_S, descriptors)
        except PeerLost:
            self.connection.hang_up()  # the loop finds its end


class FarDevices:
    """Accepts connections in the publishers' folder, and forwards messages to and from remote devices. Any thread."""

    def __init__(self, folder: Path) -> None:
        """Args:
        folder: folder of the publishers on this node.

        Raises:
            ConfigurationError: the folder cannot be used.
        """
        self._lock = threading.Lock()
        self._callers: dict[int, _Caller] = {}
        self._nodes: list[FarNode] = []
        self._numbers = itertools.count(1)
        self.num_bytes = 0
        """Bytes of buckets received from other nodes."""
        self._changed = CancelToken()
        self._stop = CancelToken()
        make_private(folder)
        self._listener = Listener(far_path(folder), self._answer)
        self._thread = threading.Thread(target=self._attend, name="keepstep-far", daemon=True)
        self._thread.start()

    # ---- from other nodes -------------------------------------------------------------------------------------------

    def rise(self, node: FarNode) -> None:
        """Adds a node with an open link, and asks it for the ranks that local devices are waiting for."""
        with self._lock:
            self._nodes.append(node)
            for tunnel, caller in self._callers.items():
                if caller.node is None:
                    self._ask(node, tunnel, caller)

    def fall(self, node: FarNode, reason: str) -> None:
        """Removes a node whose link is lost, and ends its tunnels."""
        with self._lock:
            self._nodes.remove(node)
            tunnels = [tunnel for tunnel, caller in self._callers.items() if caller.node is node]
        for tunnel in tunnels:
            self._end(tunnel, f"cannot be reached: {node.who} {reason}")

    def hear(self, node: FarNode, message: msg.AnyLinkMessage) -> None:
        """Handles a message from a node.

        Raises:
            RemoteProtocolError: the message is not valid here.
        """
        match message:
            case msg.DeviceWelcomed(tunnel, mirror, welcomed):
                self._welcome(node, tunnel, mirror, welcomed)
            case msg.BucketShipped(tunnel, number, shipment, ready):
                with self._lock:
                    mirror_there, caller = node.mirrors.get(number), self._callers.get(tunnel)
                if mirror_there is not None:
                    mirror_there.expect(shipment, ready)
                    if caller is not None:
                        caller.tell_in_turn(ready, mirror_there, shipment, ready.slot)
            case msg.TunnelSaid(tunnel, said):
                with self._lock:
                    caller = self._callers.get(tunnel)
                if caller is not None:
                    caller.tell_in_turn(said, None, 0, 0)
            case msg.TunnelEnded(tunnel, reason):
                self._end(tunnel, reason)
            case other:
                raise RemoteProtocolError(f"sent {other!r:.80}")

    def bring(self, node: FarNode, mirror: int, shipment: int, num_bytes: int, fill: Fill) -> None:
        """Receives a shipment from a node into a mirror; see `Mirror.take`."""
        with self._lock:
            there = node.mirrors.get(mirror)
            waiting = [each for each in self._callers.values() if each.node is node and each.mirror == mirror]
            self.num_bytes += num_bytes
        if there is None:  # all local readers have disconnected
            fill(None)
            return
        there.take(shipment, num_bytes, fill)
        for caller in waiting:
            caller.look_again()

    def _welcome(self, node: FarNode, tunnel: int, mirror: int, welcomed: Welcomed) -> None:
        """Handles the answer of a rank. Tells the other nodes to stop looking for it."""
        with self._lock:
            caller = self._callers.get(tunnel)
            if caller is None or caller.node is not None:
                node.link.send(msg.TunnelEnded(tunnel, "wants no answer any more"))
                return
            caller.node, caller.mirror = node, mirror
            for other in self._nodes:
                if other is not node:
                    other.link.send(msg.TunnelEnded(tunnel, "wants no answer any more"))
            try:
                if welcomed.buffer is None:
                    descriptors = []
                else:
                    if mirror not in node.mirrors:
                        node.mirrors[mirror] = Mirror(welcomed.buffer)
                    descriptors = [node.mirrors[mirror].buffer.descriptor]
            except (RemoteProtocolError, BufferUnavailable) as error:
                caller.tell(Refused(str(error), stale=False))
                return  # the caller hangs up
            caller.tell(welcomed, descriptors)

    def _ask(self, node: FarNode, tunnel: int, caller: _Caller) -> None:
        node.link.send(msg.DeviceTunnelOpened(tunnel, caller.called.rank, caller.called.introduction))

    def _end(self, tunnel: int, reason: str) -> None:
        """Ends a tunnel and closes the connection of its device."""
        with self._lock:
            caller = self._callers.get(tunnel)
        if caller is not None:
            caller.tell(PathLost(reason))
            caller.connection.hang_up()  # the loop finds its end

    # ---- from the devices of this node ------------------------------------------------------------------------------

    def _answer(self, connection: Connection, message: AnyTransferMessage) -> None:
        """Handles a new connection of a device. Runs in the listener's threads."""
        if not isinstance(message, FarCalled):
            with contextlib.suppress(PeerLost):
                refused = Refused(f"{type(message).__name__} opens no connection here", stale=False)
                connection.send(refused, time.monotonic() + SEND_S)
            connection.close()
            return
        connection.who = f"rank {message.introduction.rank}"
        caller = _Caller(message, connection)
        with self._lock:
            tunnel = next(self._numbers)
            self._callers[tunnel] = caller
            for node in self._nodes:
                self._ask(node, tunnel, caller)
        self._changed.set()

    def _attend(self) -> None:
        while True:
            self._changed.clear()
            with self._lock:
                callers = dict(self._callers)
            awaited: list[Connection | CancelToken] = [self._changed, *(each.connection for each in callers.values())]
            try:
                ready = wait(awaited, time.monotonic() + LOOK_S, self._stop)
            except Cancelled:
                return
            for tunnel, caller in callers.items():
                if caller.connection in ready:
                    self._hear_caller(tunnel, caller)

    def _hear_caller(self, tunnel: int, caller: _Caller) -> None:
        try:
            while (message := caller.connection.receive_now()) is not None:
                if caller.node is None:
                    raise RemoteProtocolError("sent a message before the answer")
                caller.node.link.send(msg.TunnelSaid(tunnel, message))
        except (PeerLost, RemoteProtocolError) as error:
            self._drop(tunnel, caller, what_of(error))

    def _drop(self, tunnel: int, caller: _Caller, reason: str) -> None:
        with self._lock:
            del self._callers[tunnel]
            node = caller.node
            for each in self._nodes if node is None else [node]:
                each.link.send(msg.TunnelEnded(tunnel, reason))
            if node is not None and caller.mirror:
                users = [each for each in self._callers.values() if each.node is node and each.mirror == caller.mirror]
                if not users:
                    node.mirrors.pop(caller.mirror, None)
        with caller.turn:
            caller.connection.close()

    def close(self) -> None:
        """Closes all connections."""
        self._listener.close()
        self._stop.set()
        self._thread.join()
        for caller in self._callers.values():
            caller.connection.close()
        self._stop.close()
        self._changed.close()
