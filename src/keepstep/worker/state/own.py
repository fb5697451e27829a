"""What the ``state_dict()`` of a module or optimizer says beyond the tensors and values that keepstep finds by itself.

A class that overrides ``state_dict()``, or has a hook of it, tells there what it needs to continue: a module's extra
state, an optimizer's fp32 master weights. It is host state. Tensors in it that are parameters, buffers or optimizer
state are recognised by their memory, not by their names, and left out.

Restoring writes to the object's own tensors, dicts and lists in place, and then calls its ``load_state_dict()`` if it
overrides that, too. Since torch's own casts and copies, the known tensors get their content and their place back after
it.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from keepstep.errors import ConfigurationError, StateMismatch
from keepstep.weights.memory.blocks import is_dtensor, local_of
from keepstep.weights.memory.bytes_of import other_than_memory
from keepstep.worker.state import tree
from keepstep.worker.state.rearranged import beside_parameters

_EXTRA_STATE = "_extra_state"
"""torch's key for what ``get_extra_state()`` returns (``torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX``)."""
_IDLE_AFTER = 3
"""A module whose ``state_dict()`` has said nothing beyond in this many steps is not asked in every step any more."""


class OwnModuleState:
    """One module that describes its state itself."""

    def __init__(self, path: str, module: torch.nn.Module, *, with_children: bool) -> None:
        """Args:
        path: name of the module, for messages.
        module: the module.
        with_children: whether ``state_dict()`` is overridden or hooked, and not only what it calls for this module.
        """
        self.path = path
        self._module = module
        self._with_children = with_children
        self._num_empty = 0

    @property
    def is_idle(self) -> bool:
        """Whether it need not be asked in every step."""
        return self._num_empty >= _IDLE_AFTER and not _overrides(self._module, torch.nn.Module, "get_extra_state")

    def read(self) -> dict[str, Any]:
        """What it says beyond its parameters and buffers, by key. Nothing is copied."""
        beyond = self._said()
        self._num_empty = 0 if beyond else self._num_empty + 1
        return beyond

    def check(self) -> None:
        """Checks that what it says can be restored.

        Raises:
            ConfigurationError: names what would be lost, and says what to do.
        """
        module, base = self._module, torch.nn.Module
        loads = _overrides(module, base, "_load_from_state_dict")
        if self._with_children:
            hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
            loads = loads or bool(hooks) or _overrides(module, base, "load_state_dict")
        if loads:
            return
        beyond, again = self.read(), self.read()
        parts = module.modules() if self._with_children else [module]
        if any(_overrides(part, base, "set_extra_state") for part in parts):
            beyond = {key: value for key, value in beyond.items() if not key.endswith(_EXTRA_STATE)}
        place = tree.passing(beyond, {key: again.get(key) for key in beyond})
        if place is not None:
            raise ConfigurationError(
                f"protect(): {self.path}.state_dict() gives {place}, and {type(module).__qualname__} has no method "
                "that would restore it: override set_extra_state(), _load_from_state_dict() or load_state_dict(), too"
            )

    def load(self, beyond: dict[str, Any]) -> None:
        """Restores what `read` has returned, here or on another rank.

        Raises:
            StateMismatch: the module refuses it.
        """
        present = self._said()
        if not beyond and not present:
            return
        whole = self._whole()
        for key in present.keys() - beyond.keys():
            del whole[key]
        whole.update(tree.put_into(present, tree.placed(beyond, present)))
        module, errors = self._module, list[str]()
        with _kept(_tensors_of(module, self._with_children)), _same_objects(module, self._with_children):
            try:
                if not self._with_children:
                    metadata = {"version": module._version}
                    module._load_from_state_dict(whole, "", metadata, False, [], [], errors)
                elif _overrides(module, torch.nn.Module, "load_state_dict"):
                    module.load_state_dict(whole)
                else:
                    module.load_state_dict(whole, strict=False)
            except (RuntimeError, KeyError, ValueError, TypeError) as error:
                raise StateMismatch(f"{self.path} does not load its own state: {error}") from error
        if errors:
            raise StateMismatch(f"{self.path} does not load its own state: {errors[0]}")

    def _said(self) -> dict[str, Any]:
        found = None
        if self._with_children and any(map(is_dtensor, _tensors_of(self._module, True))):
            found = beside_parameters(self._module, self._whole)
        return self._beyond(self._whole() if found is None else found)

    def _whole(self) -> dict[str, Any]:
        module = self._module
        if not self._with_children:
            whole: dict[str, Any] = OrderedDict()
            module._save_to_state_dict(whole, "", True)
            return whole
        if not _overrides(module, torch.nn.Module, "state_dict"):
            return module.state_dict(keep_vars=True)
        try:
            return module.state_dict(keep_vars=True)
        except TypeError:  # its own state_dict() may not take it
            return module.state_dict()

    def _beyond(self, whole: dict[str, Any]) -> dict[str, Any]:
        known = {_memory_of(tensor) for tensor in _tensors_of(self._module, self._with_children)}
        return {
            key: value.detach() if isinstance(value, torch.Tensor) else value
            for key, value in whole.items()
            if not isinstance(value, torch.Tensor) or _memory_of(value) not in known
        }


