"""The publishers' node: tunnels end at a device of the node, and buckets come out of its buffer in shared memory."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from pathlib import Path

from keepstep.cancel import Cancelled, CancelToken
from keepstep.errors import PeerLost, RemoteProtocolError, StaleGeneration
from keepstep.protocol.transfer import messages as msg
from keepstep.protocol.transfer.messages import AnyTransferMessage
from keepstep.weights.channels.connection import Connection, wait, what_of
from keepstep.weights.channels.flow import attach_buffer
from keepstep.weights.channels.listener import dial, dial_any, listener_path
from keepstep.weights.memory.buffers import SharedSlots
from keepstep.weights.memory.bytes_of import address_of, copy_bytes
from keepstep.weights.remote.switch import Switch

SEND_S = 1.0
"""For a device to take a message: they are short, and its socket holds hundreds of them."""
FOREVER_S = 1e9
LOOK_S = 3600.0
"""The kernel waits no longer than some weeks at a time."""
NUM_REMEMBERED = 8
"""Updates whose buckets are remembered: one is under way, and some for late consumers."""


@dataclasses.dataclass(slots=True, eq=False)
class _Attached:
    """A consumer of another node, on the device."""

    connection: Connection
    slots: SharedSlots = dataclasses.field(default_factory=SharedSlots)
    update: int = 0
    """The latest that began on this tunnel."""
    is_ready: bool = False
    """Whether the consumer has been told that it is attached; the device is heard from then on."""
    turn: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def send(self, message: AnyTransferMessage) -> None:
        with self.turn:
            self.connection.send(message, time.monotonic() + SEND_S)

    def close(self) -> None:
        self.connection.close()
        self.slots.close()


class DeviceTunnels:
    """The top of all tunnels. See `keepstep.weights.remote.switch.Above`."""

    def __init__(self, folder: Path, rank: int | None, switch: Switch) -> None:
        """Args:
        folder: that of the publishers.
        rank: of the device whose consumers they become; None: the lowest one on this node that is there.
        switch: of this node.
        """
        path = listener_path(folder, rank or 0)
        self._path = None if rank is None else path
        self._folder, self._who, self._switch = folder, "a publisher" if rank is None else f"rank {rank}", switch
        self._lock = threading.Lock()
        self._dialling: dict[int, CancelToken] = {}
        self._attached: dict[int, _Attached] = {}
        self._gone: list[_Attached] = []
        self._brought: dict[int, set[int]] = {}
        self._changed = CancelToken()
        self._stop = CancelToken()
        self._thread = threading.Thread(target=self._attend, name="keepstep-tunnels", daemon=True)
        self._thread.start()

    # ---- from below -------------------------------------------------------------------------------------------------

    def open(self, tunnel: int, introduction: msg.SubscriberCalled) -> None:
        """See `Above`."""
        with self._lock:
            self._dialling[tunnel] = CancelToken()
        arguments = (tunnel, introduction, self._dialling[tunnel])
        threading.Thread(target=self._dial, args=arguments, name="keepstep-dial", daemon=True).start()

    def say(self, tunnel: int, message: AnyTransferMessage) -> None:
        """See `Above`."""
        with self._lock:
            there = self._attached.get(tunnel)
        if there is not None:
            self._send(tunnel, there, message)

    def end(self, tunnel: int, reason: str) -> None:
        """See `Above`."""
        with self._lock:
            if (dialling := self._dialling.pop(tunnel, None)) is not None:
                dialling.set()
            there = self._attached.pop(tunnel, None)
        if there is not None:
            with contextlib.suppress(PeerLost):  # the device is gone, too
                there.send(msg.PathLost(reason))
            with self._lock:
                self._gone.append(there)
            self._changed.set()

    def _send(self, tunnel: int, there: _Attached, message: AnyTransferMessage) -> None:
        try:
            there.send(message)
        except PeerLost:
            there.connection.hang_up()  # the loop finds its end

    def _dial(self, tunnel: int, introduction: msg.SubscriberCalled, stop: CancelToken) -> None:
        until_s = time.monotonic() + FOREVER_S
        try:
            if self._path is None:
                connection, welcomed = dial_any(self._folder, introduction, until_s, stop)
            else:
                connection, welcomed = dial(self._path, introduction, self._who, until_s, stop)
        except Cancelled:
            return
        except (PeerLost, RemoteProtocolError) as error:
            self._switch.hear(tunnel, msg.Refused(str(error), isinstance(error, StaleGeneration)))
            return
        if welcomed.buffer is not None and welcomed.buffer.gpu is None:
            try:
                there = _Attached(connection)
                there.slots.add(0, attach_buffer(welcomed.buffer, connection))
            except RemoteProtocolError as error:
                connection.close()
                self._switch.hear(tunnel, msg.Refused(str(error), stale=False))
                return
            with self._lock:
                if self._dialling.pop(tunnel, None) is None:
                    there.close()
                    return
                self._attached[tunnel] = there
            self._switch.hear(tunnel, welcomed)
            there.is_ready = True
            self._changed.set()
        else:  # the switch refuses it
            connection.close()
            self._switch.hear(tunnel, welcomed)

    # ---- from the device --------------------------------------------------------------------------------------------

    def _attend(self) -> None:
        while True:
            self._changed.clear()
            with self._lock:
                gone, self._gone = self._gone, []
                attached = {tunnel: each for tunnel, each in self._attached.items() if each.is_ready}
            for each in gone:
                each.close()
            awaited: list[Connection | CancelToken] = [self._changed, *(each.connection for each in attached.values())]
            try:
                wait(awaited, time.monotonic() + LOOK_S, self._stop)
            except Cancelled:
                break
            self._sweep(attached)
        for each in attached.values():
            each.close()

    def _sweep(self, attached: dict[int, _Attached]) -> None:
        """Hears all that has come.

        A device tells all consumers of an update that it begins before it announces the first bucket to one of them.
        So what announces a bucket waits until all tunnels have been heard once more.
        """
        announced = self._hear_all(attached)
        if announced:
            announced += self._hear_all(attached)
        for tunnel, ready in announced:
            self._bring(tunnel, attached[tunnel], ready)

    def _hear_all(self, attached: dict[int, _Attached]) -> list[tuple[int, msg.BucketReady]]:
        announced = []
        for tunnel, there in attached.items():
            try:
                while (message := there.connection.receive_now()) is not None:
                    if isinstance(message, msg.BucketReady):
                        announced.append((tunnel, message))
                        continue
                    if isinstance(message, msg.BufferShared):
                        there.slots.add(message.first_slot, attach_buffer(message.place, there.connection))
                        continue
                    if isinstance(message, msg.UpdateBegan):
                        if all(each.update != message.update for each in attached.values()):
                            self._brought.pop(message.update, None)  # a new publisher counts from 1 again
                        there.update = message.update
                    self._switch.hear(tunnel, message)
            except (PeerLost, RemoteProtocolError) as error:
                self._lose(tunnel, there, error)
        return announced

    def _lose(self, tunnel: int, there: _Attached, error: Exception) -> None:
        with self._lock:
            if self._attached.pop(tunnel, None) is None:
                return
            self._gone.append(there)
        self._switch.ended(tunnel, f"{there.connection.who} {what_of(error)}")

    def _bring(self, tunnel: int, there: _Attached, ready: msg.BucketReady) -> None:
        """A bucket lies in the device's buffer: takes it out once, on whichever tunnel it is announced."""
        brought = self._brought.setdefault(ready.update, set())
        while len(self._brought) > NUM_REMEMBERED:
            del self._brought[next(iter(self._brought))]
        try:
            if ready.bucket not in brought:
                if (slot := there.slots.find(ready.slot, ready.num_bytes)) is None:
                    raise RemoteProtocolError(f"announced bucket {ready.bucket} in slot {ready.slot}")
                source = slot.data_ptr()
                self._switch.bring(
                    ready.update, ready.bucket, ready.num_bytes,
                    lambda view: copy_bytes(address_of(view), source, len(view)),
                )  # fmt: skip
                brought.add(ready.bucket)
        except (PeerLost, RemoteProtocolError) as error:
            self._lose(tunnel, there, error)
            return
        self._send(tunnel, there, msg.SlotFreed(ready.update, ready.slot))

    def close(self) -> None:
        """Leaves the device."""
        with self._lock:
            for each in self._dialling.values():
                each.set()
        self._stop.set()
        self._thread.join()
        self._stop.close()
        self._changed.close()
