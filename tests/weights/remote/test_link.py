"""Links over real TCP connections: buckets of every size in stripes, streams in any order, and streams that fail."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.weights.remote.nodes import PATIENCE_S, wait_for

from keepstep.weights.memory.buffers import Fill, SlotBuffer, SlotPart
from keepstep.weights.remote.link import NodeLink
from keepstep.weights.remote.messages import BUCKET_HEADER
from keepstep.weights.remote.stream import ByteStream
from keepstep.weights.remote.switch import BucketInSlot

SLOT_BYTES = 1 << 20


def connected() -> tuple[socket.socket, socket.socket]:
    """The two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = socket.create_connection(server.getsockname())
        return caller, server.accept()[0]


class Receiver:
    """The receiving end of a link, with one slot for all buckets."""

    def __init__(self, control: socket.socket, streams: list[socket.socket]) -> None:
        self.slot = SlotPart(SlotBuffer.create(1, SLOT_BYTES), 0, SLOT_BYTES)
        self.came: list[tuple[int, int, bytes]] = []
        self.reasons: list[str] = []
        self.wants_buckets = True
        self.has_given_back = threading.Event()
        """The slot, with which nothing is written into it any more."""
        self.link = NodeLink(ByteStream(control, "s"), [ByteStream(each, "s") for each in streams], PATIENCE_S)
        self.link.start(lambda message: None, self.reasons.append, self._bring)

    def _bring(self, update: int, bucket: int, num_bytes: int, fill: Fill) -> None:
        part = SlotPart(self.slot.buffer, 0, num_bytes)
        try:
            fill(part if self.wants_buckets else None)
        finally:
            self.has_given_back.set()
        self.came.append((update, bucket, bytes(part.content)))


@contextlib.contextmanager
def receiving(num_streams: int, order: Callable[[list[socket.socket]], None]) -> Iterator[tuple[Receiver, list]]:
    """A receiver, and the other ends of its control connection and of its streams; ``order`` changes its streams'."""
    control, *streams = (connected() for _ in range(1 + num_streams))
    ends = [each[1] for each in streams]
    order(ends)
    receiver = Receiver(control[1], ends)
    try:
        yield receiver, [control[0], *(each[0] for each in streams)]
    finally:
        receiver.link.close("is over")
        receiver.link.join()
        for sock in (control[0], *(each[0] for each in streams)):
            sock.close()


@pytest.mark.parametrize("num_streams", [1, 2, 3, 8])
def test_buckets_of_any_size_come_whole_and_in_order(num_streams: int) -> None:
    """The receiver's streams stand in another order than the sender's; buckets are released when they have left."""
    drawn = random.Random(num_streams)
    sizes = [1, num_streams - 1, num_streams, num_streams + 1, SLOT_BYTES, *drawn.choices(range(1, SLOT_BYTES), k=8)]
    contents = [drawn.randbytes(size) for size in sizes if size]
    with receiving(num_streams, drawn.shuffle) as (receiver, (control, *streams)):
        sender = NodeLink(ByteStream(control, "r"), [ByteStream(each, "r") for each in streams], PATIENCE_S)
        sender.start(lambda message: None, lambda reason: None, None)
        buffer = SlotBuffer.create(len(contents), SLOT_BYTES)
        released: list[int] = []
        for index, content in enumerate(contents):
            part = SlotPart(buffer, index, len(content))
            part.content[:] = content
            sender.ship(BucketInSlot(7, index, part, lambda index=index: released.append(index)))
        wait_for(lambda: len(receiver.came) == len(contents))
        sender.close("is over")
        sender.join()
    assert receiver.came == [(7, index, content) for index, content in enumerate(contents)]
    assert released == list(range(len(contents)))
    assert receiver.link.rate.bytes_per_s > 0


def test_buckets_that_nobody_wants_are_dropped() -> None:
    with receiving(2, list.reverse) as (receiver, (_control, *streams)):
        receiver.wants_buckets = False
        for stripe, stream in enumerate(streams):
            stream.sendall(bytes([stripe]) + BUCKET_HEADER.pack(0, 1, 5, 8) + b"abcd")
        wait_for(lambda: len(receiver.came) == 1)
    assert receiver.came == [(1, 5, bytes(8))]


def test_a_bucket_that_nobody_wants_takes_no_memory_however_large_it_is_said_to_be() -> None:
    with receiving(2, list.reverse) as (receiver, (_control, *streams)):
        receiver.wants_buckets = False
        for stripe, stream in enumerate(streams):
            stream.sendall(bytes([stripe]) + BUCKET_HEADER.pack(0, 1, 5, 1 << 62) + bytes(1 << 20))
        streams[0].close()
        receiver.link.join()
    (reason,) = receiver.reasons
    assert reason.startswith("has closed the connection")


