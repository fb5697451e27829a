"""A link between two nodes over TCP: one connection for messages, and several streams for buckets.

What the rest of this folder needs of it is `NodeLink`; another way to move bytes (RDMA) would be another class with
these methods, whose ``ship`` writes into memory that the other side has named.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from keepstep.errors import ConfigurationError, PeerLost, RemoteProtocolError
from keepstep.weights.channels.connection import ConnectionEnded, what_of
from keepstep.weights.remote.messages import BUCKET_HEADER, Alive, AnyLinkMessage
from keepstep.weights.remote.stream import ByteStream
from keepstep.weights.remote.switch import BucketInSlot

SILENCE_SHARE = 0.5
"""Of the deadline: how long the node at the other end may say nothing. Below `CONSUMER_SHARE`: a node that is gone is
found before a consumer behind it is taken for the culprit."""
SIGNS = 5
"""Of life, in the time after which a node is taken for lost."""

Bring = Callable[[int, int, int, Callable[[memoryview], None]], None]
"""See `keepstep.weights.remote.switch.Switch.bring`."""


class NodeLink(Protocol):
    """To another node. Any thread may use it."""

    def send(self, message: AnyLinkMessage) -> None:
        """Sends a message, or loses it if the link is lost; never blocks."""
        ...

    def ship(self, bucket: BucketInSlot) -> None:
        """Sends a bucket after all messages sent so far, and releases it; never blocks."""
        ...

    def close(self, reason: str) -> None:
        """Ends the link; the other side sees that it has ended."""
        ...


class TcpLink:
    """A link over TCP. Made by the two sides of `keepstep.weights.remote.handshake`."""

    def __init__(self, control: ByteStream, streams: Sequence[ByteStream], deadline_s: float) -> None:
        """Args:
        control: for messages; the link owns it.
        streams: for buckets, which go one way; the link owns them.
        deadline_s: that of the publishers.
        """
        self.who = control.who
        self._control, self._streams = control, streams
        self._silence_s = SILENCE_SHARE * deadline_s
        self._messages: queue.SimpleQueue[AnyLinkMessage | None] = queue.SimpleQueue()
        self._buckets: queue.SimpleQueue[tuple[int, BucketInSlot] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_sent, self._num_heard = 0, 0
        self._is_lost = False
        self._hear: Callable[[AnyLinkMessage], None] = lambda message: None
        self._lost: Callable[[str], None] = lambda reason: None
        self._bring: Bring | None = None
        self._threads: list[threading.Thread] = []
        self.rate = Rate()
        self.peer_bytes_per_s = 0.0
        """What the other side says of its rate."""

    def start(self, hear: Callable[[AnyLinkMessage], None], lost: Callable[[str], None], bring: Bring | None) -> None:
        """Begins to work.

        Args:
            hear: given every message, in order, by one thread.
            lost: told once that the link has ended, and why, by one of the link's threads.
            bring: given every bucket, by several threads; None: buckets go the other way.
        """
        self._hear, self._lost, self._bring = hear, lost, bring
        self._run("keepstep-link-read", self._read)
        self._run("keepstep-link-write", self._write)
        for stream in self._streams:
            self._run("keepstep-stream", functools.partial(self._stream, stream))

    def send(self, message: AnyLinkMessage) -> None:
        """See `NodeLink`."""
        with self._changed:
            self._num_sent += 1
            self._messages.put(message)

    def ship(self, bucket: BucketInSlot) -> None:
        """See `NodeLink`."""
        with self._changed:
            if not self._is_lost:
                self._buckets.put((self._num_sent, bucket))
                return
        bucket.release()

    def close(self, reason: str) -> None:
        """See `NodeLink`. ``lost`` is told too."""
        self._lose(reason)

    # ---- threads ----------------------------------------------------------------------------------------------------

    def _run(self, name: str, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except (PeerLost, RemoteProtocolError, ConfigurationError) as error:
                self._lose(what_of(error))

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _read(self) -> None:
        while True:
            message = self._control.receive_message(time.monotonic() + self._silence_s)
            if isinstance(message, Alive):
                self.peer_bytes_per_s = message.bytes_per_s
                continue
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

    def _stream(self, stream: ByteStream) -> None:
        bring = self._bring
        while bring is not None:
            head = bytearray(BUCKET_HEADER.size)
            stream.receive_into(memoryview(head))
            after, update, bucket, num_bytes = BUCKET_HEADER.unpack(head)
            self._wait_for_messages(after)
            bring(update, bucket, num_bytes, functools.partial(self._fill, stream))
        self._send_buckets(stream)

    def _fill(self, stream: ByteStream, view: memoryview) -> None:
        began_s = time.monotonic()
        stream.receive_into(view)
        self.rate.came(len(view), began_s, time.monotonic())

    def _wait_for_messages(self, num_messages: int) -> None:
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: self._is_lost or self._num_heard >= num_messages, self._silence_s / SILENCE_SHARE
            )
            if self._is_lost or not is_there:
                raise ConnectionEnded(self.who, "sent a bucket without its messages")

    def _send_buckets(self, stream: ByteStream) -> None:
        while (item := self._buckets.get()) is not None:
            after, bucket = item
            try:
                header = BUCKET_HEADER.pack(after, bucket.update, bucket.bucket, len(bucket.content))
                stream.send([header, bucket.content])
            finally:
                bucket.release()
        raise ConnectionEnded(self.who, "was left")

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._is_lost:
                return
            self._is_lost = True
            self._changed.notify_all()
        self._messages.put(None)
        for each in (self._control, *self._streams):
            each.hang_up()
        while True:
            try:
                item = self._buckets.get_nowait()
            except queue.Empty:
                break
            if item is not None:
                item[1].release()
        for _ in self._streams:
            self._buckets.put(None)
        self._lost(reason)

    def join(self) -> None:
        """Waits until its threads have ended, and gives the sockets back. Not for one of its own threads."""
        for thread in self._threads:
            thread.join()
        for each in (self._control, *self._streams):
            each.close()


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
