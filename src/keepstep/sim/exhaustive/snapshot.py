"""Copies of a whole world, and fingerprints that identify equal worlds.

A world is a graph of plain objects: lists, dicts, sets, dataclasses and the classes of the simulator. Copies share
immutable objects (numbers, text, messages, layouts).
"""

from __future__ import annotations

import enum
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

_SHARED_KINDS = (int, str, float, type(None), bytes, enum.Enum, type, types.FunctionType)
_KEPT = frozenset({"story", "rng", "journal", "layout", "_layout", "settings", "_settings", "_liveness_settings"})
"""Fields that all copies share, because an exploration does not read them or does not change them."""
_IGNORED = _KEPT | {
    *("_activity", "_progress", "num_events", "_recoveries_at_last_step"),  # counters
    # What the oracle's excuses depend on.
    *(
        "_heard_s",
        "_num_heard",
        "_heard_up_to",
        "_has_told_of_step",
        "_has_joined",
        "_before_packets",
        "_was_silent",
        "_incarnations",
    ),
    "completed",
    *("_tag_since_s", "_passed"),  # durations of phases
    # Fields of channels.
    *("_received", "_acknowledged", "_transmitted", "_patient_since_s", "_owes_news", "_owes_answer"),
    *("records", "record", "connected"),  # the contents of a report
    *(
        "_by_node",
        "_finished_at",
        "_situation",
        "published",
        "notices",
        "node_news",
        "_gone_nodes",
        "_awaited_text",
        "_announced",
        "text",
        "_told_s",
        "_looked_s",
    ),  # the reports about ranks that wait
}
"""Fields that a fingerprint ignores: worlds that differ only in these behave alike from now on."""
_UNORDERED = frozenset({"given", "parts", "inside", "there", "members", "_waiting", "_open", "_finished", "digests"})
"""Dicts whose order only affects the order of events, and all orders of these are explored."""

Copy = Callable[[Any, dict[int, Any]], Any]
Describe = Callable[[Any, dict[int, int], list[Any]], None]


