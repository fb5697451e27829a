"""State that only the objects themselves know of, in real jobs with failures: the same as in a run without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, drill, run

from keepstep.drill.faults import IN_A_STEP

OWN = SCRIPTS / "own_state.py"


@pytest.mark.parametrize("flags", [[], ["--sharded"]], ids=["DDP", "FSDP2"])
def test_a_kill_in_each_phase(tmp_path: Path, flags: list[str]) -> None:
    code, result, output = drill(tmp_path, "--nproc-per-node", 2, OWN, *flags)
    assert code == 0, output
    assert {row["phase"] for row in result["faults"]} >= set(IN_A_STEP)


def test_a_load_that_gives_something_else_is_repeated(tmp_path: Path) -> None:
    faults = "kill@step=5,phase=backward,rank=1"
    code, result, output = drill(
        tmp_path, "--nproc-per-node", 2, "--faults", faults, OWN, "--steps", 10, "--forgets", 1
    )
    assert code == 0, output
    assert [recovery["cause"] for recovery in result["recoveries"]] == ["signal", "state differs"]


def test_a_load_that_gives_something_else_again_ends_the_job_and_saves_what_the_others_hold(tmp_path: Path) -> None:
    job = ("run", "--nproc-per-node", 2, OWN, "--steps", 10, "--kill-at", 5, "--forgets", 9)
    code, _out, err = run(*job, cwd=tmp_path)
    assert code == 76, err
    assert "rank 1: optimizer['state']['all']['t'] is not what was restored" in err
    assert len(list(tmp_path.glob("keepstep-rescue-step5-rank0-*"))) == 1


def test_what_torch_saves_is_compared_as_well(tmp_path: Path) -> None:
    """An object hides a number from keepstep, and the drill still finds it."""
    job = ("--nproc-per-node", 2, "--faults", "none", "--run-dir", tmp_path / "runs", OWN, "--steps", 3)
    code, result, output = drill(tmp_path, *job)
    assert (code, result["state_dicts"]) == (0, None), output
    assert list((tmp_path / "runs" / "reference").glob("state_dicts")) == [], "what is equal is not kept"
    code, result, output = drill(tmp_path, *job, "--hides")
    assert code == 1, output
    assert result["reference_digest"] == result["digest"]
    assert result["state_dicts"].startswith("rank0.pt: ['hidden']['n'] is ")
    assert result["explanation"]["kind"] == "a state_dict() differs, and no record of keepstep's"
