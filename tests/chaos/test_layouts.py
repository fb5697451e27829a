"""Ranks that hold parts of a model: a lost one gets its part from another replica, and every bit of it is right."""

import re
from pathlib import Path

import pytest
from tests.support.jobs import EXAMPLES, SCRIPTS, drill

from keepstep.drill.faults import IN_A_STEP

SPACING = 4
SMALL = ("--width", 32, "--context", 32, "--batch-size", 4)
"""A shape of the GPT with short steps."""


def check(tmp_path: Path, faults: str, num_steps: int, *script: object) -> str:
    """Runs a drill of four ranks, and returns what it wrote."""
    ranks = ("--nproc-per-node", 4, "--spares", 1)
    code, result, output = drill(tmp_path, *ranks, "--faults", faults, *script, "--steps", num_steps)
    assert code == 0, output
    assert result["identical"]
    for row in result["faults"]:
        assert row["steps_recomputed"] <= 1, row
    return output


@pytest.mark.parametrize("script", ["hsdp.py", "pipeline.py", "tensor_parallel.py"])
def test_a_kill_in_every_phase_and_a_hang(tmp_path: Path, script: str) -> None:
    faults = [f"kill@step={3 + n * SPACING},phase={phase},rank={n % 4}" for n, phase in enumerate(IN_A_STEP)]
    faults.append(f"hang@step={3 + len(faults) * SPACING},phase=backward,rank=2")
    check(tmp_path, ";".join(faults), 3 + len(faults) * SPACING, SCRIPTS / script)


def test_groups_without_the_lost_rank_stay_as_they_are(tmp_path: Path) -> None:
    """On a mesh of 2 x 2. A rank that was synced when it was lost leaves nothing under way but the gradient barrier."""
    members = {"replicate": [{0, 2}, {1, 3}], "shard": [{0, 1}, {2, 3}]}
    lost = {4: 1, 8: 2, 12: 3}
    faults = [f"kill@step={step - 1},phase=barrier,rank={rank}" for step, rank in lost.items()]
    output = check(tmp_path, ";".join(faults), 14, SCRIPTS / "hsdp.py", "--groups")
    told = re.findall(r"^rank (\d) step (\d+) kept (.*)$", output, re.MULTILINE)
    kept = {(int(step), int(rank)): set(names.split(" and ")) - {"none"} for rank, step, names in told}
    assert len(kept) == 3 * len(lost), output
    num_kept = 0
    for step, rank in lost.items():
        for name, pair in [(name, pair) for name, pairs in members.items() for pair in pairs]:
            said = {name in kept[step, member] for member in pair - {rank}}
            assert len(said) == 1, f"the members of {name} {pair} differ after step {step}: {output}"
            assert said == {False} or rank not in pair
            num_kept += True in said
    assert num_kept > 0, output


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B"])
def test_other_schedules(tmp_path: Path, schedule: str) -> None:
    faults = "kill@step=3,phase=backward,rank=1;kill@step=7,phase=forward,rank=2"
    check(tmp_path, faults, 11, SCRIPTS / "pipeline.py", "--schedule", schedule)


@pytest.mark.parametrize("how", ["hsdp", "tp", "pp"])
def test_a_gpt(tmp_path: Path, how: str) -> None:
    faults = "kill@step=3,phase=backward,rank=1;kill@step=6,phase=optimizer,rank=2"
    check(tmp_path, faults, 9, EXAMPLES / "train_gpt.py", "--parallel", how, *SMALL)


@pytest.mark.parametrize("script", ["hsdp.py", "pipeline.py", "tensor_parallel.py"])
def test_random_instants(tmp_path: Path, seed: int, script: str) -> None:
    check(tmp_path, f"kill@phase=random,count=30,seed={seed}", 300, SCRIPTS / script)
