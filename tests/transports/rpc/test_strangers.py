"""Which connections are closed when there are too many without a token, with plain sockets in the place of gRPC's."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from keepstep.transports.rpc.strangers import StrangerLimit

CROWD, OTHER = "127.0.0.2", "127.0.0.3"


class Listening:
    """A port, and the connections that it has accepted."""

    def __init__(self, family: socket.AddressFamily, opened: contextlib.ExitStack) -> None:
        self._opened = opened
        self._socket = opened.enter_context(socket.socket(family))
        if family is socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.bind(("::" if family is socket.AF_INET6 else "127.0.0.1", 0))
        self._socket.listen()
        self.port = self._socket.getsockname()[1]

    def connect(self, host: str) -> socket.socket:
        """Opens a connection from a host, and accepts it. Returns the client's end."""
        client = socket.create_connection(("127.0.0.1", self.port), source_address=(host, 0))
        self._opened.enter_context(client)
        self._opened.enter_context(self._socket.accept()[0])
        client.setblocking(False)
        return client


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["ipv4", "both"])
def listening(request: pytest.FixtureRequest) -> Iterator[Listening]:
    with contextlib.ExitStack() as opened:
        yield Listening(request.param, opened)


def is_open(client: socket.socket) -> bool:
    try:
        return bool(client.recv(1))
    except BlockingIOError:
        return True


def address(client: socket.socket) -> str:
    """The address as gRPC tells it."""
    host, port = client.getsockname()
    return f"{host}:{port}"


def test_no_more_are_open_than_may_be_and_the_oldest_of_the_greatest_crowd_go(listening: Listening) -> None:
    limit = StrangerLimit(listening.port, 4)
    first = listening.connect(OTHER)
    crowd = [listening.connect(CROWD) for _ in range(3)]
    assert limit.look(0.0) == 0
    crowd += [listening.connect(CROWD) for _ in range(3)]
    assert limit.look(0.0) == 3
    assert [is_open(each) for each in (first, *crowd)] == [True, False, False, False, True, True, True]


def test_admitted_connections_are_not_counted_and_not_closed(listening: Listening) -> None:
    limit = StrangerLimit(listening.port, 1)
    agents = [listening.connect(CROWD) for _ in range(5)]
    for agent in agents:
        limit.admit(address(agent))
    strangers = [listening.connect(CROWD) for _ in range(3)]
    assert limit.look(0.0) == 2
    assert all(map(is_open, agents))
    assert [is_open(each) for each in strangers] == [False, False, True]


def test_an_admission_ends_with_the_call_or_after_its_time(listening: Listening) -> None:
    limit = StrangerLimit(listening.port, 1)
    caller, agent, newest = (listening.connect(CROWD) for _ in range(3))
    limit.admit(address(agent))
    limit.admit(address(caller), 10.0)
    assert limit.look(9.0) == 0
    assert limit.look(10.0) == 1
    assert [is_open(each) for each in (caller, agent, newest)] == [False, True, True]
    limit.forget(address(agent))
    newest.close()
    listening.connect(CROWD)
    assert limit.look(11.0) >= 1
    assert not is_open(agent)


def test_other_files_of_the_process_are_left_alone(listening: Listening) -> None:
    limit = StrangerLimit(listening.port, 1)
    with contextlib.ExitStack() as opened:
        other = Listening(socket.AF_INET, opened)
        elsewhere = [other.connect(CROWD) for _ in range(3)]
        ours, theirs = map(opened.enter_context, socket.socketpair())
        listening.connect(CROWD)
        assert limit.look(0.0) == 0
        assert all(map(is_open, elsewhere))
        ours.send(b"x")
        assert theirs.recv(1) == b"x"
        assert is_open(listening.connect(CROWD))  # it still listens
