"""Pipeline parallelism: makes steps of `torch.distributed.pipelining`'s schedules undoable and repeatable.

A schedule is not re-entrant: the next step uses what an interrupted one has left in the schedule and its stages. And in
its first step neighbours exchange the shapes of activations and gradients (torch calls it metadata inference), which a
replacement has not done. Both have one remedy: before the first step of a generation every rank, survivor or
replacement, has its schedule as the script built it. The adapter records all attributes and containers of torch's
pipelining classes before the first step, without a list of their names, and puts them back.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from keepstep.errors import ConfigurationError
from keepstep.typenames import is_named
from keepstep.worker.parallel.layout import Replicated

_INFERENCE = ("_initialize_stage", "_initialize_stages")
"""The method that infers the metadata: of schedules with one stage on a rank, and of those with several."""


def is_schedule(thing: object) -> bool:
    """Whether an object is a pipeline schedule."""
    return is_named(thing, "_PipelineSchedule")


class Pipelined(Replicated):
    """The adapter of pipeline schedules."""

    def __init__(self, schedules: dict[str, Any]) -> None:
        """Checks that steps of the schedules can be undone.

        Args:
            schedules: the protected schedules, by the user's names.

        Raises:
            ConfigurationError: keepstep does not find its way in this release's schedules, or a schedule does not suit
                DDP.
        """
        for name, schedule in schedules.items():
            _check(name, schedule)
        self._schedules = list(schedules.values())
        self._as_built: list[_Content] = []
        """The content of the schedules before the first step."""

    @property
    def is_sharded(self) -> bool:
        """Always True: each rank has its own stages."""
        return True

    def undo(self, *, in_backward: bool) -> None:
        """Drops what the interrupted step has left in schedules and stages, whether in forward or backward."""
        for content in self._as_built:
            content.put_back()

    def new_generation(self) -> None:
        """Makes all ranks infer the metadata in the next step, as in the first step of a schedule.

        Metadata inference runs each stage once on uninitialised tensors. Its changes of module buffers, such as
        BatchNorm's statistics, would differ from run to run, so they are undone (torch 2.15 does it itself). And DDP
        would reduce the first micro-batch separately after it, which rounds differently from a step without metadata
        inference.
        """
        if not self._as_built:
            self._as_built = [_Content(schedule) for schedule in self._schedules]
        for content in self._as_built:
            content.put_back()
        for schedule in self._schedules:
            for method in _INFERENCE:
                if hasattr(schedule, method):
                    _leave_no_trace_once(schedule, method)


class _Content:
    """All attributes and containers of a schedule and its stages, down to what is not of torch's pipelining.

    Modules, groups, functions and tensors are kept as references; nothing of them is copied.
    """

    def __init__(self, schedule: Any) -> None:
        self._found: dict[int, tuple[Any, Any]] = {}
        self._record(schedule)

    def _record(self, thing: Any) -> None:
        if id(thing) in self._found:
            return
        parts: Sequence[Any]
        match thing:
            case tuple():
                parts = thing
            case dict():
                self._found[id(thing)] = (thing, dict(thing))
                parts = list(thing.values())
            case list() | set():
                self._found[id(thing)] = (thing, list(thing))
                parts = list(thing)
            case _ if _is_of_pipelining(thing):
                self._found[id(thing)] = (vars(thing), dict(vars(thing)))
                parts = list(vars(thing).values())
            case _:
                return
        for part in parts:
            self._record(part)

    def put_back(self) -> None:
        for container, content in self._found.values():
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)


def _is_of_pipelining(thing: object) -> bool:
    """Whether an object is of a class of torch's pipelining, or one derived from it, and may change."""
    if isinstance(thing, (type, enum.Enum, torch.nn.Module)) or not hasattr(thing, "__dict__"):
        return False
    return any(base.__module__.startswith("torch.distributed.pipelining") for base in type(thing).__mro__)


def stages_of(schedule: Any) -> Sequence[Any]:
    """This rank's stages of a schedule.

    Raises:
        ConfigurationError: this release of torch keeps them elsewhere.
    """
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if not all(hasattr(stage, "submod") for stage in stages):
        raise ConfigurationError(_unknown(schedule, "_stage or _stages with the module of each stage"))
    return list(stages)


def refuse_unprotected(modules: dict[str, torch.nn.Module], schedules: dict[str, Any]) -> None:
    """Refuses an unprotected schedule whose stages are protected.

    Args:
        modules: the protected modules.
        schedules: the protected schedules.

    Raises:
        ConfigurationError: there is such a schedule.
    """
    if "torch.distributed.pipelining.schedules" not in sys.modules:
        return
    parts = {id(part) for module in modules.values() for part in module.modules()}
    known = {id(schedule) for schedule in schedules.values()}
    for thing in gc.get_objects():
        if id(thing) in known or not is_schedule(thing):
            continue
        if any(id(stage.submod) in parts for stage in stages_of(thing)):
            raise ConfigurationError(
                f"protect(): a {type(thing).__name__} has stages that are protected, and what an interrupted step "
                "leaves in it could not be dropped: pass it as well, protect(..., schedule=schedule)"
            )


def _check(name: str, schedule: Any) -> None:
    stages = stages_of(schedule)
    if _splits_backward(schedule) and any(isinstance(each.submod, DistributedDataParallel) for each in stages):
        raise ConfigurationError(
            f"protect({name}={type(schedule).__name__}): this schedule computes weight gradients outside of autograd, "
            "and DistributedDataParallel does not reduce those, so that its ranks drift apart; use FSDP2 in the stages"
        )
    if not any(hasattr(schedule, method) for method in _INFERENCE):
        raise ConfigurationError(_unknown(schedule, " or ".join(_INFERENCE)))


def _splits_backward(schedule: Any) -> bool:
    """Whether a schedule computes weight gradients apart from input gradients, as zero-bubble schedules do."""
    rows = (getattr(schedule, "pipeline_order", None) or {}).values()
    return any(
        action.computation_type.name == "BACKWARD_WEIGHT" for row in rows for action in row if action is not None
    )


def _unknown(schedule: Any, missing: str) -> str:
    return (
        f"protect(): the {type(schedule).__name__} of torch {torch.__version__} lacks {missing}, so an interrupted "
        "step of it could not be undone; use a release of torch that keepstep names as tested"
    )


def _leave_no_trace_once(schedule: Any, method: str) -> None:
    """Makes the next call of a schedule's method, and only that, leave the modules of its stages unchanged."""

    @functools.wraps(getattr(schedule, method))
    def guarded(*args: Any, **kwargs: Any) -> Any:
        vars(schedule).pop(method, None)
        with contextlib.ExitStack() as entered:
            for stage in stages_of(schedule):
                entered.enter_context(_kept(list(stage.submod.buffers())))
                if isinstance(stage.submod, DistributedDataParallel):
                    entered.enter_context(stage.submod.no_sync())
            return getattr(schedule, method)(*args, **kwargs)

    vars(schedule)[method] = guarded


@contextlib.contextmanager
def _kept(buffers: Sequence[torch.Tensor]) -> Iterator[None]:
    copies = [(buffer, buffer.detach().clone()) for buffer in buffers]
    yield
    with torch.no_grad():
        for buffer, copy in copies:
            buffer.copy_(copy)
