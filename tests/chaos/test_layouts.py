"""Ranks that hold parts of a model: a lost one gets its part back, and every bit of it is right.

Where a replica holds the same part it comes from there, else from the snapshot in memory.
"""

import re
from pathlib import Path

import pytest
from tests.support import layouts
from tests.support.jobs import EXAMPLES, SCRIPTS, drill

SMALL = ("--width", 32, "--context", 32, "--batch-size", 4)
"""A shape of the GPT with short steps."""


def check(tmp_path: Path, layout: str, spares: int, faults: tuple[str, int]) -> None:
    """Runs a drill of a layout on four ranks."""
    code, result, output = drill(tmp_path, *layouts.arguments(layout, spares, faults))
    assert code == 0, output
    assert result["identical"]
    for row in result["faults"]:
        assert row["steps_recomputed"] <= layouts.most_again(layout), row


@pytest.mark.parametrize("spares", [1, 0])
@pytest.mark.parametrize("layout", layouts.LAYOUTS, ids=layouts.short)
def test_a_kill_in_every_phase_and_a_hang(tmp_path: Path, layout: str, spares: int) -> None:
    check(tmp_path, layout, spares, layouts.in_every_phase())


@pytest.mark.parametrize("layout", layouts.AT_RANDOM, ids=layouts.short)
def test_random_instants(tmp_path: Path, seed: int, layout: str) -> None:
    check(tmp_path, layout, 1, layouts.at_random(30, seed))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_kill_in_the_first_step(tmp_path: Path, phase: str) -> None:
    """Survivors have run the first forward, in which FSDP2 decides what it keeps gathered; the replacement has not."""
    check(tmp_path, "HSDP 2 × 2", 1, (f"kill@step=0,phase={phase},rank=1", 3))


def test_groups_without_the_lost_rank_stay_as_they_are(tmp_path: Path) -> None:
    """On a mesh of 2 x 2. A rank that was synced when it was lost leaves nothing under way but the gradient barrier."""
    members = {"replicate": [{0, 2}, {1, 3}], "shard": [{0, 1}, {2, 3}]}
    lost = {4: 1, 8: 2, 12: 3}
    faults = [f"kill@step={step - 1},phase=barrier,rank={rank}" for step, rank in lost.items()]
    arguments = ("--nproc-per-node", 4, "--spares", 1, "--faults", ";".join(faults))
    code, result, output = drill(tmp_path, *arguments, SCRIPTS / "hsdp.py", "--groups", "--steps", 14)
    assert code == 0, output
    assert result["identical"]
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


@pytest.mark.parametrize("how", ["hsdp", "tp", "pp"])
def test_a_gpt(tmp_path: Path, how: str) -> None:
    faults = "kill@step=3,phase=backward,rank=1;kill@step=6,phase=optimizer,rank=2"
    script = (EXAMPLES / "train_gpt.py", "--parallel", how, *SMALL, "--steps", 9)
    code, result, output = drill(tmp_path, "--nproc-per-node", 4, "--spares", 1, "--faults", faults, *script)
    assert code == 0, output
    assert result["identical"]
    for row in result["faults"]:
        assert row["steps_recomputed"] <= 1, row
