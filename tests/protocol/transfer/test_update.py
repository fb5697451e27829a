"""The coordinator's machine: whatever comes in whatever order, one verdict, the same for all."""

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keepstep.protocol.transfer import messages as msg
from keepstep.protocol.transfer.boxes import Box, whole
from keepstep.protocol.transfer.layout import Consumer, HeldPart, Layout, Misfit, Want
from keepstep.protocol.transfer.plan import Limits, TensorForm
from keepstep.protocol.transfer.update import SubscriberStanding, Terms, UpdateMachine, UpdateStage, Verdict

VERSION, GENERATION, DEADLINE_S = 7, 3, 5.0
FORM = TensorForm(("a",), "float32", (4,), 4)
HELD = (HeldPart(FORM, whole((4,))),)


def machine_of(world_size: int, now_s: float = 0.0) -> UpdateMachine:
    return UpdateMachine(Terms(VERSION, GENERATION, world_size, Limits(64, 32), DEADLINE_S), now_s)


def offer(
    version: int = VERSION,
    generation: int = GENERATION,
    last_update: int = 0,
    held: tuple[HeldPart, ...] = HELD,
    consumers: tuple[Consumer, ...] = (),
    rank: int = 1,
    holds: tuple[int | None, ...] = (),
) -> msg.UpdateOffered:
    return msg.UpdateOffered(rank, generation, version, last_update, held, consumers, holds)


def agreed(world_size: int, now_s: float = 0.0) -> tuple[UpdateMachine, int]:
    """A machine whose devices all have offered, and the number of the update."""
    machine = machine_of(world_size, now_s)
    found = [verdict for rank in range(world_size) for verdict in machine.receive(rank, offer(), now_s)]
    (told,) = found
    assert isinstance(told, msg.UpdateAgreed)
    return machine, told.update


# ---- Anything at all ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happens to the machine. ``age`` is how many updates ago a report was meant for."""

    kind: str
    rank: int
    age: int
    amount: float


KINDS = ["offer", "offer", "offer", "moved", "prepared", "prepared", "failed", "lost", "time", "stale", "other"]
OLD = 9
"""The number of the last update before this one."""


@st.composite
def courses(draw: st.DrawFn) -> tuple[int, list[Event]]:
    """A world's size and what happens in it; some go well, most do not."""
    world_size = draw(st.integers(1, 4))
    ranks, ages = st.integers(0, world_size - 1), st.sampled_from([0, 0, 0, 1, 2])
    times = st.floats(0.0, 1.5 * DEADLINE_S)
    events = draw(st.lists(st.builds(Event, st.sampled_from(KINDS), ranks, ages, times), max_size=25))
    for kind in ("prepared", "offer"):
        if draw(st.booleans()):
            first = draw(st.integers(0, len(events)))
            events[first:first] = [Event(kind, rank, 0, 0.0) for rank in range(world_size)]
    return world_size, events


