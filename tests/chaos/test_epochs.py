"""A script with epochs over a torch DataLoader loses ranks, and every bit comes out the same."""

from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, drill
from tests.support.layouts import in_every_phase


@pytest.mark.parametrize(
    ("spares", "options"),
    [
        (1, ("--workers", 1)),
        (0, ("--workers", 0)),
        (1, ("--workers", 2, "--accumulate", 2, "--epochs", 6)),
        (1, ("--workers", 2, "--step-sampler", "--epochs", 4)),
    ],
    ids=["a spare and workers", "no spare", "accumulation", "a step sampler and workers"],
)
def test_a_kill_in_every_phase_and_a_hang(tmp_path: Path, spares: int, options: tuple[object, ...]) -> None:
    faults, _num_steps = in_every_phase(3)
    ranks = ("--nproc-per-node", 3, "--spares", spares)
    code, result, output = drill(tmp_path, *ranks, "--faults", faults, SCRIPTS / "epochs.py", *options)
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []
    assert all(row["steps_recomputed"] <= 1 for row in result["faults"])


def test_two_ranks_at_once(tmp_path: Path) -> None:
    faults = "kill@step=5,phase=backward,rank=1;kill@step=5,phase=backward,rank=2"
    code, result, output = drill(
        tmp_path, "--nproc-per-node", 3, "--spares", 2, "--faults", faults, SCRIPTS / "epochs.py"
    )
    assert code == 0, output
    assert result["identical"]


@pytest.mark.parametrize("flags", [[], ["--datasets"]], ids=["its own dataset", "Hugging Face's, several epochs"])
def test_a_stream_of_which_each_rank_reads_its_own(tmp_path: Path, flags: list[str]) -> None:
    faults, _num_steps = in_every_phase(3)
    ranks = ("--nproc-per-node", 3, "--spares", 1)
    code, result, output = drill(tmp_path, *ranks, "--faults", faults, SCRIPTS / "stream.py", *flags)
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []
