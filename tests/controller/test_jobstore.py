"""The store of the job: what torch's stores do, bounded, kept in a file, and what a recovery means for who waits."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest

from keepstep.controller import jobstore
from keepstep.controller.jobstore import JobStore
from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import AT_ONCE, StoreAnswered, StoreRequested
from keepstep.protocol.recovery import Stage
from keepstep.transports.framing import frame


class Asking:
    """A store of the job, asked by workers whose requests are numbered in turn."""

    def __init__(self, store: JobStore | None = None, first: int = 0) -> None:
        self.store = store or JobStore()
        self._numbers = itertools.count(first)

    def ask(
        self, operation: str, *keys: str, value: bytes = b"", worker: int = 0, generation: int = 0
    ) -> list[StoreAnswered]:
        number = next(self._numbers)
        return self.store.request(StoreRequested(worker, generation, number, f"job_{operation}", keys, value))

    def value(self, operation: str, *keys: str, value: bytes = b"") -> tuple[bytes, ...] | None:
        """The values of the one answer to a request that has to be answered at once."""
        (answer,) = self.ask(operation, *keys, value=value)
        assert answer.error == ""
        return answer.values

    def settle(
        self, stage: Stage, generation: int = 2, awaited: Sequence[int] = (), lost: Sequence[int] = ()
    ) -> list[StoreAnswered]:
        return self.store.settle(stage, generation, awaited, lambda worker: worker in lost)


def two(expected: bytes, desired: bytes) -> bytes:
    return msgspec.msgpack.encode((expected, desired))


def test_a_wait_is_answered_when_its_last_key_comes_and_a_get_with_the_value() -> None:
    store = Asking()
    assert store.ask("wait", "a", "b", "a", worker=3) == []
    assert store.ask("get", "b", worker=4) == []
    assert store.ask("set", "a", value=b"1") == [StoreAnswered(0, 2, (), "")]
    assert store.ask("wait", "b", worker=3) == []
    assert store.ask("add", "b", value=b"7") == [
        StoreAnswered(0, 4, (b"7",), ""),
        StoreAnswered(3, 0, (), ""),
        StoreAnswered(3, 3, (), ""),
        StoreAnswered(4, 1, (b"7",), ""),
    ]
    assert store.ask("set", "b", value=b"8") == [StoreAnswered(0, 5, (), "")], "all were answered once"


def test_a_key_that_is_deleted_while_another_one_is_waited_for_is_waited_for_again() -> None:
    store = Asking()
    store.ask("set", "b")
    store.ask("wait", "a", "b", worker=3)
    store.ask("delete", "b")
    assert store.ask("set", "a")[1:] == []
    assert store.ask("set", "b")[1:] == [StoreAnswered(3, 1, (), "")]


def test_a_wait_that_is_cancelled_is_forgotten() -> None:
    store = Asking()
    store.ask("wait", "a", worker=3)
    assert store.ask("cancel", value=b"0", worker=3) == [StoreAnswered(3, 1, (), ""), StoreAnswered(3, 0, (), "")]
    assert store.ask("cancel", value=b"0", worker=3) == [StoreAnswered(3, 2, (), "")]
    assert store.ask("set", "a") == [StoreAnswered(0, 3, (), "")]


def test_a_wait_that_must_not_wait_names_the_first_key_that_is_missing() -> None:
    store = Asking()
    store.ask("set", "a", value=b"1")
    assert store.value("get", "a", value=AT_ONCE) == (b"1",)
    (answer,) = store.ask("wait", "a", "b", "c", value=AT_ONCE, generation=1)
    assert answer.error == "no rank has set key 'b' of the store"
    assert store.ask("set", "b") == [StoreAnswered(0, 3, (), "")], "nobody waits"


def test_a_request_that_comes_twice_is_carried_out_once() -> None:
    store = JobStore()
    add = StoreRequested(0, 0, 100, "job_add", ("n",), b"2")
    assert store.request(add) == store.request(add) == [StoreAnswered(0, 100, (b"2",), "")]
    wait = StoreRequested(1, 0, 7, "job_wait", ("late",), b"")
    assert store.request(wait) == store.request(wait) == []
    late = StoreRequested(0, 0, 101, "job_set", ("late",), b"")
    assert store.request(late) == [StoreAnswered(0, 101, (), ""), StoreAnswered(1, 7, (), "")]


def test_answers_are_kept_for_the_newest_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobstore, "MAX_ANSWERS", 2)
    store = JobStore()
    requests = [StoreRequested(0, 0, number, "job_add", ("n",), b"1") for number in range(3)]
    for request in requests:
        store.request(request)
    assert store.request(requests[1])[0].values == (b"2",)
    assert store.request(requests[0])[0].values == (b"4",), "it was forgotten"


@pytest.mark.parametrize(
    ("operation", "keys", "value"),
    [
        ("pop", ("a",), b""),
        ("set", (), b""),
        ("set", ("a", "b"), b""),
        ("get", ("a", "b"), b""),
        ("add", ("a",), b"many"),
        ("compare_set", ("a",), b"one"),
        ("cancel", (), b""),
    ],
)
def test_a_request_without_sense_is_the_workers_fault(operation: str, keys: tuple[str, ...], value: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="worker 0"):
        Asking().ask(operation, *keys, value=value)


# ---- bounds ---------------------------------------------------------------------------------------------------------


def test_a_full_store_refuses_with_its_size_and_takes_what_makes_it_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobstore, "MAX_STORE_BYTES", 1 << 20)
    store = Asking()
    store.value("set", "a", value=bytes(1 << 19))
    for operation, value in (("set", bytes(1 << 19)), ("compare_set", two(b"", bytes(1 << 19)))):
        (answer,) = store.ask(operation, "b", value=value)
        assert "the store of the job is full: 1 keys take 0 MiB of 1 MiB" in answer.error
    assert "full" in store.ask("append", "a", value=bytes(1 << 19))[0].error
    assert store.value("check", "b") == (b"0",)
    store.value("set", "a", value=bytes(1 << 18))
    store.value("set", "b", value=bytes(1 << 19))
    store.value("delete", "b")
    store.value("set", "c", value=bytes(1 << 19))


def test_a_key_or_a_value_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobstore, "MAX_STORE_VALUE_BYTES", 10)
    store = Asking()
    assert "a value of 11 bytes" in store.ask("set", "a", value=bytes(11))[0].error
    store.value("set", "a", value=bytes(10))
    assert "a value of 11 bytes" in store.ask("append", "a", value=b"1")[0].error
    assert "at most 64 KiB" in store.ask("set", "ä" * 40_000)[0].error
    assert store.value("num_keys") == (b"1",)


# ---- recoveries -----------------------------------------------------------------------------------------------------


def test_a_recovery_leaves_keys_and_who_waits_as_they_are() -> None:
    store = Asking()
    store.ask("set", "a", value=b"1")
    store.ask("wait", "late", worker=1, generation=1)
    store.ask("wait", "late", worker=2)
    for stage in (Stage.STOPPING, Stage.RECOVERING, Stage.TRAINING):
        assert store.settle(stage, awaited=[1, 5]) == []
    assert store.value("get", "a") == (b"1",)
    assert [answer.worker for answer in store.ask("set", "late", worker=5)] == [5, 1, 2]


def test_when_all_ranks_restart_the_store_is_empty() -> None:
    store = Asking()
    store.store.restart()
    store.ask("set", "a", value=b"1")
    store.ask("wait", "late", worker=1)
    store.settle(Stage.STARTING, generation=1)
    assert store.value("check", "a") == (b"1",)
    store.settle(Stage.STOPPING, generation=2)
    assert store.value("check", "a") == (b"1",)
    store.store.restart()
    assert store.value("num_keys") == (b"0",)
    assert [answer.worker for answer in store.ask("set", "late", worker=7)] == [7], "worker 1 is gone"


def test_when_all_that_are_waited_for_wait_between_steps_none_of_them_will_set_the_key() -> None:
    store = Asking()
    store.ask("wait", "one", worker=1, generation=1)
    store.ask("get", "two", worker=2, generation=1)
    store.ask("wait", "of a thread", worker=2)
    assert store.settle(Stage.STOPPING, awaited=[1, 2, 3]) == [], "worker 3 may set it"
    first, second = store.settle(Stage.STOPPING, awaited=[1, 2])
    assert (first.worker, second.worker) == (1, 2)
    assert "generation 2: a rank was lost" in first.error
    assert "none will set 'one'" in first.error
    assert "none will set 'two'" in second.error
    assert store.settle(Stage.STOPPING, awaited=[1, 2]) == []
    assert [answer.worker for answer in store.ask("set", "of a thread", worker=3)] == [3, 2]


def test_a_thread_that_waits_does_not_make_its_rank_hopeless() -> None:
    store = Asking()
    store.ask("wait", "one", worker=1)
    assert store.settle(Stage.STOPPING, awaited=[1]) == []
    assert store.settle(Stage.STOPPING, awaited=[]) == []


def test_what_a_lost_worker_waited_for_is_forgotten() -> None:
    store = Asking()
    store.ask("wait", "one", worker=1)
    assert store.settle(Stage.STOPPING, awaited=[2], lost=[1]) == []
    assert [answer.worker for answer in store.ask("set", "one", worker=3)] == [3]


# ---- the file -------------------------------------------------------------------------------------------------------


Opened = Callable[[Path], Asking]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Opens a store with a file, as another controller would."""
    firsts = itertools.count(0, 10_000)
    with ExitStack() as stack:
        yield lambda path: Asking(stack.enter_context(closing(JobStore(path, is_durable=True))), next(firsts))


