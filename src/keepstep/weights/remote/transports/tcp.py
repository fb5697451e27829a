"""Buckets over TCP in stripes: each stream of a link carries one part of every bucket, at the same time.

A bucket that used only one of several streams would get only that stream's share of the bandwidth, on each link of a
chain of nodes. In stripes it gets the whole bandwidth. A stream begins with the number of its stripe, in one byte. The
parts of all buckets follow, in the same order on each stream.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Sequence

from keepstep.errors import RemoteProtocolError
from keepstep.weights.channels.connection import ConnectionEnded
from keepstep.weights.memory.buffers import SlotPart
from keepstep.weights.remote.link import Bring, NodeLink
from keepstep.weights.remote.messages import BUCKET_HEADER, AnyLinkMessage
from keepstep.weights.remote.stream import ByteStream
from keepstep.weights.remote.switch import BucketInSlot

Header = tuple[int, ...]
"""The fields of `BUCKET_HEADER`."""


class TcpTransport:
    """See `keepstep.weights.remote.link.BucketTransport`."""

    def __init__(self, streams: Sequence[ByteStream]) -> None:
        """Takes ownership of ``streams``, the streams of one link. The order may differ between the two ends."""
        self._streams = streams
        self._outgoing: list[queue.SimpleQueue[_OutgoingBucket | None]] = [queue.SimpleQueue() for _ in streams]
        self._incoming = _IncomingBucket(len(streams))

    def start(self, link: NodeLink, bring: Bring | None) -> None:
        """See `BucketTransport`. A thread for each stream."""
        for stripe, stream in enumerate(self._streams):
            work = functools.partial(self._send_stripes, stream, stripe)
            if bring is not None:
                work = functools.partial(self._receive, link, stream, bring)
            link.run("keepstep-stream", work)

    def ship(self, bucket: BucketInSlot, num_messages: int) -> None:
        """See `BucketTransport`."""
        outgoing = _OutgoingBucket(bucket, num_messages, len(self._streams))
        for each in self._outgoing:
            each.put(outgoing)

    def hear(self, message: AnyLinkMessage) -> bool:
        """See `BucketTransport`. It has no messages of its own."""
        return False

    def end(self) -> None:
        """See `BucketTransport`. A thread that receives may call it too, before the link does."""
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
        """See `BucketTransport`."""
        for stream in self._streams:
            stream.close()

    def _part(self, content: memoryview, stripe: int) -> memoryview:
        num_bytes, num_stripes = len(content), len(self._streams)
        return content[num_bytes * stripe // num_stripes : num_bytes * (stripe + 1) // num_stripes]

    # ---- threads ----------------------------------------------------------------------------------------------------

    def _send_stripes(self, stream: ByteStream, stripe: int) -> None:
        stream.send([bytes([stripe])])
        while (outgoing := self._outgoing[stripe].get()) is not None:
            bucket = outgoing.bucket
            try:
                content = bucket.part.content
                header = BUCKET_HEADER.pack(outgoing.num_messages, bucket.update, bucket.bucket, len(content))
                stream.send([header, self._part(content, stripe)])
            finally:
                outgoing.left()
        raise ConnectionEnded(stream.who, "was left")

    def _receive(self, link: NodeLink, stream: ByteStream, bring: Bring) -> None:
        first = bytearray(1)
        stream.receive_into(memoryview(first))
        (stripe,) = first
        self._incoming.claim(stripe)
        if stripe == 0:
            self._receive_buckets(link, stream, bring)
        else:
            self._receive_stripes(stream, stripe)

    def _receive_buckets(self, link: NodeLink, stream: ByteStream, bring: Bring) -> None:
        """Receives the first stripe of each bucket. Its thread also finds the bucket's slot."""
        while True:
            header = _receive_header(stream)
            num_messages, update, bucket, num_bytes = header
            link.wait_for_messages(num_messages)
            bring(update, bucket, num_bytes, functools.partial(self._fill, link, stream, header))

    def _fill(self, link: NodeLink, stream: ByteStream, header: Header, part: SlotPart | None) -> None:
        """Receives a bucket; one that no consumer wants any more is read and dropped."""
        began_s, num_bytes = time.monotonic(), header[-1]
        content = memoryview(bytearray(num_bytes)) if part is None else part.content
        self._incoming.begin(header, content)
        try:
            stream.receive_into(self._part(content, 0))
        except BaseException:  # the threads of the other streams must stop writing
            self.end()
            raise
        finally:  # no thread may write into the slot after this returns
            is_complete = self._incoming.wait_for_others()
        if not is_complete:
            raise ConnectionEnded(link.who, "has closed one of its streams")
        link.rate.came(num_bytes, began_s, time.monotonic())

    def _receive_stripes(self, stream: ByteStream, stripe: int) -> None:
        """Receives another stripe of each bucket, into the slot that the first stripe's thread has found."""
        while True:
            header = _receive_header(stream)
            is_complete = False
            try:
                stream.receive_into(self._part(self._incoming.wait_for_next(stripe, header, stream.who), stripe))
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
        self._content = memoryview(b"")
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

    def begin(self, header: Header, content: memoryview) -> None:
        """Begins a bucket. Its bytes are written to ``content``."""
        with self._changed:
            self._num_begun += 1
            self._header, self._content = header, content
            self._changed.notify_all()

    def wait_for_others(self) -> bool:
        """Waits until no other thread writes into the bucket. Returns whether all other stripes are complete."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unfilled() or (self._has_ended and not self._written))
            self._content = memoryview(b"")
            return not self._unfilled()

    def wait_for_next(self, stripe: int, header: Header, who: str) -> memoryview:
        """Waits until stripe 0 has begun the bucket that comes next on this stripe. Returns the bucket's memory.

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
