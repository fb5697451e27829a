"""One end of a link between two nodes that publish: the devices of this node, for devices of the other one.

Their connections pass through tunnels. Buckets do not: what a device announces to several devices of the other node
goes over the link once, straight out of the device's buffer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import time
from pathlib import Path

from keepstep.cancel import Cancelled, CancelToken
from keepstep.errors import PeerLost, RemoteProtocolError, StaleGeneration
from keepstep.protocol.transfer.messages import AnyTransferMessage, BucketReady, DeviceCalled, PathLost, Refused
from keepstep.weights.channels.connection import Connection, wait, what_of
from keepstep.weights.channels.flow import attach_buffer
from keepstep.weights.channels.listener import dial, listener_path
from keepstep.weights.memory.buffers import SlotBuffer
from keepstep.weights.remote import messages as msg
from keepstep.weights.remote.bridge.mirrors import ON_A_GPU
from keepstep.weights.remote.devices import FOREVER_S, LOOK_S, SEND_S
from keepstep.weights.remote.link import NodeLink
from keepstep.weights.remote.switch import BucketInSlot

LOOK_FOR_RANK_S = 0.1
"""Between two looks whether a rank is on this node: every node looks for what a device of another one wants."""


@dataclasses.dataclass(slots=True, eq=False)
class _Shipment:
    """What was announced last in a slot, and to which tunnels."""

    number: int
    update: int
    bucket: int
    told: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True, eq=False)
class _Mirrored:
    """A device's buffer, which has a mirror on the other node."""

    number: int
    buffer: SlotBuffer
    is_shared: bool
    latest: dict[int, _Shipment] = dataclasses.field(default_factory=dict)
    """By slot. Used by the thread that hears the devices."""


@dataclasses.dataclass(slots=True, eq=False)
class _Reached:
    """A device of this node, as a tunnel leads to it."""

    connection: Connection
    mirrored: _Mirrored | None
    turn: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def send(self, message: AnyTransferMessage) -> None:
        with self.turn:
            self.connection.send(message, time.monotonic() + SEND_S)


