"""What sources offer and consumers want, put together: who is served, who is not, and why."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.transfer.cases import boxes_in, shards

from keepstep.errors import StateMismatch
from keepstep.protocol.transfer.boxes import Box, whole
from keepstep.protocol.transfer.layout import Consumer, HeldPart, Layout, Problem, Want, lay_out, serve_one
from keepstep.protocol.transfer.plan import Limits, Part, Reader, TensorForm

LIMITS = Limits(64, 32)
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def form(*names: str, dtype: str = "float32", shape: tuple[int, ...] = (4, 3)) -> TensorForm:
    return TensorForm(names, dtype, shape, ITEM_BYTES[dtype])


def all_of(*forms: TensorForm) -> list[HeldPart]:
    """What a source offers that holds these whole."""
    return [HeldPart(each, whole(each.shape)) for each in forms]


def wants(each: TensorForm, start: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Want:
    return Want(each.names, each.dtype, each.shape if shape is None else shape, start)


def problem_of(want: Want, *forms: TensorForm) -> str | None:
    """What the layout has to say about a consumer with one want."""
    found = lay_out([all_of(*forms)], [[Consumer("engine", (want,))]], LIMITS)
    assert (found.problems[0] is None) == bool(found.readers[0].parts)
    return None if found.problems[0] is None else found.problems[0].reason


# ---- Random layouts -------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@dataclasses.dataclass(frozen=True)
class Case:
    """Tensors, what each rank holds of them, and consumers by device; of each, whether what it wants is there."""

    forms: list[TensorForm]
    held: list[list[HeldPart]]
    consumers: list[list[Consumer]]
    is_served: list[bool]

    @property
    def layout(self) -> Layout:
        return lay_out(self.held, self.consumers, LIMITS)


@st.composite
def good_wants(draw: st.DrawFn, published: TensorForm) -> Want:
    """A want that is there: all of the tensor or a block, under any names of which one is its."""
    names = draw(st.permutations([draw(st.sampled_from(published.names)), "also.mine"]))
    if draw(st.booleans()):
        return Want(tuple(names), published.dtype, published.shape, None)
    box = draw(boxes_in(whole(published.shape)))
    return Want(tuple(names), published.dtype, box.shape, box.start)


@st.composite
def bad_wants(draw: st.DrawFn, published: TensorForm) -> Want:
    """A want that is not there: of another name, dtype, number of dimensions or size, or beyond the tensor's end."""
    right = wants(published)
    wrong = [
        Want(("unheard.of",), right.dtype, right.shape, None),
        Want(right.names, "int64", right.shape, None),
        Want(right.names, right.dtype, (*right.shape, 1), None),
        Want(right.names, right.dtype, (*right.shape, 1), (0,) * (len(right.shape) + 1)),
    ]
    for dim, size in enumerate(right.shape):
        larger = (*right.shape[:dim], size + 1, *right.shape[dim + 1 :])
        smaller = (*right.shape[:dim], size - 1, *right.shape[dim + 1 :])
        behind = tuple(int(each == dim) for each in range(len(right.shape)))
        wrong += [
            Want(right.names, right.dtype, larger, None),
            Want(right.names, right.dtype, smaller, None),
            Want(right.names, right.dtype, right.shape, behind),
            Want(right.names, right.dtype, right.shape, tuple(-each for each in behind)),
        ]
    return draw(st.sampled_from(wrong))


@st.composite
def consumer_of(draw: st.DrawFn, name: str, forms: list[TensorForm], is_served: bool) -> Consumer:
    if is_served and draw(st.booleans()):
        return Consumer(name, None)
    found = [draw(good_wants(draw(st.sampled_from(forms)))) for _ in range(draw(st.integers(0, 3)))]
    if not is_served:
        found.insert(draw(st.integers(0, len(found))), draw(bad_wants(draw(st.sampled_from(forms)))))
    return Consumer(name, tuple(found))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.integers(1, 3))
    forms, held = [], [[] for _ in range(num_ranks)]
    for number in range(draw(st.integers(1, 3))):
        names = (f"t{number}", f"tied{number}")[: draw(st.integers(1, 2))]
        forms.append(form(*names, dtype=draw(st.sampled_from(list(ITEM_BYTES))), shape=draw(SHAPES)))
        for rank, box in enumerate(draw(shards(forms[-1].shape, num_ranks))):
            held[rank].append(HeldPart(forms[-1], box))
    is_served, consumers = [], []
    for device in range(num_ranks):
        there = draw(st.lists(st.booleans(), max_size=2))
        consumers.append([draw(consumer_of(f"c{device}.{i}", forms, each)) for i, each in enumerate(there)])
        is_served += there
    return Case(forms, held, consumers, is_served)


