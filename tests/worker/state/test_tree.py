"""Nested values as plain lists, and back."""

import enum
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.ranks import file_store, run_ranks
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from keepstep.errors import ConfigurationError, RemoteProtocolError, StateMismatch
from keepstep.worker.state import tree

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(1 << 70), max_value=1 << 70)
    | st.floats()
    | st.text()
    | st.binary()
)
keys = st.recursive(scalars, lambda inner: st.tuples(inner) | st.tuples(inner, inner), max_leaves=4)
hashables = st.sets(st.integers()) | st.sets(st.text()) | st.sets(st.tuples(st.integers(), st.text()))


def pairs(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(st.tuples(keys.filter(lambda key: "nan" not in repr(key)), values), max_size=4)


values = st.recursive(
    scalars | hashables | st.dictionaries(st.text(), st.integers()).map(Counter),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | pairs(inner).map(dict)
        | pairs(inner).map(OrderedDict)
    ),
    max_leaves=20,
)


def through_the_wire(value: Any) -> Any:
    tensors: list[torch.Tensor] = []
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(tree.pack(value, tensors)))
    return tree.unpack(plain, tensors)


def same(left: Any, right: Any) -> bool:
    """Equal in type, order and every bit of a float."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        both_nan = math.isnan(left) and math.isnan(right)
        return both_nan or (left == right and math.copysign(1, left) == math.copysign(1, right))
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(one, two) for one, two in zip(left.items(), right.items(), strict=True)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(one, two) for one, two in zip(left, right, strict=True))
    return bool(left == right)


@given(values)
def test_a_round_trip_loses_nothing(value: Any) -> None:
    assert same(through_the_wire(value), value)


def test_a_dtype_is_carried() -> None:
    assert through_the_wire({"moments": torch.bfloat16}) == {"moments": torch.bfloat16}
    assert tree.difference(torch.bfloat16, torch.float16) == ""


def test_the_comparison_itself_can_tell() -> None:
    assert not same([1], (1,))
    assert not same(0.0, -0.0)
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not same(True, 1)
    assert not same(Counter(a=1), {"a": 1})
    assert same([math.nan], [math.nan])


def test_tensors_travel_by_reference() -> None:
    first, second = torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16)
    tensors: list[torch.Tensor] = []
    plain = tree.pack({"a": [first, (second,)], "again": first}, tensors)
    assert [tensor is other for tensor, other in zip(tensors, (first, second, first), strict=True)] == [True] * 3
    value = tree.unpack(plain, tensors)
    assert value["a"][0] is first
    assert value["a"][1][0] is second
    assert value["again"] is first


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.int64(-3), -3),
        (np.uint64((1 << 64) - 1), (1 << 64) - 1),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.float64("nan"), math.nan),
    ],
    ids=repr,
)
def test_numpys_scalars_become_pythons(value: Any, expected: Any) -> None:
    assert same(through_the_wire(value), expected)


class Plain:
    """Nothing that can be carried."""


Point = namedtuple("Point", "x y")

REFUSED = [
    ({"a": [1, {"b": Plain()}]}, "state['a'][1]['b'] is a ", "Plain"),
    ([0, (1, Plain())], "state[1][1] is a ", "Plain"),
    ({"f": print}, "state['f'] is a ", "builtin_function_or_method"),
    ({"d": defaultdict(int)}, "state['d'] is a ", "collections.defaultdict"),
    ({"p": Point(1, 2)}, "state['p'] is a ", "Point"),
    ({"z": 1j}, "state['z'] is a ", "builtins.complex"),
    ({"l": np.longdouble(1)}, "state['l'] is a ", "numpy.longdouble"),
    ({"n": np.zeros(2)}, "state['n'] is a ", "numpy.ndarray"),
    ({3: {"s": frozenset()}}, "state[3]['s'] is a ", "builtins.frozenset"),
    ({frozenset(): 1}, "state is a ", "builtins.frozenset"),
]


@pytest.mark.parametrize(("value", "begins", "names"), REFUSED, ids=[names for _value, _begins, names in REFUSED])
def test_a_refusal_names_path_and_type_and_what_is_allowed(value: Any, begins: str, names: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        tree.pack(value, [], "state")
    text = str(caught.value)
    assert text.startswith(begins)
    assert f"{names}: keepstep can carry numbers" in text


def test_a_refusal_without_a_path_still_says_what() -> None:
    with pytest.raises(ConfigurationError, match=r"^the state is a .*Plain"):
        tree.pack(Plain(), [])


@pytest.mark.parametrize(
    "plain",
    [
        ["nothing", 1],
        [],
        ["tensor"],
        ["tensor", "a"],
        ["int", 3],
        ["int", "three"],
        ["float", "x"],
        [["list"]],
        ["list", ["no"]],
        ["dict", 1],
        ["dict", [1, 2, 3]],
        ["dict", [["list"], 1]],
        ["set", ["list"]],
        ["dtype", "nn"],
        ["dtype", "no"],
        ["dtype", 3],
    ],
    ids=repr,
)
def test_what_pack_has_not_made_is_refused(plain: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="not a packed value"):
        tree.unpack(plain, [])


@pytest.mark.parametrize("index", [1, -1])
def test_a_tensor_that_is_not_there_is_refused(index: int) -> None:
    with pytest.raises(RemoteProtocolError, match="not a packed value"):
        tree.unpack(["tensor", index], [torch.zeros(1)])


def test_a_set_of_several_types() -> None:
    value = {1, "a", None, (2, "b"), (2, None), math.inf, 1 << 70}
    assert through_the_wire(value) == value


@given(st.lists(st.integers() | st.text() | st.none() | st.tuples(st.integers(), st.text()), unique=True))
def test_equal_sets_have_one_plain_form(items: list[Any]) -> None:
    """The digest of a rank is made of it, and Python's own order depends on the process and the set's history."""
    forwards, backwards = set(items), set()
    backwards.update(reversed(items))
    assert tree.pack(forwards, []) == tree.pack(backwards, [])


def test_a_set_of_tensors_is_refused() -> None:
    """It has no order that is the same on two ranks."""
    with pytest.raises(ConfigurationError, match=r"^state is a set of tensors: keepstep can carry"):
        tree.pack({torch.zeros(1), torch.ones(1)}, [], "state")


class Colour(enum.IntEnum):
    RED = 1


class Mode(enum.StrEnum):
    FAST = "fast"


class Word(str):
    """A string of the user's own class."""

    __slots__ = ()


