"""A link between two nodes: messages over one authenticated connection, and buckets over the link's transport.

A transport is a class with the methods of `BucketTransport`; `keepstep.weights.remote.transports` contains the existing
ones. The rest of this folder uses only `NodeLink`, which is the same for every transport.
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
"""Share of the deadline after which a silent node counts as lost. It is below `CONSUMER_SHARE`, so that a lost node is
detected before a consumer behind it is taken for the culprit."""
SIGNS = 5
"""Number of signs of life that a node sends within the time after which it would count as lost."""

Bring = Callable[[int, int, int, Fill], None]
"""See `keepstep.weights.remote.switch.Switch.bring`."""


class BucketTransport(Protocol):
    """One end of the transport for the buckets of one link. All buckets of a link go in the same direction."""

    def start(self, link: NodeLink, bring: Bring | None) -> None:
        """Starts the transport, in threads of ``link.run``. Called once, before all other methods.

        Args:
            link: the link.
            bring: called with every received bucket, by several threads; None on the sending end.

        Raises:
            ConfigurationError: the transport does not work on this machine. The link is then lost.
        """
        ...

    def ship(self, bucket: BucketInSlot, num_messages: int) -> None:
        """Sends a bucket, and releases it when it has been sent. It never blocks for long.

        Args:
            bucket: the bucket. The transport owns it until it calls ``release``.
            num_messages: number of messages sent on the link so far. The other end delivers the bucket after them.

        Raises:
            ConfigurationError: the transport cannot send from the bucket's memory. The link is then lost.
        """
        ...

    def hear(self, message: AnyLinkMessage) -> bool:
        """Handles a message from the other end. Returns False if the message is not for the transport.

        Raises:
            RemoteProtocolError: the message is not valid here.
        """
        ...

    def end(self) -> None:
        """Called once when the link is lost, by any thread: wakes waiting threads and releases unsent buckets."""
        ...

    def close(self) -> None:
        """Frees all resources. Called after the threads have ended. Afterwards the transport writes to no slot."""
        ...


class NodeLink:
    """One end of a link to another node. Any thread may use it."""

    def __init__(self, control: ByteStream, transport: BucketTransport | None, deadline_s: float) -> None:
        """Args:
        control: connection for messages; the link owns it.
        transport: transport of buckets; the link owns it. None for a link without buckets.
        deadline_s: the publishers' deadline, in seconds.
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
        """The receive rate that the other side has reported, in bytes/s."""

    def start(self, hear: Callable[[AnyLinkMessage], None], lost: Callable[[str], None], bring: Bring | None) -> None:
        """Starts the link.

        Args:
            hear: called with every message, in order, by one thread.
            lost: called once with the reason when the link has ended, by a thread of the link or of the caller.
            bring: called with every received bucket, by several threads; None on the sending end.
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
        """Sends a message without blocking. Drops it if the link is lost."""
        with self._changed:
            self._num_sent += 1
            self._messages.put(message)

    def ship(self, bucket: BucketInSlot) -> None:
        """Sends a bucket after all messages sent so far, and releases it. It never blocks for long."""
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
        """Ends the link at both ends. It also calls ``lost``."""
        self._lose(reason)

    # ---- for its transport ------------------------------------------------------------------------------------------

    def run(self, name: str, work: Callable[[], None]) -> None:
        """Runs ``work`` in a thread. If it raises, the link is lost."""

        def guarded() -> None:
            try:
                work()
            except (PeerLost, RemoteProtocolError, ConfigurationError) as error:
                self._lose(what_of(error))

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait_for_messages(self, num_messages: int) -> None:
        """Waits until this number of messages has arrived from the other end.

        Raises:
            ConnectionEnded: they did not arrive within the deadline, or the link is lost.
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
        """Waits until the link's threads have ended, and frees its resources. The link's threads must not call it."""
        with self._starting:
            threads = self._threads
        for thread in threads:
            thread.join()
        if self._transport is not None:
            self._transport.close()
        self._control.close()


class Rate:
    """Measures the rate of received buckets, without pauses."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._began_s, self._last_s, self._num_bytes = 0.0, 0.0, 0
        self.bytes_per_s = 0.0

    def came(self, num_bytes: int, began_s: float, now_s: float) -> None:
        """Counts bytes that arrived from ``began_s`` to ``now_s``. A pause of more than a second restarts the count."""
        with self._turn:
            if began_s > self._last_s + 1.0:
                self._began_s, self._num_bytes = began_s, 0
            self._last_s = max(self._last_s, now_s)
            self._num_bytes += num_bytes
            if self._last_s > self._began_s:
                self.bytes_per_s = self._num_bytes / (self._last_s - self._began_s)