def parts_of(consumer: Consumer, forms: list[TensorForm]) -> tuple[Part, ...]:
    """What a consumer that is served gets, found by looking through all tensors."""
    if consumer.wants is None:
        return tuple(Part(number, whole(each.shape)) for number, each in enumerate(forms))
    found = []
    for want in consumer.wants:
        if 0 in want.shape:  # there is nothing of it to get
            continue
        (number,) = [number for number, each in enumerate(forms) if set(each.names) & set(want.names)]
        found.append(Part(number, Box((0,) * len(want.shape) if want.start is None else want.start, want.shape)))
    return tuple(found)


@given(cases())
def test_those_whose_wants_are_there_are_served_and_the_others_are_reported(case: Case) -> None:
    layout, all_members = case.layout, list(itertools.chain(*case.consumers))
    assert len(layout.readers) == len(layout.problems) == len(all_members)
    for reader, problem, consumer, is_served in zip(
        layout.readers, layout.problems, all_members, case.is_served, strict=True
    ):
        assert (problem is None) == is_served
        assert reader.parts == (parts_of(consumer, case.forms) if is_served else ())
        assert problem is None or problem.reason.startswith(f"{consumer.name} ")


@given(cases())
def test_readers_follow_each_other_by_device(case: Case) -> None:
    devices = [device for device, there in enumerate(case.consumers) for _ in there]
    assert [reader.device for reader in case.layout.readers] == devices


@given(cases())
def test_all_devices_make_the_same_plan_and_nothing_in_it_is_for_the_unserved(case: Case) -> None:
    plan = case.layout.plan()
    assert plan == case.layout.plan()
    served = {reader for bucket in plan.buckets for reader in bucket.readers}
    assert all(case.is_served[reader] for reader in served)


@given(cases())
def test_each_tensor_stands_once_and_its_holders_are_the_ranks(case: Case) -> None:
    layout = case.layout
    assert layout.forms == tuple(case.forms)
    assert layout.limits == LIMITS
    for own, parts in zip(case.held, layout.holders, strict=True):
        assert [HeldPart(layout.forms[part.tensor], part.box) for part in parts] == own


@given(cases())
def test_one_alone_gets_what_it_would_get_among_others(case: Case) -> None:
    layout = case.layout
    readers = zip(layout.readers, layout.problems, itertools.chain(*case.consumers), strict=True)
    for reader, problem, consumer in readers:
        if problem is None:
            alone = serve_one(layout, reader.device, consumer)
            assert (alone.readers, alone.problems) == ((reader,), (None,))
            assert (alone.forms, alone.holders, alone.limits) == (layout.forms, layout.holders, layout.limits)
        else:
            with pytest.raises(StateMismatch) as caught:
                serve_one(layout, reader.device, consumer)
            assert Problem.of(caught.value) == problem
            assert type(caught.value) is type(problem.error)


# ---- What is told ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("want", "told"),
    [
        (Want(("b",), "float32", (4, 3), None), "engine wants 'b', which is not published"),
        (
            Want(("a",), "bfloat16", (4, 3), None),
            "engine takes 'a' as bfloat16[4, 3], published is float32[4, 3]",
        ),
        (
            Want(("a",), "float32", (3, 4), None),
            "engine takes 'a' as float32[3, 4], published is float32[4, 3]",
        ),
        (
            Want(("a",), "float32", (2, 3), None),
            "engine takes 'a' as float32[2, 3], published is float32[4, 3]",
        ),
        (
            Want(("a",), "float32", (2, 3), (3, 0)),
            "engine takes 'a' as float32[2, 3] from [3, 0] on, published is float32[4, 3]",
        ),
    ],
    ids=["name", "dtype", "shape", "part without its place", "beyond the end"],
)
def test_a_problem_names_consumer_tensor_and_both_forms(want: Want, told: str) -> None:
    assert problem_of(want, form("a")) == told


