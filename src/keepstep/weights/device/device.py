"""One device among those that publish: its listener, its buffers, and who is connected to it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from keepstep.errors import ConfigurationError, PeerLost
from keepstep.protocol.transfer import messages as msg
from keepstep.protocol.transfer.layout import Consumer
from keepstep.protocol.transfer.messages import AnyTransferMessage
from keepstep.protocol.transfer.plan import Limits
from keepstep.protocol.transfer.update import Agreement
from keepstep.weights.channels.connection import Connection, ConnectionEnded
from keepstep.weights.channels.deltas import SentVersion
from keepstep.weights.channels.listener import Listener, listener_path, make_private
from keepstep.weights.device.callers import Callers
from keepstep.weights.device.source_connections import SourceConnections
from keepstep.weights.device.subscriber_registry import Attached, Proxy, SubscriberRegistry
from keepstep.weights.memory.buffers import Buffer, make_buffer
from keepstep.weights.memory.pieces import SLOT_EXTRA_BYTES

NUM_SLOTS = 4
"""Of each buffer: some are filled while others are read, so that a process that is awake has more than one to deal
with. Measured with four devices on two cores, an update takes a sixth less processor time than with two slots."""
NUM_GPU_SLOTS = 2
"""Of each buffer on a GPU, where there are two of them: one slot is filled while the other is read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What a device is told; see `keepstep.weights.publisher.Publisher`."""

    folder: Path
    rank: int
    world_size: int
    bucket_bytes: int
    deadline_s: float
    buffers_on: torch.device

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError(
                f"rank={self.rank} with world_size={self.world_size}: allowed are 0 to {self.world_size - 1}"
            )
        if self.deadline_s <= 0:
            raise ConfigurationError(f"deadline_s={self.deadline_s}: allowed are times above 0")

    @property
    def limits(self) -> Limits:
        """How buckets are filled: what is half a bucket or more does not wait for others."""
        return Limits(self.bucket_bytes, self.bucket_bytes // 2)

    @property
    def has_ipc(self) -> bool:
        """Whether buckets are copied into a buffer of the device's own: on a GPU. Consumers read in host memory of any
        device."""
        return self.buffers_on.type != "cpu"

    def first_slot(self, rank: int) -> int:
        """The number that consumers of this device have for the first slot of a device's H2D buffer.

        This device's own is the one in `Welcomed`.
        """
        return 0 if rank == self.rank else NUM_SLOTS * (1 + rank)

    def first_late_slot(self, rank: int) -> int:
        """The same, for buffers that a device has for consumers that come late."""
        return NUM_SLOTS * (1 + self.world_size + rank)

    @property
    def sign_s(self) -> float:
        """How often a device and the coordinator show that they are there."""
        return min(1.0, self.deadline_s / 4)

    def make_buffer(self) -> Buffer:
        """A new buffer for buckets of this size."""
        num_slots = NUM_GPU_SLOTS if self.has_ipc else NUM_SLOTS
        return make_buffer(self.buffers_on, num_slots, self.bucket_bytes + SLOT_EXTRA_BYTES)


class Device:
    """What lasts from one update to the next. The listener's threads and the publishing one meet here."""

    def __init__(
        self,
        settings: Settings,
        generation: int,
        came: Callable[[Attached, int | None], None],
        asked: Callable[[Connection, msg.CatchUpCalled], None],
    ) -> None:
        """Args:
        settings: of this device.
        generation: of the membership.
        came: told of each consumer that has attached itself, and of the version it has.
        asked: given the connection of each device that asks for what was published last; it owns the connection.
        """
        self.settings, self.generation = settings, generation
        self.subscriber_registry = SubscriberRegistry()
        self.readers = Callers[msg.DeviceCalled]()
        """Of this device's H2D buffer."""
        self.offers = Callers[msg.UpdateOffered]()
        """For the coordinator, where this device is that."""
        self.agreement: Agreement | None = None
        """Of the last update that was coordinated here."""
        self.sent: SentVersion | None = None
        """What this device sent of the last version that counts."""
        self._came, self._asked = came, asked
        self._numbers = threading.Lock()
        self._last_update = 0
        make_private(settings.folder)
        self.h2d = settings.make_buffer()
        self.ipc = settings.make_buffer() if settings.has_ipc else None
        self.source_connections = SourceConnections(
            settings.folder, settings.rank, settings.world_size, settings.buffers_on, settings.first_slot
        )
        self._listener: Listener | None = None
        self._door_path = listener_path(settings.folder, settings.rank)

    def open(self) -> None:
        """From now on others find it; the callbacks that are told of them must be ready."""
        self._listener = Listener(self._door_path, self._answer)

    @property
    def shared(self) -> Buffer:
        """What its consumers map from the begin: the IPC buffer, or the H2D buffer where there is none."""
        return self.h2d if self.ipc is None else self.ipc

    @property
    def buffer_bytes(self) -> int:
        """Of its buffers together."""
        return self.h2d.num_bytes + (0 if self.ipc is None else self.ipc.num_bytes)

    @property
    def last_update(self) -> int:
        """The highest number of an update that was here."""
        return self._last_update

    def saw_update(self, update: int) -> None:
        """An update of this number has been agreed on."""
        with self._numbers:
            self._last_update = max(self._last_update, update)

    def number_update(self) -> int:
        """A number for an update of this device's own."""
        with self._numbers:
            self._last_update += 1
            return self._last_update

    def close(self) -> None:
        """Ends all connections and gives the buffers back."""
        if self._listener is not None:
            self._listener.close()
        self.source_connections.drop()
        self.subscriber_registry.close()
        self.readers.close()
        self.offers.close()
        self.h2d.close()
        if self.ipc is not None:
            self.ipc.close()

    def _answer(self, connection: Connection, message: AnyTransferMessage) -> None:
        """A process dials. Runs in the listener's threads."""
        try:
            self._welcome(connection, message)
        except PeerLost:
            connection.close()
        except BaseException:  # the caller must not wait for an answer that does not come
            connection.close()
            raise

    def _welcome(self, connection: Connection, message: AnyTransferMessage) -> None:
        own, until_s = self.settings.rank, time.monotonic() + self.settings.deadline_s
        match message:
            case msg.DeviceCalled() | msg.UpdateOffered() | msg.CatchUpCalled() | msg.SubscriberCalled() if (
                refused := self._refused(message)
            ) is not None:
                connection.send(refused, until_s)
                connection.close()
            case msg.DeviceCalled(rank=rank):
                connection.who = f"rank {rank}"
                self.readers.add(message, connection, lambda: self.welcome_to(self.h2d, connection, until_s))
            case msg.UpdateOffered(rank=rank):
                connection.who = f"rank {rank}"
                self.offers.add(
                    message, connection, lambda: connection.send(msg.Welcomed(own, self.generation, None), until_s)
                )
            case msg.CatchUpCalled(rank=rank):
                connection.who = f"rank {rank}"
                self._asked(connection, message)
            case msg.ProxyCalled(name=name):
                connection.who = "the process that stands in for consumers of other nodes"
                proxy = Proxy(name, connection)
                self.subscriber_registry.add_proxy(proxy, lambda: self.welcome_to(self.shared, connection, until_s))
            case msg.SubscriberCalled(name=name, wants=wants, proxied=proxied):
                connection.who = name
                attached = Attached(Consumer(name, wants), connection, message.delta, version=message.version)
                if proxied is not None:
                    attached.number, attached.proxy = proxied.number, self.subscriber_registry.proxy(proxied.proxy)
                    if attached.proxy is None:
                        raise ConnectionEnded(name, "came without its proxy, which is gone")
                is_mapped = proxied is None
                self.subscriber_registry.add(
                    attached, lambda: self.welcome_to(self.shared, connection, until_s, is_mapped=is_mapped)
                )
                self._came(attached, message.version)
            case other:
                connection.send(msg.Refused(f"{other!r:.80} opens no connection", stale=False), until_s)
                connection.close()

    def _refused(
        self, called: msg.DeviceCalled | msg.UpdateOffered | msg.CatchUpCalled | msg.SubscriberCalled
    ) -> msg.Refused | None:
        """Why this caller is sent away."""
        if called.generation > self.generation:
            reason = f"it is of generation {self.generation}, the caller of {called.generation}"
            return msg.Refused(reason, stale=False)
        if isinstance(called, msg.SubscriberCalled):
            return None
        if called.generation < self.generation:
            reason = f"generation {called.generation} is over, this is generation {self.generation}"
            return msg.Refused(reason, stale=True)
        if not 0 <= called.rank < self.settings.world_size:
            return msg.Refused(f"there is no rank {called.rank} among {self.settings.world_size}", stale=False)
        return None

    def welcome_to(self, buffer: Buffer, connection: Connection, until_s: float, *, is_mapped: bool = True) -> None:
        """Answers a caller that wants to read in a buffer, or (not ``is_mapped``) whose proxy does.

        Raises:
            PeerLost: it is gone.
        """
        place, descriptors = buffer.share()
        connection.send(
            msg.Welcomed(self.settings.rank, self.generation, place), until_s, descriptors if is_mapped else ()
        )