class Big(int):
    """An integer of the user's own class."""


class Share(float):
    """A float of the user's own class."""


@pytest.mark.parametrize(
    "value", [Colour.RED, Word("x"), Mode.FAST, Big(1 << 70), Share(math.nan)], ids=lambda value: type(value).__name__
)
def test_a_subclass_is_refused(value: Any) -> None:
    """It would come back as its base; to bring its class back takes a pickle."""
    name = type(value).__qualname__
    for place in ({"a": value}, {value: 1}, {value}):
        with pytest.raises(ConfigurationError, match=rf"^state.* is a .*\.{name}: .* but no classes derived from them"):
            tree.pack(place, [], "state")


def dtensors(_rank: int, _size: int, path: Path) -> tuple[bool, list[Any]]:
    """What becomes of a state with a DTensor, and of one that lies otherwise where it comes to."""
    dist.init_process_group("gloo", store=file_store(path, 1), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    average = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    value = {"ema": [average, torch.ones(2)], "n": (3, OrderedDict(a=average))}
    tensors: list[torch.Tensor] = []
    packed = tree.pack(value, tensors)
    back = tree.placed(tree.unpack(packed, tensors), value)
    is_same = type(back["ema"][0]) is type(average) and back["n"][1]["a"].placements == (Shard(0),)
    is_same = is_same and torch.equal(back["ema"][0].full_tensor(), average.full_tensor()) and back["n"][0] == 3
    plain = tree.placed({"ema": [torch.zeros(6)], "more": torch.ones(1)}, {"ema": []})
    try:
        tree.placed({"ema": tree.LocalPart(torch.zeros(5))}, {"ema": average})
    except StateMismatch as error:
        return is_same, [type(plain["ema"][0]), type(plain["more"]), str(error)]
    raise AssertionError


def test_dtensors_are_carried_as_a_ranks_part(tmp_path: Path) -> None:
    ((is_same, (first, second, error)),) = run_ranks(1, dtensors, tmp_path)
    assert is_same
    assert (first, second) == (torch.Tensor, torch.Tensor)
    assert error.startswith("'a copy of a parameter' is sharded in another way")


def test_what_stands_for_a_tensor_travels() -> None:
    value = {"own": [tree.Known("optimizer/0/exp_avg"), torch.ones(2)]}
    tensors: list[torch.Tensor] = []
    back = tree.unpack(tree.pack(value, tensors), tensors)
    assert back["own"][0] == tree.Known("optimizer/0/exp_avg")
    assert len(tensors) == 1


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, None),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, "['a']['b'][1]"),
        ({"a": 1}, {"a": 1, "b": None}, "['b']"),
        ({"a": 1}, {"a": 1.0}, "['a']"),
        ({"a": True}, {"a": 1}, "['a']"),
        ([1, 2], [1, 2, 3], ""),
        ([1], (1,), ""),
        (float("nan"), float("nan"), None),
        (0.0, -0.0, ""),
        ({1: torch.ones(2)}, {1: torch.ones(2)}, None),
        ({1: torch.ones(2)}, {1: torch.ones(2, dtype=torch.float64)}, "[1]"),
        ({1: torch.tensor([0.0])}, {1: torch.tensor([-0.0])}, "[1]"),
        ({1: torch.tensor([float("nan")])}, {1: torch.tensor([float("nan")])}, None),
        (tree.Known("a"), tree.Known("b"), ""),
        ({2**70, 3}, {3, 2**70}, None),
        (torch.ones(2, 2).t(), torch.ones(2, 2), None),
    ],
)
def test_a_difference_is_named(one: Any, other: Any, place: str | None) -> None:
    assert tree.difference(one, other) == place
    assert (tree.difference(other, one) is None) == (place is None)


def test_content_is_put_in_place() -> None:
    tensor, inner, items = torch.zeros(2), {"n": 1, "more": 2}, [torch.zeros(1), 5, 6]
    live = {"inner": inner, "items": items, "tensor": tensor, "old": 1}
    value = {"inner": {"n": 3}, "items": [torch.ones(1), 7], "tensor": torch.ones(2), "new": (torch.ones(3),)}
    first = items[0]
    assert tree.put_into(live, value) is live
    assert tree.difference(live, value) is None
    assert (id(live["inner"]), id(live["items"]), id(live["tensor"])) == (id(inner), id(items), id(tensor))
    assert items[0] is first
    assert live["new"][0] is not value["new"][0], "nothing is shared with the image"


def test_a_tensor_of_another_form_is_replaced() -> None:
    live = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.bfloat16)}
    value = {"a": torch.ones(2), "b": torch.ones(2)}
    tree.put_into(live, value)
    assert tree.difference(live, value) is None


def test_what_cannot_be_put_in_place_is_named() -> None:
    kept, held = torch.zeros(2), {"n": 1}

    def said() -> Any:
        return {"held": held, "kept": kept, "list": [kept], "copy": {"of": kept.clone()}}

    assert tree.passing(said(), said()) == "['copy']['of']"
    assert tree.passing({"held": held, "list": [kept]}, {"held": held, "list": [kept]}) is None
    assert tree.passing({"n": 1}, {"n": 1}) == "['n']"
