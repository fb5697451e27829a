"""Who is attached to a device: who comes, who takes whose place, and who has gone."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from tests.weights.channels.descriptors import given_back
from tests.weights.channels.pairs import connection_pair
from tests.worker.ranks import DEADLINE_S

from keepstep.errors import PeerLost
from keepstep.protocol.transfer.layout import Consumer, Layout
from keepstep.protocol.transfer.messages import MovementSeen, ProxiedReader, SaidTo, UpdateBegan, UpdateBeganFor
from keepstep.protocol.transfer.plan import Limits
from keepstep.weights.channels.connection import Connection, ConnectionEnded, ConnectionStalled
from keepstep.weights.device.subscriber_registry import Attached, Proxy, SubscriberRegistry, show_sign, tell, tell_begin

SOON_S = 0.05
Come = Callable[[str], Connection]


def later() -> float:
    return time.monotonic() + DEADLINE_S


def no_welcome() -> None:
    """Tells a newcomer nothing."""


@pytest.fixture
def attendance() -> Iterator[SubscriberRegistry]:
    with given_back():
        made = SubscriberRegistry()
        yield made
        made.close()


@pytest.fixture
def come(attendance: SubscriberRegistry) -> Iterator[Come]:
    """Attaches a consumer of this name; its own end of the connection."""
    ends = []

    def come(name: str) -> Connection:
        ours, theirs = connection_pair(name)
        ends.append(theirs)
        attendance.add(Attached(Consumer(name, None), ours), no_welcome)
        return theirs

    yield come
    for end in ends:
        end.close()


def present(attendance: SubscriberRegistry) -> list[str]:
    return [each.name for each in attendance.present()]


def has_ended(connection: Connection) -> bool:
    """Whether the other side has closed the connection."""
    try:
        connection.receive_now()
    except ConnectionEnded:
        return True
    return False


def test_they_are_present_in_the_order_in_which_they_came(attendance: SubscriberRegistry, come: Come) -> None:
    assert present(attendance) == []
    for name in ("b", "a", "c"):
        come(name)
    assert present(attendance) == ["b", "a", "c"]
    assert present(attendance) == ["b", "a", "c"]


def test_what_is_said_to_one_comes_to_it(attendance: SubscriberRegistry, come: Come) -> None:
    ends = {name: come(name) for name in ("a", "b")}
    for number, each in enumerate(attendance.present()):
        tell([each], MovementSeen(number))
    assert ends["a"].receive_now() == MovementSeen(0)
    assert ends["b"].receive_now() == MovementSeen(1)


def test_a_newer_one_of_the_same_name_takes_the_place_of_the_older(attendance: SubscriberRegistry, come: Come) -> None:
    older, other = come("a"), come("b")
    newer = come("a")
    assert present(attendance) == ["b", "a"]
    assert has_ended(older)
    assert not has_ended(newer)
    assert not has_ended(other)
    tell(attendance.present()[1:], MovementSeen(1))
    assert newer.receive_now() == MovementSeen(1)


def test_a_subscriber_that_has_gone_is_forgotten(attendance: SubscriberRegistry, come: Come) -> None:
    gone, _stays = come("a"), come("b")
    gone.close()
    assert present(attendance) == ["b"]
    come("a")
    assert present(attendance) == ["b", "a"]


def test_a_subscriber_that_was_sent_away_is_forgotten(attendance: SubscriberRegistry, come: Come) -> None:
    come("a")
    attendance.present()[0].connection.close()
    assert present(attendance) == []


def test_all_are_sent_away_in_the_end(attendance: SubscriberRegistry, come: Come) -> None:
    ends = [come("a"), come("b")]
    attendance.close()
    assert present(attendance) == []
    assert all(has_ended(end) for end in ends)


def test_nobody_is_let_in_after_the_end(attendance: SubscriberRegistry, come: Come) -> None:
    attendance.close()
    with pytest.raises(ConnectionEnded, match="came when all was over"):
        come("a")
    ours, theirs = connection_pair("p")
    with pytest.raises(ConnectionEnded, match="came when all was over"):
        attendance.add_proxy(Proxy("p", ours), no_welcome)
    assert present(attendance) == []
    for end in (ours, theirs):
        end.close()


# ---- Newcomers ------------------------------------------------------------------------------------------------------


def test_a_newcomer_is_present_from_the_moment_in_which_it_knows(attendance: SubscriberRegistry) -> None:
    """No process sees it before, nor the one whose place it takes go."""
    ours, theirs = connection_pair("a")
    welcomed = threading.Event()
    seen: list[list[str]] = []

    def look() -> None:
        welcomed.wait(DEADLINE_S)
        seen.append(present(attendance))

    onlooker = threading.Thread(target=look, daemon=True)
    onlooker.start()

    def welcome() -> None:
        ours.send(MovementSeen(0), later())
        welcomed.set()

    attendance.add(Attached(Consumer("a", None), ours), welcome)
    onlooker.join(DEADLINE_S)
    assert seen == [["a"]]
    assert theirs.receive_now() == MovementSeen(0)
    theirs.close()


def test_a_newcomer_that_cannot_be_welcomed_is_not_present(attendance: SubscriberRegistry, come: Come) -> None:
    older = come("a")
    ours, theirs = connection_pair("a")
    theirs.close()
    with pytest.raises(PeerLost):
        attendance.add(Attached(Consumer("a", None), ours), lambda: ours.send(MovementSeen(0), later()))
    assert present(attendance) == ["a"]
    assert not has_ended(older)
    ours.close()


# ---- Waiting for them -----------------------------------------------------------------------------------------------


def test_they_are_waited_for(attendance: SubscriberRegistry, come: Come) -> None:
    about_to_wait, came = threading.Event(), queue.Queue[bool]()

    def wait() -> None:
        about_to_wait.set()
        came.put(attendance.wait_for(2, 100 * DEADLINE_S))

    threading.Thread(target=wait, daemon=True).start()
    about_to_wait.wait(DEADLINE_S)
    come("a")
    come("b")
    assert came.get(timeout=DEADLINE_S)


def test_too_few_have_come(attendance: SubscriberRegistry, come: Come) -> None:
    assert attendance.wait_for(0, 0.0)
    assert not attendance.wait_for(1, SOON_S)
    come("a")
    come("a")
    assert attendance.wait_for(1, 0.0)
    assert not attendance.wait_for(2, SOON_S)


def test_a_subscriber_that_has_gone_is_not_among_those_who_came(attendance: SubscriberRegistry, come: Come) -> None:
    come("a").close()
    assert not attendance.wait_for(1, SOON_S)
    come("b")
    assert not attendance.wait_for(2, SOON_S)


# ---- One of them ----------------------------------------------------------------------------------------------------


def fill(connection: Connection) -> None:
    """Says so much that the other side, which reads nothing, can take no more."""
    with suppress(ConnectionStalled):
        for number in itertools.count():
            connection.send(MovementSeen(number), 0.0)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.weights.device.subscriber_registry.NOTICE_S", SOON_S)


@pytest.mark.usefixtures("_impatient")
def test_one_who_cannot_be_told_has_to_come_again(attendance: SubscriberRegistry, come: Come) -> None:
    come("a")
    (attached,) = attendance.present()
    fill(attached.connection)
    tell([attached], MovementSeen(0))
    assert attached.connection.is_closed
    assert present(attendance) == []
    tell([attached], MovementSeen(0))


def test_one_who_has_gone_is_told_nothing(attendance: SubscriberRegistry, come: Come) -> None:
    end = come("a")
    (attached,) = attendance.present()
    end.close()
    tell([attached], MovementSeen(0))
    assert attached.connection.is_closed


def test_a_sign_that_cannot_be_shown_does_not_matter(attendance: SubscriberRegistry, come: Come) -> None:
    end = come("a")
    (attached,) = attendance.present()
    fill(attached.connection)
    show_sign([attached], MovementSeen(0))
    assert not attached.connection.is_closed
    assert end.receive_now() == MovementSeen(0)
    end.close()
    show_sign([attached], MovementSeen(0))
    assert not attached.connection.is_closed


# ---- Consumers of other nodes ---------------------------------------------------------------------------------------


@pytest.fixture
def come_by_proxy(attendance: SubscriberRegistry) -> Iterator[Callable[[str, int], tuple[Attached, Connection]]]:
    """Attaches a consumer of another node, by this proxy; the proxy's end of its own connection comes with it."""
    ends: dict[str, Connection] = {}
    others = []

    def come(name: str, number: int) -> tuple[Attached, Connection]:
        if attendance.proxy(name) is None:
            ours, ends[name] = connection_pair(name)
            others.append(ends[name])
            attendance.add_proxy(Proxy(name, ours), no_welcome)
        ours, theirs = connection_pair(f"{name}/{number}")
        others.append(theirs)
        attached = Attached(Consumer(f"{name}/{number}", None), ours, holds=number)
        attached.proxy, attached.number = attendance.proxy(name), number
        attendance.add(attached, no_welcome)
        return attached, ends[name]

    yield come
    for end in others:
        end.close()


