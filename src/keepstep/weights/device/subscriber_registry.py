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
"""Timeout for a message to a consumer. A consumer that does not read notices by its own deadline."""


@dataclasses.dataclass(eq=False, slots=True)
class Proxy:
    """A process that represents consumers on other nodes. A message to several of them is sent to it once.

    Attributes:
        name: name of the process.
        connection: connection to the process.
        mapped: further buffers that it has mapped besides the one in `Welcomed`, by the number of the first slot.
    """

    name: str
    connection: Connection
    mapped: dict[int, Buffer] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False, slots=True)
class Attached:
    """A consumer that is attached to this device.

    Attributes:
        consumer: its name, and the tensors that it wants.
        connection: connection to it. With a proxy, this connection only receives; the proxy's connection sends.
        delta: whether it uses delta updates.
        holds: the version that it got in the latest update on this connection; used by the publishing thread.
        mapped: further buffers that it has mapped; see `Proxy`.
        version: the last version that it is known to have; for display only.
        proxy: its proxy, if it is on another node.
        number: its number among the consumers of its proxy.
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
        """Whether its connection, or its proxy's, has ended."""
        return self.connection.has_ended or (self.proxy is not None and self.proxy.connection.has_ended)

    def share(self, first_slot: int, buffer: Buffer) -> None:
        """Shares a buffer with the consumer, unless it has mapped it. Its slots are numbered from ``first_slot``."""
        told = self.proxy or self
        if told.mapped.get(first_slot) is not buffer:
            told.mapped[first_slot] = buffer
            place, descriptors = buffer.share()
            _tell(told.connection, BufferShared(first_slot, place), descriptors)


def tell_begin(update: UpdateBeganFor, consumers: Mapping[int, Attached]) -> None:
    """Tells consumers that an update begins.

    Args:
        update: the message; this function fills in ``members``.
        consumers: the consumers in the update, by reader index.
    """
    members: dict[Proxy, list[ProxiedReader]] = {}
    for reader, each in consumers.items():
        base, each.holds = each.holds, None  # set again after the update: in-place weights may mix two versions
        if each.proxy is None:
            began = UpdateBegan(update.update, update.version, update.generation, update.layout, reader, base)
            _tell(each.connection, began)
        else:
            members.setdefault(each.proxy, []).append(ProxiedReader(each.number, reader, base))
    for proxy, of_proxy in members.items():
        _tell(proxy.connection, msgspec.structs.replace(update, members=tuple(of_proxy)))


def tell(consumers: Iterable[Attached], notice: Notice) -> None:
    """Sends a notice to consumers. Closes the connection of one that cannot be reached, which must attach again."""
    for connection, message in _packed(consumers, notice):
        _tell(connection, message)


def show_sign(consumers: Iterable[Attached], notice: Notice) -> None:
    """Sends consumers a sign of life, without waiting. It is dropped if a consumer does not read."""
    for connection, message in _packed(consumers, notice):
        with contextlib.suppress(PeerLost):
            connection.send(message, time.monotonic())


def _packed(consumers: Iterable[Attached], notice: Notice) -> list[tuple[Connection, AnyTransferMessage]]:
    """The connections and messages for a notice: one message for all consumers of a proxy."""
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
    """The attached consumers by name, in the order of attaching. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._present: dict[str, Attached] = {}
        self._proxies: dict[str, Proxy] = {}
        self._replaced: list[Connection] = []
        """Replaced connections, shut down but not closed yet."""
        self._is_closed = False

    def add(self, attached: Attached, welcome: Callable[[], None]) -> None:
        """Adds a consumer. It replaces a consumer of the same name.

        Args:
            attached: the consumer.
            welcome: sends the answer to the consumer. No other message is sent before it.

        Raises:
            PeerLost: from ``welcome``, or because the registry is closed. The consumer is not added then.
        """
        with self._changed:
            self._let_in(attached.connection, welcome)
            if (former := self._present.pop(attached.name, None)) is not None:
                former.connection.hang_up()
                self._replaced.append(former.connection)
            self._present[attached.name] = attached
            self._changed.notify_all()

    def add_proxy(self, proxy: Proxy, welcome: Callable[[], None]) -> None:
        """Adds a proxy, as `add`. Consumers of a replaced proxy of the same name are lost."""
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
        """The connected proxy of this name, or None."""
        with self._changed:
            there = self._proxies.get(name)
            return None if there is None or there.connection.has_ended else there

    def present(self) -> list[Attached]:
        """The currently attached consumers. Removes those whose connections have ended."""
        with self._changed:
            return self._forget_gone()

    def versions(self) -> tuple[tuple[str, int | None], ...]:
        """Name and version of each attached consumer.

        It removes no consumer from the registry, so it may be called during an update.
        """
        with self._changed, contextlib.suppress(OSError, ValueError):  # the publishing thread may be closing one
            return tuple((each.name, each.version) for each in self._present.values() if not each.has_ended)
        return ()

    def wait_for(self, num_consumers: int, timeout_s: float) -> bool:
        """Waits until ``num_consumers`` are attached. Returns False if ``timeout_s`` seconds pass first."""
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
        """Closes all connections, and refuses new consumers from now on."""
        with self._changed:
            self._is_closed = True
            connections = [each.connection for each in self._forget_gone()]
            connections += [proxy.connection for proxy in self._proxies.values()]
            self._present, self._proxies = {}, {}
        for connection in connections:
            connection.close()
