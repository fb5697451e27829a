"""A pipeline's step that was left anywhere is undone, and done again with the same bits."""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import Watcher, file_store, join, meet, run_ranks
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from keepstep.errors import ConfigurationError
from keepstep.worker.parallel.choose import layout_of
from keepstep.worker.parallel.pipeline import Pipelined

WIDTH, BATCH, MICROBATCHES = 6, 8, 4
SCHEDULES: dict[str, tuple[type, int]] = {
    "GPipe": (ScheduleGPipe, 1),
    "1F1B": (Schedule1F1B, 1),
    "Interleaved1F1B": (ScheduleInterleaved1F1B, 2),
    "InterleavedZeroBubble": (ScheduleInterleavedZeroBubble, 2),
    "ZBVZeroBubble": (ScheduleZBVZeroBubble, 2),
}
"""The class, and how many stages a rank has."""


class Interrupted(BaseException):
    """Ends a step in its middle, as `StepInterrupted` does."""


def stage_numbers(rank: int, per_rank: int, num_ranks: int, schedule: type) -> list[int]:
    """V-shaped schedules give the first rank the last stage, too."""
    if per_rank == 1:
        return [rank]
    second = 2 * num_ranks - 1 - rank if schedule is ScheduleZBVZeroBubble else rank + num_ranks
    return [rank, second]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, target)


class Pipeline:
    """One rank's stages and schedule."""

    def __init__(self, name: str, rank: int, num_ranks: int) -> None:
        kind, per_rank = SCHEDULES[name]
        self.modules, stages = [], []
        for number in stage_numbers(rank, per_rank, num_ranks, kind):
            torch.manual_seed(number)
            first, last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
            module = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Dropout(0.2), last)
            self.modules.append(module)
            stages.append(PipelineStage(module, number, num_ranks * per_rank, torch.device("cpu")))
        self.schedule = kind(stages[0] if per_rank == 1 else stages, MICROBATCHES, loss_fn=loss_of)
        self.is_first = any(stage.is_first for stage in stages)
        self.is_last = any(stage.is_last for stage in stages)

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

    def on_each_call(self, call: Callable[[], None]) -> list[Any]:
        """Has something called before each forward of a layer, and after each gradient: where keepstep stops a step."""
        layers = [layer for module in self.modules for layer in module]
        found = [layer.register_forward_pre_hook(lambda *_: call()) for layer in layers]
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        return found + [each.register_post_accumulate_grad_hook(lambda _: call()) for each in parameters]


def interrupt(pipeline: Pipeline, seed: int, at_call: int) -> int | None:
    """Runs a step up to one of its stop points, counted from 1.

    Returns:
        None: it came there. Else how many there were.
    """
    num_calls = 0

    def count() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == at_call:
            raise Interrupted

    hooks = pipeline.on_each_call(count)
    try:
        pipeline.step(seed)
    except Interrupted:
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return num_calls


def redo(rank: int, num_ranks: int, path: Path, name: str, parts: list[float], culprit: int) -> None:
    """Interrupts a step of one rank, at these parts of it, and has all ranks do it again."""
    registry, _world = join(path, rank, num_ranks, Watcher(echoes=True))
    pipeline = Pipeline(name, rank, num_ranks)
    adapter = Pipelined({"schedule": pipeline.schedule})
    wanted = []
    for seed in range(2):
        pipeline.drop_gradients()
        wanted.append(([float(each) for each in pipeline.step(seed)], [each.clone() for each in pipeline.gradients()]))
    for number, part in enumerate(parts):
        pipeline.drop_gradients()
        num_calls = interrupt(pipeline, 0, -1)
        assert num_calls
        pipeline.drop_gradients()
        meet(path, num_ranks, f"before {number}")
        left = file_store(path, name=f"left {number}")
        if rank == culprit:
            assert interrupt(pipeline, 1, 1 + round(part * (num_calls - 1))) is None
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
        pipeline.drop_gradients()
        adapter.new_generation()
        losses = [float(each) for each in pipeline.step(1)]
        assert losses == wanted[1][0]
        for ours, theirs in zip(pipeline.gradients(), wanted[1][1], strict=True):
            assert torch.equal(ours, theirs)


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


def test_what_cannot_be_undone_is_refused(tmp_path: Path) -> None:
    for first, second in run_ranks(2, refused, tmp_path):
        assert "a ScheduleGPipe has stages that are protected" in first
        assert "protect(schedule=ScheduleZBVZeroBubble)" in second
        assert "DistributedDataParallel does not reduce those" in second


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_that_was_left_anywhere_is_done_again(tmp_path: Path, name: str, culprit: int) -> None:
    run_ranks(2, redo, tmp_path, name, [0.0, 0.25, 0.5, 0.75, 1.0], culprit)
