"""Copies nested Python values, and converts them without loss to plain lists for msgpack and back, without pickle."""

from __future__ import annotations

import copy
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from keepstep.errors import ConfigurationError, RemoteProtocolError
from keepstep.weights.memory.blocks import is_dtensor, local_of

_SCALARS = frozenset({bool, int, float, str, bytes, type(None)})
_INT64 = 1 << 63
_CONTAINERS: dict[type, str] = {
    dict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
    list: "list",
    tuple: "tuple",
    set: "set",
}
_MAKERS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
    "list": list,
    "tuple": tuple,
    "set": set,
}


def is_constant(value: Any) -> bool:
    """Whether ``value`` cannot be changed in place: a scalar, or a tuple of scalars."""
    if type(value) is tuple:
        return all(type(item) in _SCALARS for item in value)
    return type(value) in _SCALARS


def copied(value: Any) -> Any:
    """A deep copy of a value of a few plain types, ten times as fast as `copy.deepcopy`.

    Immutable values are shared. An object that occurs twice in ``value`` becomes two objects, as with `unpack`.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind is list:
        return [copied(item) for item in value]
    if kind is tuple:
        return tuple([copied(item) for item in value])
    return copy.deepcopy(value)


def unplaced(value: Any) -> Any:
    """Replaces each DTensor in a value by its local tensor."""
    return _mapped(value, value, lambda tensor, _like: local_of(tensor))


def placed(value: Any, like: Any, place: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """The inverse of `unplaced`.

    Args:
        value: a value with the local tensors of DTensors.
        like: a value with DTensors in the corresponding places. It may lack some items of ``value``.
        place: wraps a local tensor in a DTensor with the mesh and placements of another one.
    """
    return _mapped(value, like, lambda tensor, its: place(tensor, its) if is_dtensor(its) else tensor)


def _mapped(value: Any, like: Any, change: Callable[[torch.Tensor, Any], torch.Tensor]) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return change(value, like)
    if kind in (dict, OrderedDict):
        by_key = like if type(like) is kind else {}
        return kind((key, _mapped(item, by_key.get(key), change)) for key, item in value.items())
    if kind in (list, tuple):
        its = like if type(like) is kind and len(like) == len(value) else [None] * len(value)
        return kind(_mapped(item, other, change) for item, other in zip(value, its, strict=True))
    return value


def pack(value: Any, tensors: list[torch.Tensor], path: str = "") -> Any:
    """Converts ``value`` to its plain form. Each tensor is appended to ``tensors`` and replaced by its index.

    Args:
        value: scalars, strings, bytes, lists, tuples, sets, dicts (also OrderedDict and Counter) and tensors; no other
            subclasses of these, because `unpack` could not recreate them. No DTensors: see `unplaced`.
        tensors: receives references to the tensors.
        path: location of the value in the user's object, for the error message.

    Raises:
        ConfigurationError: a value of another type, named by its path.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):  # a longdouble stays one
        return pack(value.item(), tensors, path)
    if type(value) in _SCALARS:
        return _pack_scalar(value)
    name = _CONTAINERS.get(type(value))
    if name in ("dict", "ordered", "counter"):
        return [name, *([pack(k, tensors, path), pack(v, tensors, f"{path}[{k!r}]")] for k, v in value.items())]
    if name == "set" and not any(isinstance(item, torch.Tensor) for item in value):
        # Python's order of a set differs from process to process, and not all of its items can be compared.
        return [name, *sorted((pack(item, tensors, f"{path}{{...}}") for item in value), key=msgspec.msgpack.encode)]
    if name in ("list", "tuple"):
        return [name, *(pack(item, tensors, f"{path}[{index}]") for index, item in enumerate(value))]
    what = "set of tensors" if name == "set" else f"{type(value).__module__}.{type(value).__qualname__}"
    raise ConfigurationError(
        f"{path or 'the state'} is a {what}: keepstep can carry "
        "numbers, strings, bytes, None, lists, tuples, sets, dicts and tensors, but no classes derived from them; "
        "leave it out of state_dict() or turn it into those"
    )


def _pack_scalar(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return ["float", repr(value)]
    if isinstance(value, int) and not isinstance(value, bool) and not -_INT64 <= value < _INT64:
        return ["int", str(value)]
    return value


def unpack(plain: Any, tensors: list[torch.Tensor]) -> Any:
    """Converts a plain form from `pack` back to the value.

    Raises:
        RemoteProtocolError: ``plain`` is not a result of `pack`, or does not match ``tensors``.
    """
    try:
        return _unpack(plain, tensors)
    except (ValueError, TypeError) as error:
        raise RemoteProtocolError(f"not a packed value: {plain!r:.80}: {error}") from error


def _unpack(plain: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(plain, list):
        return plain
    match plain:
        case ["tensor", int(index)] if 0 <= index < len(tensors):
            return tensors[index]
        case ["float", str(text)]:
            return float(text)
        case ["int", str(text)]:
            return int(text)
        case [("dict" | "ordered" | "counter") as name, *items]:
            pairs = [(_unpack(key, tensors), _unpack(item, tensors)) for key, item in items]
            return _MAKERS[name](pairs)
        case [("list" | "tuple" | "set") as name, *items]:
            return _MAKERS[name](_unpack(item, tensors) for item in items)
        case _:
            raise RemoteProtocolError(f"not a packed value: {plain!r:.80}")
