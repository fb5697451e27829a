"""ZeRO-1: whose optimizer state a rank holds, and that a step comes out the same after its state came back."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import join, run_ranks
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from keepstep.errors import ConfigurationError
from keepstep.worker.parallel.choose import layout_of
from keepstep.worker.parallel.zero import local_optimizer
from keepstep.worker.state.checkpoint import Checkpoints
from keepstep.worker.state.dcp.content import Share
from keepstep.worker.state.image import describe, finish, targets
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.state.rollback import StepSnapshot


def zero(model: torch.nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> Any:
    warnings.simplefilter("ignore")  # torch's own, when it is imported
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.05, **options)


class Rank:
    """One rank's model, optimizer and what is protected of them."""

    def __init__(self, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(4, 7), torch.nn.BatchNorm1d(7), torch.nn.Tanh(), torch.nn.Linear(7, 3)]
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers))
        self.optimizer = zero(self.model, **options)
        objects = {"model": self.model, "optimizer": self.optimizer}
        self.state = ProtectedState(objects, layout_of(objects))
        self.snapshot = StepSnapshot(self.state)

    def forward_backward(self, step: int) -> None:
        self.snapshot.take()
        self.state.layout.begin_step()
        self.optimizer.zero_grad()
        draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
        self.model(torch.randn(5, 4, generator=draw)).square().mean().backward()

    def update(self) -> None:
        self.state.layout.before_barrier()
        self.optimizer.step()

    def undo(self) -> None:
        self.snapshot.put_back_modes()
        self.state.layout.undo(in_backward=True)
        self.snapshot.put_back()

    def contents(self) -> dict[str, bytes]:
        return {name: tensor.detach().numpy().tobytes() for name, tensor in self.state.live_tensors()}


def taken_back(rank: int, size: int, path: Path, options: dict[str, Any], seed: int) -> None:
    """Steps, then one undone before its update, one whose update is cut off, and both again: all the same."""
    registry, _world = join(path, rank, size)
    me = Rank(seed, **options)
    for step in range(2):
        me.forward_backward(step)
        me.update()
    header, blocks = describe(me.state, 2)
    kept = [block.held.tensor.clone() for block in blocks]
    assert any(name.startswith("optimizer/") for name in me.contents())
    me.forward_backward(2)
    me.update()
    expected = me.contents()
    for is_new in (False, True):  # as on a survivor, and as on a replacement
        if is_new:
            me = Rank(seed + 1, **options)
        registry.take_down()
        registry.drain()
        me.forward_backward(2)
        me.update()  # with echoes in the place of what other ranks would have sent
        registry.connect(2 + is_new, rank)
        assert me.contents() != expected
        tensors, host = targets(me.state, header, "the snapshot")
        with torch.no_grad():
            for tensor, content in zip(tensors, kept, strict=True):
                tensor.copy_(content)
        finish(me.state, header, host)
        me.state.layout.restored()
        me.forward_backward(2)
        me.undo()
        me.forward_backward(2)
        me.update()
        assert me.contents() == expected


@pytest.mark.parametrize(
    "options", [{}, {"parameters_as_bucket_view": True}, {"kind": torch.optim.SGD, "momentum": 0.9}]
)
def test_a_step_is_the_same_from_a_snapshot(options: dict[str, Any], tmp_path: Path, seed: int) -> None:
    run_ranks(3, taken_back, tmp_path, options, seed)