class Copier:
    """Copies worlds, and identifies equal ones. It decides once per type how to handle its objects."""

    def __init__(self, essence: Mapping[type, Callable[[Any], object]]) -> None:
        """Args:
        essence: type -> a function of an object, whose result replaces the object in a fingerprint, unless it is None.
        """
        self._essence = essence
        self._shared: set[type] = set()
        """Types whose objects copies share."""
        self._copies: dict[type, Copy] = {}
        self._describes: dict[type, Describe] = {}

    def copy(self, world: Any) -> Any:
        """Returns a copy of a world and of all objects that it refers to."""
        return self._copy(world, {})

    def fingerprint(self, world: Any) -> int:
        """Returns a number that is the same for equal worlds, and almost certainly differs for others."""
        parts: list[Any] = []
        self._describe(world, {}, parts)
        try:
            return hash(tuple(parts))
        except TypeError:  # messages that contain dicts have no hash
            return hash(tuple(part if _has_hash(part) else repr(part) for part in parts))

    def _is_shared(self, value: Any, kind: type) -> bool:
        """Returns whether objects of a type are immutable. Remembers such types."""
        if issubclass(kind, _SHARED_KINDS) or _is_frozen(value):
            self._shared.add(kind)
        return kind in self._shared

    # ---- copies -----------------------------------------------------------------------------------------------------

    def _copy(self, value: Any, memo: dict[int, Any]) -> Any:
        kind = type(value)
        copy = self._copies.get(kind)
        if copy is None:
            copy = self._copies[kind] = self._copy_for(value, kind)
        return copy(value, memo)

    def _copy_for(self, value: Any, kind: type) -> Copy:
        if self._is_shared(value, kind):
            return lambda value, memo: value
        if issubclass(kind, tuple):
            return self._copy_tuple
        if kind in (list, deque, set, frozenset):
            return self._copy_collection
        if issubclass(kind, dict):
            return self._copy_dict
        if isinstance(value, msgspec.Struct):
            return self._copy_struct
        return self._copy_object(kind, _fields(kind))

    def _copy_tuple(self, value: Any, memo: dict[int, Any]) -> Any:
        parts = [self._copy(part, memo) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)

    def _copy_collection(self, value: Any, memo: dict[int, Any]) -> Any:
        known = memo.get(id(value))
        if known is None:
            known = memo[id(value)] = type(value)([self._copy(part, memo) for part in value])
        return known

    def _copy_dict(self, value: Any, memo: dict[int, Any]) -> Any:
        known = memo.get(id(value))
        if known is None:
            known = memo[id(value)] = defaultdict(value.default_factory) if type(value) is defaultdict else {}
            for key, part in value.items():
                known[key] = self._copy(part, memo)
        return known

    def _copy_struct(self, value: Any, memo: dict[int, Any]) -> Any:
        known = memo.get(id(value))
        if known is None:
            parts = [self._copy(getattr(value, name), memo) for name in value.__struct_fields__]
            known = memo[id(value)] = type(value)(*parts)
        return known

    def _copy_object(self, kind: type, fields: tuple[str, ...]) -> Copy:
        shared = self._shared

        def copy(value: Any, memo: dict[int, Any]) -> Any:
            known = memo.get(id(value))
            if known is not None:
                return known
            made: Any = object.__new__(kind)
            memo[id(value)] = made
            for name in getattr(value, "__dict__", fields):
                part = getattr(value, name)
                is_kept = type(part) in shared or name in _KEPT
                object.__setattr__(made, name, part if is_kept else self._copy(part, memo))
            return made

        return copy

    # ---- fingerprints -----------------------------------------------------------------------------------------------

    def _describe(self, value: Any, seen: dict[int, int], parts: list[Any]) -> None:
        kind = type(value)
        describe = self._describes.get(kind)
        if describe is None:
            describe = self._describes[kind] = self._describe_for(value, kind)
        describe(value, seen, parts)

    def _describe_for(self, value: Any, kind: type) -> Describe:
        if self._is_shared(value, kind):
            return lambda value, seen, parts: parts.append(value)
        if issubclass(kind, set | frozenset):
            return lambda value, seen, parts: parts.append(tuple(sorted(value)))
        if issubclass(kind, tuple | list | deque):
            return self._describe_sequence
        if issubclass(kind, dict):
            return self._describe_dict
        return self._describe_object(kind, _fields(kind))

    def _describe_sequence(self, value: Any, seen: dict[int, int], parts: list[Any]) -> None:
        parts.append(len(value))
        for part in value:
            self._describe(part, seen, parts)

    def _describe_dict(self, value: Any, seen: dict[int, int], parts: list[Any]) -> None:
        parts.append(len(value))
        for key, part in value.items():
            parts.append(key)
            self._describe(part, seen, parts)

    def _describe_object(self, kind: type, fields: tuple[str, ...]) -> Describe:
        essence = self._essence.get(kind)
        shared = self._shared

        def describe(value: Any, seen: dict[int, int], parts: list[Any]) -> None:
            """Adds an object's fields to ``parts``, or only its number if it was added before."""
            if (number := seen.get(id(value))) is not None:
                parts.append(number)
                return
            if essence is not None and (stands_for_it := essence(value)) is not None:
                parts.append(stands_for_it)
                return
            seen[id(value)] = len(seen)
            parts.append(kind.__name__)
            for name in getattr(value, "__dict__", fields):
                if name in _IGNORED:
                    continue
                part = getattr(value, name)
                if type(part) in shared:
                    parts.append(part)
                    continue
                if name in _UNORDERED and isinstance(part, dict):
                    part = dict(sorted(part.items(), key=lambda entry: repr(entry[0])))
                self._describe(part, seen, parts)

        return describe


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _is_frozen(value: Any) -> bool:
    if isinstance(value, msgspec.Struct):
        return value.__struct_config__.frozen
    parameters = getattr(type(value), "__dataclass_params__", None)
    return bool(parameters and parameters.frozen)


def _fields(kind: type) -> tuple[str, ...]:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    slots: Iterable[str] = (name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))
    return tuple(name for name in slots if name != "__weakref__")
