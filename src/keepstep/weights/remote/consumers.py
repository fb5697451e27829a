"""Serves the consumers of a node without publishers: they attach as to a device, and read this node's buffer."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from keepstep.cancel import Cancelled, CancelToken
from keepstep.errors import PeerLost, RemoteProtocolError
from keepstep.protocol.transfer import messages as msg
from keepstep.protocol.transfer.messages import AnyTransferMessage
from keepstep.weights.channels.connection import Connection, wait, what_of
from keepstep.weights.channels.listener import Listener, listener_path, make_private
from keepstep.weights.memory.buffers import SlotBuffer
from keepstep.weights.remote.switch import BucketInSlot, Switch

NOTICE_S = 0.1
"""Timeout for a message to a consumer, as on a device. A consumer that does not read notices by its own deadline."""
LOOK_S = 3600.0
"""The kernel waits no longer than some weeks at a time."""


@dataclasses.dataclass(slots=True, eq=False)
class _Consumer:
    connection: Connection
    tunnel: int = 0
    turn: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def send(self, message: AnyTransferMessage, descriptors: Sequence[int] = ()) -> None:
        with self.turn:
            try:
                self.connection.send(message, time.monotonic() + NOTICE_S, descriptors)
            except PeerLost:
                self.connection.hang_up()  # the loop finds its end


class LocalConsumers:
    """The local consumers, as the lower ends of their tunnels. See `keepstep.weights.remote.switch.Below`."""

    def __init__(self, folder: Path, switch: Switch) -> None:
        """Args:
        folder: folder in which this node's consumers connect. It is created with access for this user only, if missing.
        switch: the switch of this node.

        Raises:
            ConfigurationError: the folder cannot be used.
        """
        self._switch = switch
        self._lock = threading.Lock()
        self._consumers: dict[int, _Consumer] = {}
        self._numbers = itertools.count(1)
        self._changed = CancelToken()
        self._stop = CancelToken()
        make_private(folder)
        self._listener = Listener(listener_path(folder, 0), self._answer)
        self._thread = threading.Thread(target=self._attend, name="keepstep-consumers", daemon=True)
        self._thread.start()

    @property
    def num_consumers(self) -> int:
        """Number of consumers that are attached, or are waiting to be."""
        with self._lock:
            return len(self._consumers)

    # ---- from above -------------------------------------------------------------------------------------------------

    def tell(self, key: int, message: AnyTransferMessage, buffer: SlotBuffer | None) -> None:
        """See `Below`."""
        if (consumer := self._consumers.get(key)) is not None:
            consumer.send(message, () if buffer is None else [buffer.descriptor])

    def begin(self, update: msg.UpdateBeganFor) -> None:
        """See `Below`."""
        for number, reader, base in map(msgspec.structs.astuple, update.members):
            began = msg.UpdateBegan(update.update, update.version, update.generation, update.layout, reader, base)
            self.tell(number, began, None)

    def tell_all(self, keys: Sequence[int], message: msg.Notice | msg.BucketUnchanged) -> None:
        """See `Below`."""
        for key in keys:
            self.tell(key, message, None)

    def give(self, keys: Sequence[int], bucket: BucketInSlot) -> None:
        """See `Below`."""
        ready = msg.BucketReady(bucket.update, bucket.bucket, bucket.part.slot, bucket.part.num_bytes)
        for key in keys:
            self.tell(key, ready, None)

    def end(self, key: int, reason: str) -> None:
        """See `Below`."""
        if (consumer := self._consumers.get(key)) is not None:
            consumer.connection.hang_up()

    # ---- from the consumers -----------------------------------------------------------------------------------------

    def _answer(self, connection: Connection, message: AnyTransferMessage) -> None:
        """Handles a new connection. Runs in the listener's threads."""
        if not isinstance(message, msg.SubscriberCalled):
            refused = msg.Refused(f"{type(message).__name__} opens no connection on this node", stale=False)
            _Consumer(connection).send(refused)
            connection.close()
            return
        connection.who = message.name
        consumer = _Consumer(connection)
        key = next(self._numbers)
        with self._lock:
            self._consumers[key] = consumer
        consumer.tunnel = self._switch.open(self, key, message, is_local=True)
        self._changed.set()

    def _attend(self) -> None:
        while True:
            self._changed.clear()
            with self._lock:
                present = {key: each for key, each in self._consumers.items() if each.tunnel}
            awaited: list[Connection | CancelToken] = [self._changed, *(each.connection for each in present.values())]
            try:
                ready = wait(awaited, time.monotonic() + LOOK_S, self._stop)
            except Cancelled:
                return
            for key, consumer in present.items():
                if consumer.connection in ready:
                    self._hear(key, consumer)

    def _hear(self, key: int, consumer: _Consumer) -> None:
        try:
            while (message := consumer.connection.receive_now()) is not None:
                match message:
                    case msg.SlotFreed():
                        self._switch.free(consumer.tunnel, message.update, message.slot)
                    case msg.VersionLoaded() | msg.VersionTaken() | msg.LoadFailed():
                        self._switch.say(consumer.tunnel, message)
                    case other:
                        raise RemoteProtocolError(f"sent {other!r:.80}")
        except (PeerLost, RemoteProtocolError) as error:
            with self._lock:
                del self._consumers[key]
            self._switch.leave(consumer.tunnel, what_of(error))
            with consumer.turn:
                consumer.connection.close()

    def close(self) -> None:
        """Stops accepting consumers, and closes the connections of the attached ones."""
        self._listener.close()
        self._stop.set()
        self._thread.join()
        for consumer in self._consumers.values():
            consumer.connection.close()
        self._stop.close()
        self._changed.close()
