"""One device among those that publish: its door, its buffers, and who is connected to it."""

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
from keepstep.weights.device.attendance import Attached, Attendance
from keepstep.weights.device.callers import Callers
from keepstep.weights.device.mesh import Mesh
from keepstep.weights.lines.door import Door, door_path, make_private
from keepstep.weights.lines.line import Line
from keepstep.weights.memory.buffers import Buffer, make_buffer
from keepstep.weights.memory.pieces import SLOT_EXTRA_BYTES

NUM_SLOTS = 2
"""Of each buffer: one is filled while the other is read."""


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
    def sign_s(self) -> float:
        """How often a device and the coordinator show that they are there."""
        return min(1.0, self.deadline_s / 4)

    def make_buffer(self) -> Buffer:
        """A new buffer for buckets of this size."""
        return make_buffer(self.buffers_on, NUM_SLOTS, self.bucket_bytes + SLOT_EXTRA_BYTES)


class Device:
    """What lasts from one update to the next. The door's threads and the publishing one meet here."""

    def __init__(
        self,
        settings: Settings,
        generation: int,
        came: Callable[[Attached, int | None], None],
        asked: Callable[[Line, msg.CatchUpCalled], None],
    ) -> None:
        """Args:
        settings: of this device.
        generation: of the membership.
        came: told of each consumer that has attached itself, and of the version it has.
        asked: given the line of each device that asks for what was published last; it owns the line.
        """
        self.settings, self.generation = settings, generation
        self.attendance = Attendance()
        self.readers = Callers[msg.DeviceCalled]()
        """Of this device's H2D buffer."""
        self.offers = Callers[msg.UpdateOffered]()
        """For the coordinator, where this device is that."""
        self.agreement: Agreement | None = None
        """Of the last update that was coordinated here."""
        self._came, self._asked = came, asked
        self._numbers = threading.Lock()
        self._last_update = 0
        make_private(settings.folder)
        self.h2d = settings.make_buffer()
        self.ipc = settings.make_buffer()
        self.mesh = Mesh(settings.folder, settings.rank, settings.world_size, settings.buffers_on)
        self._door: Door | None = None
        self._door_path = door_path(settings.folder, settings.rank)

    def open(self) -> None:
        """From now on others find it; whoever is told of them must be ready."""
        self._door = Door(self._door_path, self._answer)

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
        """Ends all lines and gives the buffers back."""
        if self._door is not None:
            self._door.close()
        self.mesh.drop()
        self.attendance.close()
        self.readers.close()
        self.offers.close()
        self.h2d.close()
        self.ipc.close()

    def _answer(self, line: Line, message: AnyTransferMessage) -> None:
        """Somebody knocks. Runs in the door's threads."""
        try:
            self._welcome(line, message)
        except PeerLost:
            line.close()
        except BaseException:  # whoever it was does not wait for an answer that does not come
            line.close()
            raise

    def _welcome(self, line: Line, message: AnyTransferMessage) -> None:
        own, until_s = self.settings.rank, time.monotonic() + self.settings.deadline_s
        match message:
            case msg.DeviceCalled() | msg.UpdateOffered() | msg.CatchUpCalled() | msg.SubscriberCalled() if (
                refused := self._refused(message)
            ) is not None:
                line.send(refused, until_s)
                line.close()
            case msg.DeviceCalled(rank=rank):
                line.who = f"rank {rank}"
                self.readers.add(message, line, lambda: self.welcome_to(self.h2d, line, until_s))
            case msg.UpdateOffered(rank=rank):
                line.who = f"rank {rank}"
                self.offers.add(message, line, lambda: line.send(msg.Welcomed(own, self.generation, None), until_s))
            case msg.CatchUpCalled(rank=rank):
                line.who = f"rank {rank}"
                self._asked(line, message)
            case msg.SubscriberCalled(name=name, wants=wants):
                line.who = name
                attached = Attached(Consumer(name, wants), line)
                self.attendance.add(attached, lambda: self.welcome_to(self.ipc, line, until_s))
                self._came(attached, message.version)
            case other:
                line.send(msg.Refused(f"{other!r:.80} opens no line", stale=False), until_s)
                line.close()

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

    def welcome_to(self, buffer: Buffer, line: Line, until_s: float) -> None:
        """Answers whoever has called to read in a buffer. Raises PeerLost if it is gone."""
        place, descriptors = buffer.share()
        line.send(msg.Welcomed(self.settings.rank, self.generation, place), until_s, descriptors)
