"""Copies nested Python values, and converts them without loss to plain lists for msgpack and back, without pickle."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from keepstep.errors import ConfigurationError, RemoteProtocolError, StateMismatch
from keepstep.weights.memory.blocks import is_dtensor, local_of
from keepstep.weights.memory.bytes_of import as_dense, byte_view, digest_of, other_than_memory

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


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """Stands for a tensor that is carried under a name of its own, where it occurs in a value once more.

    Attributes:
        name: of the tensor.
    """

    name: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LocalPart:
    """Stands for a DTensor in a value that comes from another process.

    Attributes:
        tensor: the local tensor of this rank.
    """

    tensor: torch.Tensor


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


def changed(value: Any, change: Callable[[Any, Any], Any], like: Any = None) -> Any:
    """Applies a function to each tensor, `Known` and `LocalPart` in a value, and to what ``like`` has in that place."""
    return _mapped(value, like, change)


def placed(value: Any, like: Any) -> Any:
    """Makes DTensors of the `LocalPart` in a value.

    Args:
        value: from `unpack`.
        like: a value with DTensors in the corresponding places, which give mesh and placements.

    Raises:
        StateMismatch: see `placed_as`.
    """
    return _mapped(value, like, lambda leaf, its: placed_as(leaf.tensor, its) if type(leaf) is LocalPart else leaf)


def placed_all(value: Any, like: torch.Tensor) -> Any:
    """Same as `placed`, with one DTensor for all parts."""
    return _mapped(value, None, lambda leaf, _its: placed_as(leaf.tensor, like) if type(leaf) is LocalPart else leaf)


def placed_as(local: torch.Tensor, parameter: Any, name: str = "a copy of a parameter") -> torch.Tensor:
    """Wraps a local tensor in a DTensor with the mesh and placements of ``parameter``.

    Raises:
        StateMismatch: ``parameter`` is no DTensor, or its local tensor has another shape.
    """
    if not is_dtensor(parameter) or local_of(parameter).shape != local.shape:
        raise StateMismatch(f"'{name}' is sharded in another way than its parameter: such state cannot be restored")
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def put_into(live: Any, value: Any) -> Any:
    """Gives a live value the content of another one, in place as far as possible.

    Args:
        live: its tensors of the same form, dicts and lists are written to in place, so that other holders of them see
            the content, too.
        value: the content; it is not shared with the result, except for its `Known`.

    Returns:
        ``live``, or a copy of ``value`` where it is of another form.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if live is value:
            return live
        if isinstance(live, torch.Tensor) and _form(live) == _form(value):
            with torch.no_grad():
                local_of(live).copy_(local_of(value))
            return live
        return value.detach().clone()
    if kind in (dict, OrderedDict):
        own = live if type(live) is kind else kind()
        new = [(key, put_into(own.get(key), item)) for key, item in value.items()]
        own.clear()
        own.update(new)
        return own
    if kind is list:
        items = live if type(live) is kind else []
        its = [*items, *[None] * len(value)]
        items[:] = [put_into(its[index], item) for index, item in enumerate(value)]
        return items
    if kind is tuple and type(live) is tuple and len(live) == len(value):
        return tuple([put_into(its, item) for its, item in zip(live, value, strict=True)])
    return copied(value)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return type(tensor) is torch.nn.Parameter, tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def passing(one: Any, again: Any, path: str = "") -> str | None:
    """Finds what `put_into` cannot restore: a value that is made anew each time an object is asked for its state.

    Args:
        one: the state of an object.
        again: the same, asked for once more.
        path: the place of the state, for the result.

    Returns:
        the place of the first such value; None if all of them are tensors and containers of the object's own.
    """
    if isinstance(one, torch.Tensor) and isinstance(again, torch.Tensor):
        return None if local_of(one).data_ptr() == local_of(again).data_ptr() else path
    if type(one) in (dict, OrderedDict, list):
        if one is again:
            return None  # its items are put into it
        if type(one) is not list:
            found = (passing(item, again.get(key), f"{path}[{key!r}]") for key, item in one.items())
            return next((place for place in found if place is not None), None)
    if type(one) in (list, tuple) and type(again) is type(one):
        found = (passing(item, its, f"{path}[{i}]") for i, (item, its) in enumerate(zip(one, again, strict=False)))
        return next((place for place in found if place is not None), None)
    return path


