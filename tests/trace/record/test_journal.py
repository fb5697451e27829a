"""The journal: what is written is read again, what is torn or damaged is dealt with, and a real job can be relived."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS

from keepstep.drill.drill import OBSERVER
from keepstep.drill.faults import parse, write_plan
from keepstep.errors import ConfigurationError
from keepstep.launcher.flags import job_options, make_parser
from keepstep.launcher.job import Job, run_job
from keepstep.protocol.controller import (
    ControllerMachine,
    DeadlineCame,
    JournalEntry,
    LeaseExpired,
    ReportsReceived,
    Restarted,
)
from keepstep.protocol.messages import Cause, FenceWorker, NodeJoined, Stop, Tag, WorkerLost
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import Stage
from keepstep.trace.record.journal import Journal, read, take_over

LOST = WorkerLost(1, Cause.SIGNAL, "killed by SIGKILL\u00e9\n", True, Tag(1, 7, Phase.SYNCED), 12.000000000000002)
ENTRIES = [
    JournalEntry(
        10.1, ReportsReceived("node-a", 5, (NodeJoined("node-a", 4, "rack", 0, 0, (), 0), LOST)), "stopping", 2
    ),
    JournalEntry(
        11.0,
        LeaseExpired("node-a", "no heartbeat for 3 s", 8.0),
        "stopping",
        2,
        ((None, Stop(2, "lost", None), "lost"), ("node-b", FenceWorker(3, "why"), "why")),
    ),
    JournalEntry(12.0, DeadlineCame(())),
    JournalEntry(13.0, Restarted()),
]


def written(path: Path, entries: list[JournalEntry]) -> bytes:
    with Journal(path) as journal:
        journal.write(entries[:1])
        journal.write([])
        journal.write(entries[1:])
    return path.read_bytes()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert written(path, ENTRIES).count(b"\n") == len(ENTRIES)
    assert read(path) == ENTRIES


def test_what_is_written_can_be_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        for number, entry in enumerate(ENTRIES):
            journal.write([entry])
            assert read(path) == ENTRIES[: number + 1]


def test_a_torn_last_line_is_left_away_wherever_it_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = written(path, ENTRIES)
    complete = whole.rstrip(b"\n").rfind(b"\n") + 1
    for length in range(complete, len(whole)):
        path.write_bytes(whole[:length])
        assert read(path) == ENTRIES[:-1]


def test_who_writes_on_cuts_off_what_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = written(path, ENTRIES)
    path.write_bytes(whole[:-3])
    written(path, ENTRIES[-1:])
    assert path.read_bytes() == whole


def test_who_takes_over_reads_what_the_former_writer_cannot_change_any_more(tmp_path: Path) -> None:
    """It may only have stood still, and go on in the middle of a line."""
    path = tmp_path / "journal.jsonl"
    whole = written(path, ENTRIES)
    with Journal(path) as former:
        path.write_bytes(whole[:-3])
        assert take_over(path) == ENTRIES[:-1]
        former.write(ENTRIES[:1])
        with Journal(path, is_durable=True) as latter:
            former.write(ENTRIES[:2])
            latter.write(ENTRIES[-1:])
            former.write(ENTRIES[2:])
    assert path.read_bytes() == whole
    assert [each.name for each in tmp_path.iterdir()] == ["journal.jsonl"]


def test_a_journal_to_take_over_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        take_over(tmp_path / "journal.jsonl")


@pytest.mark.parametrize("damage", [b"", b"{", b'{"at_s":1,"event":{"type":"Nothing"}}', b"\xff\xfe", b"[1]"])
def test_a_damaged_line_is_named(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    lines = written(path, ENTRIES).split(b"\n")
    lines[1] = damage
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigurationError, match=r"journal\.jsonl, line 2: not an entry of a journal"):
        read(path)


def test_a_bit_that_has_changed_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    """Also where the line would still be a good one, with another meaning."""
    path = tmp_path / "journal.jsonl"
    whole = written(path, ENTRIES)
    first = whole[: whole.index(b"\n")]
    for at in range(len(first)):
        changed = first[at] ^ 0x01
        if changed == ord("\n"):
            continue
        path.write_bytes(whole[:at] + bytes([changed]) + whole[at + 1 :])
        with pytest.raises(ConfigurationError, match=r"line 1: not an entry of a journal: its checksum is wrong"):
            read(path)


def test_each_line_is_an_object_of_json(tmp_path: Path) -> None:
    for line in written(tmp_path / "journal.jsonl", ENTRIES).splitlines():
        assert set(json.loads(line)) >= {"at_s", "event", "xxh3"}


def test_a_journal_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        read(tmp_path / "journal.jsonl")


def test_a_real_job_can_be_relived(tmp_path: Path) -> None:
    flags = ["--nproc-per-node", "2", "--redirects", "3", "--run-dir", str(tmp_path)]
    options = job_options(make_parser("keepstep run").parse_args([*flags, str(SCRIPTS / "tiny.py"), "--steps", "12"]))
    write_plan(tmp_path, parse("kill@step=5,phase=backward,rank=1", world_size=2))
    agent = dataclasses.replace(options.agent, digest=True, observer=OBSERVER)
    seen: list[Job] = []

    async def accompany(job: Job) -> None:
        seen.append(job)

    result = run_job(dataclasses.replace(options, agent=agent), accompany)
    assert result["exit_code"] == 0, result["reason"]
    job = seen[0].controller.job
    entries = read(tmp_path / "journal.jsonl")
    again = ControllerMachine.from_journal(options.recovery, entries, time.monotonic(), lease_s=None).job
    assert len(job.records) == 1
    assert again.records == job.records
    assert (again.stage, again.generation, again.ended) == (Stage.ENDED, job.generation, job.ended)
    assert (again.progress.trained_to, again.digests, again.membership) == (
        job.progress.trained_to,
        job.digests,
        job.membership,
    )
    assert again.roster.workers == job.roster.workers
