"""A connection between two processes, over real sockets: messages, descriptors, and the end of the other side."""

import itertools
import mmap
import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.weights.channels.descriptors import given_back
from tests.weights.channels.pairs import connection_pair
from tests.worker.ranks import DEADLINE_S, run_ranks

from keepstep.cancel import Cancelled, CancelToken
from keepstep.errors import BufferUnavailable, RemoteProtocolError
from keepstep.protocol.transfer.messages import (
    MAX_BODY_BYTES,
    AnyTransferMessage,
    DevicePrepared,
    MovementSeen,
    Refused,
    SlotFreed,
    encode,
)
from keepstep.weights.channels.connection import (
    INLINE_BYTES,
    MAX_DESCRIPTORS,
    Connection,
    ConnectionEnded,
    ConnectionStalled,
    same_user,
    wait,
)

Pair = tuple[Connection, Connection]

SOON_S = 0.05
"""For what is not going to come; the tests wait as long as that for it, and measure nothing."""


def soon() -> float:
    return time.monotonic() + SOON_S


def later() -> float:
    """For what has to come."""
    return time.monotonic() + DEADLINE_S


@pytest.fixture
def pair() -> Iterator[Pair]:
    with given_back():
        left, right = connection_pair("the other")
        yield left, right
        left.close()
        right.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Connection]]:
    """A connection, and the bare socket at its other end."""
    with given_back():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection = Connection(theirs, "the other")
        yield ours, connection
        ours.close()
        connection.close()


@pytest.fixture
def memory_file() -> Iterator[int]:
    descriptor = os.memfd_create("keepstep-test", os.MFD_CLOEXEC)
    yield descriptor
    os.close(descriptor)


def of_size(num_bytes: int) -> Refused:
    """A message that is so long when it is encoded."""
    message = Refused("x" * num_bytes, False)
    excess = len(encode(message)) - num_bytes
    message = Refused("x" * (num_bytes - excess), False)
    assert len(encode(message)) == num_bytes
    return message


def send(connection: Connection, *messages: AnyTransferMessage) -> None:
    for message in messages:
        connection.send(message, later())


def fill(connection: Connection, message: AnyTransferMessage) -> int:
    """Sends the same until nothing goes in any more; how often."""
    for sent in itertools.count():
        try:
            connection.send(message, soon())
        except ConnectionStalled:
            return sent
    raise AssertionError


# ---- Messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_bytes", [100, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1, 208 << 10, 1 << 20, 5_000_000]
)
def test_messages_of_every_size_arrive(pair: Pair, num_bytes: int) -> None:
    left, right = pair
    message = of_size(num_bytes)
    send(left, message, MovementSeen(1))
    assert right.receive(later()) == message
    assert right.receive(later()) == MovementSeen(1)
    assert right.receive_now() is None


@settings(max_examples=30)
@given(st.lists(st.sampled_from([50, INLINE_BYTES, INLINE_BYTES + 1, 100_000]), max_size=5))
def test_messages_come_in_their_order_whatever_their_size(sizes: list[int]) -> None:
    left, right = connection_pair("the other")
    sent = [message for number, size in enumerate(sizes) for message in (of_size(size), MovementSeen(number))]
    send(left, *sent)
    assert [right.receive_now() for _ in sent] == sent
    assert right.receive_now() is None
    left.close()
    right.close()


def test_a_long_message_travels_in_a_file(raw: tuple[socket.socket, Connection]) -> None:
    theirs, connection = raw
    connection.send(of_size(INLINE_BYTES + 1), later())
    packet, (descriptor,), _flags, _address = socket.recv_fds(theirs, 100, 5)
    assert packet == b"f"
    assert os.fstat(descriptor).st_size == INLINE_BYTES + 1
    os.close(descriptor)


