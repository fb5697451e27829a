"""One publishing device: its listener, its buffers, and its connections."""

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
"""Number of slots in each buffer: some are filled while others are read, so that a scheduled process has work for more
than one. With four devices on two cores, an update takes a sixth less processor time than with two slots."""
NUM_GPU_SLOTS = 2
"""Number of slots in each of the two buffers on a GPU: one slot is filled while the other is read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a device; see `keepstep.weights.publisher.Publisher`."""

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
        """The sizes by which tensors are packed into buckets. A piece of half a bucket or more gets its own bucket."""
        return Limits(self.bucket_bytes, self.bucket_bytes // 2)

    @property
    def has_ipc(self) -> bool:
        """Whether the device copies buckets into an IPC buffer of its own: on a GPU. In host memory, consumers read the
        buffers of all devices directly."""
        return self.buffers_on.type != "cpu"

    def first_slot(self, rank: int) -> int:
        """The number by which consumers of this device know the first slot of a rank's H2D buffer.

        The buffer in `Welcomed` is this device's own.
        """
        return 0 if rank == self.rank else NUM_SLOTS * (1 + rank)

    def first_late_slot(self, rank: int) -> int:
        """The same, for the buffers for consumers that attach late."""
        return NUM_SLOTS * (1 + self.world_size + rank)

    @property
    def sign_s(self) -> float:
        """Interval of signs of life from a device and the coordinator, in seconds."""
        return min(1.0, self.deadline_s / 4)

    def make_buffer(self) -> Buffer:
        """Allocates a buffer for buckets of this size."""
        num_slots = NUM_GPU_SLOTS if self.has_ipc else NUM_SLOTS
        return make_buffer(self.buffers_on, num_slots, self.bucket_bytes + SLOT_EXTRA_BYTES)


class Device:
    """The state of a device that lasts between updates. The listener's threads and the publishing thread share it."""

    def __init__(
        self,
        settings: Settings,
        generation: int,
        came: Callable[[Attached, int | None], None],
        asked: Callable[[Connection, msg.CatchUpCalled], None],
    ) -> None:
        """Args:
        settings: settings of this device.
        generation: generation of the membership.
        came: called with each new consumer and the version that it has.
        asked: called with the connection of each device that requests the last version; it owns the connection.
        """
        self.settings, self.generation = settings, generation
        self.subscriber_registry = SubscriberRegistry()
        self.readers = Callers[msg.DeviceCalled]()
        """Connections of the devices that read this device's H2D buffer."""
        self.offers = Callers[msg.UpdateOffered]()
        """Connections with offers, if this device runs the coordinator."""
        self.agreement: Agreement | None = None
        """Agreement of the last update that this device coordinated."""
        self.sent: SentVersion | None = None
        """The record of the last committed version that this device sent, as base for delta updates."""
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
        self._listener_path = listener_path(settings.folder, settings.rank)

    def open(self) -> None:
        """Starts the listener. The callbacks may be called from now on."""
        self._listener = Listener(self._listener_path, self._answer)

    @property
    def shared(self) -> Buffer:
        """The buffer that consumers map when they attach: the IPC buffer, or the H2D buffer if there is none."""
        return self.h2d if self.ipc is None else self.ipc

    @property
    def buffer_bytes(self) -> int:
        """Total size of the buffers in bytes."""
        return self.h2d.num_bytes + (0 if self.ipc is None else self.ipc.num_bytes)

    @property
    def last_update(self) -> int:
        """The highest update number so far."""
        return self._last_update

    def saw_update(self, update: int) -> None:
        """Records the number of an update that all devices have agreed on."""
        with self._numbers:
            self._last_update = max(self._last_update, update)

    def number_update(self) -> int:
        """Returns a new number for an update of this device's own."""
        with self._numbers:
            self._last_update += 1
            return self._last_update

    def close(self) -> None:
        """Closes all connections and frees the buffers."""
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
        """Handles a new connection. Runs in the listener's threads."""
        try:
            self._welcome(connection, message)
        except PeerLost:
            connection.close()
        except BaseException:  # closes the connection, so that the caller does not wait for an answer
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
                        raise ConnectionEnded(name, "attached through a proxy that has disconnected")
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
        """The refusal for a caller of another generation or an invalid rank; None if the caller is accepted."""
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
        """Answers a caller with the description of a buffer and, if ``is_mapped``, its descriptors.

        A consumer behind a proxy gets no descriptors: the proxy maps the buffer.

        Raises:
            PeerLost: the caller is gone.
        """
        place, descriptors = buffer.share()
        connection.send(
            msg.Welcomed(self.settings.rank, self.generation, place), until_s, descriptors if is_mapped else ()
        )
