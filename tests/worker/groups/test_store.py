"""The members' store, spoken over a worker's line, with the controller's rendezvous at the other end."""

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch import distributed as dist

from keepstep.controller.rendezvous import Rendezvous
from keepstep.errors import PeerLost
from keepstep.protocol.messages import StoreRequested
from keepstep.transports.framing import FrameDecoder, frame
from keepstep.worker.groups.store import LinkStore
from keepstep.worker.link import Link

LONG = timedelta(seconds=60)


class Controller:
    """Answers one worker's requests from a `Rendezvous` in generation 1, in a thread of its own."""

    def __init__(self, end: socket.socket) -> None:
        self.rendezvous = Rendezvous()
        self.rendezvous.begin(1)
        self.seen: list[StoreRequested] = []
        self.waits = threading.Event()
        """A request came that has no answer yet."""
        self._end = end
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        decoder = FrameDecoder()
        while data := self._end.recv(1 << 16):
            for message in decoder.feed(data):
                assert isinstance(message, StoreRequested)
                self.seen.append(message)
                answers = self.rendezvous.request(message)
                for answer in answers:
                    self._end.sendall(frame(answer))
                if not answers:
                    self.waits.set()


@pytest.fixture
def line() -> Iterator[tuple[Link, Controller]]:
    # The listener ends the whole process when its agent is gone, so both ends stay open as long as this one lives.
    ours, theirs = socket.socketpair()
    LEFT_OPEN.extend((ours, theirs))
    link = Link(ours, worker=5)
    link.listen(lambda order: None)
    return link, Controller(theirs)


LEFT_OPEN: list[socket.socket] = []


def test_every_operation(line: tuple[Link, Controller]) -> None:
    link, controller = line
    store = LinkStore(link, 1, "world", LONG)
    store.set("text", "a")
    store.set("bytes", b"\0\xff")
    assert (store.get("text"), store.get("bytes")) == (b"a", b"\0\xff")
    assert [store.add("count", 2), store.add("count", -5)] == [2, -3]
    assert [store.check(["text", "count"]), store.check(["text", "none"]), store.check([])] == [True, False, True]
    store.wait(["text", "bytes"])
    store.wait(["text"], timedelta(seconds=30))
    assert [store.delete_key("text"), store.delete_key("text"), store.check(["text"])] == [True, False, False]
    assert {request.worker for request in controller.seen} == {5}
    assert {request.generation for request in controller.seen} == {1}
    assert all(key.startswith("world/") for request in controller.seen for key in request.keys)


def test_what_torch_calls_from_c(line: tuple[Link, Controller]) -> None:
    """Gloo sees the store through torch's C++, here through a PrefixStore."""
    inner = LinkStore(line[0], 1, "world", LONG)  # torch does not keep the Python object alive
    store = dist.PrefixStore("inside", inner)
    store.set("key", b"\1\0\2")
    store.wait(["key"])
    assert store.get("key") == b"\1\0\2"
    assert store.add("count", 3) == 3
    assert store.check(["key"])
    assert line[1].seen[0].keys == ("world/inside/key",)


def test_two_groups_share_nothing(line: tuple[Link, Controller]) -> None:
    first, second = (LinkStore(line[0], 1, name, LONG) for name in ("world", "0-1.0"))
    first.set("key", b"1")
    assert not second.check(["key"])


def test_a_key_that_does_not_come_is_an_error_with_its_name(line: tuple[Link, Controller]) -> None:
    store = LinkStore(line[0], 1, "world", timedelta(milliseconds=1))
    with pytest.raises(PeerLost, match=r"generation 1: keys \('world/key',\) did not come in 0\.001 s"):
        store.get("key")
    with pytest.raises(PeerLost, match=r"did not come in 0\.002 s"):
        LinkStore(line[0], 1, "world", LONG).wait(["key"], timedelta(milliseconds=2))


def test_another_generation_is_over(line: tuple[Link, Controller]) -> None:
    with pytest.raises(PeerLost, match="generation 2: the generation is over"):
        LinkStore(line[0], 2, "world", LONG).add("count", 1)


def test_a_key_is_set_without_a_wait_and_read_with_others_at_once(line: tuple[Link, Controller]) -> None:
    link, controller = line
    LinkStore(link, 2, "world", LONG).set("key", b"of a generation that is over")
    store = LinkStore(link, 1, "world", timedelta(0))
    store.set("a", b"1")
    store.set("b", b"2")
    store.set_timeout(LONG)
    assert store.multi_get(["b", "a"]) == [b"2", b"1"]
    assert [request.operation for request in controller.seen] == ["set", "set", "set", "get"]


def test_who_waits_is_freed_when_the_generation_ends(line: tuple[Link, Controller]) -> None:
    link, controller = line
    found = SimpleNamespace(error=None)

    def wait() -> None:
        try:
            LinkStore(link, 1, "world", LONG).get("key")
        except PeerLost as error:
            found.error = str(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert controller.waits.wait(60)
    link.fail_requests()
    waiting.join(60)
    assert found.error == "rendezvous of generation 1: the generation is over"


def test_a_waiting_get_is_answered_by_a_later_set(line: tuple[Link, Controller]) -> None:
    link, controller = line
    values: list[bytes] = []
    store = LinkStore(link, 1, "world", LONG)
    waiting = threading.Thread(target=lambda: values.append(store.get("key")))
    waiting.start()
    assert controller.waits.wait(60)
    store.set("key", b"there")
    waiting.join(60)
    assert values == [b"there"]
