"""The script's own values in protected host state, as the attributes of one object."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch.utils._pytree import tree_leaves

from keepstep.errors import ConfigurationError, RemoteProtocolError, StateMismatch, UsageError
from keepstep.weights.memory.blocks import is_dtensor
from keepstep.weights.memory.bytes_of import byte_view, host_bytes
from keepstep.worker.state import tree
from keepstep.worker.values.missing import Missing

Refusal = Callable[[str], str | None]
"""Gets an attribute's name as the script writes it. Returns why the script may not change it now, or None."""

_NOTHING = object()


class Constants:
    """The bytes of immutable values by name: keepstep compares them several times in each step."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, bytes]] = {}

    def to_bytes(self, name: str, value: Any, path: str) -> bytes:
        """As `to_bytes`; of the value that it has returned last under this name, the same object."""
        known, encoded = self._known.get(name, (_NOTHING, b""))
        if known is value:
            return encoded
        encoded = to_bytes(value, path)
        if tree.is_constant(value):
            self._known[name] = value, encoded
        return encoded


class State:
    """Protected attributes: the result of `Session.state`.

    keepstep restores them when it repeats an interrupted step, and sends them to a replacement. The set of attributes
    is fixed at creation. Values are numbers, strings, bytes, None, tensors, and lists, tuples, sets and dicts of these.
    The object owns the values. A value that the script changes in place counts as changed.
    """

    __slots__ = ("__dict__", "_constants", "_label", "_refusal", "_seals")

    _label: str
    _refusal: Refusal
    _seals: dict[str, bytes]
    _constants: Constants

    def __init__(self, label: str, values: dict[str, Any], refusal: Refusal) -> None:
        """Takes the ``label`` under which messages name the object.

        Raises:
            ConfigurationError: a name is not allowed as an attribute, or a value cannot be sent to another process.
        """
        set_slot = object.__setattr__
        set_slot(self, "_label", label)
        set_slot(self, "_refusal", refusal)
        set_slot(self, "_seals", {})
        set_slot(self, "_constants", Constants())
        for name, value in values.items():
            if name.startswith("_") or hasattr(State, name):
                raise ConfigurationError(f"{label}: an attribute cannot be called '{name}' here; take another name")
            self._bytes_of(name, value)
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises:
        UsageError: the attribute was not declared, or the script may not change it now.
        ConfigurationError: the value cannot be sent to another process.
        """
        if name not in self.__dict__:
            raise UsageError(f"{self._label} has no attribute '{name}': declare it, session.state({name}=...)")
        if refused := self._refusal(f"{self._label}.{name}"):
            raise UsageError(refused)
        if tree.is_constant(value) or not _is_missing(value):
            self._bytes_of(name, value)  # raises if the value cannot be sent
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        raise UsageError(f"{self._label}.{name} cannot be deleted: every rank has the same attributes")

    def __repr__(self) -> str:
        return f"{self._label}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    def __reduce__(self) -> Any:
        """A copy, or what is read from a file, has the values and nothing of keepstep."""
        return SimpleNamespace, (), dict(self.__dict__)

    def _bytes_of(self, name: str, value: Any) -> bytes:
        return self._constants.to_bytes(name, value, f"{self._label}.{name}")

    # ---- as a protected object --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The values by their names, by reference."""
        return dict(self.__dict__)

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Sets all values, without counting this as a change by the script.

        Raises:
            StateMismatch: ``values`` has other names than this object.
        """
        if set(values) != set(self.__dict__):
            different = sorted(set(values) ^ set(self.__dict__))
            raise StateMismatch(f"{self._label}.{different[0]} is declared on one rank or in one run, and not here")
        self.__dict__.update(values)
        self.seal()

    def as_bytes(self) -> dict[str, bytes]:
        """Each value as bytes, by its name; equal bytes are equal values.

        Raises:
            ConfigurationError: the script changed a value in place, and it cannot be sent to another process now.
        """
        return {name: self._bytes_of(name, value) for name, value in self.__dict__.items()}

    def seal(self) -> dict[str, bytes]:
        """Records the current values, for `changed`.

        Returns:
            `as_bytes`.
        """
        seals = self.as_bytes()
        object.__setattr__(self, "_seals", seals)
        return seals

    def changed(self) -> str | None:
        """The first attribute that differs from its value at `seal`, as the script writes it; None if none differs."""
        for name, seal in self._seals.items():
            if self._bytes_of(name, self.__dict__[name]) != seal:
                return f"{self._label}.{name}"
        return None


def _is_missing(value: Any) -> bool:
    """Whether the value is the result of a collective that a failure interrupted; see `MissingValues`."""
    return any(isinstance(leaf, Missing) for leaf in tree_leaves(value))


class _Packed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A serialized value: its tree, and dtype, shape, device type and content of each tensor."""

    tree: Any
    tensors: tuple[tuple[str, tuple[int, ...], str, bytes], ...]


def to_bytes(value: Any, path: str) -> bytes:
    """Serializes a value, including its tensors.

    Args:
        value: a value of the types that `tree.pack` supports.
        path: the value's name in the script, for the error message.

    Raises:
        ConfigurationError: the value contains another type, a DTensor, or a tensor with a gradient graph.
    """
    tensors: list[torch.Tensor] = []
    packed = tree.pack(value, tensors, path)
    if any(tensor.requires_grad or is_dtensor(tensor) for tensor in tensors):
        raise ConfigurationError(
            f"{path} holds a DTensor, or a tensor with a gradient graph: take .item(), .to_local() or .detach() of it"
        )
    return msgspec.msgpack.encode(_Packed(packed, tuple(_tensor_bytes(tensor) for tensor in tensors)))


def from_bytes(encoded: bytes, path: str) -> Any:
    """Deserializes the result of `to_bytes`.

    Raises:
        RemoteProtocolError: `to_bytes` did not produce these bytes.
    """
    try:
        packed = msgspec.msgpack.decode(encoded, type=_Packed)
        return tree.unpack(packed.tree, [_tensor_of(*parts) for parts in packed.tensors])
    except (msgspec.MsgspecError, RuntimeError, AttributeError) as error:
        raise RemoteProtocolError(f"{path} does not parse: {error}") from error


def _tensor_bytes(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str, bytes]:
    content = host_bytes(tensor.detach().cpu().contiguous()).tobytes()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.device.type, content


def _tensor_of(dtype: str, shape: tuple[int, ...], device: str, content: bytes) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    if content:
        byte_view(tensor).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return tensor.to(device)
