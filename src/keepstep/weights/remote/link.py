"""A link between two nodes: messages over one authenticated connection, and buckets in stripes over its streams.

A bucket that used only one of several streams would get only that stream's share of the bandwidth, on each link of a
chain of nodes. In stripes it gets the whole bandwidth: each stream carries one part of every bucket, at the same time.
A stream begins with the number of its stripe, in one byte. The parts of all buckets follow, in the same order on each
stream. All buckets of a link go in the same direction.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from keepstep.errors import ConfigurationError, PeerLost, RemoteProtocolError
from keepstep.weights.channels.connection import ConnectionEnded, what_of
from keepstep.weights.memory.buffers import Fill, SlotPart
from keepstep.weights.remote.messages import BUCKET_HEADER, Alive, AnyLinkMessage
from keepstep.weights.remote.stream import ByteStream
from keepstep.weights.remote.switch import BucketInSlot

SILENCE_SHARE = 0.5
"""Share of the deadline after which a silent node counts as lost. It is below `CONSUMER_SHARE`, so that a lost node is
detected before a consumer behind it is taken for the culprit."""
SIGNS = 5
"""Number of signs of life that a node sends within the time after which it would count as lost."""

Header = tuple[int, ...]
"""The fields of `BUCKET_HEADER`."""
Bring = Callable[[int, int, int, Fill], None]
"""See `keepstep.weights.remote.switch.Switch.bring`."""


class NodeLink:
    """One end of a link to another node. Any thread may use it."""

    def __init__(self, control: ByteStream, streams: Sequence[ByteStream], deadline_s: float) -> None:
        """Args:
        control: connection for messages; the link owns it.
        streams: connections for buckets; the link owns them. Their order may differ between the two ends. A link
            without any carries no buckets.
        deadline_s: the publishers' deadline, in seconds.
        """
        self.who = control.who
        self._deadline_s = deadline_s
        self._control, self._stripes = control, _Stripes(self, streams)
        self._silence_s = SILENCE_SHARE * deadline_s
        self._messages: queue.SimpleQueue[AnyLinkMessage | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_sent, self._num_heard = 0, 0
        self._is_lost = False
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
            bring: called with every received bucket, in order, by another thread; None on the sending end.
        """
        self._hear, self._lost = hear, lost
        with self._starting:
            self._stripes.start(bring)
            self.run("keepstep-link-read", self._read)
            self.run("keepstep-link-write", self._write)

    def send(self, message: AnyLinkMessage) -> None:
        """Sends a message without blocking. Drops it if the link is lost."""
        with self._changed:
            self._num_sent += 1
            self._messages.put(message)

    def ship(self, bucket: BucketInSlot) -> None:
        """Sends a bucket after all messages sent so far, without blocking, and releases it when it has left."""
        with self._changed:
            if not self._is_lost:
                self._stripes.ship(bucket, self._num_sent)
                return
        bucket.release()

    def close(self, reason: str) -> None:
        """Ends the link at both ends. It also calls ``lost``."""
        self._lose(reason)

    # ---- for its stripes --------------------------------------------------------------------------------------------

    def run(self, name: str, work: Callable[[], None]) -> None:
        """Runs ``work`` in a thread. If it raises anything, the link is lost: the peer sees signs of life from another
        thread, and would wait."""

        def guarded() -> None:
            try:
                work()
            except (PeerLost, RemoteProtocolError, ConfigurationError) as error:
                self._lose(what_of(error))
            except Exception as error:  # whatever it is, the peer must not wait for this thread
                traceback.print_exc()
                self._lose(f"was left because of an error: {type(error).__name__}: {error}")

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
                lambda: self._is_lost or self._num_heard >= num_messages, self._deadline_s
            )
            if self._is_lost or not is_there:
                raise ConnectionEnded(self.who, "sent a bucket without its messages")

    # ---- threads ----------------------------------------------------------------------------------------------------

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

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._is_lost:
                return
            self._is_lost = True
            self._changed.notify_all()
        self._messages.put(None)
        self._control.hang_up()
        self._stripes.end()
        self._lost(reason)

    def join(self) -> None:
        """Waits until the link's threads have ended, and frees its resources. The link's threads must not call it."""
        with self._starting:
            threads = self._threads
        for thread in threads:
            thread.join()
        self._stripes.close()
        self._control.close()


