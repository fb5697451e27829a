"""Objects of the script that follow what is protected, and were not given to ``protect()`` themselves."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterable, Iterator

import torch

from keepstep.worker.loop.wrapped import unwrapped
from keepstep.worker.state.protected import ProtectedState

_DEPTH = 8
"""How far a protected object's parts are followed: from a trainer by a dict and a list to a scheduler, and to its parts
by two more."""
_OTHERS = (type, types.ModuleType, types.FunctionType, torch.nn.Module, torch.optim.Optimizer, torch.Tensor)
_NO_CLASSES_OF = ("keepstep", "torch.distributed", "accelerate", "lightning", "transformers", "torchtitan")
"""Packages whose objects are left out: keepstep, or its integration with a framework, knows them."""


def forgotten(state: ProtectedState) -> list[str]:
    """Finds schedulers, scalers, averages and other objects with a state that follow a protected object.

    It looks at all objects of the process, which takes some 50 ms, less where a fork has them from its parent.

    Args:
        state: the protected objects.

    Returns:
        a description of each, such as "StepLR of 'optimizer'".
    """
    followed: dict[int, str] = {}
    for name, thing in (*state.optimizers.items(), *state.modules.items()):
        parts = thing.modules() if isinstance(thing, torch.nn.Module) else (thing,)
        followed |= {id(part): name for part in parts}
    parameters = {id(each): name.partition(".")[0] for name, each in state.parameters()}
    forms = {_form_of(part): name for name, module in state.modules.items() for part in (module, *module.children())}
    known = followed.keys() | _held_by(state.others.values())

    def whom(thing: object) -> str | None:
        if isinstance(thing, torch.amp.GradScaler):
            return next(iter(state.optimizers), None) if thing.is_enabled() else None
        held = list(_held(thing))
        copied: Iterator[str | None] = (forms.get(_form_of(each)) for each in held if isinstance(each, torch.nn.Module))
        names = (*copied, *(followed.get(id(each)) for each in held), *(parameters.get(id(each)) for each in held))
        return next((own for own in names if own is not None), None)

    others = (thing for thing in _with_state() if id(thing) not in known and unwrapped(thing) is thing)
    return [f"{type(thing).__qualname__} of '{own}'" for thing in others if (own := whom(thing)) is not None]


def _with_state() -> list[object]:
    """All objects with ``state_dict()`` and ``load_state_dict()`` of classes that scripts use."""
    things = gc.get_objects()
    kinds = {kind for kind in set(map(type, things)) if _may_follow(kind)}
    return [thing for thing in things if type(thing) in kinds]


def _may_follow(kind: type) -> bool:
    has = all(any(name in vars(each) for each in kind.__mro__) for name in ("state_dict", "load_state_dict"))
    return has and not str(kind.__module__).startswith(_NO_CLASSES_OF)


def _held_by(things: Iterable[object]) -> set[int]:
    """Ids of objects, and of what they hold: a scheduler of schedulers gives the state of all."""
    found, level = set[int](), list(things)
    for _ in range(_DEPTH):
        found.update(map(id, level))
        parts = (each for each in gc.get_referents(*level) if gc.is_tracked(each) and not isinstance(each, _OTHERS))
        level = [each for each in parts if id(each) not in found]
    return found


def _held(thing: object) -> Iterator[object]:
    """Yields the attributes of an object, what stands in lists of them, and what they refer to weakly.

    Of a module only ``module`` among its children, where wrappers have what they copy: other children are its own.
    """
    values = dict(getattr(thing, "__dict__", {}))
    if isinstance(thing, torch.nn.Module):
        children = values.get("_modules", {})
        values = {name: value for name, value in values.items() if not name.startswith("_")}
        values["module"] = children.get("module")
    values.pop("param_groups", None)
    for value in values.values():
        for each in value if isinstance(value, list | tuple) else (value,):
            yield each() if isinstance(each, weakref.ReferenceType) else each


def _form_of(module: object) -> tuple[tuple[str, torch.Size], ...] | None:
    """Names and shapes of a module's parameters; None if it has none. A copy of a module has the same."""
    if not isinstance(module, torch.nn.Module):
        return None
    return tuple((name, each.shape) for name, each in module.named_parameters()) or None
