"""One end of a link between two nodes with publishers: connects devices on the other node to devices on this one.

Messages go through tunnels. Buckets do not: a bucket that a device announces to several devices on the other node goes
over the link once, directly from the device's buffer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import time
from pathlib import Path

from keepstep.cancel import Cancelled, CancelToken
from keepstep.errors import PeerLost, RemoteProtocolError, StaleGeneration
from keepstep.protocol.transfer.messages import AnyTransferMessage, BucketReady, DeviceCalled, Refused
from keepstep.weights.channels.connection import wait
from keepstep.weights.channels.flow import attach_buffer
from keepstep.weights.channels.listener import dial, listener_path
from keepstep.weights.memory.buffers import SlotBuffer, SlotPart
from keepstep.weights.remote import messages as msg
from keepstep.weights.remote.bridge.mirrors import ON_A_GPU
from keepstep.weights.remote.devices import FOREVER_S, DeviceConnections, Reached
from keepstep.weights.remote.link import NodeLink
from keepstep.weights.remote.switch import BucketInSlot

LOOK_FOR_RANK_S = 0.1
"""Interval between two checks whether a requested rank is on this node: a request goes to all nodes."""


@dataclasses.dataclass(slots=True, eq=False)
class _Shipment:
    """The last announcement in a slot, and the tunnels that it went to."""

    number: int
    update: int
    bucket: int
    told: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True, eq=False)
class _Mirrored:
    """A device's buffer that has a mirror on the other node."""

    number: int
    buffer: SlotBuffer
    is_shared: bool
    latest: dict[int, _Shipment] = dataclasses.field(default_factory=dict)
    """Slot -> last shipment. Used by the thread that receives from the devices."""


@dataclasses.dataclass(slots=True, eq=False)
class _Mirroring(Reached):
    """A device on this node at the end of a tunnel."""

    mirrored: _Mirrored | None = None


class LocalDevices(DeviceConnections[_Mirroring]):
    """See `keepstep.weights.remote.feeder.LinkEnd`."""

    def __init__(self, folder: Path, link: NodeLink, name: str) -> None:
        """Args:
        folder: folder of the publishers.
        link: link to the other node.
        name: name of that node.
        """
        self._folder, self._link, self._name = folder, link, name
        self._numbers = itertools.count(1)
        super().__init__("keepstep-bridge")

    # ---- from the other node ----------------------------------------------------------------------------------------

    def hear(self, message: msg.AnyLinkMessage) -> None:
        """See `LinkEnd`."""
        match message:
            case msg.DeviceTunnelOpened(tunnel):
                self._open(tunnel, functools.partial(self._dial, message))
            case msg.TunnelSaid(tunnel, said):
                self._say(tunnel, said)
            case msg.TunnelEnded(tunnel, reason):
                self._end(tunnel, reason)
            case other:
                raise RemoteProtocolError(f"sent {other!r:.80}")

    def lose(self, reason: str) -> None:
        """See `LinkEnd`."""
        self._end_all(f"cannot be reached: node {self._name!r} {reason}")

    def _dial(self, opened: msg.DeviceTunnelOpened, stop: CancelToken) -> None:
        tunnel, who = opened.tunnel, f"rank {opened.rank}"
        path = listener_path(self._folder, opened.rank)
        try:
            while not path.exists():  # the rank is on at most one node; the others wait until they are cancelled
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

        def make() -> _Mirroring:
            is_shared = isinstance(opened.introduction, DeviceCalled)
            mirrored = self._mirrored(buffer, is_shared) if isinstance(buffer, SlotBuffer) else None
            self._link.send(msg.DeviceWelcomed(tunnel, 0 if mirrored is None else mirrored.number, welcomed))
            return _Mirroring(connection, mirrored=mirrored)

        self._enter(tunnel, connection, make)

    def _mirrored(self, buffer: SlotBuffer, is_shared: bool) -> _Mirrored:
        """The mirror record of a device's buffer. All readers of the regular updates share one, found by its file.

        A transfer to a late consumer's device has update numbers of that device, so it gets a record of its own.
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

    def _heard(self, number: int, there: _Mirroring, message: AnyTransferMessage) -> None:
        if isinstance(message, BucketReady):
            self._ship(number, there, message)
        else:
            self._link.send(msg.TunnelSaid(number, message))

    def _lost(self, number: int, there: _Mirroring, reason: str) -> None:
        self._link.send(msg.TunnelEnded(number, reason))

    def _ship(self, tunnel: int, reached: _Mirroring, ready: BucketReady) -> None:
        """Sends a bucket from a device's buffer. The device announces it on each tunnel; it is sent only once."""
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
            part = SlotPart(mirrored.buffer, ready.slot, ready.num_bytes)
            # The slot is freed by the readers on the other node.
            self._link.ship(BucketInSlot(mirrored.number, shipment.number, part, lambda: None))