def test_a_want_is_reported_by_the_first_of_its_names() -> None:
    problem = problem_of(Want(("x", "y"), "float32", (4, 3), None), form("a"))
    assert problem == "engine wants 'x', which is not published"


@pytest.mark.parametrize("names", [("mine", "a"), ("mine", "b"), ("a", "b"), ("b",)])
def test_any_name_of_a_tied_tensor_will_do(names: tuple[str, ...]) -> None:
    assert problem_of(Want(names, "float32", (4, 3), None), form("c"), form("a", "b")) is None


@pytest.mark.parametrize(
    ("start", "shape"),
    [((), (4, 3)), ((0,), (4, 3)), ((0, 0, 0), (4, 3)), ((0, 0), (-1, 3)), ((2, 0), (-1, 3))],
    ids=["no place", "half a place", "too much of a place", "no size", "a size that goes back"],
)
def test_a_block_that_is_none_is_its_consumers_problem(start: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Wants come over a line, so they may be anything; the others are served."""
    good, odd = Consumer("good", None), Consumer("odd", (Want(("a",), "float32", shape, start),))
    layout = lay_out([all_of(form("a"))], [[odd, good]], LIMITS)
    assert layout.problems[1] is None
    assert layout.problems[0] is not None
    assert [bucket.readers for bucket in layout.plan().buckets] == [(1,)]


# ---- Sources that disagree ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (form("a", dtype="bfloat16"), r"'a' is bfloat16\[4, 3\] on rank 2 and float32\[4, 3\] on rank 0"),
        (form("a", shape=(3, 4)), r"'a' is float32\[3, 4\] on rank 2 and float32\[4, 3\] on rank 0"),
        (
            form("a", "b"),
            r"'a' is .* on rank 2 and .* under other names: \['a', 'b'\] and \['a'\] are tied",
        ),
    ],
    ids=["dtype", "shape", "ties"],
)
def test_sources_that_see_a_tensor_differently_are_named(other: TensorForm, told: str) -> None:
    held = [all_of(form("z"), form("a")), all_of(form("z")), all_of(form("z"), other)]
    with pytest.raises(StateMismatch, match=told):
        lay_out(held, [[], [], []], LIMITS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([form("a", "b")], [form("b", "a")]),
        ([form("a", "b")], [form("b")]),
        ([form("b")], [form("a", "b")]),
        ([form("a", "b")], [form("c", "b")]),
    ],
    ids=["the order", "one without the tie", "one with a tie", "another tie"],
)
def test_sources_that_tie_a_name_differently_are_reported(one: list[TensorForm], other: list[TensorForm]) -> None:
    """Two tensors under one name: a consumer of it would get either, and a consumer of all of them gets it twice."""
    with pytest.raises(StateMismatch, match="'b'"):
        lay_out([all_of(*one), all_of(*other)], [[], []], LIMITS)


def test_sources_may_hold_different_tensors_and_different_blocks() -> None:
    a, b = form("a"), form("b")
    top, bottom = Box((0, 0), (2, 3)), Box((2, 0), (2, 3))
    layout = lay_out([[HeldPart(a, top)], [HeldPart(b, whole((4, 3))), HeldPart(a, bottom)]], [[], []], LIMITS)
    assert layout.forms == (a, b)
    assert layout.holders == ((Part(0, top),), (Part(1, whole((4, 3))), Part(0, bottom)))


def test_no_consumers() -> None:
    layout = lay_out([all_of(form("a"))], [[]], LIMITS)
    assert (layout.readers, layout.problems, layout.plan().buckets) == ((), (), ())


def test_a_consumer_that_wants_nothing_is_served_with_nothing() -> None:
    layout = lay_out([all_of(form("a"))], [[Consumer("idle", ())]], LIMITS)
    assert (layout.readers, layout.problems) == ((Reader(0, ()),), (None,))
