"""A link between two nodes: messages over one authenticated connection, and buckets by the link's transport.

A transport is a class with the methods of `BucketTransport`; `keepstep.weights.remote.transports` has those that there
are. What the rest of this folder needs of a link is `NodeLink`, which is the same with each of them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from keepstep.errors import ConfigurationError, PeerLost, RemoteProtocolError
from keepstep.weights.channels.connection import ConnectionEnded, what_of
from keepstep.weights.memory.buffers import Fill
from keepstep.weights.remote.messages import Alive, AnyLinkMessage
from keepstep.weights.remote.stream import ByteStream
from keepstep.weights.remote.switch import BucketInSlot

SILENCE_SHARE = 0.5
"""Of the deadline: how long the node at the other end may say nothing. Below `CONSUMER_SHARE`: a node that is gone is
found before a consumer behind it is taken for the culprit."""
SIGNS = 5
"""Of life, in the time after which a node is taken for lost."""

Bring = Callable[[int, int, int, Fill], None]
"""See `keepstep.weights.remote.switch.Switch.bring`."""


class BucketTransport(Protocol):
    """Moves the buckets of one link, which all go one way. One end of it."""

    def start(self, link: NodeLink, bring: Bring | None) -> None:
        """Begins to work, in threads of ``link.run``; called once, before anything else.

        Args:
            link: its own.
            bring: given every bucket, by several threads; None: buckets go the other way.

        Raises:
            ConfigurationError: it does not work on this machine; the link is lost then.
        """
        ...

    def ship(self, bucket: BucketInSlot, num_messages: int) -> None:
        """Sends a bucket, and releases it when it has left; never blocks for long.

        Args:
            bucket: owned by the transport until it releases it.
            num_messages: that were sent on the link so far; the other end brings the bucket after them.

        Raises:
            ConfigurationError: the bucket's memory cannot be sent from; the link is lost then.
        """
        ...

    def hear(self, message: AnyLinkMessage) -> bool:
        """Takes a message of the transport's own from the other end; False: it is for others.

        Raises:
            RemoteProtocolError: it has no meaning here.
        """
        ...

    def end(self) -> None:
        """The link is lost: ends what its threads wait for, and releases what was not sent. Any thread, once."""
        ...

    def close(self) -> None:
        """Gives back what it has; its threads have ended. When it returns, nothing writes into a slot any more."""
        ...


class NodeLink:
    """To another node. Any thread may use it. Made by the two sides of `keepstep.weights.remote.handshake`."""

    def __init__(self, control: ByteStream, transport: BucketTransport | None, deadline_s: float) -> None:
        """Args:
        control: for messages; the link owns it.
        transport: for buckets; the link owns it. None: no buckets go over this link.
        deadline_s: that of the publishers.
        """
        self.who = control.who
        self.deadline_s = deadline_s
        self._control, self._transport = control, transport
        self._silence_s = SILENCE_SHARE * deadline_s
        self._messages: queue.SimpleQueue[AnyLinkMessage | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_sent, self._num_heard = 0, 0
        self.lost = threading.Event()
        """Set when the link has ended."""
        self._hear: Callable[[AnyLinkMessage], None] = lambda message: None
        self._lost: Callable[[str], None] = lambda reason: None
        self._threads: list[threading.Thread] = []
        self._starting = threading.RLock()
        """Held while they are started: the first of them may lose the link before the last one runs."""
        self.rate = Rate()
        self.peer_bytes_per_s = 0.0
        """What the other side says of its rate."""

    def start(self, hear: Callable[[AnyLinkMessage], None], lost: Callable[[str], None], bring: Bring | None) -> None:
        """Begins to work.

        Args:
            hear: given every message, in order, by one thread.
            lost: told once that the link has ended, and why, by one of the link's threads or the caller's.
            bring: given every bucket, by several threads; None: buckets go the other way.
        """
        self._hear, self._lost = hear, lost
        with self._starting:
            if self._transport is not None:
                try:
                    self._transport.start(self, bring)
                except ConfigurationError as error:
                    self._lose(str(error))
                    return
            self.run("keepstep-link-read", self._read)
            self.run("keepstep-link-write", self._write)

    def send(self, message: AnyLinkMessage) -> None:
        """Sends a message, or loses it if the link is lost; never blocks."""
        with self._changed:
            self._num_sent += 1
            self._messages.put(message)

    def ship(self, bucket: BucketInSlot) -> None:
        """Sends a bucket after all messages sent so far, and releases it; never blocks for long."""
        problem = None
        with self._changed:
            if self._transport is not None and not self.lost.is_set():
                try:
                    self._transport.ship(bucket, self._num_sent)
                    return
                except ConfigurationError as error:
                    problem = str(error)
        bucket.release()
        if problem is not None:
            self._lose(problem)

    def close(self, reason: str) -> None:
        """Ends the link; the other side sees that it has ended. ``lost`` is told too."""
        self._lose(reason)

    # ---- for its transport ------------------------------------------------------------------------------------------

    def run(self, name: str, work: Callable[[], None]) -> None:
        """Has a thread do some work; the link is lost if it fails."""

        def guarded() -> None:
            try:
                work()
            except (PeerLost, RemoteProtocolError, ConfigurationError) as error:
                self._lose(what_of(error))

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait_for_messages(self, num_messages: int) -> None:
        """Waits until so many have been heard from the other end.

        Raises:
            ConnectionEnded: they did not come within the deadline, or the link is lost.
        """
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: self.lost.is_set() or self._num_heard >= num_messages, self.deadline_s
            )
            if self.lost.is_set() or not is_there:
                raise ConnectionEnded(self.who, "sent a bucket without its messages")

    # ---- threads ----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while True:
            message = self._control.receive_message(time.monotonic() + self._silence_s)
            if isinstance(message, Alive):
                self.peer_bytes_per_s = message.bytes_per_s
                continue
            if self._transport is None or not self._transport.hear(message):
                self._hear(message)
            with self._changed:
                self._num_heard += 1
                self._changed.notify_all()

    def _write(self) -> None:
        while True:
            try:
                message = self._messages.get(timeout=self._silence_s / SIGNS)
            except queue.Empty:
                message = Alive(self.rate.bytes_per_s)
            if message is None:
                return
            self._control.send_message(message, time.monotonic() + self._silence_s)

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self.lost.is_set():
                return
            self.lost.set()
            self._changed.notify_all()
        self._messages.put(None)
        self._control.hang_up()
        if self._transport is not None:
            self._transport.end()
        self._lost(reason)

    def join(self) -> None:
        """Waits until its threads have ended, and gives back what it has. Not for one of its own threads."""
        with self._starting:
            threads = self._threads
        for thread in threads:
            thread.join()
        if self._transport is not None:
            self._transport.close()
        self._control.close()


class Rate:
    """How fast buckets come, while some do."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._began_s, self._last_s, self._num_bytes = 0.0, 0.0, 0
        self.bytes_per_s = 0.0

    def came(self, num_bytes: int, began_s: float, now_s: float) -> None:
        """So many bytes came since then; a pause of more than a second begins a new count."""
        with self._turn:
            if began_s > self._last_s + 1.0:
                self._began_s, self._num_bytes = began_s, 0
            self._last_s = max(self._last_s, now_s)
            self._num_bytes += num_bytes
            if self._last_s > self._began_s:
                self.bytes_per_s = self._num_bytes / (self._last_s - self._began_s)
