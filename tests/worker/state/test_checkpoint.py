"""Checkpoints: whole or not there, and every bit in them."""

import copy
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import run_ranks
from tests.worker.state.parts import OPTIMIZERS, SCHEDULERS, Job, advance, small, train

from keepstep.errors import ConfigurationError
from keepstep.worker.state import checkpoint
from keepstep.worker.state.checkpoint import Checkpoints, rescue, rescue_parent
from keepstep.worker.state.dcp.content import Share, describe
from keepstep.worker.state.protected import ProtectedState

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path, seed: int) -> None:
    job = Job(seed)
    checkpoints = Checkpoints(job.state, tmp_path / "new" / "folder", every=3)
    assert checkpoints.steps() == ()
    job.train(3, seed)
    checkpoints.after_step(3, generation=1)
    before = job.everything()
    job.train(2, seed + 50)  # while it is being written
    after = job.everything()
    checkpoints.flush()
    assert checkpoints.steps() == (3,)
    assert after != before
    checkpoints.load(3)
    assert job.everything() == before
    job.train(2, seed + 50)
    assert job.everything() == after, "it goes on as it did"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_fresh_process_takes_it_up(optimizer: str, tmp_path: Path, seed: int) -> None:
    job, other = Job(seed, optimizer), Job(seed + 1, optimizer)
    job.train(3, seed)
    checkpoints = Checkpoints(job.state, tmp_path, every=1)
    checkpoints.after_step(3, 1)
    checkpoints.flush()
    found = Checkpoints(other.state, tmp_path, every=1)
    assert found.steps() == (3,)
    found.load(3)
    assert other.everything() == job.everything()
    job.train(2, seed + 9)
    other.train(2, seed + 9)
    assert other.everything() == job.everything()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_host_state_comes_back(scheduler: str, tmp_path: Path, seed: int) -> None:
    job, other = Job(seed, "sgd", scheduler), Job(seed, "sgd", scheduler)
    for step in range(4):
        train(job.model, [job.optimizer], 1, seed)
        advance(job.scheduler, float(step))
    checkpoints = Checkpoints(job.state, tmp_path, every=4)
    checkpoints.after_step(4, 1)
    checkpoints.flush()
    Checkpoints(other.state, tmp_path, every=4).load(4)
    assert other.state.host_bytes()[0] == job.state.host_bytes()[0]
    assert other.optimizer.param_groups[0]["lr"] == job.optimizer.param_groups[0]["lr"]


