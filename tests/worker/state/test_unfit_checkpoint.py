"""Checkpoints that do not fit, or are damaged: refused, by name, before anything is touched."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.worker.state.parts import Job, content, small, written

from keepstep.errors import ConfigurationError, RemoteProtocolError, StateMismatch
from keepstep.worker.state import checkpoint
from keepstep.worker.state.checkpoint import Checkpoints
from keepstep.worker.state.dcp.writing import CHECKSUMS, CONTENT, checksum_of
from keepstep.worker.state.protected import ProtectedState

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: small(inputs=3), "'model/model.0.weight' is float32[5, 3] on this rank and float32[5, 4] on "),
        (lambda: small().double(), "'model/model.0.weight' is float64[5, 4] on this rank and float32[5, 4] on "),
        (lambda: torch.nn.Sequential(torch.nn.Linear(4, 5)), "'model/model.1.weight', which this rank's model lacks"),
        (lambda: torch.nn.Sequential(*small(), torch.nn.Linear(3, 1)), "this rank's model has ['model/model.4.bias', "),
    ],
    ids=["shape", "type", "less", "more"],
)
def test_a_checkpoint_of_another_model_is_refused(model: Any, text: str, tmp_path: Path) -> None:
    written(tmp_path, {"model": small()})
    other = model()
    state = ProtectedState({"model": other})
    before = content(state)
    checkpoints = Checkpoints(state, tmp_path, every=1)
    with pytest.raises(StateMismatch) as caught:
        checkpoints.load(1)
    assert text in str(caught.value)
    assert f"{tmp_path}/step_0000000001" in str(caught.value)
    assert str(caught.value).endswith("start with what wrote the checkpoint, or give another checkpoint_dir")
    assert content(state) == before
    assert checkpoints.steps() == (1,), "an older one would not fit either, and this one is whole"


def test_a_checkpoint_of_other_objects_is_refused(tmp_path: Path, seed: int) -> None:
    job = Job(seed)
    job.train(1, seed)
    written(tmp_path, {"model": job.model, "optimizer": job.optimizer})
    before = job.everything()
    with pytest.raises(StateMismatch, match=r"'scheduler' is protected on one of this rank and .*step_0000000001 only"):
        Checkpoints(job.state, tmp_path, every=1).load(1)
    assert job.everything() == before


def test_optimizer_state_of_parameters_that_are_not_there_is_refused(tmp_path: Path, seed: int) -> None:
    job = Job(seed)
    job.train(1, seed)
    written(tmp_path, {"model": job.model, "optimizer": job.optimizer})
    fewer = torch.optim.AdamW(list(job.model.parameters())[:2])
    state = ProtectedState({"model": job.model, "optimizer": fewer})
    with pytest.raises(
        StateMismatch, match=r"'optimizer/optimizer/model\.1\.weight/exp_avg', whose parameter no optimizer"
    ):
        Checkpoints(state, tmp_path, every=1).load(1)


DAMAGE = [
    "no metadata",
    "metadata cut off",
    "no data",
    "data cut off",
    "no checksums",
    "checksums cut off",
    "checksums empty",
    "all empty",
    "a flipped bit",
    "a flipped bit in the metadata",
    "a flipped bit in the checksums",
]


def damage(folder: Path, how: str) -> None:
    metadata, data, checksums = folder / ".metadata", next(folder.glob("*.distcp")), folder / "checksums"
    match how:
        case "no metadata":
            metadata.unlink()
        case "metadata cut off":
            metadata.write_bytes(metadata.read_bytes()[:100])
        case "no data":
            data.unlink()
        case "data cut off":
            data.write_bytes(data.read_bytes()[:-600])
        case "no checksums":
            checksums.unlink()
        case "checksums cut off":
            checksums.write_text(checksums.read_text().splitlines()[0] + "\n")
        case "checksums empty":
            checksums.write_bytes(b"")
        case "all empty":
            checksums.write_bytes(b"")
            metadata.unlink()
            data.unlink()
        case "a flipped bit":
            flip(data)
        case "a flipped bit in the metadata":
            flip(metadata)
        case "a flipped bit in the checksums":
            flip(checksums)


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 3] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_does_not_load_and_says_so(how: str, tmp_path: Path, seed: int) -> None:
    job = Job(seed)
    written(tmp_path, {"model": job.model, "optimizer": job.optimizer, "scheduler": job.scheduler})
    damage(tmp_path / "step_0000000001", how)
    job.train(1, seed)
    before = job.everything()
    with pytest.raises(RemoteProtocolError, match=f"the checkpoint {tmp_path}/step_0000000001 cannot be loaded: "):
        Checkpoints(job.state, tmp_path, every=1).load(1)
    assert job.everything() == before, "nothing is touched before everything has been verified"


def test_a_checkpoint_that_is_gone_does_not_load_and_says_so(tmp_path: Path, seed: int) -> None:
    with pytest.raises(RemoteProtocolError, match=r"step_0000000001 cannot be loaded: .*No such file"):
        Checkpoints(Job(seed).state, tmp_path, every=1).load(1)


def test_a_flipped_bit_of_a_weight_is_found(tmp_path: Path, seed: int) -> None:
    job = Job(seed)
    written(tmp_path, {"model": job.model})
    data = next((tmp_path / "step_0000000001").glob("*.distcp"))
    weight = job.model[0].weight.detach().numpy().tobytes()
    raw = data.read_bytes()
    assert weight in raw
    data.write_bytes(raw.replace(weight, bytes([weight[0] ^ 1]) + weight[1:]))
    with pytest.raises(RemoteProtocolError, match=f"{data} is damaged or gone"):
        Checkpoints(ProtectedState({"model": small()}), tmp_path, every=1).load(1)


def test_a_foreign_file_beside_it_does_no_harm(tmp_path: Path, seed: int) -> None:
    job = Job(seed)
    written(tmp_path, {"model": job.model})
    (tmp_path / "step_0000000001" / "notes.txt").write_text("good one")
    found = Checkpoints(ProtectedState({"model": small()}), tmp_path, every=1)
    assert found.steps() == (1,)
    found.load(1)


def two_checkpoints(tmp_path: Path, seed: int) -> tuple[Job, Any]:
    """Of steps 1 and 2; what the first holds is returned as well."""
    job = Job(seed)
    checkpoints = Checkpoints(job.state, tmp_path, every=1)
    held = []
    for step in (1, 2):
        job.train(1, step)
        held.append(job.everything())
        checkpoints.after_step(step, 1)
        checkpoints.flush()
    return job, held[0]


@pytest.mark.parametrize("how", DAMAGE)
def test_a_process_that_starts_goes_on_from_the_newest_intact_one(
    how: str, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    _job, held = two_checkpoints(tmp_path, seed)
    damage(tmp_path / "step_0000000002", how)
    fresh = Job(seed + 1)
    checkpoints = Checkpoints(fresh.state, tmp_path, every=1)
    checkpoints.inspect()
    assert checkpoints.steps() == (1,)
    said = capsys.readouterr().err
    assert f"{tmp_path}/step_0000000002/" in said
    assert "the checkpoint of step 2 is left out" in said
    checkpoints.load(1)
    assert fresh.everything() == held
    fresh.train(1, seed)
    checkpoints.after_step(2, 2)
    checkpoints.flush()
    assert checkpoints.steps() == (1, 2), "the damaged one has been replaced"
    Checkpoints(fresh.state, tmp_path, every=1).load(2)


def test_older_ones_are_not_read_where_the_newest_is_intact(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    job, _held = two_checkpoints(tmp_path, seed)
    damage(tmp_path / "step_0000000001", "a flipped bit")
    checkpoints = Checkpoints(job.state, tmp_path, every=1)
    checkpoints.inspect()
    assert checkpoints.steps() == (1, 2)
    assert capsys.readouterr().err == ""


def test_one_that_is_damaged_later_is_left_out_after_it_failed_to_load(tmp_path: Path, seed: int) -> None:
    """Ranks report what they can load and agree on the newest: a failure must lead to another one, not there again."""
    job, held = two_checkpoints(tmp_path, seed)
    checkpoints = Checkpoints(job.state, tmp_path, every=1)
    assert checkpoints.steps() == (1, 2)
    damage(tmp_path / "step_0000000002", "a flipped bit")
    assert checkpoints.steps() == (1, 2)
    with pytest.raises(RemoteProtocolError):
        checkpoints.load(2)
    assert checkpoints.steps() == (1,)
    checkpoints.load(1)
    assert job.everything() == held


def test_one_that_is_removed_while_it_is_read_is_not_called_damaged(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, _held = two_checkpoints(tmp_path, seed)
    verify = checkpoint._verify

    def verify_too_late(state: ProtectedState, path: Path) -> None:
        if path.name == "step_0000000002":
            shutil.rmtree(path)
        verify(state, path)

    monkeypatch.setattr(checkpoint, "_verify", verify_too_late)
    checkpoints = Checkpoints(job.state, tmp_path, every=1)
    checkpoints.inspect()
    assert checkpoints.steps() == (1,)
    assert capsys.readouterr().err == ""


def test_where_all_are_damaged_nothing_starts_over_and_none_is_removed(tmp_path: Path, seed: int) -> None:
    two_checkpoints(tmp_path, seed)
    for step in (1, 2):
        damage(tmp_path / f"step_000000000{step}", "a flipped bit")
    before = sorted(tmp_path.rglob("*"))
    checkpoints = Checkpoints(Job(seed).state, tmp_path, every=1)
    with pytest.raises(
        ConfigurationError, match=f"checkpoint_dir {tmp_path}: none of its 2 checkpoints is intact; move"
    ):
        checkpoints.inspect()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_without_checkpoints_is_a_beginning(tmp_path: Path, seed: int) -> None:
    checkpoints = Checkpoints(Job(seed).state, tmp_path, every=1)
    checkpoints.inspect()
    assert checkpoints.steps() == ()


def test_a_checkpoint_of_an_older_form_does_not_load_and_says_so(tmp_path: Path, seed: int) -> None:
    """Its checksums are right. That version did not write which tensors are buffers."""
    job = Job(seed)
    written(tmp_path, {"model": job.model, "optimizer": job.optimizer, "scheduler": job.scheduler})
    folder = tmp_path / "step_0000000001"
    former = checksum_of(folder / CONTENT)
    (folder / CONTENT).write_bytes(msgspec.msgpack.encode(msgspec.msgpack.decode((folder / CONTENT).read_bytes())[:-1]))
    sums = (folder / CHECKSUMS).read_text()
    (folder / CHECKSUMS).write_text(sums.replace(former, checksum_of(folder / CONTENT)))
    before = job.everything()
    checkpoints = Checkpoints(job.state, tmp_path, every=1)
    text = "has another form than this version of keepstep writes .* load it with the version that has written it"
    with pytest.raises(RemoteProtocolError, match=text):
        checkpoints.load(1)
    assert job.everything() == before
    with pytest.raises(ConfigurationError, match="none of its 1 checkpoints is intact"):
        Checkpoints(job.state, tmp_path, every=1).inspect()