def fill(store: Asking) -> Asking:
    store.ask("set", "a", value=b"1" * 100)
    store.ask("append", "a", value=b"2")
    store.ask("add", "n", value=b"-5")
    store.ask("compare_set", "c", value=two(b"", b"x"))
    store.ask("set", "gone", value=b"y")
    store.ask("delete", "gone")
    store.store.flush()
    return store


def check_filled(store: Asking) -> None:
    assert store.value("get", "a") == (b"1" * 100 + b"2",)
    assert store.value("get", "n") == (b"-5",)
    assert store.value("get", "c") == (b"x",)
    assert store.value("num_keys") == (b"3",)


def test_a_controller_that_is_started_again_still_has_it(tmp_path: Path, opened: Opened) -> None:
    path = tmp_path / "store"
    fill(opened(path))
    with path.open("ab") as file:
        file.write(frame(StoreRequested(0, 0, 9, "job_set", ("torn",), b""))[:-1])
    for _ in range(2):
        again = opened(path)
        twice = StoreRequested(0, 0, 2, "job_add", ("n",), b"-5")
        assert again.store.request(twice) == [StoreAnswered(0, 2, (b"-5",), "")], "it was carried out before"
        check_filled(again)


def test_what_was_not_flushed_was_not_answered_and_is_not_there(tmp_path: Path, opened: Opened) -> None:
    store = fill(opened(tmp_path / "store"))
    store.ask("set", "late")
    check_filled(opened(tmp_path / "store"))


