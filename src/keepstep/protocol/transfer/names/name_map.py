"""Name maps: which recipe makes which tensor, by patterns of names. Data, serialisable with msgspec, and pure."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import msgspec

from keepstep.errors import AmbiguousName, ConfigurationError
from keepstep.protocol.transfer.names.recipes import (
    Chunk,
    Concat,
    Recipe,
    Select,
    Shard,
    Stack,
    names_in,
    operands,
)

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)(\*?)\}")


class Conversion(enum.StrEnum):
    """How a tensor's dtype may differ from the published one."""

    EXACT = "exact"
    """Not at all."""
    CAST = "cast"
    """Between floating dtypes of two bytes or more, or between integers, as ``Tensor.to`` does."""


class Quantize(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """To float8: each block of the consumer's tensor is divided by a scale of its own, which is one more tensor.

    A scale is the largest magnitude in its block, divided by the largest number of the dtype. The consumer computes
    it, since a shard or bucket may have but a part of the block: what travels has the published dtype.
    """

    scale: str
    """Name of the consumer's tensor of scales, a pattern with the rule's placeholders. float32, one for each block."""
    block: tuple[int, ...] | None = None
    """Shape of a block, counted from the first index of the consumer's tensor; None: one scale, of shape [] or [1]."""


Convert: TypeAlias = Conversion | Quantize


class NameRule(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How the tensors come about whose names match a pattern.

    In a pattern ``{layer}`` stands for one or more characters that are no dot, and ``{rest*}`` for any characters, at
    least one. What it stood for is put in its place in the names of the recipe.
    """

    to: str
    """The pattern of the name of what is made."""
    recipe: Recipe
    """The tensors it is made of, in the names of the other side."""
    convert: Convert | None = None
    """How its dtype may differ; None: as the map says."""


class NameMap(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How one side's tensors come from the other's. A tensor that no rule makes has the same name on both sides.

    A rule whose pattern has a ``{rest*}`` gives way to those that have none. Two of a kind that match one name are
    refused.
    """

    rules: tuple[NameRule, ...]
    tp_rank: int = 0
    """Of the consumer among the tensor-parallel ranks, for `Shard`."""
    tp_size: int = 1
    convert: Convert = Conversion.EXACT
    """How dtypes may differ where no rule says it."""

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigurationError(
                f"tp_rank={self.tp_rank} with tp_size={self.tp_size}: allowed are 0 to {self.tp_size - 1}"
            )
        if isinstance(self.convert, Quantize):
            raise ConfigurationError("a name map cannot quantize every tensor: let a rule say which")
        for rule in self.rules:
            self._check(rule)

    def for_rank(self, tp_rank: int, tp_size: int) -> NameMap:
        """The same rules for one of several tensor-parallel ranks."""
        return msgspec.structs.replace(self, tp_rank=tp_rank, tp_size=tp_size)

    def made_of(self, name: str) -> tuple[Recipe | None, Convert]:
        """The recipe for a tensor, with its placeholders filled and `Shard`s for this rank; None: no rule makes it.

        Raises:
            AmbiguousName: two rules make it.
        """
        found = self._rule_for(name)
        if found is None:
            return None, self.convert
        rule, values = found
        convert = rule.convert or self.convert
        if isinstance(convert, Quantize):
            convert = msgspec.structs.replace(convert, scale=_fill(convert.scale, values))
        return self._compile(rule.recipe, values), convert

    def made_by(self, rule: NameRule, names: Iterable[str]) -> list[str]:
        """What a rule makes of tensors of which some are there: names of those for which one of its parts is.

        Raises:
            ConfigurationError: no part of the rule has all its placeholders.
        """
        placeholders = set(_placeholders(rule.to))
        wide = {name: f"{{{name}*}}" for name, star in _PLACEHOLDER.findall(rule.to) if star}
        own = {name: f"{{{name}}}" for name in placeholders} | wide
        parts = [_fill(part, own) for part in names_in(rule.recipe) if placeholders <= set(_placeholders(part))]
        if not parts:
            raise ConfigurationError(f"no part of the rule for '{rule.to}' has all of {sorted(placeholders)}")
        names = list(names)
        bound = (values for part in parts for name in names if (values := matched(part, name)) is not None)
        return list(dict.fromkeys(_fill(rule.to, values) for values in bound))

    def _rule_for(self, name: str) -> tuple[NameRule, Mapping[str, str]] | None:
        matching = [(rule, values) for rule in self.rules if (values := matched(rule.to, name)) is not None]
        narrow = [each for each in matching if not _is_wide(each[0].to)]
        chosen = narrow or matching
        if len(chosen) > 1:
            patterns = " and ".join(f"'{rule.to}'" for rule, _values in chosen)
            raise AmbiguousName(f"'{name}' is made by several rules of the name map: {patterns}")
        return chosen[0] if chosen else None

    def _compile(self, recipe: Recipe, values: Mapping[str, str]) -> Recipe:
        match recipe:
            case str():
                return _fill(recipe, values)
            case Concat() | Stack():
                return msgspec.structs.replace(
                    recipe, parts=tuple(self._compile(each, values) for each in recipe.parts)
                )
            case Shard(of=of, dim=dim, replicas=replicas):
                part = self._compile(of, values)
                num = self.tp_size // replicas
                return part if num == 1 else Chunk(part, dim, self.tp_rank // replicas, num)
            case Chunk() | Select():
                index = _number(_fill(str(recipe.index), values), recipe)
                return msgspec.structs.replace(recipe, of=self._compile(recipe.of, values), index=index)
            case _:
                return msgspec.structs.replace(recipe, of=self._compile(recipe.of, values))

    def _check(self, rule: NameRule) -> None:
        known = set(_placeholders(rule.to))
        scale = rule.convert.scale if isinstance(rule.convert, Quantize) else ""
        used = {name for text in (*_texts(rule.recipe), scale) for name in _placeholders(text)}
        if unknown := sorted(used - known):
            raise ConfigurationError(f"the rule for '{rule.to}' uses {unknown}, which its pattern does not have")
        for replicas in _replicas(rule.recipe):
            if replicas < 1 or self.tp_size % replicas:
                raise ConfigurationError(
                    f"the rule for '{rule.to}' has replicas={replicas}, which does not divide tp_size={self.tp_size}"
                )


def matched(pattern: str, name: str) -> Mapping[str, str] | None:
    """What the placeholders of a pattern stand for in a name; None: the name does not match."""
    if "{" not in pattern:
        return {} if pattern == name else None
    found = _expression(pattern).fullmatch(name)
    return None if found is None else found.groupdict()


@functools.lru_cache(maxsize=1024)
def _expression(pattern: str) -> re.Pattern[str]:
    parts, end, known = [], 0, set[str]()
    for placeholder in _PLACEHOLDER.finditer(pattern):
        parts.append(re.escape(pattern[end : placeholder.start()]))
        name, star = placeholder.groups()
        what = ".+" if star else "[^.]+"
        parts.append(f"(?P={name})" if name in known else f"(?P<{name}>{what})")
        known.add(name)
        end = placeholder.end()
    return re.compile("".join(parts) + re.escape(pattern[end:]))


def _placeholders(text: str) -> list[str]:
    return [name for name, _star in _PLACEHOLDER.findall(text)]


def _is_wide(pattern: str) -> bool:
    return any(star for _name, star in _PLACEHOLDER.findall(pattern))


def _fill(text: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda placeholder: values[placeholder.group(1)], text)


def _number(text: str, operation: Chunk | Select) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"'{text}' is no index for {operation}") from None


def _texts(recipe: Recipe) -> Iterator[str]:
    """Everything in a recipe that may have placeholders."""
    if isinstance(recipe, str):
        yield recipe
    elif isinstance(recipe, Chunk | Select):
        yield str(recipe.index)
    for each in operands(recipe):
        yield from _texts(each)


def _replicas(recipe: Recipe) -> Iterator[int]:
    if isinstance(recipe, Shard):
        yield recipe.replicas
    for each in operands(recipe):
        yield from _replicas(each)
