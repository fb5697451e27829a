"""The store of one generation."""

import itertools
import random

import pytest

from keepstep.controller import rendezvous
from keepstep.controller.rendezvous import Rendezvous
from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import StoreAnswered, StoreRequested


class Store:
    """A rendezvous, asked by workers whose requests are numbered in turn."""

    def __init__(self, generation: int = 1) -> None:
        self.rendezvous = Rendezvous()
        assert self.rendezvous.begin(generation) == []
        self._numbers = itertools.count()

    def ask(
        self, operation: str, *keys: str, value: bytes = b"", worker: int = 0, generation: int = 1
    ) -> list[StoreAnswered]:
        request = StoreRequested(worker, generation, next(self._numbers), operation, keys, value)
        return self.rendezvous.request(request)

    def value(self, operation: str, *keys: str, value: bytes = b"") -> tuple[bytes, ...] | None:
        """The one answer to a request that has to be answered at once."""
        (answer,) = self.ask(operation, *keys, value=value)
        return answer.values


def test_every_operation() -> None:
    store = Store()
    assert store.value("set", "a", value=b"1") == ()
    assert store.value("get", "a") == (b"1",)
    assert store.value("set", "a", value=b"\0\xff") == ()
    assert store.value("get", "a") == (b"\0\xff",)
    assert store.value("add", "n", value=b"5") == (b"5",)
    assert store.value("add", "n", value=b"-7") == (b"-2",)
    assert store.value("get", "a", "n") == (b"\0\xff", b"-2")
    assert store.value("check", "a", "n") == (b"1",)
    assert store.value("check", "a", "b") == (b"0",)
    assert store.value("check") == (b"1",)
    assert store.value("delete", "a") == (b"1",)
    assert store.value("delete", "a") == (b"0",)
    assert store.value("check", "a") == (b"0",)
    assert store.value("get") == ()


def test_a_get_waits_until_all_its_keys_are_there() -> None:
    store = Store()
    assert store.ask("get", "a", "b", worker=3) == []
    assert store.ask("set", "a", value=b"1", worker=1) == [StoreAnswered(1, 1, (), "")]
    answers = store.ask("add", "b", value=b"2", worker=1)
    assert answers == [StoreAnswered(1, 2, (b"2",), ""), StoreAnswered(3, 0, (b"1", b"2"), "")]
    assert store.ask("set", "b", value=b"3") == [StoreAnswered(0, 3, (), "")], "it was answered once"


def test_one_set_serves_all_who_wait() -> None:
    store = Store()
    for worker in range(3):
        assert store.ask("get", "key", worker=worker) == []
    assert store.ask("get", "other", worker=3) == []
    answers = store.ask("set", "key", value=b"v", worker=9)
    assert answers == [
        StoreAnswered(9, 4, (), ""),
        *(StoreAnswered(worker, worker, (b"v",), "") for worker in range(3)),
    ]


def test_one_worker_may_wait_for_the_same_key_twice() -> None:
    store = Store()
    store.ask("get", "key", worker=1)
    store.ask("get", "key", worker=1)
    assert store.ask("set", "key", value=b"v")[1:] == [
        StoreAnswered(1, 0, (b"v",), ""),
        StoreAnswered(1, 1, (b"v",), ""),
    ]


def test_another_generation_is_answered_at_once_with_nothing() -> None:
    store = Store(generation=5)
    for generation in (4, 6):
        for operation in ("get", "set", "add", "check", "delete"):
            answers = store.ask(operation, "key", value=b"1", generation=generation)
            assert [answer.values for answer in answers] == [None]
    assert store.ask("check", "key", generation=5)[0].values == (b"0",)