def test_a_file_does_not_grow_with_the_number_of_changes(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobstore, "COMPACT_BYTES", 3_000)
    monkeypatch.setattr(jobstore, "MAX_ANSWERS", 8)
    path = tmp_path / "store"
    store = fill(opened(path))
    for number in range(300):
        store.ask("set", "heartbeat", value=str(number).encode() * 10)
        store.store.flush()
        assert path.stat().st_size < 5_000
    again = opened(path)
    assert again.value("get", "heartbeat") == (b"299" * 10,)
    again.ask("delete", "heartbeat")
    check_filled(again)


def test_a_former_controller_that_still_writes_harms_nothing(tmp_path: Path, opened: Opened) -> None:
    former = fill(opened(tmp_path / "store"))
    successor = opened(tmp_path / "store")
    former.ask("set", "a", value=b"too late")
    former.store.flush()
    check_filled(successor)
    check_filled(opened(tmp_path / "store"))


def test_a_former_controller_that_restarts_all_ranks_leaves_the_file_of_its_successor(
    tmp_path: Path, opened: Opened
) -> None:
    former = fill(opened(tmp_path / "store"))
    opened(tmp_path / "store")
    former.store.restart()
    former.ask("set", "a", value=b"too late")
    former.store.flush()
    check_filled(opened(tmp_path / "store"))


def test_a_former_controller_does_not_compact_over_the_file_of_its_successor(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = fill(opened(tmp_path / "store"))
    opened(tmp_path / "store")
    monkeypatch.setattr(jobstore, "COMPACT_BYTES", -1_000_000)
    former.ask("set", "a", value=b"too late")
    with pytest.raises(OSError, match="another controller has taken it over"):
        former.store.flush()
    check_filled(opened(tmp_path / "store"))


def test_a_start_from_scratch_goes_on_in_the_file(tmp_path: Path, opened: Opened) -> None:
    store = fill(opened(tmp_path / "store"))
    store.ask("set", "not flushed")
    store.store.restart()
    store.ask("set", "b", value=b"2")
    store.store.flush()
    again = opened(tmp_path / "store")
    assert again.value("num_keys") == (b"1",)
    assert again.value("get", "b") == (b"2",)


def test_a_start_from_scratch_empties_the_file(tmp_path: Path, opened: Opened) -> None:
    store = fill(opened(tmp_path / "store"))
    store.store.restart()
    assert (tmp_path / "store").stat().st_size == 0
    assert opened(tmp_path / "store").value("num_keys") == (b"0",)
