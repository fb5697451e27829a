"""The record of a start-up: complete when all ranks are at their first step, and never of an earlier start."""

from pathlib import Path

import pytest

from keepstep.controller.startup import StartUpRecord
from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import StoreAnswered, StoreRequested
from keepstep.protocol.recovery import Stage
from keepstep.protocol.recovery.scripts import startup

GENERATION = 1


def keep(record: StartUpRecord, name: str, value: bytes, generation: int = GENERATION) -> tuple[bytes, ...] | None:
    answers = record.request(StoreRequested(0, generation, 1, "keep", (name,), value), GENERATION)
    assert [(answer.worker, answer.request) for answer in answers] == [(0, 1)]
    return answers[0].values


def ask(record: StartUpRecord, name: str, worker: int = 9) -> list[StoreAnswered]:
    return record.request(StoreRequested(worker, 0, 5, "kept", (name,), b""), GENERATION)


def test_who_asks_early_waits_until_all_ranks_stand_ready() -> None:
    record = StartUpRecord()
    assert ask(record, "group/world") == []
    assert ask(record, "group/0-1", worker=8) == []
    assert keep(record, "group/world", b"value") == (b"1",)
    assert record.settle(is_complete=False) == []
    assert record.settle(is_complete=True) == [StoreAnswered(9, 5, (b"value",), ""), StoreAnswered(8, 5, (), "")]
    assert record.settle(is_complete=True) == []
    assert ask(record, "group/world", worker=7) == [StoreAnswered(7, 5, (b"value",), "")]


def test_what_comes_late_or_of_another_generation_is_not_kept() -> None:
    record = StartUpRecord()
    assert keep(record, "name", b"of an earlier start", generation=GENERATION + 1) is None
    record.settle(is_complete=True)
    assert keep(record, "name", b"late") is None
    assert ask(record, "name") == [StoreAnswered(9, 5, (), "")]


def test_a_start_from_scratch_forgets_the_former_one() -> None:
    record = StartUpRecord()
    keep(record, "name", b"old")
    record.settle(is_complete=True)
    record.starts_over(Stage.STARTING, 2)
    record.settle(is_complete=False)
    assert ask(record, "name") == []
    keep(record, "other", b"new")
    assert record.settle(is_complete=True) == [StoreAnswered(9, 5, (), "")]


def test_a_controller_that_is_started_again_still_has_it(tmp_path: Path) -> None:
    path = tmp_path / "start-up"
    first = StartUpRecord(path, is_durable=True)
    keep(first, "a", b"1" * 100)
    keep(first, "b", b"2" * 100)
    keep(first, "a", b"3")
    with path.open("ab") as file:
        file.write(b"\x90\x01\x00\x00torn")
    for _ in range(2):
        again = StartUpRecord(path)
        assert again.settle(is_complete=True) == []
        assert ask(again, "a") == [StoreAnswered(9, 5, (b"3",), "")]
        assert ask(again, "b") == [StoreAnswered(9, 5, (b"2" * 100,), "")]


def test_a_start_up_in_whose_middle_the_controller_was_restarted_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "start-up"
    keep(StartUpRecord(path), "a", b"1")
    again = StartUpRecord(path)
    again.starts_over(Stage.STARTING, 2)
    again.settle(is_complete=False)
    again.settle(is_complete=True)
    assert ask(again, "a") == [StoreAnswered(9, 5, (), "")]
    assert path.read_bytes() == b""


def test_a_controller_that_was_paused_writes_no_more_into_the_record_of_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "start-up"
    late = StartUpRecord(path)
    keep(late, "a", b"1")
    StartUpRecord(path)
    keep(late, "a", b"other")
    late.settle(is_complete=True)
    late.starts_over(Stage.STARTING, 2)
    late.settle(is_complete=False)
    third = StartUpRecord(path)
    third.settle(is_complete=True)
    assert ask(third, "a") == [StoreAnswered(9, 5, (b"1",), "")]


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "MAX_KEPT_BYTES", 10)
    record = StartUpRecord()
    assert keep(record, "a", b"12345678") == (b"1",)
    assert keep(record, "b", b"123") == (b"0",)
    assert keep(record, "a", b"123") == (b"1",), "what it replaces does not count"
    assert keep(record, "b", b"1234567") == (b"1",)


def test_a_request_names_one_key() -> None:
    with pytest.raises(RemoteProtocolError, match="'keep' names 2 keys"):
        StartUpRecord().request(StoreRequested(3, 1, 1, "keep", ("a", "b"), b""), GENERATION)
