"""Hooks of keepstep's on the modules and parameters of a script, which nothing sees but a call or a backward."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

_HANDLES: list[RemovableHandle] = []
"""Of all hooks in this process."""


def hook_before(module: torch.nn.Module, act: Callable[[torch.nn.Module, Any], None]) -> RemovableHandle:
    """Has ``act`` called with the module and its arguments, as by `Module.register_forward_pre_hook`."""
    return _hook(module, "_forward_pre_hooks", act)


def hook_after(module: torch.nn.Module, act: Callable[[torch.nn.Module, Any, Any], None]) -> RemovableHandle:
    """Has ``act`` called with the module, its arguments and its output, as by `Module.register_forward_hook`."""
    return _hook(module, "_forward_hooks", act)


def hook_gradient(parameter: torch.Tensor, act: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """See `Tensor.register_post_accumulate_grad_hook`, whose hooks are in no copy anyway."""
    _HANDLES.append(parameter.register_post_accumulate_grad_hook(act))
    return _HANDLES[-1]


def remove_hooks() -> None:
    """Removes all hooks."""
    for handle in _HANDLES:
        handle.remove()
    _HANDLES.clear()


def on_gradient_of(output: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Registers a hook that runs when the backward reaches a module's output."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    first = next((leaf for leaf in _tensors(output) if leaf.requires_grad and leaf.grad_fn is not None), None)
    if first is not None:
        first.register_hook(hook)


class _Hooks(OrderedDict[int, Any]):
    """The hooks of a module, among them keepstep's, which only a call of the module sees.

    Copies, pickled modules and scripted ones have the script's own alone: ``copy.deepcopy(model)`` and
    ``torch.save(model)`` give what they give without keepstep. torch calls what ``items()`` gives, and scripts what
    ``values()`` gives (torch 2.13 to 2.15).
    """

    def __init__(self, former: OrderedDict[int, Any]) -> None:
        """Takes the place of ``former``, from which handles of the hooks in it still remove them."""
        super().__init__(former)
        self._former, self._from_former = former, list(former)

    def items(self) -> Any:
        """All hooks."""
        if len(self._former) != len(self._from_former):
            for key in self._from_former:
                if key not in self._former:
                    self.pop(key, None)
            self._from_former = list(self._former)
        return super().items()

    def of_script(self) -> OrderedDict[int, Any]:
        """The hooks that are not keepstep's."""
        return OrderedDict((key, hook) for key, hook in self.items() if not isinstance(hook, _Hook))

    def values(self) -> Any:
        """See `of_script`."""
        return self.of_script().values()

    def copy(self) -> Any:
        """See `of_script`."""
        return self.of_script()

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.of_script(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.of_script().__reduce_ex__(protocol)


class _Hook:
    """A hook of keepstep's."""

    __slots__ = ("_act",)

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act

    def __call__(self, *arguments: Any) -> None:
        self._act(*arguments)


def _hook(module: torch.nn.Module, kind: str, act: Callable[..., None]) -> RemovableHandle:
    hooks = module.__dict__[kind]
    if not isinstance(hooks, _Hooks):
        module.__dict__[kind] = hooks = _Hooks(hooks)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = _Hook(act)
    _HANDLES.append(handle)
    return handle


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