class Watch:
    """Drives a machine, and holds every verdict against what has been reported."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.machine = machine_of(world_size)
        self.now_s = 0.0
        self.update: int | None = None
        self.prepared: set[int] = set()
        self.verdicts: list[Verdict] = []

    def happen(self, event: Event) -> None:
        number = OLD + 1 - event.age
        match event.kind:
            case "offer":
                found = self.machine.receive(event.rank, offer(last_update=OLD - event.age), self.now_s)
            case "stale":
                odd = offer(generation=GENERATION - 1, rank=event.rank)
                assert self.machine.standing_of(odd) is SubscriberStanding.IS_PAST
                assert self.machine.past(odd).fault is msg.TransferFault.STALE
                found = []
            case "other":
                odd = offer(version=VERSION + 1, rank=event.rank)
                assert self.machine.standing_of(odd) is SubscriberStanding.IS_AHEAD
                found = self.machine.ahead(odd)
            case "moved":
                found = self.machine.receive(event.rank, msg.MovementSeen(number), self.now_s)
            case "prepared":
                if self.update == number:
                    self.prepared.add(event.rank)
                found = self.machine.receive(event.rank, msg.DevicePrepared(number), self.now_s)
            case "failed":
                failed = msg.DeviceFailed(number, "rank 2", "no reason", stalled=event.amount > 1.0)
                found = self.machine.receive(event.rank, failed, self.now_s)
                assert number == self.update or not found, "a failure of an earlier update ended this one"
            case "lost":
                stage = self.machine.stage
                found = self.machine.lost(event.rank, "it closed the line")
                assert stage is not UpdateStage.OFFERING or not found, "a device may come again before an update moves"
            case _:
                self.now_s += event.amount
                found = self.machine.tick(self.now_s)
        self.take(found)

    def take(self, found: list[Verdict]) -> None:
        for verdict in found:
            assert not self.is_over, f"{verdict} after the last word"
            self.verdicts.append(verdict)
            match verdict:
                case msg.UpdateAgreed():
                    assert self.update is None, "agreed on twice"
                    self.update = verdict.update
                    assert (verdict.version, verdict.generation) == (VERSION, GENERATION)
                case msg.VersionCommitted():
                    assert (verdict.update, verdict.version) == (self.update, VERSION)
                    assert self.prepared == set(range(self.world_size))
                case msg.UpdateAborted():
                    assert verdict.update == (self.update or 0)
                    assert verdict.culprit
                    assert verdict.reason
        assert self.machine.is_over == self.is_over
        assert self.machine.stage is self.expected_stage()

    @property
    def is_over(self) -> bool:
        return bool(self.verdicts) and not isinstance(self.verdicts[-1], msg.UpdateAgreed)

    def expected_stage(self) -> UpdateStage:
        if not self.verdicts:
            return UpdateStage.OFFERING
        if isinstance(self.verdicts[-1], msg.UpdateAgreed):
            return UpdateStage.MOVING
        return UpdateStage.COMMITTED if isinstance(self.verdicts[-1], msg.VersionCommitted) else UpdateStage.ABORTED


@settings(max_examples=300)
@given(courses())
@example((1, [Event("offer", 0, 0, 0.0), Event("prepared", 0, 0, 0.0), Event("failed", 0, 0, 0.0)]))
@example((2, [Event("lost", 0, 0, 0.0), Event("time", 0, 0, DEADLINE_S), Event("offer", 0, 0, 0.0)]))
def test_whatever_happens_there_is_one_verdict(course: tuple[int, list[Event]]) -> None:
    world_size, events = course
    watch = Watch(world_size)
    for event in events:
        watch.happen(event)
    watch.happen(Event("time", 0, 0, 2 * DEADLINE_S))
    assert watch.is_over, "time alone must end it"
    for rank in range(world_size):
        for kind in ("offer", "prepared", "failed", "lost", "time"):
            watch.happen(Event(kind, rank, 0, DEADLINE_S))


@given(st.permutations(range(4)), st.permutations(range(4)), st.lists(st.integers(0, 20), min_size=4, max_size=4))
def test_when_all_are_well_the_version_is_committed(offers: list[int], prepared: list[int], last: list[int]) -> None:
    machine = machine_of(4)
    found = [verdict for rank in offers for verdict in machine.receive(rank, offer(last_update=last[rank]), 1.0)]
    (told,) = found
    assert isinstance(told, msg.UpdateAgreed)
    assert told.update > max(last)
    for rank in prepared[:-1]:
        assert machine.receive(rank, msg.DevicePrepared(told.update), 2.0) == []
        assert machine.receive(rank, msg.DevicePrepared(told.update), 2.0) == []
    done = machine.receive(prepared[-1], msg.DevicePrepared(told.update), 3.0)
    assert done == [msg.VersionCommitted(told.update, VERSION)]
    assert machine.stage is UpdateStage.COMMITTED


# ---- Reports of another update --------------------------------------------------------------------------------------


def test_prepared_before_the_agreement_counts_for_nothing() -> None:
    """What an update that broke off left on a line is read in the next one."""
    machine = machine_of(2)
    assert machine.receive(1, msg.DevicePrepared(OLD), 0.0) == []
    machine.lost(1, "it closed the line")
    machine.receive(0, offer(last_update=OLD), 0.0)
    (told,) = machine.receive(1, offer(last_update=OLD), 0.0)
    assert told.update == OLD + 1
    assert machine.receive(0, msg.DevicePrepared(told.update), 0.0) == []
    assert machine.receive(1, msg.DevicePrepared(OLD), 0.0) == []
    assert machine.receive(1, msg.DevicePrepared(told.update), 0.0) == [msg.VersionCommitted(told.update, VERSION)]


def test_a_lone_device_cannot_be_prepared_for_what_it_has_not_offered() -> None:
    machine = machine_of(1)
    assert machine.receive(0, msg.DevicePrepared(OLD), 0.0) == []
    assert machine.stage is UpdateStage.OFFERING


def test_a_failure_of_the_update_before_does_not_end_this_one() -> None:
    machine = machine_of(2)
    assert machine.receive(1, msg.DeviceFailed(OLD, "rank 0", "it was killed", stalled=False), 0.0) == []
    assert machine.stage is UpdateStage.OFFERING


def test_a_device_that_offers_again_while_buckets_move_makes_no_second_agreement() -> None:
    """It has started over on another line; what it had of this update is gone."""
    machine, update = agreed(2)
    found = machine.receive(1, offer(last_update=update), 1.0)
    assert not any(isinstance(verdict, msg.UpdateAgreed) for verdict in found)
    found += machine.receive(0, msg.DevicePrepared(update), 2.0)
    assert msg.VersionCommitted(update, VERSION) not in found


# ---- What breaks ----------------------------------------------------------------------------------------------------


def test_a_loss_while_offering_is_no_verdict_and_its_place_may_be_taken() -> None:
    machine = machine_of(2)
    machine.receive(1, offer(), 0.0)
    assert machine.lost(1, "it closed the line") == []
    assert machine.receive(0, offer(), 1.0) == []
    (told,) = machine.receive(1, offer(last_update=4), 2.0)
    assert isinstance(told, msg.UpdateAgreed)
    assert told.update == 5


def test_a_loss_while_moving_ends_it() -> None:
    machine, update = agreed(2)
    machine.receive(1, msg.DevicePrepared(update), 1.0)
    found = machine.lost(1, "it closed the line")
    assert found == [msg.UpdateAborted(update, msg.TransferFault.LOST, "rank 1", "it closed the line")]


def test_a_failed_device_names_the_culprit() -> None:
    machine, update = agreed(3)
    found = machine.receive(1, msg.DeviceFailed(update, "rank 2", "it sent nothing", stalled=False), 1.0)
    assert found == [msg.UpdateAborted(update, msg.TransferFault.LOST, "rank 2", "it sent nothing")]


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (offer(generation=2, version=8), "it is of generation 2, rank 0 of 3"),
        (offer(version=6), "it publishes version 6, rank 0 publishes 7"),
    ],
    ids=["generation", "version"],
)
def test_a_device_that_is_behind_is_told_so_and_no_other(odd: msg.UpdateOffered, reason: str) -> None:
    machine = machine_of(2)
    machine.receive(0, offer(), 0.0)
    assert machine.standing_of(odd) is SubscriberStanding.IS_PAST
    assert machine.past(odd) == msg.UpdateAborted(0, msg.TransferFault.STALE, "rank 1", reason)
    (told,) = machine.receive(1, offer(), 0.0)
    assert isinstance(told, msg.UpdateAgreed)


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (offer(generation=4, version=6), "it is of generation 4, rank 0 of 3"),
        (offer(version=8), "it publishes version 8, rank 0 publishes 7"),
    ],
    ids=["generation", "version"],
)
def test_an_update_that_a_device_has_given_up_does_not_wait(odd: msg.UpdateOffered, reason: str) -> None:
    machine = machine_of(2)
    machine.receive(0, offer(), 0.0)
    assert machine.standing_of(odd) is SubscriberStanding.IS_AHEAD
    assert machine.ahead(odd) == [msg.UpdateAborted(0, msg.TransferFault.STALE, "rank 1", reason)]
    assert machine.ahead(odd) == [], "one verdict is enough"


def test_of_those_that_stand_the_one_that_is_silent_is_to_blame() -> None:
    """Rank 2 is stopped. Rank 0 waits for rank 1 to free a slot, which waits for a bucket from rank 2."""
    machine, update = agreed(3)
    for now_s in (1.0, 2.0, 3.0, 4.0):
        for rank in (0, 1):
            assert machine.receive(rank, msg.StillThere(), now_s) == []
    failed = msg.DeviceFailed(update, "rank 1", "has shown nothing for 4 s", stalled=True)
    silent = msg.UpdateAborted(update, msg.TransferFault.LOST, "rank 2", "has said nothing for 4.2 s")
    assert machine.receive(0, failed, 4.2) == [silent]


@pytest.mark.parametrize("stalled", [True, False])
def test_who_is_heard_of_may_be_to_blame_nevertheless(stalled: bool) -> None:
    machine, update = agreed(3)
    for rank in (0, 1, 2):
        machine.receive(rank, msg.StillThere(), 3.0)
    if not stalled:
        machine.receive(1, msg.StillThere(), 6.0)  # the others are silent, but the line to rank 1 was cut
    failed = msg.DeviceFailed(update, "rank 1", "the reason", stalled=stalled)
    now_s = 5.4 if stalled else 6.0
    assert machine.receive(0, failed, now_s) == [
        msg.UpdateAborted(update, msg.TransferFault.LOST, "rank 1", "the reason")
    ]


def test_at_the_deadline_those_that_say_they_wait_are_not_named() -> None:
    machine, _update = agreed(3)
    for now_s in (1.0, 2.0, 3.0, 4.0):
        for rank in (0, 2):
            machine.receive(rank, msg.StillThere(), now_s)
    (told,) = machine.tick(DEADLINE_S)
    assert isinstance(told, msg.UpdateAborted)
    assert (told.culprit, told.reason) == ("rank 1", "has shown no movement within 5 s")


def test_sources_that_disagree_end_it() -> None:
    machine = machine_of(2)
    machine.receive(0, offer(), 0.0)
    other = HeldPart(TensorForm(("a",), "int32", (4,), 4), whole((4,)))
    (told,) = machine.receive(1, offer(held=(other,)), 0.0)
    assert isinstance(told, msg.UpdateAborted)
    assert (told.fault, told.culprit) == (msg.TransferFault.LAYOUT, "the layout")
    assert "'a' is int32[4] on rank 1 and float32[4] on rank 0" in told.reason


def test_a_consumer_that_wants_what_no_device_holds_is_left_out() -> None:
    machine = machine_of(1)
    half = HeldPart(FORM, Box((0,), (2,)))
    modest = Consumer("modest", (Want(("a",), "float32", (2,), (0,)),))
    (told,) = machine.receive(0, offer(held=(half,), consumers=(Consumer("engine", None), modest)), 0.0)
    assert isinstance(told, msg.UpdateAgreed)
    problem, none = told.layout.problems
    assert problem is not None
    assert problem.misfit is Misfit.PART
    assert "no source holds 'a' at [2] with shape [2]" in problem.reason
    assert none is None
    assert [bucket.readers for bucket in told.layout.plan().buckets] == [(1,)]


def test_a_block_that_lies_outside_of_its_tensor_ends_it() -> None:
    machine = machine_of(1)
    (told,) = machine.receive(0, offer(held=(HeldPart(FORM, Box((3,), (2,))),)), 0.0)
    assert isinstance(told, msg.UpdateAborted)
    assert told.fault is msg.TransferFault.LAYOUT


def test_a_consumer_that_wants_what_there_is_not_is_left_out() -> None:
    machine = machine_of(1)
    odd = Consumer("odd", (Want(("b",), "float32", (4,), None),))
    (told,) = machine.receive(0, offer(consumers=(odd, Consumer("good", None))), 0.0)
    assert isinstance(told, msg.UpdateAgreed)
    assert [problem is None for problem in told.layout.problems] == [False, True]


def test_what_consumers_hold_is_reported_by_reader() -> None:
    machine, consumers = machine_of(3), tuple(Consumer(name, None) for name in "ab")
    machine.receive(0, offer(consumers=consumers, holds=(6, None), rank=0), 0.0)
    machine.receive(1, offer(rank=1), 0.0)
    (told,) = machine.receive(2, offer(consumers=consumers, holds=(6,), rank=2), 0.0)
    assert isinstance(told, msg.UpdateAgreed)
    assert told.holds == (6, None, None, None)  # what does not fit to the consumers counts for nothing


# ---- The agreement of the update before ------------------------------------------------------------------------------


def layout_of(machine: UpdateMachine, *offers: msg.UpdateOffered) -> Layout:
    """What the devices agree on that offer this."""
    found = [verdict for rank, each in enumerate(offers) for verdict in machine.receive(rank, each, 0.0)]
    (told,) = found
    assert isinstance(told, msg.UpdateAgreed)
    return told.layout


ENGINE = (Consumer("engine", None),)


def test_what_is_offered_again_is_agreed_on_again() -> None:
    first = machine_of(2)
    layout = layout_of(first, offer(), offer(consumers=ENGINE))
    second = UpdateMachine(first.terms, 0.0, first.agreement)
    assert layout_of(second, offer(last_update=1), offer(last_update=1, consumers=ENGINE)) is layout


@pytest.mark.parametrize(
    "changed",
    [
        (offer(), offer()),
        (offer(consumers=ENGINE), offer()),
        (offer(), offer(consumers=(Consumer("another", None),))),
        (offer(held=HELD * 2), offer(consumers=ENGINE)),
    ],
    ids=["consumer gone", "on another device", "another consumer", "other weights"],
)
def test_what_is_offered_otherwise_is_laid_out_again(changed: tuple[msg.UpdateOffered, msg.UpdateOffered]) -> None:
    first = machine_of(2)
    layout_of(first, offer(), offer(consumers=ENGINE))
    second = UpdateMachine(first.terms, 0.0, first.agreement)
    assert layout_of(second, *changed) == layout_of(machine_of(2), *changed)


def test_a_layout_that_did_not_come_about_does_not_stay() -> None:
    odd = offer(held=(HeldPart(FORM, Box((3,), (2,))),), consumers=ENGINE)
    first = machine_of(1)
    first.receive(0, odd, 0.0)
    assert first.stage is UpdateStage.ABORTED
    second = UpdateMachine(first.terms, 0.0, first.agreement)
    (told,) = second.receive(0, odd, 0.0)
    assert isinstance(told, msg.UpdateAborted)


# ---- Silence --------------------------------------------------------------------------------------------------------

sets_of_ranks = st.sets(st.integers(0, 3), min_size=1)
begins = st.floats(0.0, 1e6)


def silent_in(verdicts: list[Verdict]) -> str:
    (told,) = verdicts
    assert isinstance(told, msg.UpdateAborted)
    assert told.fault is msg.TransferFault.LOST
    return told.culprit


def named(ranks: set[int]) -> str:
    return f"rank {min(ranks)}" if len(ranks) == 1 else f"ranks {sorted(ranks)}"


@given(begins, sets_of_ranks)
def test_who_offers_nothing_is_named_at_the_deadline_and_not_before(begin_s: float, silent: set[int]) -> None:
    machine = machine_of(4, begin_s)
    for rank in set(range(4)) - silent:
        assert machine.receive(rank, offer(), begin_s) == []
    assert machine.deadline_s == begin_s + DEADLINE_S
    assert machine.tick(begin_s + 0.9 * DEADLINE_S) == []
    found = machine.tick(begin_s + DEADLINE_S)
    assert silent_in(found) == named(silent)
    assert "did not offer this version within 5 s" in found[0].reason


@given(begins, sets_of_ranks, st.integers(1, 6))
def test_who_stands_while_others_move_is_named_within_its_deadline(
    begin_s: float, silent: set[int], rounds: int
) -> None:
    """However long it takes: the devices that move or are prepared are not suspected."""
    machine, update = agreed(4, begin_s)
    now_s, moving = begin_s, set(range(4)) - silent
    for _ in range(rounds):
        now_s += 0.8 * DEADLINE_S
        for rank in range(4):
            assert machine.receive(rank, msg.MovementSeen(update), now_s) == []
        assert machine.tick(now_s) == []
    last_s = now_s
    if moving:
        machine.receive(min(moving), msg.DevicePrepared(update), now_s)
    now_s = last_s + 0.5 * DEADLINE_S
    for rank in moving - {min(moving, default=0)}:
        machine.receive(rank, msg.MovementSeen(update), now_s)
    assert machine.deadline_s == last_s + DEADLINE_S
    assert machine.tick(last_s + 0.9 * DEADLINE_S) == []
    found = machine.tick(last_s + DEADLINE_S)
    assert silent_in(found) == named(silent)
    assert "has shown no movement within 5 s" in found[0].reason


def test_the_time_of_moving_begins_with_the_agreement() -> None:
    machine = machine_of(2)
    machine.receive(0, offer(), 0.0)
    machine.receive(1, offer(), 4.0)
    assert machine.tick(8.0) == []
    assert machine.deadline_s == 4.0 + DEADLINE_S


def test_nothing_is_said_after_the_verdict() -> None:
    machine, update = agreed(1)
    machine.lost(0, "it closed the line")
    assert machine.tick(100.0) == []
    assert machine.lost(0, "again") == []
    assert machine.receive(0, msg.DevicePrepared(update), 100.0) == []
    assert machine.stage is UpdateStage.ABORTED
