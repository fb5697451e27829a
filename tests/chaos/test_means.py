"""Sums of an epoch survive a loss where epochs begin and end, and each line of them is written once."""

from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, drill

NUM_BATCHES = 7


@pytest.mark.parametrize(("form", "updates"), [("--accelerate", 2), ("--one-loop", 2), ("--by-hand", 1)])
def test_a_rank_is_lost_where_epochs_begin_and_end(tmp_path: Path, form: str, updates: int) -> None:
    steps = NUM_BATCHES * updates
    epoch = steps if form == "--one-loop" else steps + 1
    ends = [n * epoch + steps - 1 for n in range(3)]
    end = "backward" if form == "--one-loop" else "updated"  # in one loop a rank's line of a step is lost with it
    places = [(3, "backward", 1), (epoch, "forward", 0), (ends[1], end, 1), (ends[2], end, 0)]
    faults = ";".join(f"kill@step={step},phase={phase},rank={rank}" for step, phase, rank in places)
    options = ("--nproc-per-node", 2, "--spares", 1, "--compare", "means*", "--faults", faults)
    code, result, output = drill(tmp_path, *options, SCRIPTS / "means.py", form, "--updates", updates)
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []


@pytest.mark.parametrize("phases", [("forward", "synced", "barrier"), ("optimizer", "barrier", "updated")])
def test_a_line_of_an_end_of_an_epoch_is_written_once(tmp_path: Path, phases: tuple[str, ...]) -> None:
    ends = [(n + 1) * (NUM_BATCHES + 1) - 1 for n in range(3)]
    places = zip(ends, phases, (1, 0, 0), strict=True)
    faults = ";".join(f"kill@step={step},phase={phase},rank={rank}" for step, phase, rank in places)
    options = ("--nproc-per-node", 2, "--spares", 1, "--compare", "means*", "--faults", faults)
    code, result, output = drill(tmp_path, *options, SCRIPTS / "means.py")
    assert code == 0, output
    assert result["missed"] == []


def test_a_drill_of_which_nothing_is_said(tmp_path: Path) -> None:
    options = ("--nproc-per-node", 2, "--spares", 1, "--compare", "means*")
    code, result, output = drill(tmp_path, *options, SCRIPTS / "means.py")
    assert code == 0, output
    assert result["missed"] == []
    assert any("phase=updated,rank=0" in fault["specification"] for fault in result["faults"]), result["faults"]
