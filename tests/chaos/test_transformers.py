"""Hugging Face's Trainer loses ranks: weights, checkpoints, metrics and logs come out as without a loss."""

import json
import re
import shutil
import statistics
from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, drill, run
from tests.support.layouts import in_every_phase

SCRIPT = SCRIPTS / "hf_trainer.py"
RANKS = 3
LOGGING = 5
"""The unit after the fourth step, in which rank 0 logs, evaluates and saves."""


def check(tmp_path: Path, faults: str, spares: int, *options: object) -> str:
    arguments = ("--nproc-per-node", RANKS, "--spares", spares, "--compare", "out", "--faults", faults)
    code, result, output = drill(tmp_path, *arguments, SCRIPT, *options)
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []
    assert all(row["steps_recomputed"] <= 1 for row in result["faults"])
    # Without a spare it depends on which is faster: the new process, or the recovery that gives it the rank.
    assert not spares or {row["spare"] for row in result["faults"]} == {"warm"}
    return output


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


def test_each_rank_has_its_own_log(tmp_path: Path) -> None:
    """Of its own losses, and of what a callback logs when a step's update is done."""
    faults, _num_steps = in_every_phase(RANKS)
    check(tmp_path, f"{faults};kill@step={LOGGING},phase=updated,rank=0", 1, "--epochs", 5, "--own-logs")


COUNTING = (
    "kill@step=2,phase=forward,rank=0;kill@step=6,phase=backward,rank=1;kill@step=11,phase=barrier,rank=0;"
    "kill@step=15,phase=synced,rank=1;kill@step=22,phase=optimizer,rank=0;kill@step=26,phase=updated,rank=1",
    "kill@step=3,phase=synced,rank=1;kill@step=7,phase=forward,rank=0;kill@step=8,phase=updated,rank=1;"
    "kill@step=18,phase=updated,rank=0;kill@step=20,phase=synced,rank=1;kill@step=31,phase=forward,rank=0",
)
"""In the phases of a step, and in the work behind it. Behind steps 6 and 17 are four units: they log and evaluate, tell
of the evaluation, save, and tell of that; behind another step is one."""


@pytest.mark.parametrize("faults", COUNTING, ids=["in a step", "in the work behind it"])
def test_callbacks_and_a_trainer_count_for_each_rank(faults: str, tmp_path: Path) -> None:
    """Each rank writes at the end what it has counted: events in front of the barrier and behind it, and its losses."""
    check(tmp_path, faults, 1, "--epochs", 3, "--counting")


def test_callbacks_count_where_epochs_end(tmp_path: Path) -> None:
    """An epoch of five steps ends with four units that log, evaluate and save; the next one begins with step 14."""
    faults = "kill@step=10,phase=updated,rank=0;kill@step=14,phase=forward,rank=1;kill@step=24,phase=forward,rank=0"
    check(tmp_path, faults, 0, "--epochs", 3, "--counting", "--strategy", "epoch")


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_callbacks_of_survivors_hear_once_of_an_evaluation_and_of_a_checkpoint(strategy: str, tmp_path: Path) -> None:
    """Ranks are lost when they have evaluated, and when they have saved, before the others have done so as well.

    The callbacks change what the optimizer does, have something saved, and reduce a value.
    """
    faults = "kill@step=5,phase=forward,rank=1;kill@step=7,phase=forward,rank=0;kill@step=10,phase=backward,rank=1;"
    faults += "kill@step=14,phase=forward,rank=1;kill@step=16,phase=forward,rank=2"
    output = check(tmp_path, faults, 1, "--epochs", 3, "--telling", "--strategy", strategy)
    last = 4 if strategy == "steps" else 5
    assert f"keepstep: step 5 comes after the Trainer's global_step {last}" in output
    assert f" 5 ({last}) " in output, "in the table"


def test_the_evaluation_at_the_start_is_logged_once(tmp_path: Path) -> None:
    check(tmp_path, "kill@step=3,phase=backward,rank=0", 0, "--epochs", 1, "--eval-on-start")


def test_a_training_that_is_resumed_from_a_checkpoint_is_the_same_as_one_that_was_not(tmp_path: Path) -> None:
    ranks, whole, again = ("--nproc-per-node", 2), tmp_path / "whole", tmp_path / "again"
    for out, options in ((whole, ()), (again, ("--resume",))):
        code, _out, err = run("run", *ranks, SCRIPT, "--out", out, "--epochs", 2, *options)
        assert code == 0, err
        shutil.copytree(whole / "checkpoint-8", again / "checkpoint-8", dirs_exist_ok=True)
    for name in ("best.pt", "checkpoint-14/model.safetensors", "checkpoint-14/rng_state_1.pth"):
        assert (whole / name).read_bytes() == (again / name).read_bytes(), name


@pytest.mark.parametrize(("dying", "loaded"), [((), (8, 8, 12, 12)), (("--dying", 0), (8, 8))], ids=["all", "one"])
def test_fresh_ranks_load_the_newest_checkpoint_and_a_replacement_none(
    dying: tuple[object, ...], loaded: tuple[int, ...], tmp_path: Path
) -> None:
    job = ("--nproc-per-node", 2, "--spares", 0, SCRIPT, "--epochs", 2)
    whole, again = tmp_path / "whole", tmp_path / "again"
    code, _out, err = run("run", *job, "--out", whole)
    assert code == 0, err
    shutil.copytree(whole / "checkpoint-8", again / "checkpoint-8")
    code, out, err = run("run", *job, "--out", again, "--resume", "--die-at", 13, *dying)
    assert code == 0, err
    assert tuple(map(int, re.findall(r"loads .*checkpoint-(\d+)", out))) == loaded
    for name in ("best.pt", "checkpoint-14/model.safetensors"):
        assert (whole / name).read_bytes() == (again / name).read_bytes(), name
    first, second = (json.loads((out / "history.json").read_text()) for out in (whole, again))
    assert first[:-1] == second[:-1]
    losses = [line["loss"] for line in first if line["step"] > loaded[-1] and "loss" in line]
    assert second[-1]["train_loss"] == pytest.approx(statistics.mean(losses)), "of the steps since the checkpoint"
    told = [json.loads(line) for line in (again / "lines.txt").read_text().splitlines()]
    assert told == [line for line in second if line["step"] > loaded[0]]


@pytest.mark.parametrize("spares", [1, 0])
def test_fsdp2_is_restored_from_snapshots(tmp_path: Path, spares: int) -> None:
    """Files of shards have other bytes in each run."""
    files = ("out/lines.txt", "out/history.json", "out/checkpoint-*/trainer_state.json")
    compared = [option for pattern in files for option in ("--compare", pattern)]
    faults, _num_steps = in_every_phase(RANKS)
    arguments = ("--nproc-per-node", RANKS, "--spares", spares, *compared, "--faults", faults)
    options = ("--fsdp", "--snapshot-every", 2, "--epochs", 4)
    code, result, output = drill(tmp_path, *arguments, SCRIPT, *options)
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []
    assert all(row["steps_recomputed"] <= 3 for row in result["faults"])