class Rate:
    """Measures the rate of received buckets, without pauses."""

    def __init__(self) -> None:
        self._began_s, self._last_s, self._num_bytes = 0.0, 0.0, 0
        self.bytes_per_s = 0.0

    def came(self, num_bytes: int, began_s: float, now_s: float) -> None:
        """Counts bytes that arrived from ``began_s`` to ``now_s``. A pause of more than a second restarts the count."""
        if began_s > self._last_s + 1.0:
            self._began_s, self._num_bytes = began_s, 0
        self._last_s = now_s
        self._num_bytes += num_bytes
        if now_s > self._began_s:
            self.bytes_per_s = self._num_bytes / (now_s - self._began_s)


class _Stripes:
    """The streams of one end of a link, with a thread for each."""

    def __init__(self, link: NodeLink, streams: Sequence[ByteStream]) -> None:
        self._link, self._streams = link, streams
        self._outgoing: list[queue.SimpleQueue[_OutgoingBucket | None]] = [queue.SimpleQueue() for _ in streams]
        self._incoming = _IncomingBucket(len(streams))

    def start(self, bring: Bring | None) -> None:
        for stripe, stream in enumerate(self._streams):
            work = functools.partial(self._send_stripes, stream, stripe)
            if bring is not None:
                work = functools.partial(self._receive, stream, bring)
            self._link.run("keepstep-stream", work)

    def ship(self, bucket: BucketInSlot, num_messages: int) -> None:
        """Queues a bucket for all streams. The other end delivers it after ``num_messages`` messages."""
        if not self._streams:
            bucket.release()
            return
        outgoing = _OutgoingBucket(bucket, num_messages, len(self._streams))
        for each in self._outgoing:
            each.put(outgoing)

    def end(self) -> None:
        """Wakes the threads and releases unsent buckets. A thread that receives may call it before the link does."""
        for stream in self._streams:
            stream.hang_up()
        self._incoming.end()
        for each in self._outgoing:
            while True:
                try:
                    outgoing = each.get_nowait()
                except queue.Empty:
                    break
                if outgoing is not None:
                    outgoing.left()
            each.put(None)

    def close(self) -> None:
        """Closes the streams, when the threads have ended."""
        for stream in self._streams:
            stream.close()

    def _bounds(self, num_bytes: int, stripe: int) -> tuple[int, int]:
        num_stripes = len(self._streams)
        return num_bytes * stripe // num_stripes, num_bytes * (stripe + 1) // num_stripes

    def _receive_part(self, stream: ByteStream, content: memoryview | None, num_bytes: int, stripe: int) -> None:
        """Receives a stripe of a bucket; without ``content`` it is dropped, however large the peer says it is."""
        begin, end = self._bounds(num_bytes, stripe)
        if content is None:
            stream.drop(end - begin)
        else:
            stream.receive_into(content[begin:end])

    # ---- threads ----------------------------------------------------------------------------------------------------

    def _send_stripes(self, stream: ByteStream, stripe: int) -> None:
        stream.send([bytes([stripe])])
        while (outgoing := self._outgoing[stripe].get()) is not None:
            bucket = outgoing.bucket
            try:
                content = bucket.part.content
                header = BUCKET_HEADER.pack(outgoing.num_messages, bucket.update, bucket.bucket, len(content))
                begin, end = self._bounds(len(content), stripe)
                stream.send([header, content[begin:end]])
            finally:
                outgoing.left()
        raise ConnectionEnded(stream.who, "was left")

    def _receive(self, stream: ByteStream, bring: Bring) -> None:
        first = bytearray(1)
        stream.receive_into(memoryview(first))
        (stripe,) = first
        self._incoming.claim(stripe)
        if stripe == 0:
            self._receive_buckets(stream, bring)
        else:
            self._receive_stripes(stream, stripe)

    def _receive_buckets(self, stream: ByteStream, bring: Bring) -> None:
        """Receives the first stripe of each bucket. Its thread also finds the bucket's slot."""
        while True:
            header = _receive_header(stream)
            num_messages, update, bucket, num_bytes = header
            self._link.wait_for_messages(num_messages)
            bring(update, bucket, num_bytes, functools.partial(self._fill, stream, header))

    def _fill(self, stream: ByteStream, header: Header, part: SlotPart | None) -> None:
        """Receives a bucket; one that no consumer wants any more is read and dropped."""
        began_s, num_bytes = time.monotonic(), header[-1]
        self._incoming.begin(header, None if part is None else part.content)
        try:
            self._receive_part(stream, None if part is None else part.content, num_bytes, 0)
        except BaseException:  # the threads of the other streams must stop writing
            self.end()
            raise
        finally:  # no thread may write into the slot after this returns
            is_complete = self._incoming.wait_for_others()
        if not is_complete:
            raise ConnectionEnded(self._link.who, "has closed one of its streams")
        self._link.rate.came(num_bytes, began_s, time.monotonic())

    def _receive_stripes(self, stream: ByteStream, stripe: int) -> None:
        """Receives another stripe of each bucket, into the slot that the first stripe's thread has found."""
        while True:
            header = _receive_header(stream)
            is_complete = False
            try:
                content = self._incoming.wait_for_next(stripe, header, stream.who)
                self._receive_part(stream, content, header[-1], stripe)
                is_complete = True
            finally:
                self._incoming.written(stripe, is_complete)


