"""Lightning's Trainer loses ranks: weights, logs and checkpoints come out as without a loss."""

from pathlib import Path

import pytest
import torch
from tests.support.jobs import SCRIPTS, drill, run
from tests.support.layouts import in_every_phase

FAULTS = (
    "kill@step=4,phase=forward,rank=1;kill@step=10,phase=backward,rank=2;kill@step=13,phase=synced,rank=0;"
    "kill@step=17,phase=barrier,rank=1;kill@step=21,phase=updated,rank=0"
)


@pytest.mark.parametrize("spares", [1, 0])
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--manual",),
        ("--accumulate", 2, "--workers", 1, "--epochs", 5),
        ("--precision", "bf16-mixed"),
        ("--precision", "16-mixed"),
        ("--loaders", "max_size_cycle"),
        ("--loaders", "max_size", "--workers", 1),
    ],
    ids=[
        "automatic",
        "manual",
        "accumulation and workers",
        "mixed precision",
        "scaled",
        "two loaders",
        "uneven loaders",
    ],
)
def test_kills_and_every_file(tmp_path: Path, spares: int, options: tuple[object, ...]) -> None:
    arguments = ("--nproc-per-node", 3, "--spares", spares, "--compare", "out", "--faults", FAULTS)
    _code, result, output = drill(tmp_path, *arguments, SCRIPTS / "lightning_trainer.py", *options)
    assert result["exit_code"] == 0, output
    assert result["identical"], output
    assert [file for file in result["files"] if file["difference"]] == [], output
    assert len(result["faults"]) >= 4, output  # some step has no backward: behind it Lightning logs and validates


WHOLE_EPOCHS = ("--log-every", 1000, "--validate", 1.0)
"""Nothing follows a step but the last one of an epoch, so that every phase comes in the steps that are struck."""


@pytest.mark.parametrize("spares", [1, 0])
@pytest.mark.parametrize("options", [(), ("--keys", 150)], ids=["few keys", "many keys"])
def test_a_kill_in_every_phase_and_a_hang(tmp_path: Path, spares: int, options: tuple[object, ...]) -> None:
    faults, _num_steps = in_every_phase(3)
    arguments = ("--nproc-per-node", 3, "--spares", spares, "--compare", "out", "--faults", faults)
    code, result, output = drill(tmp_path, *arguments, SCRIPTS / "lightning_trainer.py", *WHOLE_EPOCHS, *options)
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []


def test_two_ranks_at_once(tmp_path: Path) -> None:
    faults = "kill@step=5,phase=backward,rank=0;kill@step=5,phase=backward,rank=2"
    arguments = ("--nproc-per-node", 3, "--spares", 2, "--compare", "out", "--faults", faults)
    code, result, output = drill(tmp_path, *arguments, SCRIPTS / "lightning_trainer.py", *WHOLE_EPOCHS)
    assert code == 0, output
    assert result["identical"]
    assert "keepstep: step 5 comes after Lightning's global_step 5" in output


@pytest.mark.parametrize("spares", [1, 0])
def test_a_gan_that_alternates_by_batch(tmp_path: Path, spares: int) -> None:
    faults, _num_steps = in_every_phase(3)
    arguments = ("--nproc-per-node", 3, "--spares", spares, "--faults", faults)
    code, result, output = drill(tmp_path, *arguments, SCRIPTS / "lightning_gan.py")
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []


def test_a_gan_that_updates_both_in_each_batch_is_refused(tmp_path: Path) -> None:
    code, _out, err = run("run", "--nproc-per-node", 2, SCRIPTS / "lightning_gan.py", "--both", cwd=tmp_path)
    assert code != 0
    assert "the discriminator in even steps, the generator in odd ones" in err


def test_faults_in_a_training_that_is_resumed_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    script, ranks = SCRIPTS / "lightning_trainer.py", ("--nproc-per-node", 3)
    code, _out, err = run("run", *ranks, script, "--epochs", 1, cwd=tmp_path / "first")
    assert code == 0, err
    faults = "kill@step=4,phase=backward,rank=0;kill@step=10,phase=updated,rank=1"
    resumed = (script, *WHOLE_EPOCHS, "--resume", tmp_path / "first/out/best/last.ckpt")
    code, result, output = drill(tmp_path, *ranks, "--spares", 1, "--compare", "out", "--faults", faults, *resumed)
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []


@pytest.mark.parametrize(("dying", "restored"), [((), 1), (("--dying", 0), 0)], ids=["all", "one"])
def test_fresh_ranks_load_the_newest_checkpoint_and_a_replacement_none(
    dying: tuple[object, ...], restored: int, tmp_path: Path
) -> None:
    job = ("--nproc-per-node", 2, "--spares", 0, SCRIPTS / "lightning_trainer.py", *WHOLE_EPOCHS)
    ends = []
    for name, options in (("whole", ()), ("again", ("--resume", "last", "--die-at", 20, *dying))):
        (tmp_path / name).mkdir()
        code, out, err = run("run", *job, *options, cwd=tmp_path / name)
        assert code == 0, err
        ends.append(torch.load(tmp_path / name / "out/best/last.ckpt", weights_only=True)["state_dict"])
        assert (out + err).count("Restoring states from the checkpoint path") == (restored if options else 0)
    first, second = ends
    assert all(torch.equal(value, second[name]) for name, value in first.items())
