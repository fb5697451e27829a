"""FSDP2 (`torch.distributed.fsdp.fully_shard`), and HSDP, which is FSDP2 on a mesh of two dimensions.

A module computes with gathered parameters, and keeps its own shard as DTensors. keepstep protects the DTensors. An
interrupted step leaves modules gathered, reductions half done, and gradients of gathered parameters that the next
backward would add to. ``FSDPModule.reset_iter_state()`` resets all of these but, in torch 2.13, the last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from inspect import get_annotations
from typing import Any

import torch

from keepstep.errors import ConfigurationError
from keepstep.typenames import is_named
from keepstep.worker.groups.group import SurvivingGroup
from keepstep.worker.parallel.layout import Replicated

_GROUP_FLAGS = (
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "post_forward_mesh_info",
    "unshard_in_backward",
)
"""Flags of a parameter group that a script may set for a part of a step, as with ``set_requires_gradient_sync()``."""
_FLAGS_BEFORE_THE_FIRST_FORWARD = tuple(name for name in _GROUP_FLAGS if name != "post_forward_mesh_info")
"""The first forward sets the other one for good: from then on the root stays gathered after a forward."""
_CONTEXT_FLAGS = ("is_last_backward", "post_optim_event", "manual_backward_finalization")
"""Such flags of the root's context. Torch 2.13 does not know the last one."""

_GATHERED = "_unsharded_param"
"""The gathered parameter, which a group's parameter has from its first all-gather on."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Flag:
    """One attribute, and its value when the step was yielded."""

    owner: Any
    name: str
    value: Any

    def put_back(self) -> None:
        setattr(self.owner, self.name, self.value)


class FullySharded(Replicated):
    """The adapter of FSDP2.

    It does not import FSDP's classes, because that takes long, and a script without FSDP need not wait for it.
    """

    def __init__(self, found: dict[str, Any]) -> None:
        """Args:
            found: the FSDP modules by name, as `find_fully_sharded` returns them.

        Raises:
            ConfigurationError: one of them cannot be protected.
        """
        self._modules = list(found.values())
        self._states = list({id(state): state for state in map(_state_of, found.values())}.values())
        for name, module in found.items():
            _check(name, module)
        self._flags: list[_Flag] = []

    @property
    def is_sharded(self) -> bool:
        """Always True."""
        return True

    def at_rest(self) -> None:
        """Makes every module show its shards: a forward, such as one for an evaluation, leaves the root gathered."""
        for module in self._modules:
            module.reshard()

    def hand_out(self) -> None:
        """Records the flags that the script may set on modules for a part of a step."""
        groups = [
            _Flag(group, name, getattr(group, name))
            for state in self._states
            for group in state._fsdp_param_groups
            for name in (_GROUP_FLAGS if state._is_root is not None else _FLAGS_BEFORE_THE_FIRST_FORWARD)
        ]
        contexts = [
            _Flag(state._state_ctx, name, getattr(state._state_ctx, name))
            for state in self._states
            for name in _CONTEXT_FLAGS
            if hasattr(state._state_ctx, name)
        ]
        self._flags = [*groups, *contexts]

    def begin_step(self) -> None:
        """Makes every module begin sharded: a gathered one would skip the all-gather, and other ranks would wait."""
        self.at_rest()

    def undo(self, *, in_backward: bool) -> None:
        """Resets modules, reductions, flags and the gradients of gathered parameters."""
        for module in self._modules:
            if _state_of(module)._is_root:
                module.reset_iter_state()
        for group in self._groups():
            for parameter in group.fsdp_params:
                if not _is_computed(parameter, "unsharded_accumulated_grad"):
                    parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, _GATHERED):  # it was gathered once
                    parameter._unsharded_param.grad = None
        for flag in self._flags:
            flag.put_back()

    def _groups(self) -> Iterator[Any]:
        for state in self._states:
            yield from state._fsdp_param_groups


def find_fully_sharded(modules: dict[str, torch.nn.Module]) -> dict[str, Any]:
    """Returns the FSDP modules in the protected modules, by name."""
    return {
        f"{name}.{path}" if path else name: part
        for name, module in modules.items()
        for path, part in module.named_modules()
        if is_named(part, "FSDPModule")
    }


def _is_computed(thing: Any, name: str) -> bool:
    """Whether an attribute is a property. In torch 2.15 it returns the gradient of the gathered parameter."""
    return isinstance(getattr(type(thing), name, None), property)


def _state_of(module: Any) -> Any:
    return module._get_fsdp_state()


def _check(name: str, module: Any) -> None:
    if not hasattr(module, "reset_iter_state"):
        raise ConfigurationError(
            f"protect(): {name} is fully sharded, and torch {torch.__version__} has no FSDPModule.reset_iter_state(), "
            "without which no interrupted step can be undone: use a release of torch that keepstep names as tested"
        )
    for group in _state_of(module)._fsdp_param_groups:
        if not all(
            hasattr(parameter, "unsharded_accumulated_grad") and _GATHERED in get_annotations(type(parameter))
            for parameter in group.fsdp_params
        ):
            raise ConfigurationError(
                f"protect(): {name} is fully sharded, and FSDP2 of torch {torch.__version__} keeps gradients in "
                "another place than keepstep knows: use a release of torch that keepstep names as tested"
            )
        if not all(isinstance(found, SurvivingGroup) for found in group.mesh_info.mesh.get_all_groups()):
            raise ConfigurationError(
                f"protect(): the process groups of {name} were not made by keepstep; call keepstep.init() before "
                "init_device_mesh(), instead of torch.distributed.init_process_group()"
            )
    for path, part in module.named_modules():
        if _has_statistics_of_its_own(part):
            raise ConfigurationError(
                f"protect(): {name}{'.' if path else ''}{path} is a {type(part).__name__}, whose statistics are other "
                "ones on every rank under FSDP2, so no rank could give a lost one its own back: use "
                "torch.nn.SyncBatchNorm, or a norm without statistics"
            )


def _has_statistics_of_its_own(part: torch.nn.Module) -> bool:
    norms = torch.nn.modules.batchnorm._NormBase
    return isinstance(part, norms) and not isinstance(part, torch.nn.SyncBatchNorm) and part.track_running_stats