ComeByProxy = Callable[[str, int], tuple[Attached, Connection]]
LAYOUT = Layout((), (), (), (), Limits(4096, 2048))


def test_what_all_are_told_goes_to_each_proxy_once(
    attendance: SubscriberRegistry, come: Come, come_by_proxy: ComeByProxy
) -> None:
    here = come("here")
    (_first, one), (_second, same), (_third, two) = (come_by_proxy(*who) for who in [("p", 1), ("p", 2), ("q", 1)])
    assert one is same
    consumers = dict(enumerate(attendance.present()))
    tell_begin(UpdateBeganFor(7, 8, 9, LAYOUT, ()), consumers)
    tell(consumers.values(), MovementSeen(7))
    show_sign(consumers.values(), MovementSeen(7))
    assert [here.receive_now() for _ in range(4)] == [
        UpdateBegan(7, 8, 9, LAYOUT, 0, None), MovementSeen(7), MovementSeen(7), None,
    ]  # fmt: skip
    members = ProxiedReader(1, 1, 1), ProxiedReader(2, 2, 2)
    for end, own, numbers in ((one, members, (1, 2)), (two, (ProxiedReader(1, 3, 1),), (1,))):
        said = SaidTo(numbers, MovementSeen(7))
        assert [end.receive_now() for _ in range(4)] == [UpdateBeganFor(7, 8, 9, LAYOUT, own), said, said, None]


def test_consumers_of_a_proxy_that_has_gone_are_forgotten(
    attendance: SubscriberRegistry, come_by_proxy: ComeByProxy
) -> None:
    _attached, end = come_by_proxy("p", 1)
    come_by_proxy("q", 1)
    end.close()
    assert attendance.proxy("p") is None
    assert present(attendance) == ["q/1"]


def test_a_newer_proxy_takes_the_place_of_the_older(attendance: SubscriberRegistry, come_by_proxy: ComeByProxy) -> None:
    _attached, end = come_by_proxy("p", 1)
    ours, theirs = connection_pair("p")
    attendance.add_proxy(Proxy("p", ours), no_welcome)
    assert present(attendance) == []
    assert has_ended(end)
    assert not has_ended(theirs)
    theirs.close()
