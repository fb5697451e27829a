"""The consumers that are attached to one device."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from keepstep.errors import PeerLost
from keepstep.protocol.transfer.layout import Consumer
from keepstep.protocol.transfer.messages import (
    AnyTransferMessage,
    BufferShared,
    Notice,
    ProxiedReader,
    SaidTo,
    UpdateBegan,
    UpdateBeganFor,
)
from keepstep.weights.channels.connection import Connection, ConnectionEnded
from keepstep.weights.memory.buffers import Buffer

NOTICE_S = 0.1
"""For telling a consumer something; one that does not read finds out by its own deadline."""


@dataclasses.dataclass(eq=False, slots=True)
class Proxy:
    """A process that stands in for consumers of other nodes: what several of them are told is said to it once.

    Attributes:
        name: its own.
        connection: to it.
        mapped: buffers beside the one in `Welcomed` in which buckets may lie for it, by the number of the first slot.
    """

    name: str
    connection: Connection
    mapped: dict[int, Buffer] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False, slots=True)
class Attached:
    """A consumer on this device.

    Attributes:
        consumer: what it is called and wants.
        connection: to it. With a proxy it is heard there, and told nothing.
        delta: whether it keeps what it has, and need not get it again.
        holds: the version that it took in the latest update, over this connection; used by the publishing thread.
        mapped: as that of `Proxy`.
        version: the last that it is known to have, for the eye.
        proxy: what stands in for it, if it is on another node.
        number: of it, among the consumers of its proxy.
    """

    consumer: Consumer
    connection: Connection
    delta: bool = False
    holds: int | None = None
    mapped: dict[int, Buffer] = dataclasses.field(default_factory=dict)
    version: int | None = None
    proxy: Proxy | None = None
    number: int = 0

    @property
    def name(self) -> str:
        """Its name."""
        return self.consumer.name

    @property
    def has_ended(self) -> bool:
        """Whether it cannot be told anything any more."""
        return self.connection.has_ended or (self.proxy is not None and self.proxy.connection.has_ended)

    def share(self, first_slot: int, buffer: Buffer) -> None:
        """Tells it of a buffer of which it does not know yet; its slots have numbers from ``first_slot`` on."""
        told = self.proxy or self
        if told.mapped.get(first_slot) is not buffer:
            told.mapped[first_slot] = buffer
            place, descriptors = buffer.share()
            _tell(told.connection, BufferShared(first_slot, place), descriptors)


def tell_begin(update: UpdateBeganFor, consumers: Mapping[int, Attached]) -> None:
    """Tells consumers that an update begins.

    Args:
        update: of which ``members`` are to be filled in.
        consumers: those that take part, by reader.
    """
    members: dict[Proxy, list[ProxiedReader]] = {}
    for reader, each in consumers.items():
        base, each.holds = each.holds, None  # until it has taken this one: in place it may be in between
        if each.proxy is None:
            began = UpdateBegan(update.update, update.version, update.generation, update.layout, reader, base)
            _tell(each.connection, began)
        else:
            members.setdefault(each.proxy, []).append(ProxiedReader(each.number, reader, base))
    for proxy, of_proxy in members.items():
        _tell(proxy.connection, msgspec.structs.replace(update, members=tuple(of_proxy)))


def tell(consumers: Iterable[Attached], notice: Notice) -> None:
    """Tells consumers something; one that cannot be told has to come again."""
    for connection, message in _packed(consumers, notice):
        _tell(connection, message)


def show_sign(consumers: Iterable[Attached], notice: Notice) -> None:
    """Tells consumers something that does not matter to one that reads nothing at the moment."""
    for connection, message in _packed(consumers, notice):
        with contextlib.suppress(PeerLost):
            connection.send(message, time.monotonic())


def _packed(consumers: Iterable[Attached], notice: Notice) -> list[tuple[Connection, AnyTransferMessage]]:
    """What is to be sent, and on which connections: one message for all that share a proxy."""
    packed: list[tuple[Connection, AnyTransferMessage]] = []
    numbers: dict[Proxy, list[int]] = {}
    for each in consumers:
        if each.proxy is None:
            packed.append((each.connection, notice))
        else:
            numbers.setdefault(each.proxy, []).append(each.number)
    return packed + [(proxy.connection, SaidTo(tuple(each), notice)) for proxy, each in numbers.items()]


def _tell(connection: Connection, message: AnyTransferMessage, descriptors: Sequence[int] = ()) -> None:
    try:
        connection.send(message, time.monotonic() + NOTICE_S, descriptors)
    except PeerLost:
        connection.close()


class SubscriberRegistry:
    """Who is attached, by name, in the order in which they came. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._present: dict[str, Attached] = {}
        self._proxies: dict[str, Proxy] = {}
        self._replaced: list[Connection] = []
        """The threads that wait on them have been woken; each closes its own connection."""
        self._is_closed = False

    def add(self, attached: Attached, welcome: Callable[[], None]) -> None:
        """A consumer has come; one of the same name that was there is replaced.

        Args:
            attached: the consumer.
            welcome: tells it so. Once it knows it is present, and it is told nothing else before.

        Raises:
            PeerLost: from ``welcome``, or because no consumer is let in any more; it is not present then.
        """
        with self._changed:
            self._let_in(attached.connection, welcome)
            if (former := self._present.pop(attached.name, None)) is not None:
                former.connection.hang_up()
                self._replaced.append(former.connection)
            self._present[attached.name] = attached
            self._changed.notify_all()

    def add_proxy(self, proxy: Proxy, welcome: Callable[[], None]) -> None:
        """As `add`. Consumers of a former one of the same name are gone."""
        with self._changed:
            self._let_in(proxy.connection, welcome)
            if (former := self._proxies.pop(proxy.name, None)) is not None:
                former.connection.hang_up()
                self._replaced.append(former.connection)
            self._proxies[proxy.name] = proxy

    def _let_in(self, connection: Connection, welcome: Callable[[], None]) -> None:
        if self._is_closed:
            raise ConnectionEnded(connection.who, "came when all was over")
        welcome()

    def proxy(self, name: str) -> Proxy | None:
        """The one of this name, if it is there."""
        with self._changed:
            there = self._proxies.get(name)
            return None if there is None or there.connection.has_ended else there

    def present(self) -> list[Attached]:
        """The consumers that are there now; those that have gone are forgotten."""
        with self._changed:
            return self._forget_gone()

    def versions(self) -> tuple[tuple[str, int | None], ...]:
        """Each consumer that is there now, and the version it has.

        It drops none of those that have ended from the registry, so an update may be under way.
        """
        with self._changed, contextlib.suppress(OSError, ValueError):  # the thread that publishes closes one just now
            return tuple((each.name, each.version) for each in self._present.values() if not each.has_ended)
        return ()

    def wait_for(self, num_consumers: int, timeout_s: float) -> bool:
        """Waits until so many are attached; whether they came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._forget_gone()) >= num_consumers, timeout_s)

    def _forget_gone(self) -> list[Attached]:
        for connection in self._replaced:
            connection.close()
        self._replaced.clear()
        for name, each in list(self._present.items()):
            if each.has_ended:
                del self._present[name]
                each.connection.close()
        for name, proxy in list(self._proxies.items()):
            if proxy.connection.has_ended:
                del self._proxies[name]
                proxy.connection.close()
        return list(self._present.values())

    def close(self) -> None:
        """Ends all connections; no consumer is let in any more."""
        with self._changed:
            self._is_closed = True
            connections = [each.connection for each in self._forget_gone()]
            connections += [proxy.connection for proxy in self._proxies.values()]
            self._present, self._proxies = {}, {}
        for connection in connections:
            connection.close()
