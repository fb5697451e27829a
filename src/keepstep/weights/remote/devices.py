"""Connections to the devices of this node for processes on other nodes, and the upper end of consumers' tunnels."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from keepstep.cancel import Cancelled, CancelToken
from keepstep.errors import PeerLost, RemoteProtocolError, StaleGeneration
from keepstep.protocol.transfer import messages as msg
from keepstep.protocol.transfer.messages import AnyTransferMessage
from keepstep.weights.channels.connection import Connection, ConnectionEnded, ConnectionStalled, wait, what_of
from keepstep.weights.channels.flow import attach_buffer
from keepstep.weights.channels.listener import dial, dial_any, listener_path
from keepstep.weights.memory.buffers import SharedSlots
from keepstep.weights.memory.bytes_of import copy_bytes
from keepstep.weights.remote.switch import Switch

SEND_S = 1.0
"""Timeout for a message to a device. Messages are short, and the device's socket holds hundreds of them."""
ANSWER_S = 2.0
"""Timeout for a device to answer a consumer. After it, another device may have replaced it."""
FOREVER_S = 1e9
LOOK_S = 3600.0
"""The kernel waits no longer than some weeks at a time."""
PROXY = 0
"""Number of the proxy's own connection. Tunnels of consumers are numbered from 1."""


@dataclasses.dataclass(slots=True, eq=False)
class Reached:
    """A connection to a device of this node."""

    connection: Connection
    turn: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def send(self, message: AnyTransferMessage) -> None:
        """Any thread. Raises PeerLost."""
        with self.turn:
            self.connection.send(message, time.monotonic() + SEND_S)

    def close(self) -> None:
        """Ends it."""
        self.connection.close()


There = TypeVar("There", bound=Reached)


