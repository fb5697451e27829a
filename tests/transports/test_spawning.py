"""What an agent and its spawner say to each other."""

import os
import socket
from collections.abc import Iterator

import msgspec
import pytest

from keepstep.errors import RemoteProtocolError
from keepstep.transports.spawning import (
    SpawnerReady,
    SpawnWorker,
    WorkerExited,
    WorkerSpawned,
    decode_report,
    receive_request,
    send_request,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("length", [0, 10, 1 << 20])
def test_a_request_arrives_with_its_descriptors(pair: tuple[socket.socket, socket.socket], length: int) -> None:
    request = SpawnWorker(3, ("script.py", "x" * length), False, True, {"A": "ü"}, True, False)
    read, write = os.pipe()
    send_request(pair[0], request, [write, read])
    received = receive_request(pair[1])
    assert received is not None
    assert received[0] == request
    their_write, their_read = received[1]
    assert len({read, write, their_read, their_write}) == 4
    os.close(write)
    os.write(their_write, b"x")
    assert os.read(read, 1) == b"x"
    for descriptor in (read, their_write, their_read):
        os.close(descriptor)


def test_requests_leave_nothing_open_and_keep_their_order(pair: tuple[socket.socket, socket.socket]) -> None:
    before = os.listdir("/proc/self/fd")
    for number in range(3):
        send_request(pair[0], SpawnWorker(number, ("script.py",), False, False, {}, False, False), [])
    received = [receive_request(pair[1]) for _ in range(3)]
    assert [entry[0].worker for entry in received if entry is not None] == [0, 1, 2]
    assert os.listdir("/proc/self/fd") == before


def test_the_end_of_the_stream(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].close()
    assert receive_request(pair[1]) is None


def test_an_end_with_unread_reports_is_an_end_too(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].send(msgspec.json.encode(SpawnerReady(5)))
    pair[0].close()
    assert receive_request(pair[1]) is None


@pytest.mark.parametrize("report", [SpawnerReady(5), WorkerSpawned(1, 77), WorkerExited(1, 77, -9, True, 2.5)], ids=str)
def test_a_report_is_read_as_it_was_written(report: SpawnerReady | WorkerSpawned | WorkerExited) -> None:
    assert decode_report(msgspec.json.encode(report)) == report


@pytest.mark.parametrize("data", [b"", b"{}", b'{"type":"WorkerSpawned","worker":1}', b"\xff"])
def test_what_is_no_report_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not a spawner's report"):
        decode_report(data)
