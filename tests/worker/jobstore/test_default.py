"""Torch's default store in a job does what torch's own stores do: the same operations on all, with the same results."""

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.worker.jobstore.answering import Rank
from torch import distributed as dist

from keepstep.protocol.messages import MAX_STORE_VALUE_BYTES

KEYS = st.sampled_from(["a", "b", "c"])
VALUES = st.sampled_from(["", "x", "yy", "5", "-7 ", " 3rd", "\x00\u00ff"])
NUMBERS = st.integers(-(2**40), 2**40) | st.sampled_from([2**62, -(2**63)])
OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["set", "append"]), KEYS, VALUES),
    st.tuples(st.just("add"), KEYS, NUMBERS),
    st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
    st.tuples(st.sampled_from(["get", "delete_key"]), KEYS),
    st.tuples(st.sampled_from(["check", "wait", "multi_get"]), st.lists(KEYS, max_size=3)),
    st.tuples(st.just("multi_set"), st.just(["a", "b"]), st.lists(VALUES, min_size=2, max_size=2)),
    st.tuples(st.sampled_from(["num_keys", "has_extended_api"])),
)


def outcome(store: Any, operation: str, *arguments: Any) -> object:
    """The result, or the type of the error. What 64 bits do not hold is an IndexError in C++, and here no number."""
    try:
        return getattr(store, operation)(*arguments)
    except IndexError:
        return ValueError
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error)


@pytest.fixture(scope="module")
def rank() -> Rank:
    return Rank()


@pytest.mark.parametrize("wrapped", [False, True], ids=["by itself", "through torch's C++"])
@settings(max_examples=60)
@example(script=[("add", "a", 2**62), ("append", "a", "5"), ("add", "a", 0)])
@example(script=[("set", "a", "9" * 5000), ("add", "a", 0)])
@given(script=st.lists(OPERATIONS, max_size=25))
def test_the_same_operations_have_the_same_results_as_with_a_hash_store(
    rank: Rank, wrapped: bool, script: list[tuple[Any, ...]]
) -> None:
    ours: Any = dist.PrefixStore("p", rank.store) if wrapped else rank.store
    theirs: Any = dist.PrefixStore("p", dist.HashStore()) if wrapped else dist.HashStore()
    theirs.set_timeout(timedelta(milliseconds=1))
    rank.jobstore.restart()
    for number, each in enumerate(script):
        expected = outcome(theirs, *each)
        # What is waited for in vain is so for a moment; what is answered must not depend on how loaded the machine is.
        ours.set_timeout(timedelta(milliseconds=1) if expected is dist.DistStoreError else timedelta(seconds=60))
        assert ours.timeout == rank.store.timeout  # type: ignore[attr-defined]  # not in the stub
        assert outcome(ours, *each) == expected, f"operation {number}: {each}"


def test_what_torchs_tcp_store_does_in_the_same_way(rank: Rank) -> None:
    tcp = dist.TCPStore("127.0.0.1", 0, 1, True)
    script: list[tuple[Any, ...]] = [
        ("set", "a", "1"),
        ("add", "a", 4),
        ("get", "a"),
        ("append", "a", "0"),
        ("multi_get", ["a", "a"]),
        ("compare_set", "a", "50", "51"),
        ("compare_set", "a", "50", "52"),
        ("compare_set", "none", "x", "y"),
        ("check", ["none"]),
        ("delete_key", "a"),
        ("delete_key", "a"),
        ("multi_set", ["m", "n"], ["1", "2"]),
        ("wait", ["m", "n"]),
        ("wait", ["m", "none"], timedelta(milliseconds=1)),
        ("has_extended_api",),
    ]
    rank.store.set_timeout(timedelta(seconds=60))
    rank.jobstore.restart()
    for each in script:
        assert outcome(rank.store, *each) == outcome(tcp, *each), each


UNUSUAL: list[tuple[Any, ...]] = [
    ("set", 1, "x"),
    ("set", None, "x"),
    ("set", "a", 5),
    ("set", "a", None),
    ("set", "a", bytearray(b"1")),
    ("get", "a"),
    ("set", b"a", "2"),
    ("get", b"a"),
    ("append", "a", 1),
    ("compare_set", "a", 1, 2),
    ("add", "a", 1.5),
    ("add", "a", "1"),
    ("add", "a", 2**63),
    ("add", "a", np.int64(3)),
    ("add", "a", torch.tensor(3)),
    ("add", "a", True),
    ("delete_key", 1),
    ("wait", "a"),
    ("wait", [1]),
    ("wait", ("a",)),
    ("wait", {"a"}),
    ("wait", ["a"], 60.0),
    ("check", "a"),
    ("multi_get", "a"),
    ("multi_get", ("a",)),
    ("multi_set", "ab", "cd"),
    ("set", "", "x"),
    ("get", ""),
]


@pytest.mark.parametrize("each", UNUSUAL, ids=repr)
def test_what_a_call_takes_is_what_torchs_stores_take(rank: Rank, each: tuple[Any, ...]) -> None:
    """Before it is sent: an agent that gets a message of another form ends the process that sent it."""
    stores: list[Any] = [rank.store, dist.HashStore()]
    rank.jobstore.restart()
    for store in stores:
        store.set_timeout(timedelta(seconds=60))
        store.set("a", "7")
        store.set("", "8")
    ours, theirs = (outcome(store, *each) for store in stores)
    assert ours == theirs
    assert stores[0].get("a") == stores[1].get("a")


def test_torchs_barrier_on_a_store(rank: Rank) -> None:
    rank.store.set_timeout(timedelta(seconds=60))
    rank.jobstore.restart()
    store: Any = rank.store.clone()
    store.barrier("meet", 1, timedelta(seconds=60))
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0\.001 s, keys: of two/last_member"):
        store.barrier("of two", 2, timedelta(milliseconds=1))


@pytest.mark.parametrize("call", [lambda s: s.queue_push("a", "b"), lambda s: s.list_keys()], ids=["queue", "list"])
def test_what_is_not_there_is_refused(rank: Rank, call: Any) -> None:
    for store in (rank.store, dist.PrefixStore("p", rank.store)):
        with pytest.raises(NotImplementedError):
            call(store)


def test_a_value_that_no_message_can_carry_is_refused_before_it_is_sent(rank: Rank) -> None:
    rank.jobstore.restart()
    large = bytes(MAX_STORE_VALUE_BYTES + 1)
    with pytest.raises(dist.DistStoreError, match="key 'large': a value of 8388609 bytes, and at most 8 MiB"):
        rank.store.set("large", large)
    rank.store.set_timeout(timedelta(seconds=60))
    rank.store.set("large", large[:-1])
    assert len(rank.store.get("large")) == MAX_STORE_VALUE_BYTES
    with pytest.raises(dist.DistStoreError, match="key 'large': a value of 8388609 bytes"):
        rank.store.append("large", b"1")
    rank.store.delete_key("large")


def test_a_wait_that_timed_out_leaves_nothing_behind(rank: Rank) -> None:
    rank.jobstore.restart()
    for _ in range(3):
        with pytest.raises(dist.DistStoreError):
            rank.store.wait(["never"], timedelta(milliseconds=1))
    rank.store.set_timeout(timedelta(seconds=60))
    rank.store.check([])  # what was cancelled before it has been by now
    assert not rank.jobstore._waiting
    assert not rank.jobstore._waiting_for
    assert not rank.link._store_requests
