"""A run as its folder tells it: of real jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, run

from keepstep.trace.timeline.run import Run


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_slow_rank_is_found_although_all_take_as_long(tmp_path: Path, where: str) -> None:
    """In the backward all ranks end together, for they wait for each other's gradients; only one of them works."""
    code, _, err = run("run", "--nproc-per-node", 3, "--run-dir", tmp_path / "run", SCRIPTS / "slow.py", where)
    assert code == 0, err
    seen = Run(tmp_path / "run")
    durations = seen.poll().durations
    found = [(each.rank, each.phase) for each in seen.stragglers.found()]
    seen.close()
    assert (1, where) in found
    assert [rank for rank, phase in found if phase == where] == [1]
    assert len(durations) > 3 * 39 * 4


def test_a_run_that_has_ended_is_told_to_its_end(tmp_path: Path) -> None:
    code, _, _ = run("run", "--nproc-per-node", 2, "--run-dir", tmp_path, SCRIPTS / "tiny.py", "--steps", 12)
    assert code == 0
    seen = Run(tmp_path)
    assert seen.poll().is_any
    assert not seen.poll().is_any
    assert seen.info.ended is not None
    assert (seen.info.ended.exit_code, seen.info.ended.reason) == (0, "all ranks have finished")
    assert seen.info.command[-1] == "12"
    assert (seen.pace.step, seen.goodput, seen.scenes) == (12, 1.0, [])
    assert seen.now_s == seen.info.ended.at_ns / 1e9
    assert not seen.is_alive
    assert [event.kind for event in seen.events][-1] == "job ended"
    assert all(0 <= error_ns < 10**9 for error_ns in seen.history.error_ns.values())
    seen.close()