def own_states_of(parts: Iterable[tuple[str, torch.nn.Module]]) -> list[OwnModuleState]:
    """The modules that describe their state themselves.

    Args:
        parts: all modules and submodules by name, each after those that contain it.
    """
    found: list[OwnModuleState] = []
    covered: set[torch.nn.Module] = set()
    for path, part in parts:
        if part in covered:
            continue
        if _overrides(part, torch.nn.Module, "state_dict") or _has_hooks(part):
            found.append(OwnModuleState(path, part, with_children=True))
            covered.update(part.modules())
        elif _overrides(part, torch.nn.Module, "_save_to_state_dict", "get_extra_state"):
            found.append(OwnModuleState(path, part, with_children=False))
    return found


class OwnOptimizerState:
    """What an optimizer says beyond its parameters' state and its groups."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Args:
        name: the user's, for messages.
        optimizer: that holds this rank's state.
        """
        self._name = name
        self._optimizer = optimizer

    @property
    def _describes_itself(self) -> bool:
        optimizer = self._optimizer
        hooked = _has_any(optimizer, "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
        return hooked or _overrides(optimizer, torch.optim.Optimizer, "state_dict")

    @property
    def _loads_itself(self) -> bool:
        optimizer = self._optimizer
        hooked = _has_any(optimizer, "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
        return hooked or _overrides(optimizer, torch.optim.Optimizer, "load_state_dict")

    def read(self, known: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """Reads it. Nothing is copied.

        Args:
            known: the tensors that are carried under names of their own. In what is read, they are replaced by
                `tree.Known`.

        Returns:
            "state": the state under keys that are no parameters; "shared": names of tensors that are the same one as an
            earlier tensor, whose name it is; "own": what its ``state_dict()`` says.

        Raises:
            ConfigurationError: it has state under a tensor that is no parameter of it.
        """
        parameters = {parameter for group in self._optimizer.param_groups for parameter in group["params"]}
        state = {key: value for key, value in self._optimizer.state.items() if key not in parameters}
        for key in state:
            if isinstance(key, torch.Tensor):
                raise ConfigurationError(
                    f"optimizer '{self._name}' has state for a tensor of shape {list(key.shape)} that is no parameter "
                    "of it: keep what belongs to no parameter under a text in optimizer.state"
                )
        found: dict[str, Any] = {"state": state} if state else {}
        first: dict[int, str] = {}
        named = [(name, tensor) for name, tensor in known if name.startswith(f"{self._name}/")]
        shared = {name: own for name, tensor in named if (own := first.setdefault(id(tensor), name)) != name}
        if shared:
            found["shared"] = shared
        if self._describes_itself:
            names: dict[tuple[object, ...], str] = {}
            for name, tensor in known:
                names.setdefault(_memory_of(tensor), name)
            found["own"] = tree.changed(
                self._optimizer.state_dict(), lambda leaf, _its: _known_or_detached(leaf, names)
            )
        return found

    def check(self) -> None:
        """Checks that what ``state_dict()`` says can be restored.

        Raises:
            ConfigurationError: names what would be lost, and says what to do.
        """
        if not self._describes_itself or self._loads_itself:
            return
        one, again = self._optimizer.state_dict(), self._optimizer.state_dict()
        own = [key for key in one if key not in ("state", "param_groups")]
        place = tree.passing({key: one[key] for key in own}, {key: again.get(key) for key in own})
        if place is not None:
            raise ConfigurationError(
                f"protect(): {self._name}.state_dict() gives {place}, and {type(self._optimizer).__qualname__} has no "
                "load_state_dict() of its own that would restore it: override load_state_dict(), too"
            )

    def load(self, found: dict[str, Any], known: dict[str, torch.Tensor]) -> bool:
        """Restores what `read` has returned, here or on another rank. All else must have been restored before.

        Args:
            found: as read.
            known: the tensors by the names that they are carried under.

        Returns:
            whether ``load_state_dict()`` of the optimizer was called: restore the groups and numbers again.

        Raises:
            StateMismatch: the optimizer refuses it.
        """
        optimizer = self._optimizer
        state: dict[Any, Any] = found.get("state", {})
        live_state: dict[Any, Any] = optimizer.state
        for key in [key for key in live_state if not isinstance(key, torch.Tensor) and key not in state]:
            del live_state[key]
        for key, value in state.items():
            live = live_state.get(key)
            live_state[key] = tree.put_into(live, tree.placed(value, live))
        self._replace({id(known[name]): known[first] for name, first in found.get("shared", {}).items()}, known)
        if "own" not in found or not self._describes_itself:
            return False
        live = optimizer.state_dict()
        own = tree.changed(found["own"], lambda leaf, its: self._resolved(leaf, its, known), live)
        whole = tree.put_into(live, tree.placed(own, live))
        if not self._loads_itself:
            return False
        held = {key: dict(values) for key, values in live_state.items() if isinstance(key, torch.Tensor)}
        with _kept(known.values()):
            try:
                optimizer.load_state_dict(whole)
            except (RuntimeError, KeyError, ValueError, TypeError) as error:
                raise StateMismatch(f"optimizer '{self._name}' does not load its own state: {error}") from error
        for parameter, values in held.items():
            optimizer.state[parameter].update({k: v for k, v in values.items() if isinstance(v, torch.Tensor)})
        return True

    def _replace(self, new: dict[int, torch.Tensor], known: dict[str, torch.Tensor]) -> None:
        """Puts other tensors in the places of those in the state.

        Args:
            new: by the `id` of the tensor that each replaces, wherever it stands.
            known: the tensors by name; they are replaced here as well.
        """
        places = [known, *(values for values in self._optimizer.state.values() if isinstance(values, dict))]
        for values in places if new else ():
            values.update({key: new[id(value)] for key, value in values.items() if id(value) in new})

    def _resolved(self, leaf: Any, its: Any, known: dict[str, torch.Tensor]) -> Any:
        """The tensor for a `tree.Known`. If the optimizer holds one of its own there, that becomes the known one."""
        if not isinstance(leaf, tree.Known):
            return leaf
        tensor = known[leaf.name]
        is_state = leaf.name.startswith(f"{self._name}/")
        if is_state and isinstance(its, torch.Tensor) and _memory_of(its) != _memory_of(tensor):
            with torch.no_grad():
                local_of(its).copy_(local_of(tensor))
            self._replace({id(tensor): its}, known)
        return known[leaf.name]


def _known_or_detached(tensor: Any, names: dict[tuple[object, ...], str]) -> Any:
    name = names.get(_memory_of(tensor))
    return tree.Known(name) if name is not None else tensor.detach()


def _has_any(optimizer: torch.optim.Optimizer, *hooks: str) -> bool:
    """Whether it has hooks. One that wraps another may never have called ``Optimizer.__init__()``."""
    return any(getattr(optimizer, kind, None) for kind in hooks)


def _overrides(thing: object, base: type, *methods: str) -> bool:
    """Whether an object has a method of its own in place of its base class's."""
    return any(getattr(type(thing), method) is not getattr(base, method) or method in vars(thing) for method in methods)


def _has_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has hooks of ``state_dict()``, beside those of torch's own wrappers for distributed training:
    these rename, or gather what each rank holds a part of."""
    hooks = (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())
    return any(not _module_of(hook).startswith("torch.distributed.") for hook in hooks)


def _module_of(hook: Any) -> str:
    while (inner := getattr(hook, "func", getattr(hook, "hook", None))) is not None:
        hook = inner
    return str(getattr(hook, "__module__", ""))


def _tensors_of(module: torch.nn.Module, with_children: bool) -> list[torch.Tensor]:
    return [*module.parameters(with_children), *module.buffers(with_children)]


def _memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    local = local_of(tensor)
    if other_than_memory(local) is not None or not local.numel():
        return (id(local),)
    return (local.data_ptr(), local.dtype, local.shape, local.stride())


@contextlib.contextmanager
def _kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """A context after which the tensors have the same content as before."""
    copies = [(tensor, local_of(tensor).detach().to("cpu", copy=True)) for tensor in tensors]
    yield
    with torch.no_grad():
        for tensor, copy in copies:
            local_of(tensor).copy_(copy)


@contextlib.contextmanager
def _same_objects(module: torch.nn.Module, with_children: bool) -> Iterator[None]:
    """A context after which the modules have the same parameters and buffers as before."""
    parts = list(module.modules()) if with_children else [module]
    held = [(part, dict(part._parameters), dict(part._buffers)) for part in parts]
    yield
    for part, parameters, buffers in held:
        part._parameters.clear()
        part._parameters.update(parameters)
        part._buffers.clear()
        part._buffers.update(buffers)