class Loader:
    """A loader of the user's own, with a tensor in its state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def test_tensors_in_the_host_state_come_back(tmp_path: Path) -> None:
    loader, other = Loader({"order": torch.randperm(5), "at": 3, "names": ("a", b"\0")}), Loader(None)
    model = small()
    checkpoints = Checkpoints(ProtectedState({"model": model, "loader": loader}), tmp_path, every=1)
    checkpoints.after_step(1, 1)
    checkpoints.flush()
    Checkpoints(ProtectedState({"model": small(), "loader": other}), tmp_path, every=1).load(1)
    assert torch.equal(other.value["order"], loader.value["order"])
    assert (other.value["at"], other.value["names"]) == (3, ("a", b"\0"))


def test_which_gradients_there_are_comes_back(tmp_path: Path, seed: int) -> None:
    job = Job(seed)
    weight, bias = job.model[0].weight, job.model[0].bias
    weight.grad = torch.zeros_like(weight)
    checkpoints = Checkpoints(job.state, tmp_path, every=1)
    checkpoints.after_step(1, 1)
    checkpoints.flush()
    bias.grad, weight.grad = torch.ones_like(bias), None
    checkpoints.load(1)
    assert bias.grad is None
    assert weight.grad is not None
    assert not weight.grad.any()


def test_what_is_switched_off_comes_back(tmp_path: Path, seed: int) -> None:
    job = Job(seed)
    job.model[1].eval()
    job.model[0].weight.requires_grad_(False)
    modes = job.state.modes()
    checkpoints = Checkpoints(job.state, tmp_path, every=1)
    checkpoints.after_step(1, 1)
    checkpoints.flush()
    job.model.train().requires_grad_(True)
    checkpoints.load(1)
    assert job.state.modes() == modes


# ---- which checkpoints there are ------------------------------------------------------------------------------------


def test_only_steps_that_are_due_are_written(tmp_path: Path, seed: int) -> None:
    job = Job(seed)
    checkpoints = Checkpoints(job.state, tmp_path, every=4)
    for step in range(1, 9):
        checkpoints.after_step(step, 1)
        checkpoints.flush()
    assert checkpoints.steps() == (4, 8)


def test_before_any_training_none_is_due(tmp_path: Path, seed: int) -> None:
    checkpoints = Checkpoints(Job(seed).state, tmp_path, every=2)
    assert [step for step in range(7) if checkpoints.is_due(step)] == [2, 4, 6]


def test_only_the_two_newest_are_kept(tmp_path: Path, seed: int) -> None:
    job = Job(seed)
    checkpoints = Checkpoints(job.state, tmp_path, every=1)
    for step in range(1, 6):
        job.train(1, step)
        checkpoints.after_step(step, 1)
        checkpoints.flush()
        assert checkpoints.steps() == ((step - 1, step) if step > 1 else (1,))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step_0000000004", "step_0000000005"]


def test_a_step_computed_again_does_not_replace_its_checkpoint(tmp_path: Path, seed: int) -> None:
    job = Job(seed)
    job.train(1, seed)
    checkpoints = Checkpoints(job.state, tmp_path, every=1)
    checkpoints.after_step(1, 1)
    checkpoints.flush()
    before = job.everything()
    job.train(1, seed)
    checkpoints.after_step(1, 2)
    checkpoints.flush()
    checkpoints.load(1)
    assert job.everything() == before


@pytest.mark.parametrize(
    "name", ["draft_0000000006_generation_3", "step_6", "step_00000000060", "astep_0000000006", "x"]
)
def test_what_is_not_a_finished_checkpoint_is_ignored(name: str, tmp_path: Path, seed: int) -> None:
    job = Job(seed)
    checkpoints = Checkpoints(job.state, tmp_path, every=1)
    checkpoints.after_step(1, 1)
    checkpoints.flush()
    shutil.copytree(tmp_path / "step_0000000001", tmp_path / name)
    assert checkpoints.steps() == (1,)
    for step in (2, 3):
        checkpoints.after_step(step, 1)
        checkpoints.flush()
    assert checkpoints.steps() == (2, 3), "neither counted nor in the place of a finished one"


def killed_while_writing(rank: int, size: int, directory: Path, seed: int) -> None:
    """Ends when the last byte of its checkpoint is on disk, just before it gets its name."""
    on_disk = threading.Event()
    write = checkpoint._write

    def write_and_stand_still(*arguments: Any) -> Any:
        write(*arguments)
        on_disk.set()
        threading.Event().wait()

    checkpoint._write = write_and_stand_still
    Checkpoints(Job(seed).state, directory, every=1).after_step(2, 1)
    on_disk.wait()


def test_a_rank_that_dies_while_it_writes_leaves_no_checkpoint(tmp_path: Path, seed: int) -> None:
    run_ranks(1, killed_while_writing, tmp_path, seed)
    job = Job(seed)
    checkpoints = Checkpoints(job.state, tmp_path, every=1)
    assert checkpoints.steps() == ()
    assert len(list(tmp_path.iterdir())) == 1, "nothing was begun: the test would prove nothing"
    checkpoints.after_step(2, 2)
    checkpoints.flush()
    checkpoints.load(2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_0000000002"]


class Killed(BaseException):
    """Ends a process in the place where it is raised."""


def test_a_rank_that_dies_while_it_removes_leaves_no_half_checkpoint(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def remove_one_file_and_die(folder: Path) -> None:
        next(folder.iterdir()).unlink()
        raise Killed

    job = Job(seed)
    checkpoints = Checkpoints(job.state, tmp_path, every=1)
    for step in (1, 2):
        checkpoints.after_step(step, 1)
        checkpoints.flush()
    checkpoints.after_step(3, 1)
    with monkeypatch.context() as dying:
        dying.setattr(shutil, "rmtree", remove_one_file_and_die)
        with pytest.raises(Killed):
            checkpoints.flush()
    after = Checkpoints(job.state, tmp_path, every=1)
    assert after.steps() == (2, 3)
    after.after_step(4, 2)
    after.flush()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step_0000000003", "step_0000000004"]
    assert capsys.readouterr().err == ""


def test_flush_without_anything_to_write(tmp_path: Path, seed: int) -> None:
    checkpoints = Checkpoints(Job(seed).state, tmp_path / "none", every=1)
    checkpoints.flush()
    assert not (tmp_path / "none").exists()


# ---- a folder that cannot be written --------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["", "inside", "far/inside"])
def test_a_folder_that_can_never_be_made_is_refused_early(inside: str, tmp_path: Path, seed: int) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigurationError, match=r"checkpoint_dir .*: .*/file is not a folder; give another"):
        Checkpoints(Job(seed).state, tmp_path / "file" / inside, every=1)


@pytest.mark.parametrize("made", [True, False])
def test_a_folder_that_may_not_be_written_is_refused_early(
    made: bool, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint.os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(ConfigurationError, match=r"checkpoint_dir .*no right to write in .*give another"):
        Checkpoints(Job(seed).state, tmp_path if made else tmp_path / "new", every=1)


def test_a_folder_that_is_lost_does_not_end_the_training(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be written is said once, then tried at every step that is due, and it is said when it works."""
    checkpoints = Checkpoints(Job(seed).state, tmp_path / "parent" / "folder", every=2)
    (tmp_path / "parent").write_text("in the way")
    for step in range(1, 7):
        checkpoints.after_step(step, 1)
        checkpoints.flush()
    assert checkpoints.steps() == ()
    said = capsys.readouterr().err
    assert said.count("keepstep: ") == 1
    assert f"the checkpoint {tmp_path}/parent/folder/step_0000000002 could not be written: " in said
    assert "Not a directory" in said
    assert "Training continues; it tries again every 2 steps" in said
    (tmp_path / "parent").unlink()
    for step in range(7, 11):
        checkpoints.after_step(step, 1)
        checkpoints.flush()
    assert checkpoints.steps() == (8, 10)
    assert capsys.readouterr().err.count("checkpoints are written again") == 1
    (tmp_path / "parent").rename(tmp_path / "away")
    (tmp_path / "parent").write_text("in the way")
    checkpoints.after_step(12, 1)
    assert capsys.readouterr().err.count("keepstep: ") == 1, "a new problem is said again"


def test_a_disk_that_fills_up_does_not_end_the_training(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(file: int) -> None:
        raise OSError("no space left")

    job = Job(seed)
    checkpoints = Checkpoints(job.state, tmp_path, every=1)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fill)
        checkpoints.after_step(1, 1)
        checkpoints.flush()
        assert "step_0000000001 could not be written: no space left. Training continues" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(OSError, match=r"^no space left$"):
            rescue(job.state, 1, Share(), tmp_path)
    checkpoints.after_step(2, 1)
    checkpoints.flush()
    assert checkpoints.steps() == (2,)


@pytest.mark.parametrize("older", [None, 1])
def test_a_checkpoint_that_cannot_be_written_in_a_drain_is_not_said_to_come_later(
    older: int | None, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(file: int) -> None:
        raise OSError("no space left")

    checkpoints = Checkpoints(Job(seed).state, tmp_path, every=1)
    if older is not None:
        checkpoints.after_step(older, 1)
        checkpoints.flush()
    monkeypatch.setattr(os, "fsync", fill)
    checkpoints.after_step(2, 1)
    checkpoints.flush()
    assert "Training continues" in capsys.readouterr().err
    assert not checkpoints.write_now(3, 1)
    said = capsys.readouterr().err
    newest = "its newest one is of step 1" if older else "there is none"
    assert f"step_0000000003 could not be written: no space left. The job is to end, and {newest}\n" in said


def test_no_memory_for_the_copy_does_not_end_the_training(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(state: ProtectedState, share: Share) -> Any:
        raise RuntimeError("not enough memory")

    checkpoints = Checkpoints(Job(seed).state, tmp_path, every=1)
    monkeypatch.setattr(checkpoint, "describe", too_much)
    checkpoints.after_step(1, 1)
    assert "step_0000000001 could not be written: not enough memory" in capsys.readouterr().err


def test_optimizer_state_that_the_checkpoint_lacks_is_gone_after_loading(tmp_path: Path, seed: int) -> None:
    """A parameter that first took part after the checkpoint: its moments must not survive the way back."""
    job = Job(seed)
    frozen = job.model[3].weight
    frozen.requires_grad_(False)
    job.train(2, seed)
    checkpoints = Checkpoints(job.state, tmp_path, every=1)
    checkpoints.after_step(2, 1)
    checkpoints.flush()
    before = job.everything()
    frozen.requires_grad_(True)
    job.train(1, seed + 9)
    checkpoints.load(2)
    frozen.requires_grad_(False)
    assert job.everything() == before


def test_the_order_of_memory_comes_back_in_a_fresh_process(tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    states = []
    for _ in range(2):
        model = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        states.append((ProtectedState({"model": model, "optimizer": optimizer}), model, optimizer))
    state, model, optimizer = states[0]
    model(torch.randn(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoints = Checkpoints(state, tmp_path, every=1)
    checkpoints.after_step(1, 1)
    checkpoints.flush()
    strides = [tensor.stride() for _name, tensor in state.optimizer_tensors()]
    assert any(tensor.dim() > 1 and not tensor.is_contiguous() for _name, tensor in state.optimizer_tensors())
    Checkpoints(states[1][0], tmp_path, every=1).load(1)
    assert [tensor.stride() for _name, tensor in states[1][0].optimizer_tensors()] == strides
    assert states[1][0].digest() == state.digest()


# ---- rescue ---------------------------------------------------------------------------------------------------------


def test_a_rescue_is_where_this_process_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, run_dir, temporary = (tmp_path / name for name in ("here", "run", "temporary"))
    for folder in (here, run_dir, temporary):
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    closed: set[Path] = set()
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) not in closed)  # root may write anywhere
    assert rescue_parent(str(run_dir), None) == here
    assert rescue_parent(str(run_dir), str(run_dir)) == run_dir, "in a drill"
    closed.add(here)
    assert rescue_parent(str(run_dir), None) == run_dir
    here.rmdir()
    closed.add(run_dir)
    assert rescue_parent(str(run_dir), None) == temporary
    closed.add(temporary)
    with pytest.raises(OSError, match=r"neither the working directory nor .*run nor the folder for temporary files"):
        rescue_parent(str(run_dir), None)


def test_a_rescue_holds_everything_and_can_be_put_in_place(tmp_path: Path, seed: int) -> None:
    job, other = Job(seed), Job(seed + 1)
    job.train(3, seed)
    first, second = (Path(rescue(job.state, 3, Share(rank=2), tmp_path)) for _ in range(2))
    assert first != second
    assert first.parent == tmp_path
    assert first.name.startswith("keepstep-rescue-step3-rank2-")
    doubted = Path(rescue(job.state, 3, Share(rank=2), tmp_path, in_doubt=True))
    assert doubted.name.endswith("-in-doubt")
    first.rename(tmp_path / "step_0000000003")
    Checkpoints(other.state, tmp_path, every=1).load(3)
    assert other.everything() == job.everything()


def test_the_content_is_everything_that_is_protected(seed: int) -> None:
    job = Job(seed)
    job.train(1, seed)
    content, found = describe(job.state, Share())
    parameters = [name for name, _parameter in job.state.parameters()]
    assert [header.name for header in content.tensors] == list(found)
    assert set(found) == {
        *(f"model/{name}" for name, _t in (*job.state.parameters(), *job.state.buffers())),
        *(f"optimizer/optimizer/{name}/{key}" for name in parameters for key in ("exp_avg", "exp_avg_sq", "step")),
    }
    copied = copy.deepcopy(found["model/model.0.weight"])
    assert torch.equal(copied, job.model[0].weight)