class _OutgoingBucket:
    """A bucket that is sent on all streams, and released when it has left on each. Any thread may use it."""

    def __init__(self, bucket: BucketInSlot, num_messages: int, num_streams: int) -> None:
        self.bucket = bucket
        self.num_messages = num_messages
        self._num_left = num_streams
        self._lock = threading.Lock()

    def left(self) -> None:
        """Call it when the bucket has been sent on one more stream, or cannot be sent there."""
        with self._lock:
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last:
            self.bucket.release()


class _IncomingBucket:
    """The bucket that a link is receiving; a link receives one at a time. The thread of stripe 0 begins each."""

    def __init__(self, num_stripes: int) -> None:
        self._num_stripes = num_stripes
        self._changed = threading.Condition()
        self._claimed: set[int] = set()
        self._num_begun = 0
        self._num_filled = dict.fromkeys(range(1, num_stripes), 0)
        """For each stripe, the number of buckets for which it is complete."""
        self._written: set[int] = set()
        """Stripes that are being written into the bucket."""
        self._header: Header = ()
        self._content: memoryview | None = None
        """Where the bucket goes; None: it is dropped."""
        self._has_ended = False

    def claim(self, stripe: int) -> None:
        """Registers a stream for a stripe.

        Raises:
            RemoteProtocolError: another stream has the stripe, or there is no such stripe.
        """
        with self._changed:
            if stripe >= self._num_stripes or stripe in self._claimed:
                raise RemoteProtocolError(f"began a stream with stripe {stripe} of {self._num_stripes}")
            self._claimed.add(stripe)

    def begin(self, header: Header, content: memoryview | None) -> None:
        """Begins a bucket. Its bytes are written to ``content``; None: they are dropped."""
        with self._changed:
            self._num_begun += 1
            self._header, self._content = header, content
            self._changed.notify_all()

    def wait_for_others(self) -> bool:
        """Waits until no other thread writes into the bucket. Returns whether all other stripes are complete."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unfilled() or (self._has_ended and not self._written))
            self._content = None
            return not self._unfilled()

    def wait_for_next(self, stripe: int, header: Header, who: str) -> memoryview | None:
        """Waits until stripe 0 has begun the bucket that comes next on this stripe. Returns the bucket's memory.

        None: it is dropped.

        Raises:
            ConnectionEnded: the link is lost.
            RemoteProtocolError: stripe 0 has begun another bucket.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._num_begun > self._num_filled[stripe])
            if self._has_ended:
                raise ConnectionEnded(who, "was left")
            if header != self._header:
                raise RemoteProtocolError(f"sent stripes of different buckets at once: {header}, {self._header}")
            self._written.add(stripe)
            return self._content

    def written(self, stripe: int, is_complete: bool) -> None:
        """Call it when the thread of a stripe has stopped writing into the bucket."""
        with self._changed:
            self._written.discard(stripe)
            self._num_filled[stripe] += is_complete
            self._changed.notify_all()

    def end(self) -> None:
        """Call it when the link is lost: no more stripes are written."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _unfilled(self) -> set[int]:
        return {stripe for stripe, number in self._num_filled.items() if number < self._num_begun}


def _receive_header(stream: ByteStream) -> Header:
    head = bytearray(BUCKET_HEADER.size)
    stream.receive_into(memoryview(head))
    return BUCKET_HEADER.unpack(head)
