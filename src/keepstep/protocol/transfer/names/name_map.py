"""Name maps: patterns of names that say which recipe makes which tensor. Pure data, serialisable with msgspec."""

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
    """It must be the same."""
    CAST = "cast"
    """keepstep casts between floating dtypes of two bytes or more, as ``Tensor.to`` does. All other dtypes must be the
    same."""


class Quantize(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Converts to float8. Each block of the consumer's tensor is divided by its own scale, stored in another tensor.

    A scale is the largest magnitude in its block, divided by the largest number of the dtype. The consumer computes it,
    because a shard or bucket may contain only a part of the block. So the tensor travels in the published dtype.
    """

    scale: str
    """Name of the consumer's tensor of scales, a pattern with the rule's placeholders. It is float32, with one element
    for each block."""
    block: tuple[int, ...] | None = None
    """Shape of a block. Blocks start at the first index of the consumer's tensor. None: one scale, shape [] or [1]."""


Convert: TypeAlias = Conversion | Quantize


class NameRule(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How to make the tensors whose names match a pattern.

    In a pattern, ``{layer}`` matches one or more characters except dots, and ``{rest*}`` matches one or more of any
    characters. The matched text replaces the placeholder in the names of the recipe.
    """

    to: str
    """The pattern of the names of the tensors that the rule makes."""
    recipe: Recipe
    """The tensors of which the rule makes it, by their names on the other side."""
    convert: Convert | None = None
    """How its dtype may differ; None: as in `NameMap.convert`."""


class NameMap(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How one side's tensors are made of the other side's. A tensor without a rule has the same name on both sides.

    A rule without a ``{rest*}`` has precedence over rules with one. Two matching rules of the same precedence are an
    error.
    """

    rules: tuple[NameRule, ...]
    tp_rank: int = 0
    """The consumer's tensor-parallel rank, for `Shard`."""
    tp_size: int = 1
    convert: Convert = Conversion.EXACT
    """How dtypes may differ, unless a rule has its own ``convert``."""

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
        """Returns the same map for one of several tensor-parallel ranks."""
        return msgspec.structs.replace(self, tp_rank=tp_rank, tp_size=tp_size)

    def made_of(self, name: str) -> tuple[Recipe | None, Convert]:
        """Returns the recipe for a tensor, and how its dtype may differ.

        The recipe has its placeholders filled, and each `Shard` replaced for this rank. It is None if no rule matches.

        Raises:
            AmbiguousName: several rules match.
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
        """Returns the names of the tensors that a rule makes, if at least one of their parts exists.

        Args:
            rule: a rule of the map.
            names: names of the existing tensors on the other side.

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
    """Returns placeholder -> matched text; None if the name does not match the pattern."""
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
    """Yields all texts in a recipe that may have placeholders."""
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
