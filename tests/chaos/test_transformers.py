"""Hugging Face's Trainer loses ranks: weights, checkpoints, metrics and logs come out as without a loss."""

from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, drill
from tests.support.layouts import in_every_phase

SCRIPT = SCRIPTS / "hf_trainer.py"
RANKS = 3
LOGGING = 5
"""The unit behind the fourth step, in which rank 0 logs, evaluates and saves."""


def check(tmp_path: Path, faults: str, spares: int, *options: object) -> None:
    arguments = ("--nproc-per-node", RANKS, "--spares", spares, "--compare", "out", "--faults", faults)
    code, result, output = drill(tmp_path, *arguments, SCRIPT, *options)
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []
    assert all(row["steps_recomputed"] <= 1 for row in result["faults"])


@pytest.mark.parametrize(
    ("spares", "options"),
    [
        (1, ("--epochs", 4)),
        (0, ("--epochs", 4)),
        (1, ("--epochs", 3, "--accumulate", 1, "--strategy", "epoch", "--workers", 1)),
    ],
    ids=["a spare", "no spare", "by epochs, with workers"],
)
def test_a_kill_in_every_phase_and_a_hang(tmp_path: Path, spares: int, options: tuple[object, ...]) -> None:
    faults, _num_steps = in_every_phase(RANKS)
    check(tmp_path, faults, spares, *options)


def test_two_ranks_at_once(tmp_path: Path) -> None:
    check(tmp_path, "kill@step=5,phase=forward,rank=1;kill@step=5,phase=forward,rank=2", 2, "--epochs", 2)


@pytest.mark.parametrize("phase", ["synced", "updated"])
def test_the_rank_that_logs_is_lost_when_the_line_counts(tmp_path: Path, phase: str) -> None:
    check(tmp_path, f"kill@step={LOGGING},phase={phase},rank=0", 1, "--epochs", 2)