def test_an_unforeseen_error_in_a_thread_ends_the_link_with_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    """Signs of life come from another thread, so the peer would wait."""
    with receiving(1, list.reverse) as (receiver, (_control, stream)):
        receiver.slot.buffer.close()  # what it brings a bucket into
        stream.sendall(bytes([0]) + BUCKET_HEADER.pack(0, 1, 0, 8) + b"abcdefgh")
        receiver.link.join()
    (reason,) = receiver.reasons
    assert reason == "was left because of an error: ValueError: the buffer is closed"
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_the_slot_is_given_back_when_no_stream_writes_into_it(fails: int) -> None:
    """One of three streams ends in the middle of its stripe. What the others bring later is written nowhere."""
    with receiving(3, list.reverse) as (receiver, (_control, *streams)):
        for stripe, stream in enumerate(streams):
            stream.sendall(bytes([stripe]) + BUCKET_HEADER.pack(0, 1, 0, 24) + b"abcd")
        wait_for(lambda: bytes(receiver.slot.content[:24]) == b"abcd\0\0\0\0" * 3)
        assert not receiver.has_given_back.is_set()
        streams[fails].close()
        assert receiver.has_given_back.wait(PATIENCE_S)
        before = bytes(receiver.slot.content[:24])
        for stripe in {0, 1, 2} - {fails}:
            with contextlib.suppress(OSError):  # it has hung up on it
                streams[stripe].sendall(b"efgh")
        receiver.link.join()
        assert bytes(receiver.slot.content[:24]) == before == b"abcd\0\0\0\0" * 3
        assert receiver.came == []
    assert receiver.reasons == ["has closed the connection"]


@pytest.mark.parametrize("stripe", [0, 2])
def test_a_stripe_that_another_stream_brings_or_that_there_is_none_of(stripe: int) -> None:
    with receiving(2, list.reverse) as (receiver, (_control, *streams)):
        streams[0].sendall(bytes([0]) + BUCKET_HEADER.pack(0, 1, 0, 8) + b"abcd")
        wait_for(lambda: bytes(receiver.slot.content[:4]) == b"abcd")
        streams[1].sendall(bytes([stripe]))
        assert receiver.has_given_back.wait(PATIENCE_S)
        receiver.link.join()
    assert receiver.came == []
    assert receiver.reasons == [f"began a stream with stripe {stripe} of 2"]


def test_a_link_without_streams_gives_a_bucket_back() -> None:
    """As the root's link to a node that another one feeds, if that node asks for weights there."""
    caller, end = connected()
    with caller:
        link = NodeLink(ByteStream(end, "s"), (), PATIENCE_S)
        link.start(lambda message: None, lambda reason: None, None)
        released: list[int] = []
        link.ship(BucketInSlot(1, 0, SlotPart(SlotBuffer.create(1, 8), 0, 8), lambda: released.append(0)))
        assert released == [0]
        link.close("is over")
        link.join()


def test_stripes_of_different_buckets() -> None:
    with receiving(2, list.reverse) as (receiver, (_control, *streams)):
        for stripe, stream in enumerate(streams):
            stream.sendall(bytes([stripe]) + BUCKET_HEADER.pack(0, 1, stripe, 8) + b"abcd")
        assert receiver.has_given_back.wait(PATIENCE_S)
        receiver.link.join()
    assert receiver.came == []
    (reason,) = receiver.reasons
    assert reason.startswith("sent stripes of different buckets at once: (0, 1, 1, 8)")


def test_a_link_that_is_lost_at_once_ends_when_all_its_threads_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other end hangs up, and the link's first thread is through before the second one begins."""
    caller, end = connected()
    caller.close()
    link = NodeLink(ByteStream(end, "s"), (), PATIENCE_S)
    joining: list[threading.Thread] = []
    begin = link.run

    def lost(reason: str) -> None:
        thread = threading.Thread(target=link.join)
        thread.start()
        joining.append(thread)

    def run(name: str, work: Callable[[], None]) -> None:
        if name == "keepstep-link-write":
            wait_for(lambda: bool(joining))
            joining[0].join(0.1)
            assert joining[0].is_alive(), "it has not waited for the second thread"
        begin(name, work)

    monkeypatch.setattr(link, "run", run)
    link.start(lambda message: None, lost, None)
    joining[0].join(PATIENCE_S)
    assert not joining[0].is_alive()
