"""The consumers that are attached to one device."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

from keepstep.errors import PeerLost
from keepstep.protocol.transfer.layout import Consumer
from keepstep.protocol.transfer.messages import AnyTransferMessage, BufferShared
from keepstep.weights.channels.connection import Connection
from keepstep.weights.memory.buffers import Buffer

NOTICE_S = 0.1
"""For telling a consumer something; one that does not read finds out by its own deadline."""


@dataclasses.dataclass(eq=False, slots=True)
class Attached:
    """A consumer on this device.

    Attributes:
        consumer: what it is called and wants.
        connection: to it.
        delta: whether it keeps what it has, and need not get it again.
        holds: the version that it took in the latest update, over this connection; used by the publishing thread.
        mapped: buffers beside the one in `Welcomed` in which buckets may lie for it, by the number of the first slot.
        version: the last that it is known to have, for the eye.
    """

    consumer: Consumer
    connection: Connection
    delta: bool = False
    holds: int | None = None
    mapped: dict[int, Buffer] = dataclasses.field(default_factory=dict)
    version: int | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return self.consumer.name

    def tell(self, message: AnyTransferMessage, descriptors: Sequence[int] = ()) -> None:
        """Tells it; one that cannot be told has to come again."""
        try:
            self.connection.send(message, time.monotonic() + NOTICE_S, descriptors)
        except PeerLost:
            self.connection.close()

    def share(self, first_slot: int, buffer: Buffer) -> None:
        """Tells it of a buffer of which it does not know yet; its slots have numbers from ``first_slot`` on."""
        if self.mapped.get(first_slot) is not buffer:
            self.mapped[first_slot] = buffer
            place, descriptors = buffer.share()
            self.tell(BufferShared(first_slot, place), descriptors)

    def show_sign(self, message: AnyTransferMessage) -> None:
        """Tells it something that does not matter to one that reads nothing at the moment."""
        with contextlib.suppress(PeerLost):
            self.connection.send(message, time.monotonic())


class SubscriberRegistry:
    """Who is attached, by name, in the order in which they came. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._present: dict[str, Attached] = {}
        self._replaced: list[Attached] = []
        """The threads that wait on their connections have been woken; each closes its own connection."""

    def add(self, attached: Attached, welcome: Callable[[], None]) -> None:
        """A consumer has come; one of the same name that was there is replaced.

        Args:
            attached: the consumer.
            welcome: tells it so. Once it knows it is present, and it is told nothing else before.

        Raises:
            PeerLost: from ``welcome``; it is not present then.
        """
        with self._changed:
            welcome()
            if (former := self._present.pop(attached.name, None)) is not None:
                former.connection.hang_up()
                self._replaced.append(former)
            self._present[attached.name] = attached
            self._changed.notify_all()

    def present(self) -> list[Attached]:
        """The consumers that are there now; those that have gone are forgotten."""
        with self._changed:
            return self._forget_gone()

    def versions(self) -> tuple[tuple[str, int | None], ...]:
        """Each consumer that is there now, and the version it has.

        It drops none of those that have ended from the registry, so an update may be under way.
        """
        with self._changed, contextlib.suppress(OSError, ValueError):  # the thread that publishes closes one just now
            return tuple((each.name, each.version) for each in self._present.values() if not each.connection.has_ended)
        return ()

    def wait_for(self, num_consumers: int, timeout_s: float) -> bool:
        """Waits until so many are attached; whether they came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._forget_gone()) >= num_consumers, timeout_s)

    def _forget_gone(self) -> list[Attached]:
        for each in self._replaced:
            each.connection.close()
        self._replaced.clear()
        for name, each in list(self._present.items()):
            if each.connection.has_ended:
                del self._present[name]
                each.connection.close()
        return list(self._present.values())

    def close(self) -> None:
        """Ends all connections."""
        with self._changed:
            present, self._present = self._forget_gone(), {}
        for each in present:
            each.connection.close()