def difference(one: Any, other: Any) -> str | None:
    """Compares two values bit for bit; neither the order of a dict's keys matters nor the device of a tensor.

    Returns:
        the place of the first difference as Python would write it, such as ``['groups']['optimizer'][0]['lr']``; None
        if there is none.
    """
    mine: list[torch.Tensor] = []
    its: list[torch.Tensor] = []
    return _difference(pack(one, mine), pack(other, its), (mine, its), "")


def _difference(one: Any, other: Any, tensors: tuple[list[torch.Tensor], list[torch.Tensor]], path: str) -> str | None:
    match one, other:
        case [("tensor" | "part") as kind, int(index)], [other_kind, int(its)] if kind == other_kind:
            return None if _are_equal(tensors[0][index], tensors[1][its]) else path
        case [("dict" | "ordered" | "counter") as kind, *pairs], [other_kind, *other_pairs] if kind == other_kind:
            mine = {msgspec.msgpack.encode(key): (key, value) for key, value in pairs}
            theirs = {msgspec.msgpack.encode(key): (key, value) for key, value in other_pairs}
            for form in dict.fromkeys((*mine, *theirs)):
                side, (key, _value) = (0, mine[form]) if form in mine else (1, theirs[form])
                place = f"{path}[{unpack(key, tensors[side])!r}]"
                if form not in mine or form not in theirs:
                    return place
                if (found := _difference(mine[form][1], theirs[form][1], tensors, place)) is not None:
                    return found
            return None
        case [("list" | "tuple") as kind, *items], [other_kind, *other_items] if kind == other_kind:
            if len(items) != len(other_items):
                return path
            both = enumerate(zip(items, other_items, strict=True))
            places = (_difference(item, its, tensors, f"{path}[{index}]") for index, (item, its) in both)
            return next((place for place in places if place is not None), None)
        case _:
            return None if msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other) else path  # bits and types


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    mine, its = (tensor.detach().cpu().contiguous() for tensor in (one, other))
    return torch.equal(byte_view(mine), byte_view(its))


def _mapped(value: Any, like: Any, change: Callable[[Any, Any], Any]) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor) or kind is Known or kind is LocalPart:
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
            subclasses of these, because `unpack` could not recreate them; dtypes. A DTensor becomes a `LocalPart`.
        tensors: receives references to the tensors.
        path: location of the value in the user's object, for the error message.

    Raises:
        ConfigurationError: a value of another type, named by its path.
    """
    if isinstance(value, torch.Tensor) and (problem := other_than_memory(local_of(value))) is not None:
        raise ConfigurationError(
            f"{path or 'the state'} is {problem}: keepstep restores tensors whose content is their own memory"
        )
    if type(value) is LocalPart or is_dtensor(value):
        tensors.append(value.tensor if type(value) is LocalPart else local_of(value))
        return ["part", len(tensors) - 1]
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):  # a longdouble stays one
        return pack(value.item(), tensors, path)
    if type(value) in _SCALARS:
        return _pack_scalar(value)
    if type(value) is Known:
        return ["known", value.name]
    if type(value) is torch.dtype:
        return ["dtype", str(value).removeprefix("torch.")]
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


def encoded(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """A value as msgpack, and the tensors in it: those that fill one run of memory by reference.

    Raises:
        ConfigurationError: see `pack`.
    """
    tensors: list[torch.Tensor] = []
    plain = msgspec.msgpack.encode(pack(value, tensors))
    return plain, [as_dense(tensor) for tensor in tensors]


def digest(value: Any) -> str:
    """A 128-bit digest of a value and the tensors in it."""
    plain, tensors = encoded(value)
    return digest_of([(str(index), tensor) for index, tensor in enumerate(tensors)], plain)


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
        case ["part", int(index)] if 0 <= index < len(tensors):
            return LocalPart(tensors[index])
        case ["known", str(name)]:
            return Known(name)
        case ["dtype", str(name)] if type(dtype := getattr(torch, name, None)) is torch.dtype:
            return dtype
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