class LocalDevices:
    """See `keepstep.weights.remote.feeder.LinkEnd`."""

    def __init__(self, folder: Path, link: NodeLink, name: str) -> None:
        """Args:
        folder: that of the publishers.
        link: from the other node.
        name: of that node.
        """
        self._folder, self._link, self._name = folder, link, name
        self._lock = threading.Lock()
        self._dialling: dict[int, CancelToken] = {}
        self._reached: dict[int, _Reached] = {}
        self._gone: list[_Reached] = []
        self._numbers = itertools.count(1)
        self._changed = CancelToken()
        self._stop = CancelToken()
        threading.Thread(target=self._attend, name="keepstep-bridge", daemon=True).start()

    # ---- from the other node ----------------------------------------------------------------------------------------

    def hear(self, message: msg.AnyLinkMessage) -> None:
        """See `LinkEnd`."""
        match message:
            case msg.DeviceTunnelOpened(tunnel):
                stop = CancelToken()
                with self._lock:
                    self._dialling[tunnel] = stop
                threading.Thread(target=self._dial, args=(message, stop), name="keepstep-dial", daemon=True).start()
            case msg.TunnelSaid(tunnel, said):
                with self._lock:
                    reached = self._reached.get(tunnel)
                if reached is not None:
                    try:
                        reached.send(said)
                    except PeerLost:
                        reached.connection.hang_up()  # the loop finds its end
            case msg.TunnelEnded(tunnel, reason):
                self._end(tunnel, reason)
            case other:
                raise RemoteProtocolError(f"sent {other!r:.80}")

    def lose(self, reason: str) -> None:
        """See `LinkEnd`."""
        with self._lock:
            tunnels = [*self._dialling, *self._reached]
        for tunnel in tunnels:
            self._end(tunnel, f"cannot be reached: node {self._name!r} {reason}")
        self._stop.set()

    def _end(self, tunnel: int, reason: str) -> None:
        with self._lock:
            if (stop := self._dialling.pop(tunnel, None)) is not None:
                stop.set()
            if (reached := self._reached.pop(tunnel, None)) is not None:
                self._gone.append(reached)
        if reached is not None:
            with contextlib.suppress(PeerLost):  # the device is gone, too
                reached.send(PathLost(reason))
            self._changed.set()

    def _dial(self, opened: msg.DeviceTunnelOpened, stop: CancelToken) -> None:
        tunnel, who = opened.tunnel, f"rank {opened.rank}"
        path = listener_path(self._folder, opened.rank)
        try:
            while not path.exists():  # on most nodes it never will
                wait([], time.monotonic() + LOOK_FOR_RANK_S, stop)
            connection, welcomed = dial(path, opened.introduction, who, time.monotonic() + FOREVER_S, stop)
            place = welcomed.buffer
            try:
                if place is not None and place.gpu is not None:
                    raise RemoteProtocolError(ON_A_GPU)
                buffer = None if place is None else attach_buffer(place, connection)
            except RemoteProtocolError:
                connection.close()
                raise
        except Cancelled:
            return
        except (PeerLost, RemoteProtocolError) as error:
            reason = str(error).removeprefix(f"{who} refuses this process: ")
            self._link.send(msg.TunnelSaid(tunnel, Refused(reason, isinstance(error, StaleGeneration))))
            return
        with self._lock:
            if self._dialling.pop(tunnel, None) is None:
                connection.close()
                return
            is_shared = isinstance(opened.introduction, DeviceCalled)
            mirrored = self._mirrored(buffer, is_shared) if isinstance(buffer, SlotBuffer) else None
            self._link.send(msg.DeviceWelcomed(tunnel, 0 if mirrored is None else mirrored.number, welcomed))
            self._reached[tunnel] = _Reached(connection, mirrored)
        self._changed.set()

    def _mirrored(self, buffer: SlotBuffer, is_shared: bool) -> _Mirrored:
        """The same for all that read what a device sends in updates, which the file of its buffer tells.

        What is sent to a late consumer's device alone has numbers of that device's own: it has a mirror for itself.
        """
        found = os.fstat(buffer.descriptor).st_ino
        for each in self._reached.values():
            there = each.mirrored
            if there is None or not (is_shared and there.is_shared):
                continue
            if os.fstat(there.buffer.descriptor).st_ino == found:
                return there
        return _Mirrored(next(self._numbers), buffer, is_shared)

    # ---- from the devices -------------------------------------------------------------------------------------------

    def _attend(self) -> None:
        while True:
            self._changed.clear()
            with self._lock:
                gone, self._gone = self._gone, []
                reached = dict(self._reached)
            for each in gone:
                each.connection.close()
            awaited: list[Connection | CancelToken] = [self._changed, *(each.connection for each in reached.values())]
            try:
                ready = wait(awaited, time.monotonic() + LOOK_S, self._stop)
            except Cancelled:
                break
            for tunnel, each in reached.items():
                if each.connection in ready:
                    self._hear(tunnel, each)
        with self._lock:
            left = [*gone, *self._gone, *self._reached.values()]
        for each in left:
            each.connection.close()

    def _hear(self, tunnel: int, reached: _Reached) -> None:
        try:
            while (message := reached.connection.receive_now()) is not None:
                if isinstance(message, BucketReady):
                    self._ship(tunnel, reached, message)
                else:
                    self._link.send(msg.TunnelSaid(tunnel, message))
        except (PeerLost, RemoteProtocolError) as error:
            with self._lock:
                if self._reached.pop(tunnel, None) is None:
                    return
                self._gone.append(reached)
            self._link.send(msg.TunnelEnded(tunnel, what_of(error)))

    def _ship(self, tunnel: int, reached: _Reached, ready: BucketReady) -> None:
        """A bucket lies in a device's buffer. The device tells one tunnel after the other of it."""
        mirrored = reached.mirrored
        if mirrored is None or not 0 <= ready.slot < mirrored.buffer.num_slots:
            raise RemoteProtocolError(f"announced bucket {ready.bucket} in slot {ready.slot}")
        if not 0 < ready.num_bytes <= mirrored.buffer.slot_bytes:
            raise RemoteProtocolError(f"announced bucket {ready.bucket} of {ready.num_bytes} bytes")
        shipment = mirrored.latest.get(ready.slot)
        is_new = (
            shipment is None or (shipment.update, shipment.bucket) != (ready.update, ready.bucket)
        ) or tunnel in shipment.told
        if shipment is None or is_new:
            shipment = _Shipment(next(self._numbers), ready.update, ready.bucket)
            mirrored.latest[ready.slot] = shipment
        shipment.told.add(tunnel)
        self._link.send(msg.BucketShipped(tunnel, mirrored.number, shipment.number, ready))
        if is_new:
            content = mirrored.buffer.view(ready.slot).numpy().data[: ready.num_bytes]
            self._link.ship(_in_slot(mirrored, shipment.number, ready.slot, content))


def _in_slot(mirrored: _Mirrored, shipment: int, slot: int, content: memoryview) -> BucketInSlot:
    """Keeps the buffer mapped until it is sent. The slot is freed by the readers on the other node."""

    def release() -> None:
        _ = mirrored.buffer

    return BucketInSlot(mirrored.number, shipment, slot, content, release)
