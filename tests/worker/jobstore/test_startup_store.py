"""What the store gave a rank while it started is given to its replacement, which changes nothing."""

from datetime import timedelta
from typing import Any

import pytest
from torch import distributed as dist
from torch.distributed.distributed_c10d import _store_based_barrier
from torch.distributed.elastic.utils.store import barrier

from keepstep.controller.jobstore import JobStore
from keepstep.errors import PeerLost, RemoteProtocolError
from keepstep.protocol.messages import StoreRequested
from keepstep.worker.jobstore import startup_store as startup
from keepstep.worker.jobstore.default import DefaultStore
from keepstep.worker.jobstore.startup_store import StoreRecorder, StoreReplayer


class Direct:
    """Asks a store of the job without a line; what is not there does not come."""

    def __init__(self, store: JobStore) -> None:
        self.store = store
        self.num_asked = 0

    def ask(self, operation: str, keys: tuple[str, ...], value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        self.num_asked += 1
        answers = self.store.request(StoreRequested(1, 0, self.num_asked, operation, keys, value))
        if not answers or answers[0].error:
            raise dist.DistStoreError(answers[0].error if answers else "wait timeout")
        assert answers[0].values is not None
        return answers[0].values


class Kept:
    """Keeps in memory."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.values: dict[str, bytes] = {}
        self.is_full = is_full

    def keep(self, name: str, value: bytes) -> bool:
        if not self.is_full:
            self.values[name] = value
        return not self.is_full

    def kept(self, name: str) -> bytes | None:
        return self.values.get(name)


def recorded(script: Any, keeper: Kept, rank: int = 0, jobstore: JobStore | None = None) -> Any:
    """What a rank's start-up gives, kept for its replacement."""
    recording = StoreRecorder(rank, Direct(jobstore or JobStore()))
    found = script(DefaultStore(recording))
    recording.hand_over(keeper)
    return found


def replacement(keeper: Kept, rank: int | None = 0) -> DefaultStore:
    """The store of a replacement that starts; None: of a spare that has no rank yet, and gets rank 0."""
    return DefaultStore(StoreReplayer(keeper, lambda: rank or 0, lambda: rank))


def everything(store: Any) -> list[object]:
    found: list[object] = [store.add("n", 2), store.add("n", 2)]
    store.set("text", "a")
    store.append("text", "b")
    found += [store.get("text"), store.check(["text", "none"]), store.compare_set("c", "", "x"), store.num_keys()]
    store.wait(["text"], timedelta(seconds=1))
    found += [store.multi_get(["text", "n"]), store.delete_key("text"), store.delete_key("text")]
    try:
        store.get("text")
    except dist.DistStoreError as error:
        found.append(str(error))
    barrier(store, 1, "elastic")
    _store_based_barrier(0, store, "by hand", 1, timedelta(seconds=1))
    store.barrier("torch", 1, timedelta(seconds=1))
    return found


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: dist.PrefixStore("p", s)], ids=["by itself", "through C++"])
def test_a_replacement_gets_what_its_rank_got(wrap: Any, capsys: pytest.CaptureFixture[str]) -> None:
    keeper = Kept()
    expected = recorded(lambda store: everything(wrap(store)), keeper)
    assert expected[-1] == "wait timeout"
    replaying = replacement(keeper)
    assert everything(wrap(replaying)) == expected
    assert capsys.readouterr().err == ""


def test_each_rank_has_its_own_results_and_the_store_is_not_asked_again() -> None:
    keeper, jobstore = Kept(), JobStore()
    line = Direct(jobstore)
    for rank in range(2):
        recording = StoreRecorder(rank, line)
        assert DefaultStore(recording).add("tickets", 1) == rank + 1
        recording.hand_over(keeper)
    assert [replacement(keeper, rank).add("tickets", 1) for rank in range(2)] == [1, 2]
    assert line.num_asked == 2


def test_a_spare_waits_for_its_rank_where_there_is_a_result() -> None:
    keeper = Kept()

    def script(store: DefaultStore) -> bytes:
        store.set("a", "1")
        store.wait(["a"])
        return store.get("a")

    recorded(script, keeper)
    rank: list[int] = []

    def await_rank() -> int:
        rank.append(0)
        return 0

    store = DefaultStore(StoreReplayer(keeper, await_rank, lambda: rank[0] if rank else None))
    store.set("a", "another")
    store.wait(["a"])
    assert rank == []
    assert store.get("a") == b"1"
    assert rank == [0]
    with pytest.raises(PeerLost):
        store.wait(["a"])  # its rank has waited once


def test_another_value_than_its_rank_has_set_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    keeper = Kept()
    recorded(lambda store: store.set("run", "first"), keeper)
    replacement(keeper).set("run", "second")
    error = capsys.readouterr().err
    assert error.startswith("keepstep: rank 0: a replacement gives the store another value for 'run' (set)")
    assert "read it back with get()" in error


def test_more_than_the_rank_has_asked_for_is_refused() -> None:
    keeper = Kept()
    recorded(lambda store: store.add("n", 1), keeper)
    store = replacement(keeper)
    store.add("n", 1)
    for call in (lambda: store.add("n", 1), lambda: store.get("m")):
        with pytest.raises(PeerLost, match=r"rank 0: .* in the store: a replacement gets what"):
            call()
    with pytest.raises(PeerLost, match=r"USAGE\.md"):
        replacement(Kept()).num_keys()


def test_what_is_too_large_is_reported_and_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "MAX_RESULT_BYTES", 100)
    keeper = Kept()

    def script(store: DefaultStore) -> int:
        store.set("large", bytes(100))
        store.get("large")
        return store.add("n", 1)

    recorded(script, keeper)
    assert "not all that the store gave before the first step could be kept" in capsys.readouterr().err
    store = replacement(keeper)
    store.set("large", bytes(100))
    with pytest.raises(PeerLost, match="could be kept"):
        store.get("large")
    assert store.add("n", 1) == 1


def test_a_controller_that_has_no_room_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    recorded(lambda store: store.set("a", "1"), Kept(is_full=True))
    assert "rank 0: not all that the store gave" in capsys.readouterr().err


def test_nothing_is_kept_of_a_start_up_without_the_store() -> None:
    keeper = Kept()
    recorded(lambda store: None, keeper)
    assert keeper.values == {}


def test_a_record_that_cannot_be_read_is_an_error() -> None:
    keeper = Kept()
    keeper.values["store/0"] = b"nonsense"
    with pytest.raises(RemoteProtocolError, match="store/0 cannot be read"):
        replacement(keeper).add("n", 1)
