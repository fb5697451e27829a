"""The history of phases: any stretch of it can be asked for, whether it is in memory or only on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from keepstep.protocol.messages import PhasesObserved
from keepstep.shared.tagpage import MOMENT_INDEX, SnapshotMoment
from keepstep.trace.record import phaselog
from keepstep.trace.record.phaselog import PHASE_DTYPE, PhaseLog
from keepstep.trace.timeline import history
from keepstep.trace.timeline.history import PhaseHistory

NUM = 400
WORKERS = 4


def everything() -> np.ndarray:
    """Worker after worker, a change each millisecond."""
    records = np.zeros(NUM, PHASE_DTYPE)
    records["at_ns"] = np.arange(NUM) * 1_000_000
    records["worker"] = np.arange(NUM) % WORKERS
    records["step"] = np.arange(NUM) // WORKERS
    return records


@pytest.fixture(params=[1 << 30, 50, 1], ids=["in memory", "partly", "on disk"])
def whole(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PhaseHistory:
    monkeypatch.setattr(phaselog, "SEGMENT_BYTES", 2000)
    monkeypatch.setattr(history, "IN_MEMORY", request.param)
    log, found = PhaseLog(tmp_path), PhaseHistory(tmp_path)
    rng = np.random.default_rng(1)
    for piece in np.array_split(everything(), 40):
        log.write(PhasesObserved("a", int(piece["at_ns"][0]), rng.permutation(piece).tobytes()))
        if piece["at_ns"][0] == 100_000_000:
            found.poll()
    found.poll()
    log.close()
    return found


@pytest.mark.parametrize(("begin", "end"), [(0, NUM), (10, 20), (133, 134), (390, 900), (-50, 5), (200, 200)])
def test_a_window_is_what_happened_in_it(whole: PhaseHistory, begin: int, end: int) -> None:
    expected = everything()[max(begin, 0) : end]
    found = whole.window(begin * 1_000_000, end * 1_000_000, lead=False)
    assert found.tolist() == expected.tolist()


def test_a_window_says_what_each_worker_was_in_when_it_began(whole: PhaseHistory) -> None:
    found = whole.window(101_500_000, 104_500_000)
    assert (found["at_ns"] // 1_000_000).tolist() == [98, 99, 100, 101, 102, 103, 104]


def test_the_newest_are_the_newest(whole: PhaseHistory) -> None:
    assert whole.newest(30).tolist() == everything()[-30:].tolist()
    assert len(whole.newest(10 * NUM)) == NUM


def test_a_poll_gives_what_is_new(whole: PhaseHistory) -> None:
    assert len(whole.poll()) == 0
    assert whole.end_ns == (NUM - 1) * 1_000_000
    assert whole.error_ns == {"a": 390_000_000}


def test_where_nothing_was_recorded_there_is_nothing(tmp_path: Path) -> None:
    empty = PhaseHistory(tmp_path / "phases")
    assert len(empty.poll()) == len(empty.window(0, 10**18)) == len(empty.newest(5)) == empty.end_ns == 0


def test_what_the_log_has_dropped_is_missing_and_no_error(whole: PhaseHistory) -> None:
    folder = whole._tail.folder
    phaselog.segments(folder)[0].unlink()
    found = whole.window(0, NUM * 1_000_000, lead=False)
    assert found.tolist() == everything()[-len(found) :].tolist()
    assert len(found) > NUM // 2


def test_moments_are_asked_for_by_themselves(tmp_path: Path) -> None:
    records = everything()
    records["phase"][::4] = MOMENT_INDEX[SnapshotMoment.COMPLETE]
    log, found = PhaseLog(tmp_path), PhaseHistory(tmp_path)
    log.write(PhasesObserved("a", 0, records.tobytes()))
    log.close()
    assert len(found.poll()) == NUM
    begin_ns, end_ns = 100_000_000, 120_000_000
    moments, phases = found.moments(begin_ns, end_ns), found.window(begin_ns, end_ns, lead=False)
    assert moments.tolist() == records[100:120:4].tolist()
    assert phases.tolist() == np.delete(records[100:120], np.s_[::4]).tolist()
    both = found.records(begin_ns, end_ns)
    assert [each for each in both.tolist() if each[0] >= begin_ns] == records[100:120].tolist()
    assert len(phaselog.moments_in(found.newest(NUM))) == 0
