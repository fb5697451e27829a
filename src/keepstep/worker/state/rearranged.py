"""Which values of a sharded module's ``state_dict()`` are its own parameters in another arrangement.

A hook may save parameters in the format of another library: torchtitan's splits a fused matrix of queries, keys and
values. For that it gathers shards from other ranks, and those may be lost. So ``state_dict()`` is called while tensors
without memory (torch's device "meta") stand in for the parameters and buffers, and a ``TorchDispatchMode`` follows them
through operations that only select, order, copy and cast elements. What comes out of those alone holds nothing that is
not in the parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# fmt: off
_MOVES = frozenset((
    "aten::_to_copy", "aten::_unsafe_view", "aten::alias", "aten::cat", "aten::clone", "aten::detach",
    "aten::expand", "aten::index_select", "aten::narrow", "aten::permute", "aten::reshape", "aten::select",
    "aten::slice", "aten::split", "aten::split_with_sizes", "aten::squeeze", "aten::stack", "aten::t",
    "aten::transpose", "aten::unbind", "aten::unsqueeze", "aten::view",
))
# fmt: on
"""Operations whose results consist of elements of their tensors."""


class _Uncertain(Exception):
    """A value was computed from a parameter in another way."""


class _Moves(TorchDispatchMode):
    """Follows tensors through `_MOVES`; any other use of them raises."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self._followed = {id(tensor): tensor for tensor in tensors}

    def follows(self, value: object) -> bool:
        """Whether a value is one of the tensors, or made of their elements."""
        return id(value) in self._followed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        followed = {self.follows(each) for each in _tensors_in((args, keywords))}
        if True not in followed:
            return func(*args, **keywords)
        operation = func.name().partition(".")[0]
        if False in followed or operation not in _MOVES:
            raise _Uncertain(operation)
        if operation == "aten::_to_copy":  # to another device, where there is nothing to copy
            keywords = {name: value for name, value in keywords.items() if name == "dtype"} | {"device": "meta"}
        result = func(*args, **keywords)
        self._followed.update({id(each): each for each in _tensors_in(result)})
        return result


def beside_parameters(module: torch.nn.Module, read: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Returns what a ``state_dict()`` contains beside parameters and buffers, also rearranged ones, by key.

    Args:
        module: the module.
        read: calls its ``state_dict()``.

    Returns:
        the other values; None if they cannot be told apart.
    """
    with _stand_ins(module) as tensors, _Moves(tensors) as moves, torch.no_grad():
        try:
            whole = read()
        except Exception:  # the script's own code, for which the stand-ins may be too little
            return None
    found = {key: value for key, value in whole.items() if not moves.follows(value)}
    if any(moves.follows(each) or each.is_meta for each in _tensors_in(found)):
        return None
    return found


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def _stand_ins(module: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """A context in which tensors without memory are in the places of the module's parameters and buffers."""
    made: dict[int, torch.Tensor] = {}
    tables: list[dict[str, Any]] = [table for part in module.modules() for table in (part._parameters, part._buffers)]
    held = [(table, dict(table)) for table in tables]
    try:
        for table, own in held:
            for name, tensor in own.items():
                if tensor is not None:
                    table[name] = made.setdefault(id(tensor), _like(tensor))
        yield list(made.values())
    finally:
        for table, own in held:
            table.clear()
            table.update(own)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty
