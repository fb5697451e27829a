"""Checkpoints that several ranks write: whole when the last part is there, and not before."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import file_store, run_ranks
from tests.worker.state.parts import Keeps, Part, Rows, cut, rows_of, save_together, small
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from keepstep.errors import ConfigurationError
from keepstep.worker.state.checkpoint import Checkpoints
from keepstep.worker.state.dcp import writing
from keepstep.worker.state.dcp.content import Share, describe
from keepstep.worker.state.protected import ProtectedState

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
STEP = "step_0000000001"


def written(part: Any, rank: int, shards: tuple[str, ...], folder: Path, step: int = 1, generation: int = 1) -> None:
    checkpoints = Checkpoints(part.state, folder, every=1)
    checkpoints.after_step(step, generation, Share(rank, shards))
    checkpoints.flush()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_it_counts_when_the_last_part_is_there_of_whichever_rank(order: tuple[int, ...], tmp_path: Path) -> None:
    parts = cut(0, 2, 3, 7)
    shards = tuple(part.state.shard() for part in parts)
    for number, rank in enumerate(order):
        assert Checkpoints(parts[0].state, tmp_path, every=1).steps() == ()
        assert not (tmp_path / STEP).exists()
        written(parts[rank], rank, shards, tmp_path)
        assert len(list(tmp_path.iterdir())) == 1, f"{number + 1} parts lie in one folder"
    assert Checkpoints(parts[0].state, tmp_path, every=1).steps() == (1,)
    names = [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "checksums", "content.msgpack"]
    assert sorted(path.name for path in (tmp_path / STEP).iterdir()) == names


def test_plain_dcp_loads_whole_tensors(tmp_path: Path, seed: int) -> None:
    parts = cut(0, 4, 4, 7)
    for part in parts:
        part.train(seed)
    save_together(parts, tmp_path)
    wanted = {
        "model/model.weight": torch.zeros(7, 3),
        "optimizer/optimizer/model.bias/exp_avg": torch.zeros(7),
        "optimizer/optimizer/model.bias/step": torch.zeros(()),
    }
    load(wanted, checkpoint_id=tmp_path / STEP, no_dist=True)
    weight, _bias, _weight_avg, _weight_sq, average, _sq = rows_of(parts)
    assert torch.equal(wanted["model/model.weight"], weight)
    assert torch.equal(wanted["optimizer/optimizer/model.bias/exp_avg"], average)
    assert wanted["optimizer/optimizer/model.bias/step"] == 1
    dcp_to_torch_save(tmp_path / STEP, tmp_path / "one.pt")
    assert torch.equal(torch.load(tmp_path / "one.pt")["model/model.weight"], weight)


def test_what_a_lost_rank_leaves_incomplete_never_counts_and_is_removed(tmp_path: Path) -> None:
    parts = cut(0, 4, 7)
    shards = tuple(part.state.shard() for part in parts)
    written(parts[1], 1, shards, tmp_path)  # rank 0 is lost before it has written
    assert [path.name for path in tmp_path.iterdir()] == ["draft_0000000001_generation_1"]
    written(parts[1], 1, shards, tmp_path, step=2, generation=2)
    assert len(list(tmp_path.iterdir())) == 2, "rank 1 removes nothing: rank 0 does, which others may be ahead of"
    written(parts[0], 0, shards, tmp_path, step=2, generation=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000000002"]


def test_parts_of_two_generations_make_no_checkpoint(tmp_path: Path) -> None:
    parts = cut(0, 4, 7)
    shards = tuple(part.state.shard() for part in parts)
    written(parts[0], 0, shards, tmp_path, generation=1)
    written(parts[1], 1, shards, tmp_path, generation=2)
    assert Checkpoints(parts[0].state, tmp_path, every=1).steps() == ()


def test_of_two_that_find_all_parts_one_makes_the_checkpoint(tmp_path: Path) -> None:
    parts = cut(0, 4, 7)
    shards = tuple(part.state.shard() for part in parts)
    for rank, part in enumerate(parts):
        writing.write_part(*describe(part.state, Share(rank, shards)), tmp_path, Share(rank, shards))
    (tmp_path / "completing").touch()  # by a rank that is at it
    assert not writing.complete(tmp_path, shards)
    (tmp_path / "completing").unlink()
    assert writing.complete(tmp_path, shards)
    assert not writing.complete(tmp_path, shards), "its parts are gone"


def test_a_rank_that_comes_late_finds_the_folder_renamed(tmp_path: Path) -> None:
    assert not writing.complete(tmp_path / "gone", ("a", "b"))


def test_a_part_that_was_damaged_since_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = cut(0, 4, 7)
    shards = tuple(part.state.shard() for part in parts)
    written(parts[0], 0, shards, tmp_path)
    file = tmp_path / "draft_0000000001_generation_1" / "__0.metadata"
    file.write_bytes(file.read_bytes()[:-1])
    written(parts[1], 1, shards, tmp_path)
    assert Checkpoints(parts[0].state, tmp_path, every=1).steps() == ()
    assert "__0.metadata is not what rank 0 has written" in capsys.readouterr().err


class Whole:
    """A rank that holds all of a model, and shares a name with another one that holds something else."""

    def __init__(self, seed: int, shard: str = "", width: int = 4) -> None:
        torch.manual_seed(seed)
        model, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, width)
        self.state = ProtectedState({"model": model, f"part{seed}": other}, Rows(0, 3) if width < 0 else None, shard)


def test_ranks_that_hold_other_things_under_one_name_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_together([Whole(1), Whole(2)], tmp_path)
    assert Checkpoints(Whole(1).state, tmp_path, every=1).steps() == ()
    said = capsys.readouterr().err
    assert "'model/model.weight' differs between ranks 0 and 1" in said
    assert 'protect(shard="...")' in said


def test_a_text_for_each_part_tells_them_apart(tmp_path: Path) -> None:
    parts = [Whole(seed, shard=f"expert {seed}") for seed in (1, 2)]
    save_together(parts, tmp_path)
    for seed, part in enumerate(parts, start=1):
        other = Whole(seed, shard=f"expert {seed}")
        digest = part.state.digest()
        assert other.state.digest() == digest
        torch.nn.init.zeros_(other.state.modules["model"].weight)
        Checkpoints(other.state, tmp_path, every=1).load(1)
        assert other.state.digest() == digest


def test_blocks_that_leave_a_hole_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_together([Part(0, 3), Part(4, 7)], tmp_path)
    assert Checkpoints(Part(0, 3).state, tmp_path, every=1).steps() == ()
    assert "the ranks' blocks of 'model/model.weight' are not the whole of it" in capsys.readouterr().err


def test_a_name_of_two_shapes_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Wide(Part):
        num_rows = 8

    save_together([Part(0, 3), Wide(3, 8)], tmp_path)
    assert "'model/model.weight' is float32[3, 3] from [0, 0] on of [7, 3] on one rank" in capsys.readouterr().err


def test_a_rank_that_cannot_write_leaves_the_parts_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = cut(0, 4, 7)
    shards = tuple(part.state.shard() for part in parts)
    written(parts[0], 0, shards, tmp_path)
    with monkeypatch.context() as full:
        full.setattr(writing.os, "fsync", lambda _file: (_ for _ in ()).throw(OSError("no space left")))
        written(parts[1], 1, shards, tmp_path)
    assert "no space left. Training continues" in capsys.readouterr().err
    [draft] = tmp_path.iterdir()
    assert (draft / f"part_{shards[0]}").exists()
    assert not (draft / f"part_{shards[1]}").exists()


def test_host_state_that_all_have_is_written_once(tmp_path: Path) -> None:
    order = torch.arange(5)
    parts = [Part(start, stop, loader=Keeps({"order": order, "at": 3})) for start, stop in ((0, 4), (4, 7))]
    save_together(parts, tmp_path)
    loaded = {"host/0/0": torch.zeros(5, dtype=torch.int64)}
    load(loaded, checkpoint_id=tmp_path / STEP, no_dist=True)
    assert torch.equal(loaded["host/0/0"], order)
    assert "host/1/0" not in FileSystemReader(tmp_path / STEP).read_metadata().state_dict_metadata


def looks(rank: int, size: int, path: Path, is_shared: bool) -> str:
    folder = path / ("shared" if is_shared else f"of node {rank}")
    try:
        Checkpoints(ProtectedState({"model": small()}), folder, every=1).start_together(rank, size, file_store(path, 3))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_folder_that_not_all_nodes_share_is_refused(tmp_path: Path) -> None:
    first, *others = run_ranks(3, looks, tmp_path, False)
    assert first == ""
    for rank, said in enumerate(others, start=1):
        assert said.startswith(f"checkpoint_dir {tmp_path}/of node {rank}: rank {rank} does not find there what rank 0")


def test_a_folder_that_all_share_is_left_as_it_was(tmp_path: Path) -> None:
    assert run_ranks(3, looks, tmp_path, True) == ["", "", ""]
    assert list((tmp_path / "shared").iterdir()) == []


def starts(rank: int, size: int, path: Path) -> None:
    Checkpoints(ProtectedState({"model": small()}), path / "saved", every=1).start_together(
        rank, size, file_store(path)
    )


def test_no_part_of_a_former_job_gets_into_a_checkpoint(tmp_path: Path) -> None:
    """It was at the same step of the same generation."""
    parts = cut(0, 4, 7)
    shards = tuple(part.state.shard() for part in parts)
    written(parts[1], 1, shards, tmp_path / "saved")
    run_ranks(2, starts, tmp_path)
    written(parts[0], 0, shards, tmp_path / "saved")
    assert Checkpoints(parts[0].state, tmp_path / "saved", every=1).steps() == ()


def test_a_rank_that_was_killed_in_the_middle_does_not_stand_in_the_way(tmp_path: Path) -> None:
    [part] = cut(0, 7)
    for name in ("draft_0000000001_generation_1", "draft_0000000001_generation_2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "completing").touch()
    save_together([part], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [STEP]
    Checkpoints(part.state, tmp_path, every=1).load(1)


def test_what_live_ranks_rescue_is_a_checkpoint_where_they_hold_all(tmp_path: Path) -> None:
    parts = [*cut(0, 4, 7), *cut(0, 4, 7)]  # two replicas, of which each has lost a rank
    shards = tuple(dict.fromkeys(part.state.shard() for part in parts))
    for rank in (1, 2):
        checkpoints = Checkpoints(parts[rank].state, tmp_path, every=1)
        assert checkpoints.steps() == ()
        assert checkpoints.rescue(5, Share(rank, shards)) == str(tmp_path)
    assert checkpoints.steps() == (5,)
    again = Checkpoints(parts[3].state, tmp_path, every=1)
    again.rescue(5, Share(3, shards))
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000000005"]
    again.load(5)
