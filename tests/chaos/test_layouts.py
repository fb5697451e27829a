"""Ranks that hold parts of a model: a lost one gets its part from another replica, and every bit of it is right."""

from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, drill

from keepstep.drill.faults import IN_A_STEP

SPACING = 4


def check(tmp_path: Path, faults: str, num_steps: int, *script: object) -> None:
    ranks = ("--nproc-per-node", 4, "--spares", 1)
    code, result, output = drill(tmp_path, *ranks, "--faults", faults, *script, "--steps", num_steps)
    assert code == 0, output
    assert result["identical"]
    for row in result["faults"]:
        assert row["steps_recomputed"] <= 1, row


@pytest.mark.parametrize("script", ["hsdp.py", "pipeline.py", "tensor_parallel.py"])
def test_a_kill_in_every_phase_and_a_hang(tmp_path: Path, script: str) -> None:
    faults = [f"kill@step={3 + n * SPACING},phase={phase},rank={n % 4}" for n, phase in enumerate(IN_A_STEP)]
    faults.append(f"hang@step={3 + len(faults) * SPACING},phase=backward,rank=2")
    check(tmp_path, ";".join(faults), 3 + len(faults) * SPACING, SCRIPTS / script)


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B"])
def test_other_schedules(tmp_path: Path, schedule: str) -> None:
    faults = "kill@step=3,phase=backward,rank=1;kill@step=7,phase=forward,rank=2"
    check(tmp_path, faults, 11, SCRIPTS / "pipeline.py", "--schedule", schedule)


@pytest.mark.parametrize("script", ["hsdp.py", "pipeline.py", "tensor_parallel.py"])
def test_random_instants(tmp_path: Path, seed: int, script: str) -> None:
    check(tmp_path, f"kill@phase=random,count=30,seed={seed}", 300, SCRIPTS / script)
