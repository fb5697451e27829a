"""The lease as a file: one holds it, however many try, and whatever happens to a server's answers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from keepstep.controller import lease
from keepstep.controller.lease import FOLDER, RunLease
from keepstep.errors import ConfigurationError, LeaseLost
from keepstep.protocol.lease import Lease

HOLD_S = 5.0


class Clock:
    """The clock that leases go by, in the hands of the test."""

    def __init__(self) -> None:
        self.now_s = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(lease, "_now_s", lambda: found.now_s)
    return found


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every controller is on a machine of its own: no process can tell whether another one's process lives."""
    numbers = iter(range(1000))
    monkeypatch.setattr(lease, "_place", lambda: f"machine {next(numbers)}")


def in_folder(run_dir: Path) -> list[Lease]:
    return [found for name in os.listdir(run_dir / FOLDER) if (found := Lease.parse(name)) is not None]


def test_it_is_held_renewed_and_given_back(tmp_path: Path, clock: Clock) -> None:
    with RunLease(tmp_path, HOLD_S) as first:
        assert first.take()
        assert first.taken_from is None
        clock.now_s += 10.0
        first.confirm()  # renews it, for no process has taken it meanwhile
        (held,) = in_folder(tmp_path)
        assert (held.term, held.count, held.hold_ms) == (1, 1, 5000)
    (free,) = in_folder(tmp_path)
    assert (free.term, free.is_free) == (1, True)
    with RunLease(tmp_path, HOLD_S) as second:
        assert second.take()
        assert second.term == 2
        assert second.taken_from is None
    assert sorted(os.listdir(tmp_path / FOLDER)) == [lease.name for lease in in_folder(tmp_path)]


def test_another_machine_waits_as_long_as_the_holder_said(tmp_path: Path, clock: Clock, apart: None) -> None:
    with RunLease(tmp_path, HOLD_S) as first, RunLease(tmp_path, 1.0) as second:
        assert first.take()
        assert not second.take()
        assert not second.is_served, "so far it is unknown"
        clock.now_s += 4.9
        assert not second.take()
        assert f"process {os.getpid()} on" in second.served_by()
        assert "(lease unchanged for 4.9 s)" in second.served_by()
        clock.now_s += 0.1
        assert second.take()
        assert second.term == 2
        assert second.taken_from is not None
        with pytest.raises(LeaseLost, match=f"is served by process {os.getpid()} on .* by now"):
            first.confirm()
        second.confirm()
    (left,) = in_folder(tmp_path)
    assert (left.term, left.is_free) == (2, True), "the first one had nothing to give back"


def test_who_is_seen_to_renew_it_is_alive(tmp_path: Path, clock: Clock, apart: None) -> None:
    with RunLease(tmp_path, HOLD_S) as first, RunLease(tmp_path, HOLD_S) as second:
        assert first.take()
        assert not second.take()
        clock.now_s += 4.5
        first.confirm()
        clock.now_s += 1.0
        assert not second.take()
        assert second.is_served


def test_what_was_renewed_after_the_last_look_cannot_be_taken(
    tmp_path: Path, clock: Clock, apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may show what it has cached."""
    with RunLease(tmp_path, HOLD_S) as first, RunLease(tmp_path, HOLD_S) as second:
        assert first.take()
        cached = os.listdir(tmp_path / FOLDER)
        assert not second.take()
        clock.now_s += HOLD_S
        first.confirm()
        monkeypatch.setattr(os, "listdir", lambda _path: cached)
        assert not second.take()
        monkeypatch.undo()
        first.confirm()


def test_a_stopped_process_of_this_machine_is_there(tmp_path: Path, clock: Clock) -> None:
    with RunLease(tmp_path, HOLD_S) as first, RunLease(tmp_path, HOLD_S) as second:
        assert first.take()
        assert not second.take()
        assert second.is_served


def test_the_lease_of_a_dead_process_of_this_machine_is_taken_at_once(tmp_path: Path, clock: Clock) -> None:
    program = "import sys; from pathlib import Path; from keepstep.controller.lease import RunLease\n"
    program += "lease = RunLease(Path(sys.argv[1]), 3600.0); print(lease.take(), flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"True\n"
        with RunLease(tmp_path, HOLD_S) as second:
            assert not second.take()
            other.send_signal(signal.SIGKILL)
            other.wait()
            assert second.take()
            assert second.taken_from is not None
            assert second.taken_from.pid == other.pid


def test_of_many_that_begin_together_one_holds_it(tmp_path: Path) -> None:
    together = threading.Barrier(16)
    leases: list[RunLease] = []
    holders: list[RunLease] = []

    def begin() -> None:
        together.wait()
        found = RunLease(tmp_path, HOLD_S)
        leases.append(found)
        if found.take():
            holders.append(found)

    threads = [threading.Thread(target=begin) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(leases) == 16
    assert len(holders) == 1
    assert [found.term for found in in_folder(tmp_path)] == [1]
    for found in leases:
        found.close()
    assert not [path for path in tmp_path.iterdir() if path.name != FOLDER], "no draft is left"


def test_an_answer_that_was_lost_is_no_refusal(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server did it and its answer was lost; asked once more it says that there is nothing to rename."""
    rename = os.rename

    def twice(old: Path, new: Path) -> None:
        rename(old, new)
        rename(old, new)

    monkeypatch.setattr(os, "rename", twice)
    with RunLease(tmp_path, HOLD_S) as only:
        assert only.take()
        clock.now_s += HOLD_S
        only.confirm()
    (free,) = in_folder(tmp_path)
    assert free.is_free


def test_a_store_that_is_gone_silences_the_holder_when_its_time_is_over(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_old: Path, _new: Path) -> None:
        raise OSError(5, "Input/output error")

    async def keep_trying() -> None:
        keeping = asyncio.create_task(only.keep())
        await asyncio.wait({keeping}, timeout=0.2)
        assert not keeping.done()
        keeping.cancel()
        await asyncio.wait({keeping})

    with RunLease(tmp_path, 0.05) as only:
        assert only.take()
        monkeypatch.setattr(os, "rename", broken)
        only.confirm()
        asyncio.run(keep_trying())
        assert capsys.readouterr().err.count("cannot be renewed") == 1, "once is enough"
        only.confirm()
        clock.now_s += 0.04
        with pytest.raises(LeaseLost, match=r"cannot be renewed: .*Input/output error"):
            only.confirm()


def test_a_renewal_that_took_too_long_does_not_count(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def slow(old: Path, new: Path) -> None:
        rename(old, new)
        clock.now_s += HOLD_S

    with RunLease(tmp_path, HOLD_S) as only:
        assert only.take()
        clock.now_s += HOLD_S
        monkeypatch.setattr(os, "rename", slow)
        with pytest.raises(LeaseLost, match="took too long"):
            only.confirm()


def test_the_holder_is_told_that_it_is_lost(tmp_path: Path, apart: None, clock: Clock) -> None:
    with RunLease(tmp_path, 0.05) as first, RunLease(tmp_path, HOLD_S) as second:
        assert first.take()
        assert not second.take()
        clock.now_s += 1.0
        assert second.take()
        with pytest.raises(LeaseLost, match="by now"):
            asyncio.run(asyncio.wait_for(first.keep(), 20.0))


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file")
    with pytest.raises(ConfigurationError, match=f"--run-dir {tmp_path}: holds no lease"):
        RunLease(tmp_path, HOLD_S)
