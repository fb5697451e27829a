"""Ranks that hold what no other rank holds: a lost one comes back from its snapshot, and every bit of it is right."""

from pathlib import Path

import pytest
from tests.support.jobs import EXAMPLES, SCRIPTS, drill, run
from tests.support.layouts import SPACING, in_every_phase

FSDP2 = (SCRIPTS / "hsdp.py", "--replicas", 1)


def check(tmp_path: Path, faults: str, num_steps: int, every: int, *options: object) -> None:
    """FSDP2 on four ranks with a snapshot every so many steps."""
    arguments = ("--nproc-per-node", 4, *options, "--faults", faults, *FSDP2, "--snapshot-every", every)
    code, result, output = drill(tmp_path, *arguments, "--steps", num_steps)
    assert code == 0, output
    assert result["identical"]
    for row in result["faults"]:
        assert row["steps_recomputed"] <= every + 1, row  # those since the snapshot, and the broken one


@pytest.mark.parametrize("script", ["pipeline.py", "tensor_parallel.py"])
def test_other_layouts_take_as_many_as_cost_little(tmp_path: Path, script: str) -> None:
    faults, num_steps = in_every_phase(2)
    ranks = ("--nproc-per-node", 2, "--spares", 1)
    code, result, output = drill(tmp_path, *ranks, "--faults", faults, SCRIPTS / script, "--steps", num_steps)
    assert code == 0, output
    assert result["identical"]


def test_a_warm_spare_loads_what_the_lost_rank_has_left(tmp_path: Path) -> None:
    """It is told of that after it has said what it holds."""
    faults = "kill@step=4,phase=backward,rank=2"
    code, result, output = drill(
        tmp_path, "--nproc-per-node", 3, "--spares", 1, "--faults", faults, SCRIPTS / "snapshots.py"
    )
    assert code == 0, output
    assert result["identical"]
    assert [row["superseded"] for row in result["recoveries"]] == [False], output
    assert result["recoveries"][0]["origins"]["2"] == "snapshot in memory"


def test_a_damaged_snapshot_gives_way_to_a_checkpoint(tmp_path: Path) -> None:
    faults = "kill@step=10,phase=updated,rank=1"
    script = (SCRIPTS / "damaged.py", "--damaged-at", 10, "--checkpoint-dir", "checkpoints")
    code, result, output = drill(tmp_path, "--nproc-per-node", 2, "--spares", 1, "--faults", faults, *script)
    assert code == 0, output
    assert result["identical"]
    assert [row["state_from"] for row in result["faults"]] == ["checkpoint"]
    assert "the snapshot of rank 1 at step 10 in memory has a wrong checksum" in output


@pytest.mark.parametrize("how", ["fsdp2", "tp", "pp"])
def test_a_gpt(tmp_path: Path, how: str) -> None:
    faults = "kill@step=3,phase=backward,rank=1;kill@step=6,phase=optimizer,rank=0"
    gpt = (EXAMPLES / "train_gpt.py", "--width", 32, "--context", 32, "--batch-size", 4, "--parallel", how)
    code, _result, output = drill(tmp_path, "--nproc-per-node", 2, "--faults", faults, *gpt, "--steps", 9)
    assert code == 0, output
    assert "snapshot" in output


ZERO = SCRIPTS / "zero.py"


@pytest.mark.parametrize(
    "script",
    [(ZERO,), (ZERO, "--buckets"), (ZERO, "--group", 2), (*FSDP2, "--muon"), (SCRIPTS / "hsdp.py", "--muon")],
    ids=["ZeRO", "ZeRO in buckets", "ZeRO with replicas", "Muon with FSDP2", "Muon with HSDP"],
)
def test_updates_that_communicate(tmp_path: Path, script: tuple[object, ...]) -> None:
    """A rank is killed in each phase, and one hangs in its update; others stand in the collectives of theirs."""
    faults, num_steps = in_every_phase()
    faults += f";hang@step={num_steps},phase=optimizer,rank=1"
    arguments = ("--nproc-per-node", 4, "--spares", 1, "--faults", faults, *script, "--snapshot-every", 2)
    code, result, output = drill(tmp_path, *arguments, "--steps", num_steps + SPACING)
    assert code == 0, output
    assert result["identical"]
    for row in result["faults"]:
        assert row["steps_recomputed"] <= 3, row


def test_an_update_that_communicates_is_refused_where_no_snapshots_are_taken(tmp_path: Path) -> None:
    script = (SCRIPTS / "hsdp.py", "--muon", "--steps", 3)  # all shards have a replica
    code, _out, err = run("run", "--nproc-per-node", 4, *script)
    assert code == 1
    assert "UsageError: Muon.step() runs collectives" in err
    assert "protect(snapshot_every=1), or use" in err


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_average_of_sharded_parameters(tmp_path: Path, replicas: int) -> None:
    """A rank's part of it comes from its snapshot, or from its replica."""
    faults, num_steps = in_every_phase()
    script = (SCRIPTS / "hsdp.py", "--average", "--replicas", replicas, "--steps", num_steps + SPACING)
    code, result, output = drill(tmp_path, "--nproc-per-node", 4, "--spares", 1, "--faults", faults, *script)
    assert code == 0, output
    assert result["identical"]


def test_buffers_that_differ_between_replicas_are_refused(tmp_path: Path) -> None:
    """A lost rank would get those of its replica, and train on with another statistic than without a failure."""
    script = (SCRIPTS / "hsdp.py", "--statistic", "--steps", 4)
    code, _out, err = run("run", "--nproc-per-node", 4, *script)
    assert code == 1
    assert "StateMismatch: 'model.1.mean' differs between rank" in err
    code, out, err = run("run", "--nproc-per-node", 4, *script, "--replicas", 1)
    assert (code, out) == (0, "done\n"), err


def test_no_spare(tmp_path: Path) -> None:
    """A fresh process takes the rank."""
    check(tmp_path, "kill@step=5,phase=backward,rank=1", 9, 2, "--spares", 0, "--max-restarts", 2)


def test_all_ranks_at_once(tmp_path: Path) -> None:
    """No process is left of the job but its agent."""
    faults = ";".join(f"kill@step=5,phase=backward,rank={rank}" for rank in range(4))
    check(tmp_path, faults, 9, 2, "--spares", 4)


def test_functions_are_called_again_in_the_steps_that_lie_behind(tmp_path: Path) -> None:
    faults, _num_steps = in_every_phase()
    arguments = ("--nproc-per-node", 4, "--spares", 1, "--faults", faults, SCRIPTS / "functions.py")
    code, result, output = drill(tmp_path, *arguments)
    assert code == 0, output
    assert result["identical"]
    assert max(row["steps_recomputed"] for row in result["faults"]) > 1
