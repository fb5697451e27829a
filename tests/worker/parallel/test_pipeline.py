"""A pipeline's step that was left anywhere is undone, and done again with the same bits."""

import contextlib
import gc
import threading
from pathlib import Path

import pytest
import torch
from tests.worker.ranks import Watcher, file_store, join, meet, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from keepstep.errors import ConfigurationError
from keepstep.weights.memory.blocks import local_of
from keepstep.worker.parallel.choose import layout_of
from keepstep.worker.parallel.pipeline import Pipelined
from keepstep.worker.step.stop_points import StopPoints

WIDTH, BATCH, MICROBATCHES = 6, 8, 4
SCHEDULES: dict[str, tuple[type, int]] = {
    "GPipe": (ScheduleGPipe, 1),
    "1F1B": (Schedule1F1B, 1),
    "Interleaved1F1B": (ScheduleInterleaved1F1B, 2),
    "LoopedBFS": (ScheduleLoopedBFS, 2),
    "InterleavedZeroBubble": (ScheduleInterleavedZeroBubble, 2),
    "ZBVZeroBubble": (ScheduleZBVZeroBubble, 2),
    "DualPipeV": (ScheduleDualPipeV, 2),
}
"""The class, and how many stages a rank has."""
V_SHAPED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)


class Interrupted(BaseException):
    """Ends a step in its middle, as `StepInterrupted` does."""


def stage_numbers(rank: int, per_rank: int, num_ranks: int, schedule: type) -> list[int]:
    """V-shaped schedules give the first rank the last stage, too."""
    if per_rank == 1:
        return [rank]
    second = 2 * num_ranks - 1 - rank if schedule in V_SHAPED else rank + num_ranks
    return [rank, second]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, target)


class Pipeline:
    """One rank's stages and schedule."""

    def __init__(self, name: str, rank: int, num_ranks: int, *, is_sharded: bool = False) -> None:
        """``is_sharded``: each stage is fully sharded, over one rank."""
        kind, per_rank = SCHEDULES[name]
        mesh = init_device_mesh("cpu", (num_ranks, 1), mesh_dim_names=("pipeline", "data")) if is_sharded else None
        self.modules, stages = [], []
        for number in stage_numbers(rank, per_rank, num_ranks, kind):
            torch.manual_seed(number)
            first, last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
            module = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Dropout(0.2), last)
            if mesh is not None:
                fully_shard(module, mesh=mesh["data"])
            self.modules.append(module)
            stages.append(PipelineStage(module, number, num_ranks * per_rank, torch.device("cpu")))
        self.schedule = kind(stages[0] if per_rank == 1 else stages, MICROBATCHES, loss_fn=loss_of)
        self.is_first = any(stage.is_first for stage in stages)
        self.is_last = any(stage.is_last for stage in stages)
        self.num_stops = self.leaves_at = 0
        StopPoints({"model": torch.nn.ModuleList(self.modules)}, self._stop_point, lambda _phase: None)

    def step(self, seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        batch, target = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
        losses: list[torch.Tensor] = []
        inputs = (batch,) if self.is_first else ()
        outcome = {"target": target, "losses": losses} if self.is_last else {}
        self.schedule.step(*inputs, **outcome)
        return losses

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for module in self.modules for parameter in module.parameters()]

    def drop_gradients(self) -> None:
        for module in self.modules:
            module.zero_grad()

    def leave_at(self, seed: int, at_stop: int) -> int:
        """Runs a step up to one of keepstep's stop points, counted from 1. Returns how many it passed."""
        self.num_stops, self.leaves_at = 0, at_stop
        with contextlib.suppress(Interrupted):
            self.step(seed)
        self.leaves_at = 0
        return self.num_stops

    def _stop_point(self) -> None:
        self.num_stops += 1
        if self.num_stops == self.leaves_at:
            raise Interrupted


def redo(
    rank: int, num_ranks: int, path: Path, name: str, parts: list[float], culprit: int, is_sharded: bool = False
) -> None:
    """Interrupts a step of one rank, at these parts of it, and has all ranks do it again."""
    registry, _world = join(path, rank, num_ranks, Watcher(echoes=True))
    pipeline = Pipeline(name, rank, num_ranks, is_sharded=is_sharded)
    adapter = layout_of({"model": torch.nn.ModuleList(pipeline.modules), "schedule": pipeline.schedule})
    adapter.new_generation()

    def begin() -> None:
        pipeline.drop_gradients()
        adapter.hand_out()
        adapter.begin_step()

    wanted = []
    for seed in range(2):
        begin()
        wanted.append(([float(each) for each in pipeline.step(seed)], [each.clone() for each in pipeline.gradients()]))
    for number, part in enumerate(parts):
        begin()
        num_stops = pipeline.leave_at(0, 0)
        assert num_stops > 8
        begin()
        meet(path, num_ranks, f"before {number}")
        left = file_store(path, name=f"left {number}")
        if rank == culprit:
            at = 1 + round(part * (num_stops - 1))
            assert pipeline.leave_at(1, at) == at
            left.set("left", b"")
            registry.take_down()
        else:
            stop = threading.Thread(target=lambda left=left: (left.wait(["left"]), registry.take_down()))
            stop.start()  # as the controller's order does: a send to a rank that is gone may wait for ever
            with contextlib.suppress(Exception):  # in echo a stage may get what it does not expect
                pipeline.step(1)
            stop.join()
        meet(path, num_ranks, f"stopped {number}")
        registry.drain()
        registry.connect(2 + number, rank)
        adapter.undo(in_backward=True)
        gc.collect()
        assert not [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.grad_fn is not None]
        adapter.new_generation()
        begin()
        losses = [float(each) for each in pipeline.step(1)]
        assert losses == wanted[1][0]
        for ours, theirs in zip(pipeline.gradients(), wanted[1][1], strict=True):
            assert torch.equal(local_of(ours), local_of(theirs))


def refused(rank: int, num_ranks: int, path: Path) -> list[str]:
    """What is said of a schedule that is not protected, and of one whose gradients DDP does not reduce."""
    join(path, rank, num_ranks)
    found = []
    pipeline = Pipeline("GPipe", rank, num_ranks)
    for objects in ({"model": pipeline.modules[0]}, {"model": pipeline.modules[0], "schedule": pipeline.schedule}):
        try:
            layout_of(objects)
        except ConfigurationError as error:
            found.append(str(error))
    pipeline = Pipeline("ZBVZeroBubble", rank, num_ranks)
    for stage in pipeline.schedule._stages:
        stage.submod = DistributedDataParallel(stage.submod)
    try:
        Pipelined({"schedule": pipeline.schedule})
    except ConfigurationError as error:
        found.append(str(error))
    return found


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_a_step_of_sharded_stages_that_was_left_anywhere_is_done_again(tmp_path: Path, name: str) -> None:
    run_ranks(2, redo, tmp_path, name, [0.0, 0.25, 0.5, 0.75, 1.0], 1, True)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_that_was_left_anywhere_is_done_again(tmp_path: Path, name: str, culprit: int) -> None:
    run_ranks(2, redo, tmp_path, name, [0.0, 0.25, 0.5, 0.75, 1.0], culprit)
