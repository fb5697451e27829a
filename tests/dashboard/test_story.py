"""A run in numbers: what its failures cost, next to what they would have cost a job that restarts from checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.recorded import recorded_run

from keepstep.dashboard import story
from keepstep.dashboard.story import restart
from keepstep.sim.run import case_of, run
from keepstep.trace.timeline.run import opened


def test_what_a_restart_would_have_lost(tmp_path_factory: pytest.TempPathFactory) -> None:
    with opened(recorded_run(tmp_path_factory.getbasetemp()).folder) as real:
        found = restart(real)
        assert found is not None
        ((begin_s, end_s),) = real.ledger.lost(real.now_s)
        assert found["lost_s"] == pytest.approx(end_s - begin_s, abs=1e-6)
        forward_ns = real.pace.first_forward_ns
        assert forward_ns is not None
        assert 0 < found["startup_s"] <= (forward_ns - real.info.started_ns) / 1e9
        until_failure_s = begin_s - real.info.started_ns / 1e9
    for case, interval_s in zip(found["cases"], (300, 1800), strict=True):
        assert case["interval_s"] == interval_s
        # This run takes seconds, so a restart would have begun it anew.
        assert case["lost_s"] == pytest.approx(until_failure_s, abs=0.01)
        assert case["ratio"] == pytest.approx(case["lost_s"] / found["lost_s"], rel=0.01)


def test_a_restart_goes_back_by_half_an_interval_at_most(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(story, "CHECKPOINT_INTERVALS_S", (0.002, 300))
    with opened(recorded_run(tmp_path_factory.getbasetemp()).folder) as real:
        found = restart(real)
    assert found is not None
    often, seldom = found["cases"]
    assert often["lost_s"] == pytest.approx(found["startup_s"] + 0.001, abs=0.0006)
    assert often["lost_s"] < seldom["lost_s"]


def test_nothing_failed(tmp_path: Path) -> None:
    for seed in range(1, 100):
        run(case_of(seed), record=tmp_path / str(seed))
        with opened(tmp_path / str(seed)) as simulated:
            if not simulated.scenes:
                assert restart(simulated) is None
                return
    pytest.fail("something fails in every seed")
