"""Pipeline parallelism: makes steps of `torch.distributed.pipelining`'s schedules undoable and repeatable.

A schedule is not re-entrant: the next step uses what an interrupted one has left in the schedule and its stages. And in
its first step neighbours exchange the shapes of activations and gradients (torch calls it metadata inference), which a
replacement has not done. So this adapter drops the state of an interrupted step, and makes all ranks infer the metadata
again after a recovery.
"""

from __future__ import annotations

import contextlib
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

_STAGE_LEFTOVERS = ("fwd_cache", "bwd_cache", "output_chunks", "backward_state", "dw_runner")
"""Containers of a stage that hold parts of one step."""
_SCHEDULE_LEFTOVERS = ("_internal_losses",)
_RUNTIME_LEFTOVERS = ("fwd_recv_ops", "bwd_recv_ops", "unshard_ops", "unsharded_stages", "backward_counter")
"""Such containers of a schedule, and of one that runs several stages on a rank."""
_INITIALIZED = {
    "_initialize_stage": ("_stage_forward_initialized", "_stage_backward_initialized"),
    "_initialize_stages": ("_stages_forward_initialized", "_stages_backward_initialized"),
}
"""Method that infers the metadata -> flags that it sets; for one stage on a rank, and for several."""


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
            ConfigurationError: this release of torch keeps the state of a step elsewhere, or a schedule does not suit
                DDP.
        """
        for name, schedule in schedules.items():
            _check(name, schedule)
        self._schedules = list(schedules.values())

    @property
    def is_sharded(self) -> bool:
        """Always True: each rank has its own stages."""
        return True

    def undo(self, *, in_backward: bool) -> None:
        """Drops what the interrupted step has left in schedules and stages, whether in forward or backward."""
        for schedule in self._schedules:
            forget_step(schedule)

    def new_generation(self) -> None:
        """Makes all ranks infer the metadata again in the next step.

        Metadata inference runs each stage once on uninitialised tensors (torch 2.13). Its changes of module buffers,
        such as BatchNorm's statistics, would differ from run to run, so they are undone. And DDP would reduce the first
        micro-batch separately after it, which rounds differently from a step without metadata inference.
        """
        for schedule in self._schedules:
            for method, flags in _INITIALIZED.items():
                if hasattr(schedule, flags[0]):
                    for flag in flags:
                        setattr(schedule, flag, False)
                    _leave_no_trace_once(schedule, method)


def forget_step(schedule: Any) -> None:
    """Resets a schedule and its stages, as if the step had not begun."""
    for name in (*_SCHEDULE_LEFTOVERS, *_RUNTIME_LEFTOVERS):
        if hasattr(schedule, name):
            getattr(schedule, name).clear()
    for stage in stages_of(schedule):
        for name in _STAGE_LEFTOVERS:
            getattr(stage, name).clear()
        if stage.args_recv_info:
            stage.clear_runtime_states()


def stages_of(schedule: Any) -> Sequence[Any]:
    """This rank's stages of a schedule."""
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]


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
    if _splits_backward(schedule) and any(
        isinstance(each.submod, DistributedDataParallel) for each in stages_of(schedule)
    ):
        raise ConfigurationError(
            f"protect({name}={type(schedule).__name__}): this schedule computes weight gradients outside of autograd, "
            "and DistributedDataParallel does not reduce those, so that its ranks drift apart; use FSDP2 in the stages"
        )
    of_stage = (*_STAGE_LEFTOVERS, "args_recv_info", "clear_runtime_states")
    wanted = [(schedule, _SCHEDULE_LEFTOVERS), *((stage, of_stage) for stage in stages_of(schedule))]
    if not any(hasattr(schedule, flags[0]) for flags in _INITIALIZED.values()):
        raise ConfigurationError(_unknown(name, schedule, "its flag of the first step"))
    for thing, names in wanted:
        if missing := [each for each in names if not hasattr(thing, each)]:
            raise ConfigurationError(_unknown(name, thing, ", ".join(missing)))


def _splits_backward(schedule: Any) -> bool:
    """Whether a schedule computes weight gradients apart from input gradients, as zero-bubble schedules do."""
    rows = getattr(schedule, "pipeline_order", {}).values()
    return any(
        action.computation_type.name == "BACKWARD_WEIGHT" for row in rows for action in row if action is not None
    )


def _unknown(name: str, thing: object, missing: str) -> str:
    return (
        f"protect({name}=...): the {type(thing).__name__} of torch {torch.__version__} lacks {missing}, "
        "so an interrupted step of it could not be undone; use a release of torch that keepstep names as tested"
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