def test_a_new_generation_ends_who_waits_and_forgets_the_keys() -> None:
    store = Store()
    store.ask("set", "key", value=b"1")
    store.ask("get", "missing", worker=4)
    assert store.rendezvous.begin(1) == [], "the same generation begins once"
    assert store.ask("check", "key")[0].values == (b"1",)
    assert store.rendezvous.begin(2) == [StoreAnswered(4, 1, None, "")]
    assert store.ask("check", "key", generation=2)[0].values == (b"0",)
    assert store.ask("set", "missing", value=b"", generation=2) == [StoreAnswered(0, 4, (), "")], (
        "no process waits any more"
    )


def test_an_operation_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(RemoteProtocolError, match="worker 6: no store operation is called 'pop'"):
        Store().ask("pop", "key", worker=6)


@pytest.mark.parametrize(
    ("operation", "keys", "value"),
    [("add", ("n",), b"many"), ("add", ("text",), b"1"), ("set", (), b"1"), ("add", (), b"1"), ("delete", (), b"")],
    ids=["not a number", "to a text", "set nothing", "add to nothing", "delete nothing"],
)
def test_a_request_without_sense_is_the_workers_fault(operation: str, keys: tuple[str, ...], value: bytes) -> None:
    store = Store()
    store.ask("set", "text", value=b"abc")
    with pytest.raises(RemoteProtocolError):
        store.ask(operation, *keys, value=value)


def test_a_store_that_is_full_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MAX_KEYS", 2)
    store = Store()
    store.ask("set", "a")
    store.ask("add", "b", value=b"1")
    store.ask("set", "a", value=b"again")
    with pytest.raises(RemoteProtocolError, match="the rendezvous store is full: 2 keys"):
        store.ask("set", "c")
    store.ask("delete", "a")
    assert store.value("set", "c") == ()


def test_any_order_of_requests_serves_every_request(seed: int) -> None:
    """Against a plain dictionary: a request for keys that all arrive in the end is answered, once."""
    generator = random.Random(seed)
    requests = [("get", generator.sample("abcde", generator.randrange(1, 4))) for _ in range(30)]
    requests += [("set", [key]) for key in "abcde"]
    generator.shuffle(requests)
    store, answered = Store(), []
    for operation, keys in requests:
        answered += store.ask(operation, *keys, value=keys[0].encode())
    values = {answer.request: answer.values for answer in answered}
    assert len(answered) == len(values) == len(requests)
    for number, (operation, keys) in enumerate(requests):
        assert values[number] == (tuple(key.encode() for key in keys) if operation == "get" else ())


def test_a_request_that_comes_twice_is_carried_out_once() -> None:
    """The line to its node broke before the answer had gone through."""
    store = Store()
    added = StoreRequested(0, 1, 100, "add", ("n",), b"2")
    assert store.rendezvous.request(added) == [StoreAnswered(0, 100, (b"2",), "")]
    assert store.rendezvous.request(added) == [StoreAnswered(0, 100, (b"2",), "")]
    assert store.value("get", "n") == (b"2",)
    waits = StoreRequested(1, 1, 7, "get", ("late",), b"")
    assert store.rendezvous.request(waits) == []
    assert store.rendezvous.request(waits) == []
    assert store.ask("set", "late", value=b"x") == [StoreAnswered(0, 1, (), ""), StoreAnswered(1, 7, (b"x",), "")]
    assert store.rendezvous.request(waits) == [StoreAnswered(1, 7, (b"x",), "")]


def test_a_restarted_controller_remembers_nothing_of_the_generation_it_finds() -> None:
    """What others have set in it is lost, so no process shall wait for that; the next generation is like any other."""
    found = Rendezvous(forgotten=3)
    assert found.begin(3) == []
    assert found.request(StoreRequested(0, 3, 0, "get", ("a",), b"")) == [StoreAnswered(0, 0, None, "")]
    assert found.request(StoreRequested(0, 3, 1, "set", ("a",), b"1")) == [StoreAnswered(0, 1, None, "")]
    assert found.begin(4) == []
    assert found.request(StoreRequested(0, 4, 2, "set", ("a",), b"1")) == [StoreAnswered(0, 2, (), "")]
