"""Name maps: which rule makes which tensor, and what is refused before anything moves."""

import msgspec
import pytest

from keepstep.errors import AmbiguousName, ConfigurationError
from keepstep.protocol.transfer.names import (
    Chunk,
    Concat,
    Conversion,
    NameMap,
    NameRule,
    Quantize,
    Recipe,
    Select,
    Shard,
    Transpose,
    fused_decoder,
)
from keepstep.protocol.transfer.names.name_map import matched


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("a.b", "a.b", {}),
        ("a.b", "a.c", None),
        ("a.b", "axb", None),
        ("l.{i}.w", "l.12.w", {"i": "12"}),
        ("l.{i}.w", "l.1.2.w", None),
        ("l.{i}.w", "l..w", None),
        ("l.{i*}.w", "l.1.2.w", {"i": "1.2"}),
        ("{a}.{b}", "x.y", {"a": "x", "b": "y"}),
        ("{a}.{a}", "x.x", {"a": "x"}),
        ("{a}.{a}", "x.y", None),
        ("l.{i}_w", "l.3_w", {"i": "3"}),
        ("l[{i}]", "l[3]", {"i": "3"}),
    ],
)
def test_a_pattern_matches(pattern: str, name: str, found: dict[str, str] | None) -> None:
    assert matched(pattern, name) == found


@pytest.mark.parametrize(
    ("recipe", "made"),
    [
        ("x.{i}", "x.7"),
        (Concat(("x.{i}", "y.{i}"), 1), Concat(("x.7", "y.7"), 1)),
        (Select("x", 0, "{i}"), Select("x", 0, 7)),
        (Chunk("x", 0, "{i}", 9), Chunk("x", 0, 7, 9)),
        (Transpose("x.{i}", (1, 0)), Transpose("x.7", (1, 0))),
        (Shard("x.{i}", 1), Chunk("x.7", 1, 3, 4)),
        (Shard("x.{i}", 1, replicas=2), Chunk("x.7", 1, 1, 2)),
        (Shard("x.{i}", 1, replicas=4), "x.7"),
    ],
)
def test_a_rule_is_filled_for_a_name_and_a_rank(recipe: Recipe, made: Recipe) -> None:
    assert NameMap((NameRule("to.{i}", recipe),), tp_rank=3, tp_size=4).made_of("to.7") == (made, Conversion.EXACT)


def test_one_rank_alone_has_everything() -> None:
    assert NameMap((NameRule("to", Shard("x", 0)),)).made_of("to") == ("x", Conversion.EXACT)


def test_what_no_rule_makes_keeps_its_name() -> None:
    assert NameMap((NameRule("a", "b"),), convert=Conversion.CAST).made_of("c") == (None, Conversion.CAST)


def test_a_pattern_for_the_rest_gives_way_to_a_narrower_one() -> None:
    names = NameMap((NameRule("{rest*}", "model.{rest}"), NameRule("head", "lm_head"), NameRule("norm.{x}", "ln.{x}")))
    assert [names.made_of(name)[0] for name in ("head", "norm.w", "a.b")] == ["lm_head", "ln.w", "model.a.b"]


@pytest.mark.parametrize("patterns", [("a.{x}", "{x}.b"), ("a.b", "a.b"), ("{x*}", "a.{x*}"), ("a.b", "a.{x}")])
def test_two_rules_for_one_tensor_are_refused(patterns: tuple[str, str]) -> None:
    names = NameMap(tuple(NameRule(pattern, "s") for pattern in patterns))
    with pytest.raises(AmbiguousName, match=r"'a\.b' is made by several rules") as caught:
        names.made_of("a.b")
    assert all(f"'{pattern}'" in str(caught.value) for pattern in patterns)


def test_a_scale_is_filled_too() -> None:
    quantized = Quantize("{i}.scale", (2, 2))
    names = NameMap((NameRule("{i}.w", "{i}.w", quantized),))
    assert names.made_of("3.w") == ("3.w", Quantize("3.scale", (2, 2)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: NameMap((), tp_rank=2, tp_size=2),
        lambda: NameMap((), tp_rank=-1),
        lambda: NameMap((NameRule("a.{i}", "b.{j}"),)),
        lambda: NameMap((NameRule("a.{i}", Select("b", 0, "{j}")),)),
        lambda: NameMap((NameRule("a.{i}", "b", Quantize("{k}")),)),
        lambda: NameMap((NameRule("a", Shard("b", 0, replicas=2)),), tp_size=3),
        lambda: NameMap((NameRule("a", Shard("b", 0, replicas=0)),)),
        lambda: NameMap((), convert=Quantize("s")),
        lambda: NameMap((NameRule("a.{i}", Select("b", 0, "{i}")),)).made_of("a.x"),
    ],
)
def test_a_map_that_cannot_work_is_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ConfigurationError):
        make()


def test_a_map_is_plain_data() -> None:
    quantized = NameRule("{i}.w", Concat((Shard("{i}.a", 0), Select("b", 0, "{i}"))), Quantize("{i}.s", (128, 128)))
    names = NameMap((*fused_decoder(kv_replicas=2), quantized), 1, 2, Conversion.CAST)
    assert msgspec.json.decode(msgspec.json.encode(names), type=NameMap) == names
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(names), type=NameMap) == names


@pytest.mark.parametrize(
    ("rule", "held", "made"),
    [
        (NameRule("q.{i}", "a.{i}"), ["a.1", "a.2", "b.3"], ["q.1", "q.2"]),
        (NameRule("q.{i}", Concat(("a.{i}", "b.{i}"))), ["a.1", "b.2"], ["q.1", "q.2"]),
        (NameRule("m.{x*}", "{x}"), ["a.1", "b"], ["m.a.1", "m.b"]),
        (NameRule("q", Concat(("a", "b"))), ["c"], []),
    ],
)
def test_what_a_publisher_makes_of_what_it_holds(rule: NameRule, held: list[str], made: list[str]) -> None:
    assert NameMap((rule,)).made_by(rule, held) == made


def test_a_publisher_cannot_tell_how_many_there_are() -> None:
    rule = NameRule("e.{i}", Select("experts", 0, "{i}"))
    with pytest.raises(ConfigurationError, match=r"no part of the rule for 'e\.\{i\}'"):
        NameMap((rule,)).made_by(rule, ["experts"])