def too_long_to_send(rank: int, size: int) -> str:
    """A process that may not have files of a mebibyte; memory files are files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))
    left, right = connection_pair("the other")
    with pytest.raises(BufferUnavailable) as caught:
        left.send(of_size(1 << 20), later())
    left.send(MovementSeen(1), later())
    assert right.receive(later()) == MovementSeen(1)
    return str(caught.value)


def test_a_message_for_which_there_is_no_memory_is_an_error_and_not_the_end() -> None:
    (message,) = run_ranks(1, too_long_to_send)
    assert re.fullmatch(r"a message of 10\d{5} bytes does not fit into a memory file", message)


def test_both_ends_may_send_at_the_same_time(pair: Pair) -> None:
    left, right = pair
    numbers = range(200)
    threads = [
        threading.Thread(target=send, args=[connection, *map(MovementSeen, numbers)], daemon=True)
        for connection in (left, right)
    ]
    for thread in threads:
        thread.start()
    for connection in (left, right):
        assert [connection.receive(later()) for _ in numbers] == [MovementSeen(number) for number in numbers]
    for thread in threads:
        thread.join()


def test_where_nothing_is_nothing_is_waited_for(pair: Pair) -> None:
    assert pair[0].receive_now() is None
    with pytest.raises(ConnectionStalled, match="the other says nothing"):
        pair[0].receive(soon())


# ---- Descriptors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [100, INLINE_BYTES + 1], ids=["short", "long"])
def test_a_descriptor_travels_beside_a_message(pair: Pair, memory_file: int, num_bytes: int) -> None:
    left, right = pair
    os.write(memory_file, b"what is in it")
    left.send(of_size(num_bytes), later(), [memory_file])
    assert right.receive(later()) == of_size(num_bytes)
    taken = right.take_descriptor()
    assert taken != memory_file
    assert not os.get_inheritable(taken)
    assert os.pread(taken, 100, 0) == os.pread(memory_file, 100, 0) == b"what is in it"
    os.close(taken)
    with pytest.raises(RemoteProtocolError, match="the other sent no descriptor where one belongs"):
        right.take_descriptor()


def test_descriptors_are_taken_in_the_order_in_which_they_came(pair: Pair) -> None:
    left, right = pair
    sent = [os.memfd_create(f"keepstep-{number}", os.MFD_CLOEXEC) for number in range(3)]
    left.send(MovementSeen(1), later(), sent[:1])
    left.send(of_size(INLINE_BYTES + 1), later(), sent[1:2])
    left.send(MovementSeen(2), later(), sent[2:])
    for _ in sent:
        right.receive(later())
    taken = [right.take_descriptor() for _ in sent]
    assert [os.fstat(each).st_ino for each in taken] == [os.fstat(each).st_ino for each in sent]
    for each in (*sent, *taken):
        os.close(each)


@pytest.mark.parametrize("num_bytes", [100, INLINE_BYTES + 1], ids=["short", "long"])
def test_descriptors_that_are_not_taken_are_closed_with_the_connection(
    pair: Pair, memory_file: int, num_bytes: int
) -> None:
    """Both those that were received, and those that are still on their way."""
    left, right = pair
    for _ in range(3):
        left.send(of_size(num_bytes), later(), [memory_file])
    right.receive(later())
    right.close()
    right.close()


def test_a_mapping_outlives_the_line_that_brought_its_descriptor(pair: Pair, memory_file: int) -> None:
    left, right = pair
    os.ftruncate(memory_file, 100)
    left.send(MovementSeen(1), later(), [memory_file])
    right.receive(later())
    taken = right.take_descriptor()
    right.close()
    with mmap.mmap(taken, 100) as mapped:
        mapped[0] = 7
    os.close(taken)
    assert os.pread(memory_file, 1, 0) == b"\x07"


# ---- The other end --------------------------------------------------------------------------------------------------


def test_what_was_said_before_the_end_is_heard(pair: Pair) -> None:
    left, right = pair
    assert not right.has_ended
    send(left, MovementSeen(1), of_size(INLINE_BYTES + 1))
    left.close()
    assert right.has_ended
    assert right.receive(later()) == MovementSeen(1)
    assert right.receive(later()) == of_size(INLINE_BYTES + 1)
    with pytest.raises(ConnectionEnded, match="the other has closed the connection"):
        right.receive(later())
    with pytest.raises(ConnectionEnded, match="the other has closed the connection"):
        right.send(MovementSeen(2), later())
    assert not right.is_closed
    right.close()
    assert right.is_closed


def test_last_messages_are_heard_from_one_that_left_something_unread(pair: Pair) -> None:
    left, right = pair
    left.send(MovementSeen(1), later())
    right.send(Refused("full", stale=False), later())
    right.close()
    assert left.receive(later()) == Refused("full", stale=False)
    with pytest.raises(ConnectionEnded):
        left.receive(later())


def test_the_end_is_seen_where_something_was_left_unread(pair: Pair) -> None:
    left, right = pair
    send(right, MovementSeen(1))
    left.close()
    with pytest.raises(ConnectionEnded):
        right.receive(later())


@pytest.mark.parametrize("num_bytes", [100, INLINE_BYTES, INLINE_BYTES + 1], ids=["short", "packet", "file"])
def test_a_peer_that_reads_nothing_stalls_the_line_and_not_for_ever(pair: Pair, num_bytes: int) -> None:
    left, right = pair
    message = of_size(num_bytes)
    sent = fill(left, message)
    assert sent > 0
    with pytest.raises(ConnectionStalled, match="the other reads nothing"):
        left.send(message, soon())
    assert [right.receive(later()) for _ in range(sent)] == [message] * sent
    send(left, MovementSeen(1))
    assert right.receive(later()) == MovementSeen(1)


def dying_rank(rank: int, size: int, path: Path) -> str:
    """The first rank listens to the second, which says something and is killed then."""
    if rank == 1:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection = Connection(sock, "rank 0")
        while sock.connect_ex(os.fspath(path / "listener")):
            wait([], soon())
        connection.send(of_size(INLINE_BYTES + 1), later())
        connection.receive(later())
        os.kill(os.getpid(), signal.SIGKILL)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(os.fspath(path / "fresh"))
        listening.listen(1)
        os.rename(path / "fresh", path / "listener")
        connection = Connection(listening.accept()[0], "rank 1")
    assert connection.receive(later()) == of_size(INLINE_BYTES + 1)
    connection.send(MovementSeen(1), later())
    assert wait([connection], later()) == [connection]
    try:
        return str(connection.receive_now())
    except ConnectionEnded as error:
        return str(error)


def test_the_end_of_a_killed_process_is_seen_at_once(tmp_path: Path) -> None:
    told, _nothing = run_ranks(2, dying_rank, tmp_path, silent=frozenset({1}))
    assert told.startswith("rank 1 has closed the connection")


def test_who_is_at_the_other_end_is_known_from_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert same_user(left)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert not same_user(left)
    left.close()
    right.close()


# ---- Garbage --------------------------------------------------------------------------------------------------------

GARBAGE = {
    "no kind": b"x",
    "no message": b"m",
    "no message of ours": b"m\xff\xff",
    "more than a message": b"m" + encode(MovementSeen(1)) + b"\x00",
    "not unicode": b"m" + encode(Refused("ab", False)).replace(b"ab", b"\xff\xfe"),
    "more than a packet": b"m" + bytes(INLINE_BYTES + 1),
    "no file": b"f",
}


@pytest.mark.parametrize("packet", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused_and_the_line_goes_on(raw: tuple[socket.socket, Connection], packet: bytes) -> None:
    theirs, connection = raw
    theirs.send(packet)
    theirs.send(b"m" + encode(MovementSeen(1)))
    with pytest.raises(RemoteProtocolError):
        connection.receive_now()
    assert connection.receive_now() == MovementSeen(1)


@settings(max_examples=50)
@given(st.binary(min_size=1, max_size=60))
def test_random_packets_are_refused(packet: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = Connection(theirs, "the other")
    ours.send(packet)
    with pytest.raises(RemoteProtocolError):
        connection.receive_now()
    ours.close()
    connection.close()


@pytest.mark.parametrize("packet", [b"x", b"m\xff", b"f and more", b"m" + encode(SlotFreed(1, 2))])
@pytest.mark.parametrize("count", [1, MAX_DESCRIPTORS, MAX_DESCRIPTORS + 3])
def test_descriptors_that_come_with_anything_are_not_kept(
    raw: tuple[socket.socket, Connection], memory_file: int, packet: bytes, count: int
) -> None:
    theirs, connection = raw
    with given_back():
        socket.send_fds(theirs, [packet], [memory_file] * count)
        if packet.endswith(encode(SlotFreed(1, 2))):
            assert connection.receive_now() == SlotFreed(1, 2)
        else:
            with pytest.raises(RemoteProtocolError):
                connection.receive_now()
        for _ in range(len(connection._descriptors)):
            os.close(connection.take_descriptor())


@pytest.mark.parametrize("packet", [b"x", b"f and more", b"F"])
def test_a_message_in_a_file_counts_only_where_it_is_said_to_be_one(
    raw: tuple[socket.socket, Connection], memory_file: int, packet: bytes
) -> None:
    theirs, connection = raw
    os.write(memory_file, encode(MovementSeen(1)))
    socket.send_fds(theirs, [packet], [memory_file])
    with pytest.raises(RemoteProtocolError, match="the other sent a packet that is no message"):
        connection.receive_now()


def test_an_empty_packet_with_a_descriptor_leaves_nothing(
    raw: tuple[socket.socket, Connection], memory_file: int
) -> None:
    """It looks like the end of the connection."""
    theirs, connection = raw
    with given_back():
        socket.send_fds(theirs, [b""], [memory_file])
        with pytest.raises((ConnectionEnded, RemoteProtocolError)):
            connection.receive_now()


@pytest.mark.parametrize("what", ["a pipe", "a socket", "a folder", "only to be written", "empty", "no message"])
def test_a_file_that_is_no_message_is_refused(raw: tuple[socket.socket, Connection], tmp_path: Path, what: str) -> None:
    theirs, connection = raw
    (tmp_path / "file").write_bytes(b"\xff" * 10 if what == "no message" else b"")
    ends = [*os.pipe()]
    match what:
        case "a pipe":
            sent = ends[0]
        case "a socket":
            sent = theirs.fileno()
        case "a folder":
            ends.append(sent := os.open(tmp_path, os.O_RDONLY))
        case "only to be written":
            ends.append(sent := os.open(tmp_path / "file", os.O_WRONLY))
        case _:
            ends.append(sent := os.open(tmp_path / "file", os.O_RDONLY))
    socket.send_fds(theirs, [b"f"], [sent])
    try:
        with given_back(), pytest.raises(RemoteProtocolError):
            connection.receive_now()
    finally:
        for each in ends:
            os.close(each)


def test_a_file_that_is_too_large_is_refused_unread(raw: tuple[socket.socket, Connection], memory_file: int) -> None:
    """A reader shares the place in the file with its sender: it stays where it was."""
    theirs, connection = raw
    os.ftruncate(memory_file, MAX_BODY_BYTES + 1)
    os.lseek(memory_file, 7, os.SEEK_SET)
    socket.send_fds(theirs, [b"f"], [memory_file])
    told = f"the other sent a message of {MAX_BODY_BYTES + 1} bytes: at most {MAX_BODY_BYTES} are allowed"
    with pytest.raises(RemoteProtocolError, match=told):
        connection.receive_now()
    assert os.lseek(memory_file, 0, os.SEEK_CUR) == 7


def test_a_file_is_read_from_its_beginning_wherever_its_sender_was(
    raw: tuple[socket.socket, Connection], memory_file: int
) -> None:
    theirs, connection = raw
    os.write(memory_file, encode(DevicePrepared(3)))
    socket.send_fds(theirs, [b"f"], [memory_file])
    assert connection.receive_now() == DevicePrepared(3)


# ---- Waiting --------------------------------------------------------------------------------------------------------


@pytest.fixture
def flag() -> Iterator[CancelToken]:
    made = CancelToken()
    yield made
    made.close()


def test_lines_on_which_something_has_come(pair: Pair) -> None:
    left, right = pair
    assert wait([left, right], soon()) == []
    send(left, MovementSeen(1))
    assert wait([left, right], later()) == [right]
    send(right, MovementSeen(1))
    assert set(wait([left, right], later())) == {left, right}
    right.receive_now()
    assert wait([left, right], later()) == [left]


def test_the_end_counts_as_something(pair: Pair) -> None:
    left, right = pair
    left.close()
    assert wait([right], later()) == [right]


def test_a_flag_ends_a_wait(pair: Pair, flag: CancelToken) -> None:
    waiting, ended = threading.Event(), threading.Event()

    def wait_for_ever() -> None:
        waiting.set()
        try:
            wait(pair, later(), flag)
        except Cancelled:
            ended.set()

    thread = threading.Thread(target=wait_for_ever, daemon=True)
    thread.start()
    waiting.wait(DEADLINE_S)
    flag.set()
    thread.join(DEADLINE_S)
    assert ended.is_set()


def test_a_flag_that_is_set_ends_every_wait_until_it_is_cleared(pair: Pair, flag: CancelToken) -> None:
    send(pair[0], MovementSeen(1))
    flag.set()
    flag.set()
    for _ in range(2):
        with pytest.raises(Cancelled):
            wait([pair[1]], later(), flag)
    flag.clear()
    flag.clear()
    assert wait([pair[1]], later(), flag) == [pair[1]]


def test_a_flag_can_be_waited_for_as_a_line_can(pair: Pair, flag: CancelToken) -> None:
    assert wait([flag, pair[0]], soon()) == []
    flag.set()
    assert wait([flag, pair[0]], later()) == [flag]
    assert wait([flag], later()) == [flag]
    flag.clear()
    assert wait([flag], soon()) == []


def test_a_flag_that_is_closed_touches_nothing_that_has_its_number_now(flag: CancelToken) -> None:
    number = flag.fileno()
    flag.close()
    other = CancelToken()
    assert other.fileno() == number, "the lowest number that is free"
    flag.set()
    assert wait([other], soon()) == []
    other.set()
    flag.clear()
    assert wait([other], soon()) == [other]
    other.close()