def shards_and_state(rank: int, size: int, path: Path, group_size: int, seed: int) -> tuple[str, set[str]]:
    join(path, rank, size)
    groups = [dist.new_group(range(first, first + group_size)) for first in range(0, size, group_size)]
    me = Rank(seed, process_group=groups[rank // group_size])
    me.forward_backward(0)
    me.update()
    assert local_optimizer(me.optimizer) is me.optimizer.optim
    assert me.state.is_sharded
    return me.state.shard(), {name.split("/")[1] for name, _tensor in me.state.optimizer_tensors()}


def test_each_rank_holds_the_state_of_its_own_parameters(tmp_path: Path, seed: int) -> None:
    found = run_ranks(3, shards_and_state, tmp_path, 3, seed)
    assert len({shard for shard, _owned in found}) == 3
    assert sorted(index for _shard, owned in found for index in owned) == [str(index) for index in range(6)]


def test_ranks_that_own_the_same_in_several_groups_are_replicas(tmp_path: Path, seed: int) -> None:
    (first, *_), (second, *_), (third, *_), (fourth, *_) = run_ranks(4, shards_and_state, tmp_path, 2, seed)
    assert first == third != second == fourth


def saves(rank: int, size: int, path: Path, options: dict[str, Any], seed: int) -> dict[str, bytes]:
    join(path, rank, size)
    me = Rank(seed, **options)
    for step in range(2):
        me.forward_backward(step)
        me.update()
    shards = [""] * size
    dist.all_gather_object(shards, me.state.shard())
    checkpoints = Checkpoints(me.state, path / "saved", every=1)
    checkpoints.after_step(2, 1, Share(rank, tuple(shards)))
    checkpoints.flush()
    dist.barrier()
    assert checkpoints.steps() == (2,)
    return me.contents()


def loads(rank: int, size: int, path: Path, options: dict[str, Any], seed: int) -> tuple[dict[str, bytes], set[str]]:
    join(path, rank, size)
    me = Rank(seed + 1, **options)
    me.optimizer.param_groups[0]["lr"] = 0.5
    checkpoints = Checkpoints(me.state, path.parent / "saved", every=1)
    checkpoints.inspect()
    checkpoints.load(2)
    assert me.optimizer.param_groups[0]["lr"] == 0.05
    contents = me.contents()
    me.forward_backward(2)
    me.update()
    return contents, {name for name in me.contents() if name.startswith("optimizer/")}


@pytest.mark.parametrize(("num_readers", "options"), [(1, {}), (2, {"parameters_as_bucket_view": True}), (3, {})])
def test_a_checkpoint_is_loaded_by_any_number_of_ranks(
    num_readers: int, options: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    written = run_ranks(3, saves, tmp_path, options, seed)
    (tmp_path / "again").mkdir()
    read = run_ranks(num_readers, loads, tmp_path / "again", options, seed)
    together: dict[str, bytes] = {}
    for contents in reversed(written):  # DDP has all ranks begin a forward with the buffers of rank 0
        together |= contents
    assert {name: content for contents, _names in read for name, content in contents.items()} == together
    for contents, names in read:
        assert {name for name in contents if name.startswith("optimizer/")} == names, "its own, and no other's"


def test_each_parameter_is_written_by_the_rank_that_updates_it(tmp_path: Path, seed: int) -> None:
    run_ranks(3, saves, tmp_path, {}, seed)
    saved = tmp_path / "saved" / "step_0000000002"
    parts = sum(file.stat().st_size for file in saved.glob("*.distcp"))
    (tmp_path / "alone").mkdir()
    run_ranks(1, saves, tmp_path / "alone", {}, seed)
    alone = sum(file.stat().st_size for file in (tmp_path / "alone" / "saved" / saved.name).glob("*.distcp"))
    assert parts == alone


def refusal(_rank: int, _size: int, path: Path, spoil: Callable[[Any], None]) -> str:
    join(path, 0, 1)
    optimizer = zero(torch.nn.Linear(2, 2))
    spoil(optimizer)
    with pytest.raises(ConfigurationError) as caught:
        layout_of({"optimizer": optimizer})
    return str(caught.value)


def overlaps(optimizer: Any) -> None:
    optimizer._overlap_with_ddp = True


def has_another_group(optimizer: Any) -> None:
    optimizer.process_group = object()


def trains_shards(optimizer: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    optimizer.param_groups[0]["params"][0] = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (overlaps, "overlap_with_ddp=True updates parameters inside of backward()"),
        (has_another_group, "its process group was not made by keepstep"),
        (trains_shards, "its parameters are sharded already"),
    ],
)
def test_what_is_refused(spoil: Callable[[Any], None], text: str, tmp_path: Path) -> None:
    (message,) = run_ranks(1, refusal, tmp_path, spoil)
    assert message.startswith(f"protect(optimizer=ZeroRedundancyOptimizer): {text}")
