"""Which listener is dialled for a rank, that may be on another node, and for any rank."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.weights.channels.descriptors import given_back
from tests.worker.ranks import DEADLINE_S

from keepstep.protocol.transfer.messages import (
    AnyTransferMessage,
    BufferPlace,
    DeviceCalled,
    FarCalled,
    SubscriberCalled,
    Welcomed,
)
from keepstep.weights.channels.connection import Connection, ConnectionStalled
from keepstep.weights.channels.listener import Listener, dial_any, dial_rank, far_path, listener_path

DEVICE = DeviceCalled(0, 2)
SUBSCRIBER = SubscriberCalled("c", None, 0, None, delta=False, proxied=None)
SOON_S = 0.1
"""For what is not going to come."""


def until_s() -> float:
    return time.monotonic() + DEADLINE_S


@contextlib.contextmanager
def answering(path: Path, rank: int | None) -> Iterator[queue.SimpleQueue[AnyTransferMessage]]:
    """A listener, of a rank, or (None) one that never answers; what it was told."""
    said: queue.SimpleQueue[AnyTransferMessage] = queue.SimpleQueue()
    connections: list[Connection] = []

    def answer(connection: Connection, message: AnyTransferMessage) -> None:
        connections.append(connection)
        if rank is not None:
            connection.send(Welcomed(rank, 2, BufferPlace(3, 4096, None)), until_s())
        said.put(message)

    there = Listener(path, answer)
    yield said
    there.close()
    for connection in connections:
        connection.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with given_back():
        yield tmp_path


def test_a_rank_of_this_node_and_one_of_another(folder: Path) -> None:
    with answering(listener_path(folder, 1), 1) as near, answering(far_path(folder), 5) as far:
        for rank, told, message in ((1, near, DEVICE), (5, far, FarCalled(5, DEVICE))):
            connection, welcomed = dial_rank(folder, rank, DEVICE, until_s())
            assert told.get(timeout=DEADLINE_S) == message
            assert (connection.who, welcomed.rank) == (f"rank {rank}", rank)
            connection.close()


@pytest.mark.parametrize("was_there", [False, True], ids=["first", "again"])
def test_a_rank_that_comes_up_here_while_it_is_looked_for_on_other_nodes(folder: Path, was_there: bool) -> None:
    """No other node has it, so there is no answer from there."""
    if was_there:
        listener_path(folder, 1).touch()  # as a process leaves it that was killed
    found: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    caller = threading.Thread(target=lambda: found.put(dial_rank(folder, 1, DEVICE, until_s())[0]), daemon=True)
    with answering(far_path(folder), None) as far:
        caller.start()
        assert far.get(timeout=DEADLINE_S) == FarCalled(1, DEVICE)
        with answering(listener_path(folder, 1), 1) as near:
            found.get(timeout=DEADLINE_S).close()
            assert near.get(timeout=DEADLINE_S) == DEVICE
        caller.join()


def test_the_message_says_what_is_missing_where_there_is_no_bridge(folder: Path) -> None:
    with pytest.raises(ConnectionStalled, match=r"rank 5 does not answer at .*5\.sock .*each node needs 'keepstep run"):
        dial_rank(folder, 5, DEVICE, time.monotonic() + SOON_S)


def test_a_consumer_goes_to_the_lowest_rank_that_is_there(folder: Path) -> None:
    with pytest.raises(ConnectionStalled, match=r"a publisher does not answer at .*no process listens"):
        dial_any(folder, SUBSCRIBER, time.monotonic() + SOON_S)
    listener_path(folder, 2).touch()  # as a process leaves it that was killed
    with (
        answering(listener_path(folder, 10), 10) as ten,
        answering(listener_path(folder, 9), 9) as nine,
        answering(far_path(folder), 0),
    ):
        connection, _welcomed = dial_any(folder, SUBSCRIBER, until_s())
        assert nine.get(timeout=DEADLINE_S) == SUBSCRIBER
        assert connection.who == "rank 9"
        assert ten.empty()
        connection.close()
