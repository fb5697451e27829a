"""Where new weights go: what is seen before and after the commit, and what a function is given."""

import dataclasses
import random
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import ConfigurationError
from keepstep.protocol.transfer.layout import Consumer, Layout, lay_out
from keepstep.protocol.transfer.plan import Bucket, Limits
from keepstep.weights.memory.blocks import Block, NamedBlock, Weights, named_blocks
from keepstep.weights.memory.bytes_of import byte_view
from keepstep.weights.memory.copies import checksum_of, copy_of
from keepstep.weights.memory.pieces import SLOT_EXTRA_BYTES, Held
from keepstep.weights.memory.targets import FunctionTarget, Target, TensorTarget

Tensors = dict[str, torch.Tensor]
BUCKET_BYTES = 64
BOTH = pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "in place"])


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, bytes]]:
    """Every bit of some tensors, in row-major order."""
    return {
        name: (tensor.shape, byte_view(tensor.detach().flatten().contiguous()).numpy().tobytes())
        for name, tensor in tensors.items()
    }


def weights(seed: int) -> Tensors:
    """Some tensors of several sizes and dtypes; two of them take several buckets."""
    torch.manual_seed(seed)
    return {
        "small": torch.randn(3),
        "scalar": torch.randn(()),
        "empty": torch.empty(0, 2),
        "large": torch.randn(9, 5).to(torch.bfloat16),
        "turned": torch.randn(6, 7).t(),
        "flags": torch.randn(11) > 0,
    }


def zeros_like(tensors: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


class Delivery:
    """A source with one consumer, and two slots between them."""

    def __init__(self, sources: list[Weights], target: Target, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.target = target
        self._blocks: list[list[NamedBlock]] = [named_blocks(source) for source in sources]
        held = [[block.as_held() for block in blocks] for blocks in self._blocks]
        consumers = [[Consumer("engine", target.wants)], *[[] for _ in sources[1:]]]
        self.layout: Layout = lay_out(held, consumers, Limits(bucket_bytes, bucket_bytes // 2))
        assert self.layout.problems == (None,)
        self.slots = [torch.zeros(bucket_bytes + SLOT_EXTRA_BYTES, dtype=torch.uint8) for _ in range(2)]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.layout.plan().buckets

    def begin(self) -> None:
        self.target.prepare(self.layout, self.layout.readers[0].parts)

    def bring(self, num_buckets: int | None = None) -> None:
        """Brings so many buckets, or all."""
        for bucket in self.buckets[:num_buckets]:
            slot = self.slots[bucket.index % 2]
            parts = self.layout.holders[bucket.source]
            own = {part.tensor: [block.held] for part, block in zip(parts, self._blocks[bucket.source], strict=True)}
            checksum = copy_of(slot, bucket, own).gather()
            assert self.target.load(bucket, slot) == checksum == checksum_of(slot, bucket)
            slot.fill_(255)  # it is used again

    def all(self) -> None:
        """A whole version, committed."""
        self.begin()
        self.bring()
        self.target.finish()
        self.target.commit()


def put(source: Tensors, values: Tensors) -> None:
    for name, tensor in source.items():
        tensor.copy_(values[name])


# ---- Tensors --------------------------------------------------------------------------------------------------------


@BOTH
def test_every_version_arrives_and_the_tensors_stay_the_same_objects(atomic: bool, seed: int) -> None:
    source = weights(seed)
    own = zeros_like(source)
    objects = dict(own)
    delivery = Delivery([source], TensorTarget(own, atomic))
    for number in range(5):
        put(source, weights(seed + number))
        delivery.all()
        assert bits(own) == bits(source)
        assert all(own[name] is objects[name] for name in own)


def test_what_is_put_aside_is_not_seen_before_the_commit(seed: int) -> None:
    source = weights(seed)
    own = zeros_like(source)
    delivery = Delivery([source], TensorTarget(own, atomic=True))
    for number in range(3):
        before = bits(own)
        put(source, weights(seed + number))
        delivery.begin()
        delivery.bring()
        delivery.target.finish()
        assert bits(own) == before
        delivery.target.commit()
        assert bits(own) == bits(source)


@pytest.mark.parametrize("num_buckets", [0, 1, 3])
def test_a_version_that_broke_off_leaves_nothing_in_those_after_it(num_buckets: int, seed: int) -> None:
    source = weights(seed)
    own = zeros_like(source)
    delivery = Delivery([source], TensorTarget(own, atomic=True))
    delivery.all()
    before = bits(source)
    put(source, weights(seed + 1))
    delivery.begin()
    delivery.bring(num_buckets)
    assert bits(own) == before
    put(source, weights(seed + 2))
    delivery.all()
    assert bits(own) == bits(source)


def test_in_place_nothing_is_put_aside(seed: int) -> None:
    source = weights(seed)
    own = zeros_like(source)
    places = {name: tensor.data_ptr() for name, tensor in own.items()}
    delivery = Delivery([source], TensorTarget(own, atomic=False))
    delivery.begin()
    delivery.bring()
    assert bits(own) == bits(source)
    delivery.target.commit()
    assert {name: tensor.data_ptr() for name, tensor in own.items()} == places


def test_two_sets_of_a_module_change_places() -> None:
    """No third one is ever taken."""
    source, own = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    delivery = Delivery([source], TensorTarget(own, atomic=True))
    seen = []
    for _ in range(4):
        seen.append([parameter.data_ptr() for parameter in own.parameters()])
        delivery.all()
    assert seen[0] == seen[2] != seen[1] == seen[3]


def test_other_tensors_over_the_same_memory_see_the_new_version_too() -> None:
    """As with a state dict, whose tensors are not the module's own objects."""
    source, own = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    Delivery([source], TensorTarget(own.state_dict(), atomic=True)).all()
    assert bits(own.state_dict()) == bits(source.state_dict())


@BOTH
def test_a_module_is_filled_and_computes_with_it(atomic: bool, seed: int) -> None:
    torch.manual_seed(seed)
    source, own = (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)) for _ in range(2))
    parameters = list(own.parameters())
    inputs = torch.randn(5, 3)
    delivery = Delivery([source], TensorTarget(own, atomic))
    for _ in range(3):
        with torch.no_grad():
            source(inputs)
            source[0].weight.normal_()
        delivery.all()
        assert bits(own.state_dict()) == bits(source.state_dict())
        assert torch.equal(own.eval()(inputs), source.eval()(inputs))
        source.train()
    assert all(now is before for now, before in zip(own.parameters(), parameters, strict=True))
    assert all(parameter.requires_grad for parameter in own.parameters())


@BOTH
def test_tied_tensors_stay_tied(atomic: bool, seed: int) -> None:
    torch.manual_seed(seed)
    source, tied = {"a": torch.randn(4, 2)}, torch.zeros(4, 2)
    own = {"b": tied, "a": tied.view(4, 2)}
    delivery = Delivery([source], TensorTarget(own, atomic))
    for _ in range(3):
        source["a"].normal_()
        delivery.all()
        assert torch.equal(own["a"], source["a"])
        assert own["a"].data_ptr() == own["b"].data_ptr()


@BOTH
def test_what_is_tied_where_it_comes_from_need_not_be_tied_here(atomic: bool, seed: int) -> None:
    """Such as a head that has the embedding's weights on one side, and a copy of them on the other."""
    torch.manual_seed(seed)
    one = torch.randn(8, 3)
    source = {"embedding": one, "head": one, "other": torch.randn(2)}
    own: Weights = {
        "head": torch.zeros(8, 3),
        "other": torch.zeros(2),
        "embedding": Block(torch.zeros(4, 3), (2, 0), (8, 3)),
    }
    delivery = Delivery([source], TensorTarget(own, atomic))
    for _ in range(3):
        one.normal_()
        delivery.all()
        assert torch.equal(own["other"], source["other"])
        assert torch.equal(own["embedding"].tensor, one[2:6])
        assert torch.equal(own["head"], one)


@BOTH
def test_a_part_of_a_larger_tensor_is_filled_there_or_refused(atomic: bool, seed: int) -> None:
    """As with queries, keys and values that lie in one parameter: what computes looks at the larger one."""
    torch.manual_seed(seed)
    source = {"query": torch.randn(2, 3), "key": torch.randn(2, 3)}
    fused = torch.nn.Parameter(torch.zeros(4, 3))
    parts = {"query": fused.detach()[:2], "key": fused.detach()[2:]}
    try:
        target = TensorTarget(parts, atomic)
    except ConfigurationError:
        return
    Delivery([source], target).all()
    assert torch.equal(fused, torch.cat([source["query"], source["key"]]))


@BOTH
def test_another_layout_is_taken_in_between(atomic: bool, seed: int) -> None:
    """Another publisher may hold the same tensors in another order and cut them otherwise."""
    source = weights(seed)
    own = zeros_like(source)
    target = TensorTarget(own, atomic)
    deliveries = [
        Delivery([source], target),
        Delivery([dict(reversed(list(source.items())))], target, bucket_bytes=40),
    ]
    for number in range(6):
        put(source, weights(seed + number))
        deliveries[number // 2 % 2].all()
        assert bits(own) == bits(source)


def test_it_wants_each_tensor_in_its_own_form() -> None:
    own = {"a": torch.zeros(2, 3), "b": Block(torch.zeros(2, 3), (2, 0), (4, 3))}
    target = TensorTarget(own, atomic=True)
    assert target.wants == tuple(block.as_want() for block in named_blocks(own))
    assert [want.start for want in target.wants] == [None, (2, 0)]


shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(shapes, st.sampled_from([torch.float32, torch.bfloat16, torch.int8])), min_size=1, max_size=4),
    st.integers(16, 100),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_any_tensors_from_two_sources_arrive(
    forms: list[tuple[tuple[int, ...], torch.dtype]], bucket_bytes: int, atomic: bool, seed: int
) -> None:
    """Each source has some rows of each tensor, in contiguous memory; the consumer has them in any order of memory."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    full = {f"t{number}": torch.randn(shape).to(dtype) for number, (shape, dtype) in enumerate(forms)}
    sources: list[dict[str, torch.Tensor | Block]] = [{}, {}]
    own: Tensors = {}
    for name, tensor in full.items():
        if tensor.dim():
            cut = chance.randint(0, tensor.shape[0])
            for source, first, rows in zip(sources, (0, cut), (tensor[:cut], tensor[cut:]), strict=True):
                start = (first if rows.shape[0] else 0, *(0,) * (tensor.dim() - 1))
                source[name] = Block(rows, start, tuple(tensor.shape))
        else:
            sources[chance.randint(0, 1)][name] = tensor
        dims = chance.sample(range(tensor.dim()), tensor.dim())
        backward = [dims.index(dim) for dim in range(tensor.dim())]
        own[name] = torch.zeros([tensor.shape[dim] for dim in dims], dtype=tensor.dtype).permute(backward)
    Delivery(list(sources), TensorTarget(own, atomic), bucket_bytes).all()
    assert bits(own) == bits(full)


# ---- Functions ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Taken:
    """What a function was given: copies, and where it lay."""

    values: Tensors = dataclasses.field(default_factory=dict)
    calls: list[str] = dataclasses.field(default_factory=list)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.calls.append(name)
        self.values[name] = tensor.clone()


@pytest.mark.parametrize("bucket_bytes", [16, BUCKET_BYTES, 4096])
def test_a_function_is_given_every_whole_tensor_once_a_version(bucket_bytes: int, seed: int) -> None:
    source, taken = weights(seed), Taken()
    delivery = Delivery([source], FunctionTarget(taken.load), bucket_bytes)
    for number in range(3):
        taken.calls.clear()
        put(source, weights(seed + number))
        delivery.all()
        assert bits(taken.values) == bits(source)
        assert sorted(taken.calls) == sorted(source)


def test_a_function_is_given_a_tied_tensor_by_each_of_its_names(seed: int) -> None:
    torch.manual_seed(seed)
    one, taken = torch.randn(9, 3), Taken()
    Delivery([{"a": one, "b": one}], FunctionTarget(taken.load)).all()
    assert sorted(taken.calls) == ["a", "b"]
    assert torch.equal(taken.values["a"], one)
    assert torch.equal(taken.values["b"], one)


def test_a_function_is_given_whole_tensors_of_shards(seed: int) -> None:
    torch.manual_seed(seed)
    full, taken = torch.randn(4, 6), Taken()
    sources: list[Weights] = [
        {"a": Block(full[:, :2].clone(), (0, 0), (4, 6))},
        {"a": Block(full[:, 2:].clone(), (0, 2), (4, 6))},
    ]
    Delivery(sources, FunctionTarget(taken.load)).all()
    assert taken.calls == ["a"]
    assert torch.equal(taken.values["a"], full)


def test_a_function_sees_only_what_is_whole(seed: int) -> None:
    """Until the last part of a tensor has come nothing is said of it, and an update that broke off leaves nothing."""
    torch.manual_seed(seed)
    source, taken = {"a": torch.randn(16, 2)}, Taken()
    delivery = Delivery([source], FunctionTarget(taken.load), bucket_bytes=32)
    assert len(delivery.buckets) == 4
    delivery.begin()
    delivery.bring(3)
    assert taken.calls == []
    source["a"].normal_()
    delivery.all()
    assert taken.calls == ["a"]
    assert torch.equal(taken.values["a"], source["a"])


def test_a_tensor_that_fits_a_bucket_is_looked_at_where_it_lies() -> None:
    """No copy is made of it."""
    places = []
    target = FunctionTarget(lambda _name, tensor: places.append(tensor.data_ptr()))
    delivery = Delivery([{"a": torch.ones(4), "b": torch.ones(2)}], target)
    delivery.all()
    slot = delivery.slots[0].data_ptr()
    assert places == [slot, slot + 16]


def test_an_error_of_the_function_comes_out() -> None:
    def load(_name: str, _tensor: torch.Tensor) -> None:
        raise KeyError("mine")

    delivery = Delivery([{"a": torch.ones(4)}], FunctionTarget(load))
    delivery.begin()
    with pytest.raises(KeyError, match="mine"):
        delivery.bring()


def test_a_function_wants_everything() -> None:
    assert FunctionTarget(Taken().load).wants is None


def test_a_part_is_held_by_its_place(seed: int) -> None:
    """What `TensorTarget` relies on for blocks that do not begin at zero."""
    torch.manual_seed(seed)
    source = {"a": torch.randn(6, 4)}
    own = {"a": Block(torch.zeros(3, 2), (2, 1), (6, 4))}
    target = TensorTarget(own, atomic=False)
    Delivery([source], target).all()
    (block,) = named_blocks(own)
    assert isinstance(block.held, Held)
    assert torch.equal(own["a"].tensor, source["a"][2:5, 1:3])
