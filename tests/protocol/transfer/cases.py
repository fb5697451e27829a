"""Random layouts of tensors over sources and readers, and what each of them owns, told by single elements."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from keepstep.protocol.transfer.boxes import Box, whole
from keepstep.protocol.transfer.plan import Limits, Part, Plan, Reader, TensorForm, plan_transfer

Index = tuple[int, ...]
Element = tuple[int, Index]
"""Tensor and index in it."""

DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}
"""By their size."""


# ---- The oracle -----------------------------------------------------------------------------------------------------


def indices(box: Box) -> list[Index]:
    """Every index in a box, in row-major order."""
    ranges = [range(first, first + size) for first, size in zip(box.start, box.shape, strict=True)]
    return list(itertools.product(*ranges))


def owners(owned: Iterable[tuple[int, Sequence[Part]]]) -> dict[Element, set[int]]:
    """Who owns each element that anybody owns."""
    found: dict[Element, set[int]] = {}
    for owner, parts in owned:
        for part in parts:
            for index in indices(part.box):
                found.setdefault((part.tensor, index), set()).add(owner)
    return found


@dataclasses.dataclass(frozen=True)
class Case:
    """A transfer to be planned. Its plan is made once, when it is asked for."""

    tensors: list[TensorForm]
    holders: dict[int, list[Part]]
    readers: list[Reader]
    limits: Limits

    @functools.cached_property
    def plan(self) -> Plan:
        return plan_transfer(self.tensors, self.holders, self.readers, self.limits)

    @functools.cached_property
    def held(self) -> dict[Element, set[int]]:
        return owners(self.holders.items())

    @functools.cached_property
    def wanted(self) -> dict[Element, set[int]]:
        return owners(enumerate(reader.parts for reader in self.readers))


# ---- Random boxes ---------------------------------------------------------------------------------------------------

sizes = st.one_of(st.integers(1, 6), st.integers(0, 6))
shapes = st.lists(sizes, max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, outer: Box) -> Box:
    """Any part of a box, also an empty one."""
    spans = [draw(st.sampled_from(spans_in(low, high))) for low, high in zip(outer.start, outer.stop, strict=True)]
    return Box(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))


@functools.cache
def spans_in(low: int, high: int) -> list[tuple[int, int]]:
    """All ways to begin and to stop along one dimension."""
    return list(itertools.combinations_with_replacement(range(low, high + 1), 2))


def slab(shape: tuple[int, ...], dim: int, first: int, stop: int) -> Box:
    """What one of several shards has that a tensor is cut into along one dimension."""
    start = tuple(first if each == dim else 0 for each in range(len(shape)))
    return Box(start, (*shape[:dim], stop - first, *shape[dim + 1 :]))


@st.composite
def shards(draw: st.DrawFn, shape: tuple[int, ...], num: int) -> list[Box]:
    """One box for each of some devices: rows as FSDP cuts them, columns as TP does, or replicas. Uneven, some empty."""
    dim = draw(st.sampled_from([None, *range(len(shape))]))
    if dim is None:
        return [whole(shape)] * num
    inner = sorted(draw(st.integers(0, shape[dim])) for _ in range(num - 1))
    return [slab(shape, dim, first, stop) for first, stop in itertools.pairwise([0, *inner, shape[dim]])]


# ---- Random transfers -----------------------------------------------------------------------------------------------


@st.composite
def held_boxes(draw: st.DrawFn, shape: tuple[int, ...], num: int) -> list[list[Box]]:
    """For each holder, its boxes: shards over the first few and, once more, over the others; to one of them a box more.

    Together they are all of the tensor, twice where there are others.
    """
    num_first = draw(st.integers(1, num))
    held = [[box] for box in draw(shards(shape, num_first))]
    if num_first < num:
        held += [[box] for box in draw(shards(shape, num - num_first))]
    if draw(st.booleans()):
        held[draw(st.integers(0, num - 1))].append(draw(boxes_in(whole(shape))))
    return held


@st.composite
def wanted_boxes(draw: st.DrawFn, shape: tuple[int, ...], num: int) -> list[list[Box]]:
    """For each reader, its boxes: shards over all of them, or any boxes at all."""
    if draw(st.booleans()):
        return [[box] for box in draw(shards(shape, num))]
    return [draw(st.lists(boxes_in(whole(shape)), max_size=2)) for _ in range(num)]


@st.composite
def forms(draw: st.DrawFn) -> list[TensorForm]:
    """Tensors of all sizes, among them empty ones and ones without dimensions."""
    drawn = draw(st.lists(st.tuples(shapes, st.sampled_from(list(DTYPES))), min_size=1, max_size=4))
    return [
        TensorForm((f"layers.{index}",), DTYPES[item_bytes], shape, item_bytes)
        for index, (shape, item_bytes) in enumerate(drawn)
    ]


limits = st.builds(Limits, bucket_bytes=st.integers(16, 120), lone_bytes=st.integers(0, 140))
holder_lists = st.lists(st.integers(0, 1000), min_size=1, max_size=5, unique=True)
device_lists = st.lists(st.integers(0, 4), min_size=1, max_size=4)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Transfers in which everything wanted is held; several readers may be on one device."""
    tensors, devices = draw(forms()), draw(device_lists)
    holders: dict[int, list[Part]] = {holder: [] for holder in draw(holder_lists)}
    parts: list[list[Part]] = [[] for _ in devices]
    for tensor, form in enumerate(tensors):
        for owned, each in zip(holders.values(), draw(held_boxes(form.shape, len(holders))), strict=True):
            owned += [Part(tensor, box) for box in each]
        for owned, each in zip(parts, draw(wanted_boxes(form.shape, len(devices))), strict=True):
            owned += [Part(tensor, box) for box in each]
    readers = [Reader(device, tuple(each)) for device, each in zip(devices, parts, strict=True)]
    return Case(tensors, holders, readers, draw(limits))


def replicated(case: Case) -> Case:
    """The same, but each holder holds everything."""
    everything = [Part(tensor, whole(form.shape)) for tensor, form in enumerate(case.tensors)]
    return dataclasses.replace(case, holders=dict.fromkeys(case.holders, everything))
