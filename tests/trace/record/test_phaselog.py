"""The log of phases: what is written is read, also while it grows; it stays bounded, and damage is found."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import PhasesObserved, WorkerFenced
from keepstep.protocol.phases import Phase
from keepstep.protocol.waiting.operations import Operation
from keepstep.shared import tagpage
from keepstep.shared.tagpage import PHASES, SnapshotMoment, TagReader, TagWriter
from keepstep.trace.record import phaselog
from keepstep.trace.record.phaselog import (
    NO_RANK,
    NUM_KINDS,
    PHASE_DTYPE,
    PhaseLog,
    PhaseTail,
    from_ring,
    read_segment,
    records_of,
    segments,
)
from keepstep.transports.framing import frame


def observed(first: int, num: int = 3, node: str = "node") -> PhasesObserved:
    records = np.zeros(num, PHASE_DTYPE)
    records["at_ns"] = range(first, first + num)
    return PhasesObserved(node, 7, records.tobytes())


def read_all(tail: PhaseTail) -> list[int]:
    return [at_ns for _, message in tail.read() for at_ns in records_of(message)["at_ns"].tolist()]


def small_segments(monkeypatch: pytest.MonkeyPatch, frames_per_segment: int = 2) -> None:
    monkeypatch.setattr(phaselog, "SEGMENT_BYTES", frames_per_segment * len(frame(observed(0))))


def test_a_ring_becomes_records() -> None:
    descriptor = tagpage.create("test")
    writer, reader = TagWriter(descriptor), TagReader(descriptor)
    os.close(descriptor)
    writer.write(1, 4, Phase.FORWARD)
    writer.operation_entered("world", Operation.ALL_REDUCE)
    writer.write(1, 4, Phase.SYNCED)
    ring, end = reader.copy_since(0)
    events = reader.events_since(0)
    reader.close()
    assert end == 2
    records = from_ring(ring, worker=5, rank=2, offset_ns=1000)
    assert records["at_ns"].tolist() == [event.at_ns + 1000 for event in events]
    assert records["entered_ns"].tolist() == [0, events[1].entered_ns + 1000]
    assert [PHASES[phase] for phase in records["phase"]] == [Phase.FORWARD, Phase.SYNCED]
    assert records[["step", "generation", "worker", "rank"]].tolist() == [(4, 1, 5, 2)] * 2
    assert from_ring(ring, 5, None, 0)["rank"].tolist() == [NO_RANK] * 2
    assert len(from_ring(b"", 5, None, 0)) == 0


def test_what_is_written_is_read_as_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch)
    log = PhaseLog(tmp_path / "phases")
    tail = PhaseTail(tmp_path / "phases")
    assert read_all(tail) == []
    for first in range(0, 30, 3):
        log.write(observed(first))
        assert read_all(tail) == [first, first + 1, first + 2]
    log.close()
    assert len(segments(tmp_path / "phases")) == 5
    late = PhaseTail(tmp_path / "phases")
    assert read_all(late) == list(range(30))
    tail.close()
    late.close()


def test_a_reader_waits_for_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    tail = PhaseTail(tmp_path / "phases")
    assert read_all(tail) == []
    log = PhaseLog(tmp_path / "phases")
    log.write(observed(1))
    log.close()
    assert read_all(tail) == [1, 2, 3]
    tail.close()


def test_half_a_frame_is_read_when_the_rest_has_come(tmp_path: Path) -> None:
    (tmp_path / "phases").mkdir()
    path = tmp_path / "phases" / "00000001.frames"
    data = frame(observed(0)) + frame(observed(3))
    tail = PhaseTail(tmp_path / "phases")
    found = []
    for end in range(len(data) + 1):
        path.write_bytes(data[:end])
        found += read_all(tail)
    tail.close()
    assert found == [0, 1, 2, 3, 4, 5]


def test_a_writer_that_comes_back_begins_a_segment_of_its_own(tmp_path: Path) -> None:
    for first in (0, 3):
        log = PhaseLog(tmp_path)
        log.write(observed(first))
        log.close()
    torn = segments(tmp_path)[0]
    torn.write_bytes(torn.read_bytes() + b"\x50\x00\x00\x00half")
    tail = PhaseTail(tmp_path)
    assert read_all(tail) == [0, 1, 2, 3, 4, 5]
    tail.close()
    assert [len(read_segment(path)) for path in segments(tmp_path)] == [3, 3]


def test_the_log_stays_bounded_and_what_was_marked_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch, 1)
    monkeypatch.setattr(phaselog, "MAX_SEGMENTS", 10)
    log = PhaseLog(tmp_path)
    for number in range(1, 41):
        log.write(observed(number * 10))
        if number == 5:
            log.mark()
        assert len(segments(tmp_path)) <= 10
    log.close()
    assert [int(path.stem) for path in segments(tmp_path)] == [4, 5, 6, *range(34, 41)]


def test_a_segment_that_goes_while_it_is_read_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_segments(monkeypatch)
    log = PhaseLog(tmp_path)
    log.write(observed(0))
    tail = PhaseTail(tmp_path)
    assert read_all(tail) == [0, 1, 2]
    log.write(observed(3))
    log.write(observed(6))
    segments(tmp_path)[0].unlink()
    assert read_all(tail) == list(range(3, 9))
    assert len(read_segment(tmp_path / "00000001.frames")) == 0
    log.close()
    tail.close()


@pytest.mark.parametrize("length", [1, 39, 41])
def test_half_a_record_is_refused(length: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"node a: {length} bytes are no whole records"):
        records_of(PhasesObserved("a", 0, bytes(length)))


@given(st.integers(-(2**31), 2**31 - 1).filter(lambda phase: not 0 <= phase < NUM_KINDS))
def test_a_phase_that_does_not_exist_is_refused(phase: int) -> None:
    records = np.zeros(2, PHASE_DTYPE)
    records["phase"][1] = phase
    with pytest.raises(RemoteProtocolError, match="node a: a record names a phase that does not exist"):
        records_of(PhasesObserved("a", 0, records.tobytes()))


def test_something_else_in_the_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "00000001.frames").write_bytes(frame(WorkerFenced(1)))
    with pytest.raises(RemoteProtocolError, match=r"00000001\.frames: holds WorkerFenced"):
        read_all(PhaseTail(tmp_path))


def test_a_moment_becomes_a_record_with_its_bytes() -> None:
    descriptor = tagpage.create("test")
    writer, reader = TagWriter(descriptor), TagReader(descriptor)
    os.close(descriptor)
    writer.write(1, 4, Phase.FORWARD)
    writer.moment(SnapshotMoment.COMPLETE, 1, 4, 5_000_000, 77)
    records = from_ring(reader.copy_since(0)[0], worker=5, rank=2, offset_ns=1000)
    reader.close()
    (moment,) = phaselog.moments_in(records)
    assert (moment["at_ns"], moment["entered_ns"], moment["step"], moment["rank"]) == (1077, 5_000_000, 4, 2)
    assert phaselog.phases_in(records)["phase"].tolist() == [PHASES.index(Phase.FORWARD)]
    assert len(records_of(PhasesObserved("a", 0, records.tobytes()))) == 2
    records["phase"] = tagpage.NUM_KINDS
    with pytest.raises(RemoteProtocolError, match="does not exist"):
        records_of(PhasesObserved("a", 0, records.tobytes()))
