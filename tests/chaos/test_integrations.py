"""The examples of docs/integrations lose ranks: weights, and the files that they write, come out as without a loss."""

from pathlib import Path

import pytest
from tests.support import loops
from tests.support.jobs import EXAMPLES, SCRIPTS, drill
from tests.support.layouts import in_every_phase
from tests.support.loops import RANKS

WARM = ("cv_accelerate", "hf_trainer", "sft", "fabric")
"""Their frameworks ask for the rank early, where they prepare loaders and processes."""


def check(tmp_path: Path, name: str, faults: str, spares: int) -> None:
    code, result, output = drill(tmp_path, *loops.arguments(name, spares, faults))
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []
    assert all(row["steps_recomputed"] <= 1 for row in result["faults"])
    if spares == 1 and name in WARM:
        assert {row["spare"] for row in result["faults"]} == {"warm"}


@pytest.mark.parametrize("spares", [1, 0])
@pytest.mark.parametrize("name", loops.FILES)
def test_a_kill_in_every_phase_and_a_hang(tmp_path: Path, name: str, spares: int) -> None:
    check(tmp_path, name, loops.in_every_phase(name), spares)


def test_the_first_step_of_an_epoch_is_repeated_with_what_the_epoch_begins_with(tmp_path: Path) -> None:
    """The model was evaluated at the end of the epoch before, and is switched to training at the beginning."""
    faults = "kill@step=7,phase=backward,rank=1;kill@step=13,phase=forward,rank=0"
    job = ("--nproc-per-node", RANKS, "--spares", 1, "--compare", "out", "--faults", faults)
    script = EXAMPLES / "integrations/cv_accelerate.py"
    code, result, output = drill(tmp_path, *job, script, "--epochs", 3, "--size", 48)
    assert code == 0, output
    assert result["missed"] == []


@pytest.mark.parametrize("name", loops.FILES)
def test_two_ranks_at_once(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, loops.two_at_once(name), 2)


@pytest.mark.parametrize("spares", [1, 0])
def test_fsdp2_by_the_plugin_of_accelerate(tmp_path: Path, spares: int) -> None:
    faults, _num_steps = in_every_phase(RANKS)
    arguments = ("--nproc-per-node", RANKS, "--spares", spares, "--faults", faults)
    script = SCRIPTS / "accelerate_fsdp2.py"
    code, result, output = drill(tmp_path, *arguments, script, "--snapshot-every", 2)
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []


def test_fsdp2_in_a_loop_over_epochs(tmp_path: Path) -> None:
    """An epoch has 24 steps; ranks are lost in its last one, in the first one of the next, and where that ends."""
    kills = [(7, "backward", 1), (24, "updated", 0), (27, "forward", 1), (51, "forward", 0)]
    faults = ";".join(f"kill@step={step},phase={phase},rank={rank}" for step, phase, rank in kills)
    ranks = ("--nproc-per-node", 2, "--spares", 1, "--faults", faults)
    script = SCRIPTS / "accelerate_fsdp2.py"
    code, result, output = drill(tmp_path, *ranks, script, "--snapshot-every", 5, "--epochs")
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []
