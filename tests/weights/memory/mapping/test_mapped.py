"""What of a name map does not fit is refused before anything moves, with one error that names the tensors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.transfer.names.test_recipes import Drawn, evaluated
from tests.weights.memory.delivery import Shipment, ship

from keepstep.errors import (
    AmbiguousName,
    ConfigurationError,
    DtypeMismatch,
    MissingPart,
    ShapeMismatch,
    StateMismatch,
    UnknownTensor,
)
from keepstep.protocol.transfer.names import Concat, Conversion, NameMap, NameRule, Quantize, Recipe, Slice, Transpose
from keepstep.weights.memory.blocks import Block, Weights
from keepstep.weights.memory.mapping.mapped import Mapped, published_blocks
from keepstep.weights.memory.targets import TensorTarget

Tensors = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn


# ---- Random recipes over random shards ------------------------------------------------------------------------------


@st.composite
def shards_of(draw: st.DrawFn, tensors: Tensors, num_ranks: int) -> list[dict[str, Block]]:
    """Each tensor cut in two along a random dimension at a random index, its parts dealt out to ranks, some twice."""
    ranks: list[dict[str, Block]] = [{} for _ in range(num_ranks)]
    for name, tensor in tensors.items():
        first, second = draw(st.permutations(range(num_ranks)))[:2]
        dim = draw(st.integers(0, max(0, tensor.dim() - 1)))
        cut = draw(st.integers(0, tensor.shape[dim])) if tensor.dim() else 0
        shape = tuple(tensor.shape)
        if not tensor.dim():
            ranks[first][name] = Block(tensor, (), ())
            continue
        for rank, begin, end in ((first, 0, cut), (second, cut, shape[dim])):
            start = tuple(begin if each == dim else 0 for each in range(len(shape)))
            ranks[rank][name] = Block(tensor.narrow(dim, begin, end - begin).clone(), start, shape)
    return ranks


@st.composite
def cases(draw: st.DrawFn) -> tuple[Recipe, Tensors, list[dict[str, Block]], int]:
    made = Drawn(draw)
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    recipe = made.of_shape(shape, draw(st.integers(0, 3)))
    num_ranks = draw(st.integers(2, 3))
    return recipe, made.tensors, draw(shards_of(made.tensors, num_ranks)), draw(st.sampled_from([16, 24, 64, 4096]))


@given(cases(), st.data())
def test_any_recipe_over_any_shards_in_any_buckets(
    case: tuple[Recipe, Tensors, list[dict[str, Block]], int], data: st.DataObject
) -> None:
    recipe, tensors, ranks, bucket_bytes = case
    expected = evaluated(recipe, tensors)
    shape = tuple(expected.shape)
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    size = tuple(data.draw(st.integers(1, end - first)) for first, end in zip(start, shape, strict=True))
    names = NameMap((NameRule("own", recipe),))
    whole, part = torch.zeros(shape, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    turned = torch.zeros(tuple(reversed(shape)), dtype=torch.int64).permute(tuple(reversed(range(len(shape)))))
    sources: list[Weights] = list(ranks)
    targets = [
        TensorTarget(Mapped({"own": whole}, names), atomic=True),
        TensorTarget(Mapped({"own": Block(part, start, shape)}, names), atomic=False),
        TensorTarget(Mapped({"own": turned}, names), atomic=False),
    ]
    ship(sources, targets, bucket_bytes)
    assert torch.equal(whole, expected)
    assert torch.equal(turned, expected)
    for dim, (first, length) in enumerate(zip(start, size, strict=True)):
        expected = expected.narrow(dim, first, length)
    assert torch.equal(part, expected)


@given(cases())
def test_a_publisher_makes_the_same_of_its_shards(
    case: tuple[Recipe, Tensors, list[dict[str, Block]], int],
) -> None:
    recipe, tensors, ranks, bucket_bytes = case
    everywhere = [
        {name: ranks[rank].get(name, _nothing_of(each)) for name, each in tensors.items()} for rank in range(len(ranks))
    ]
    expected = evaluated(recipe, tensors)
    own = torch.zeros(expected.shape, dtype=torch.int64)
    names = NameMap((NameRule("own", recipe),))
    ship([Mapped(each, names) for each in everywhere], [TensorTarget({"own": own}, atomic=True)], bucket_bytes)
    assert torch.equal(own, expected)


def _nothing_of(tensor: torch.Tensor) -> torch.Tensor | Block:
    """An empty block; of a tensor without dimensions, all of it."""
    if not tensor.dim():
        return tensor
    return Block(tensor[:0], (0,) * tensor.dim(), tuple(tensor.shape))


# ---- What does not fit ----------------------------------------------------------------------------------------------


def published() -> Tensors:
    return {
        "q": torch.ones(4, 6),
        "k": torch.ones(2, 6),
        "half": torch.ones(4, 6, dtype=torch.bfloat16),
        "count": torch.ones(4, 6, dtype=torch.int64),
        "e8": torch.ones(4, 6).to(FP8),
    }


CAST = Conversion.CAST
REFUSED: dict[str, tuple[type[ConfigurationError], Tensors, NameRule, str]] = {
    "unknown name": (
        UnknownTensor,
        {"own": torch.ones(4, 6)},
        NameRule("own", "qq"),
        "engine 0 wants 'own' from 'qq', which is not published",
    ),
    "missing part": (
        MissingPart,
        {"own": torch.ones(8, 6)},
        NameRule("own", Concat(("q", "k", "v"))),
        "engine 0 wants 'own', of which the part 'v' is not published",
    ),
    "shape": (
        ShapeMismatch,
        {"own": torch.ones(8, 6)},
        NameRule("own", Concat(("q", "k"))),
        r"engine 0 takes 'own' as float32\[8, 6\], made of 'q' float32\[4, 6\], 'k' float32\[2, 6\] it is \[6, 6\]",
    ),
    "shape of a renamed tensor": (
        ShapeMismatch,
        {"own": torch.ones(6, 4)},
        NameRule("own", "q"),
        r"engine 0 takes 'own' as float32\[6, 4\], published is float32\[4, 6\]",
    ),
    "shapes of parts": (
        ShapeMismatch,
        {"own": torch.ones(4, 12)},
        NameRule("own", Concat(("q", "k"), 1)),
        r"engine 0 wants 'own': Concat along dim 1 does not fit its parts: 'q' \[4, 6\], 'k' \[2, 6\]",
    ),
    "slice": (
        ShapeMismatch,
        {"own": torch.ones(4, 6)},
        NameRule("own", Slice("k", 0, 0, 4)),
        "engine 0 wants 'own': Slice",
    ),
    "dtype": (
        DtypeMismatch,
        {"own": torch.ones(4, 6)},
        NameRule("own", "half"),
        r"engine 0 takes 'own' as float32\[4, 6\], published is bfloat16\[4, 6\]",
    ),
    "dtype of a part": (
        DtypeMismatch,
        {"own": torch.ones(8, 6)},
        NameRule("own", Concat(("q", "half"))),
        r"'own' as float32\[8, 6\], made of 'q' float32\[4, 6\], 'half' bfloat16\[4, 6\]",
    ),
    "integers are not cast": (
        DtypeMismatch,
        {"own": torch.ones(4, 6)},
        NameRule("own", "count", CAST),
        r"'own' .* int64\[4, 6\], which is not cast",
    ),
    "float8 is not cast": (
        DtypeMismatch,
        {"own": torch.ones(4, 6).to(FP8)},
        NameRule("own", "q", CAST),
        "'own' as float8_e4m3fn.* which is not cast",
    ),
    "float8 is not quantized again": (
        DtypeMismatch,
        {"own": torch.ones(4, 6).to(FP8), "s": torch.ones(1)},
        NameRule("own", "e8", Quantize("s")),
        "'own'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_moves(what: str) -> None:
    kind, own, rule, told = REFUSED[what]
    target = TensorTarget(Mapped(own, NameMap((rule,))), atomic=False)
    with pytest.raises(StateMismatch, match=told) as caught:
        Shipment([published()], [target], 64)
    assert type(caught.value) is kind


def test_a_part_that_no_device_holds_is_named() -> None:
    held = {"q": torch.ones(4, 6), "k": Block(torch.ones(1, 6), (0, 0), (2, 6))}
    target = TensorTarget(
        Mapped({"own": torch.ones(6, 6)}, NameMap((NameRule("own", Concat(("q", "k"))),))), atomic=False
    )
    with pytest.raises(MissingPart, match=r"no source holds 'k' at \[1, 0\]"):
        Shipment([held], [target], 64)


def test_two_rules_for_one_tensor_are_refused_when_the_target_is_made() -> None:
    names = NameMap((NameRule("own", "q"), NameRule("ow{n}", "k")))
    with pytest.raises(AmbiguousName, match=r"'own' is made by several rules of the name map: 'own' and 'ow\{n\}'"):
        TensorTarget(Mapped({"own": torch.ones(4, 6)}, names), atomic=True)


BAD_SCALES: dict[str, tuple[type[StateMismatch], Tensors, Quantize, str]] = {
    "none": (UnknownTensor, {}, Quantize("s"), "'own' is quantized, and there is no 's'"),
    "dtype": (DtypeMismatch, {"s": torch.ones(1).half()}, Quantize("s"), "scales 's' of 'own' are float16"),
    "shape": (
        ShapeMismatch,
        {"s": torch.ones(2, 2)},
        Quantize("s", (2, 2)),
        r"'s' of 'own' are \[2, 2\], and \[2, 3\]",
    ),
    "one for all": (ShapeMismatch, {"s": torch.ones(2)}, Quantize("s"), r"'s' of 'own' are \[2\]"),
    "block": (ShapeMismatch, {"s": torch.ones(2)}, Quantize("s", (2,)), r"'own' of shape \[4, 6\] has no blocks of"),
    "block of nothing": (ShapeMismatch, {"s": torch.ones(2)}, Quantize("s", (2, 0)), "has no blocks of shape"),
}


@pytest.mark.parametrize("what", BAD_SCALES)
def test_scales_that_do_not_fit_are_refused_when_the_target_is_made(what: str) -> None:
    kind, scales, quantized, told = BAD_SCALES[what]
    own = {"own": torch.ones(4, 6).to(FP8), **scales}
    with pytest.raises(kind, match=told):
        TensorTarget(Mapped(own, NameMap((NameRule("own", "q", quantized),))), atomic=True)


def test_quantized_is_to_float8_alone() -> None:
    own = {"own": torch.ones(4, 6), "s": torch.ones(1)}
    with pytest.raises(DtypeMismatch, match="'own' is float32, and quantized is to float8 alone"):
        TensorTarget(Mapped(own, NameMap((NameRule("own", "q", Quantize("s")),))), atomic=True)


PUBLISHED_REFUSED: dict[str, tuple[type[ConfigurationError], Tensors, tuple[NameRule, ...], str]] = {
    "missing part": (
        MissingPart,
        {"q": torch.ones(2)},
        (NameRule("qk", Concat(("q", "k"))),),
        "'qk' .* part 'k' is not held",
    ),
    "two rules": (
        AmbiguousName,
        {"q": torch.ones(2)},
        (NameRule("a", "q"), NameRule("a", "q")),
        "'a' is made by several rules",
    ),
    "dtypes": (
        DtypeMismatch,
        {"q": torch.ones(2), "k": torch.ones(2).half()},
        (NameRule("qk", Concat(("q", "k"))),),
        r"'qk' cannot be published: its parts are \['float16', 'float32'\]",
    ),
    "conversion": (DtypeMismatch, {"q": torch.ones(2)}, (NameRule("a", "q", CAST),), "a publisher does not"),
}


@pytest.mark.parametrize("what", PUBLISHED_REFUSED)
def test_a_publishers_map_that_does_not_fit_is_refused_when_it_is_made(what: str) -> None:
    kind, held, rules, told = PUBLISHED_REFUSED[what]
    with pytest.raises(kind, match=told):
        published_blocks(Mapped(held, NameMap(rules)))


# ---- Quantized ------------------------------------------------------------------------------------------------------


def by_hand(values: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each block by itself."""
    rows, columns = (math.ceil(size / per) for size, per in zip(values.shape, block, strict=True))
    out, scales = torch.zeros(values.shape).to(FP8), torch.zeros(rows, columns)
    for row in range(rows):
        for column in range(columns):
            where = (slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1]))
            peak = values[where].float().abs().max()
            scales[row, column] = peak / 448 if peak > 0 else 1
            out[where] = (values[where].float() / scales[row, column]).to(FP8)
    return out, scales


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("block", [(2, 4), (3, 4), (1, 10), (9, 10), None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_are_quantized_when_the_last_of_their_buckets_has_come(
    dtype: torch.dtype, block: tuple[int, int] | None, atomic: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    q, k = torch.randn(5, 10).to(dtype), torch.randn(4, 10).to(dtype)
    k[2:] = 0
    shape = (1,) if block is None else tuple(math.ceil(size / per) for size, per in zip((9, 10), block, strict=True))
    own = {"qk": torch.zeros(9, 10).to(FP8), "qk_scale": torch.zeros(shape)}
    rule = NameRule("{x}k", Concat(("q", "k")), Quantize("{x}k_scale", block))
    names = NameMap((rule,))
    start = (0, 0), (3, 0)
    sources = [{"q": Block(q[:3], start[0], (5, 10)), "k": k}, {"q": Block(q[3:], start[1], (5, 10))}]
    shipment = Shipment(sources, [TensorTarget(Mapped(own, names), atomic)], 32)
    for _version in range(3):
        q.neg_().mul_(2)
        shipment.bring()
        values, scales = by_hand(torch.cat([q, k]), block or (9, 10))
        assert torch.equal(own["qk"].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(own["qk_scale"], scales.reshape(shape))


def test_what_is_transposed_is_quantized_in_its_own_shape(seed: int) -> None:
    torch.manual_seed(seed)
    q = torch.randn(6, 4)
    own = {"q": torch.zeros(4, 6).to(FP8), "s": torch.zeros(2, 2)}
    names = NameMap((NameRule("q", Transpose("q", (1, 0)), Quantize("s", (2, 3))),))
    ship([{"q": q}], [TensorTarget(Mapped(own, names), atomic=True)], 16)
    values, scales = by_hand(q.t(), (2, 3))
    assert torch.equal(own["q"].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(own["s"], scales)