class DeviceConnections(ABC, Generic[There]):
    """A set of connections to devices. Each is opened in a thread of its own; one thread receives from all."""

    def __init__(self, name: str) -> None:
        """Args:
        name: name of the receiving thread.
        """
        self._lock = threading.Lock()
        self._entered = threading.Condition(self._lock)
        self._dialling: dict[int, CancelToken] = {}
        self._reached: dict[int, There] = {}
        self._gone: list[There] = []
        self._is_over = False
        self._changed = CancelToken()
        self._stop = CancelToken()
        self._thread = threading.Thread(target=self._attend, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def _heard(self, number: int, there: There, message: AnyTransferMessage) -> None:
        """Handles a message from a device. Raises PeerLost or RemoteProtocolError to end the connection."""

    @abstractmethod
    def _lost(self, number: int, there: There, reason: str) -> None:
        """Called when a connection has ended for another reason than `_end`."""

    def _open(self, number: int, run: Callable[[CancelToken], None]) -> None:
        """Opens a connection in a thread. ``run`` must call `_enter` on success."""
        stop = CancelToken()
        with self._lock:
            self._dialling[number] = stop
        threading.Thread(target=run, args=[stop], name="keepstep-dial", daemon=True).start()

    def _enter(self, number: int, connection: Connection, make: Callable[[], There]) -> None:
        """Adds a connection that a device has answered. Closes it if it was ended meanwhile.

        Args:
            number: number of the connection.
            connection: the connection. This object owns it from now on.
            make: creates the entry; called with the lock held.
        """
        with self._lock:
            if self._is_over or (number != PROXY and self._dialling.pop(number, None) is None):
                connection.close()
            else:
                self._reached[number] = make()
            self._entered.notify_all()
        self._changed.set()

    def _say(self, number: int, message: AnyTransferMessage) -> None:
        """Sends a message to a device, if its connection is open."""
        with self._lock:
            there = self._reached.get(number)
        if there is not None:
            try:
                there.send(message)
            except PeerLost:
                there.connection.hang_up()  # the loop finds its end

    def _end(self, number: int, reason: str) -> None:
        """Ends a connection, because the process at the other end of its tunnel is gone."""
        with self._lock:
            if (dialling := self._dialling.pop(number, None)) is not None:
                dialling.set()
            there = self._reached.pop(number, None)
            self._entered.notify_all()
        if there is not None:
            with contextlib.suppress(PeerLost):  # the device is gone, too
                there.send(msg.PathLost(reason))
            with self._lock:
                self._gone.append(there)
            self._changed.set()

    def _end_all(self, reason: str) -> None:
        """Ends all connections, and the receiving thread."""
        with self._lock:
            self._is_over = True
            numbers = [*self._dialling, *self._reached]
        for number in numbers:
            self._end(number, reason)
        self._stop.set()

    def _attend(self) -> None:
        while True:
            self._changed.clear()
            with self._lock:
                gone, self._gone = self._gone, []
                reached = dict(self._reached)
            for each in gone:
                each.close()
            awaited: list[Connection | CancelToken] = [self._changed, *(each.connection for each in reached.values())]
            try:
                ready = wait(awaited, time.monotonic() + LOOK_S, self._stop)
            except Cancelled:
                break
            for number, each in reached.items():
                if each.connection in ready:
                    self._hear(number, each)
        for each in self._gone:
            each.close()

    def _hear(self, number: int, there: There) -> None:
        """Handles all messages that have arrived on a connection."""
        try:
            while (message := there.connection.receive_now()) is not None:
                self._heard(number, there, message)
        except (PeerLost, RemoteProtocolError) as error:
            self._drop(number, there, what_of(error))

    def _drop(self, number: int, there: There, reason: str) -> None:
        with self._lock:
            if self._reached.get(number) is not there:
                return
            del self._reached[number]
            self._gone.append(there)
        self._lost(number, there, reason)


@dataclasses.dataclass(slots=True, eq=False)
class _AsProxy(Reached):
    """The proxy's connection, which carries messages for all consumers, with the buffers of their buckets."""

    rank: int = 0
    slots: SharedSlots = dataclasses.field(default_factory=SharedSlots)

    def close(self) -> None:
        self.connection.close()
        self.slots.close()


class DeviceTunnels(DeviceConnections[Reached]):
    """The upper end of all tunnels; see `keepstep.weights.remote.switch.Above`.

    Each consumer on another node has a connection to a device on this node. Messages to several of these consumers
    arrive on one more connection, once for all.
    """

    def __init__(self, folder: Path, rank: int | None, switch: Switch) -> None:
        """Args:
        folder: folder of the publishers.
        rank: rank of the device to which the consumers attach; None selects the lowest one on this node.
        switch: the switch of this node.
        """
        if rank is not None:
            listener_path(folder, rank)  # raises if it is too long
        self._folder, self._rank, self._switch = folder, rank, switch
        self._name = secrets.token_hex(8)
        self._turn = threading.Lock()
        """To become a proxy."""
        super().__init__("keepstep-tunnels")

    def open(self, tunnel: int, introduction: msg.SubscriberCalled) -> None:
        """See `Above`."""
        self._open(tunnel, functools.partial(self._dial, tunnel, introduction))

    def say(self, tunnel: int, message: AnyTransferMessage) -> None:
        """See `Above`."""
        self._say(tunnel, message)

    def end(self, tunnel: int, reason: str) -> None:
        """See `Above`."""
        self._end(tunnel, reason)

    def _dial(self, tunnel: int, introduction: msg.SubscriberCalled, stop: CancelToken) -> None:
        introduction = msgspec.structs.replace(introduction, proxied=msg.Proxied(self._name, tunnel))
        try:
            connection, welcomed = self._dial_until(introduction, stop)
        except Cancelled:
            return
        except (PeerLost, RemoteProtocolError) as error:
            self._switch.hear(tunnel, msg.Refused(str(error), isinstance(error, StaleGeneration)))
            self._end(tunnel, "was refused")
            return
        self._switch.hear(tunnel, welcomed)
        self._enter(tunnel, connection, lambda: Reached(connection))

    def _dial_until(self, introduction: msg.SubscriberCalled, stop: CancelToken) -> tuple[Connection, msg.Welcomed]:
        """Retries until a device that knows this proxy accepts its consumer."""
        while True:
            rank = self._become_proxy(stop)
            until_s = time.monotonic() + ANSWER_S
            with contextlib.suppress(ConnectionStalled):  # it may be gone, and another one be there
                return dial(listener_path(self._folder, rank), introduction, f"rank {rank}", until_s, stop)

    def _become_proxy(self, stop: CancelToken) -> int:
        """Connects this process to a device as a proxy, if it is not. Waits for a device. Returns the device's rank."""
        with self._turn:
            there = self._reached.get(PROXY)
            if isinstance(there, _AsProxy):
                if not there.connection.has_ended:
                    return there.rank
                self._drop(PROXY, there, what_of(ConnectionEnded(there.connection.who, "has closed the connection")))
            called, until_s = msg.ProxyCalled(self._name), time.monotonic() + FOREVER_S
            if self._rank is None:
                connection, welcomed = dial_any(self._folder, called, until_s, stop)
            else:
                path = listener_path(self._folder, self._rank)
                connection, welcomed = dial(path, called, f"rank {self._rank}", until_s, stop)
            proxy = _AsProxy(connection, rank=welcomed.rank)
            if welcomed.buffer is not None and welcomed.buffer.gpu is None:  # else the switch refuses each consumer
                proxy.slots.add(0, attach_buffer(welcomed.buffer, connection))
            self._enter(PROXY, connection, lambda: proxy)
            return proxy.rank

    def _heard(self, number: int, there: Reached, message: AnyTransferMessage) -> None:
        match message:
            case msg.BufferShared(first_slot, place) if isinstance(there, _AsProxy):
                there.slots.add(first_slot, attach_buffer(place, there.connection))
            case msg.BucketReady() if isinstance(there, _AsProxy):
                self._bring(there, message)
            case msg.UpdateBeganFor(members=members) if isinstance(there, _AsProxy):
                with self._entered:  # the device has welcomed each of them
                    self._entered.wait_for(lambda: not any(each.number in self._dialling for each in members), SEND_S)
                self._switch.hear_all(message)
            case msg.SaidTo() | msg.BucketUnchanged() if isinstance(there, _AsProxy):
                self._switch.hear_all(message)
            case other:
                raise RemoteProtocolError(f"sent {other!r:.80}")

    def _bring(self, there: _AsProxy, ready: msg.BucketReady) -> None:
        """Copies an announced bucket out of the device's buffer."""
        if (slot := there.slots.find(ready.slot, ready.num_bytes)) is None:
            raise RemoteProtocolError(f"announced bucket {ready.bucket} in slot {ready.slot}")
        source = slot.data_ptr()
        self._switch.bring(
            ready.update, ready.bucket, ready.num_bytes,
            lambda part: None if part is None else copy_bytes(part.address, source, part.num_bytes),
        )  # fmt: skip
        there.send(msg.SlotFreed(ready.update, ready.slot))

    def _lost(self, number: int, there: Reached, reason: str) -> None:
        proxy = self._reached.get(PROXY)
        left = {number: there}
        if number != PROXY and proxy is not None:
            self._hear(PROXY, proxy)  # what the device has said before
        elif number == PROXY:
            with self._lock:
                left, self._reached = self._reached, {}
                self._gone += left.values()
        for tunnel, each in left.items():
            self._switch.ended(tunnel, f"{each.connection.who} {reason}")

    def close(self) -> None:
        """Leaves the device."""
        self._end_all("this server is shut down")
        self._thread.join()
        self._stop.close()
        self._changed.close()
