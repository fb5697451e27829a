"""What a consumer may use: against a model that keeps one fact for each rule."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import InternalError, WeightsNotReady, WeightsPartiallyUpdated
from keepstep.protocol.transfer.consumer import Condition, ConsumerState

ATOMIC = pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "in place"])


@dataclasses.dataclass
class Memory:
    """What lies in the memory that is used.

    Attributes:
        whole: the version of every byte, or None: none yet, or of several versions.
        coming: the version that is on its way.
        is_partial: an update broke off halfway since the last whole version.
        last: the last version that was whole.
    """

    whole: int | None = None
    coming: int | None = None
    is_partial: bool = False
    last: int | None = None


def begin(memory: Memory, atomic: bool, version: int) -> None:
    if memory.coming is not None:
        fail(memory, atomic)
    memory.coming = version
    if not atomic:
        memory.whole = None


def fail(memory: Memory, atomic: bool) -> None:
    if memory.coming is not None and not atomic:
        memory.is_partial = True
    memory.coming = None


def commit(memory: Memory) -> None:
    memory.whole = memory.last = memory.coming
    memory.is_partial, memory.coming = False, None


def usable(state: ConsumerState) -> int | None:
    """The version that may be used, or None."""
    try:
        return state.check_usable()
    except WeightsNotReady:
        return None


def condition_of(memory: Memory, atomic: bool) -> Condition:
    """What the state has to say of this memory while nothing is being written over it."""
    if memory.is_partial:
        return Condition.PARTIALLY_UPDATED
    if memory.coming is not None and not atomic:
        return Condition.UPDATING
    return Condition.EMPTY if memory.whole is None else Condition.READY


ACTIONS = st.lists(st.sampled_from(["begin", "commit", "fail"]), max_size=30)


@ATOMIC
@given(actions=ACTIONS)
def test_what_is_usable_is_whole_whatever_happens(atomic: bool, actions: list[str]) -> None:
    state, memory = ConsumerState(atomic), Memory()
    for number, action in enumerate(actions):
        if action == "begin":
            state.begin(number)
            begin(memory, atomic, number)
        elif action == "fail":
            state.fail("a reason")
            fail(memory, atomic)
        elif memory.coming is not None:
            state.commit(memory.coming)
            commit(memory)
        assert usable(state) == memory.whole
        assert (state.version, state.coming) == (memory.last, memory.coming)
        if memory.coming is None or not memory.is_partial:
            assert state.condition is condition_of(memory, atomic)
        if memory.is_partial and memory.coming is None:
            with pytest.raises(WeightsPartiallyUpdated):
                state.check_usable()


@ATOMIC
def test_nothing_has_come_yet(atomic: bool) -> None:
    with pytest.raises(WeightsNotReady, match="no version has arrived yet") as caught:
        ConsumerState(atomic).check_usable()
    assert not isinstance(caught.value, WeightsPartiallyUpdated)


def test_a_failure_in_place_tears_until_a_whole_version_has_come() -> None:
    state = ConsumerState(atomic=False)
    state.begin(1)
    state.commit(1)
    state.begin(2)
    with pytest.raises(WeightsNotReady, match="version 2 is being written over version 1"):
        state.check_usable()
    state.fail("rank 3 is gone")
    told = r"version 2 broke off halfway \(rank 3 is gone\); the next whole version makes them usable again"
    with pytest.raises(WeightsPartiallyUpdated, match=told):
        state.check_usable()
    state.begin(3)
    with pytest.raises(WeightsNotReady):
        state.check_usable()
    state.commit(3)
    assert state.check_usable() == 3


def test_a_failure_of_what_was_put_aside_does_not_tear() -> None:
    state = ConsumerState(atomic=True)
    state.begin(1)
    state.commit(1)
    state.begin(2)
    assert state.check_usable() == 1
    state.fail("rank 3 is gone")
    assert (state.condition, state.check_usable()) == (Condition.READY, 1)


def test_a_failure_before_the_first_version_leaves_an_atomic_consumer_empty() -> None:
    state = ConsumerState(atomic=True)
    state.begin(1)
    state.fail("rank 3 is gone")
    assert state.condition is Condition.EMPTY


def test_a_version_that_another_takes_the_place_of_has_failed() -> None:
    state = ConsumerState(atomic=False)
    state.begin(1)
    state.begin(2)
    state.fail("rank 3 is gone")
    assert state.condition is Condition.PARTIALLY_UPDATED
    with pytest.raises(InternalError):
        state.commit(2)


@ATOMIC
def test_a_failure_while_nothing_is_on_its_way_is_none(atomic: bool) -> None:
    state = ConsumerState(atomic)
    state.fail("rank 3 is gone")
    assert state.condition is Condition.EMPTY
    state.begin(1)
    state.commit(1)
    state.fail("rank 3 is gone")
    assert state.check_usable() == 1


@ATOMIC
@pytest.mark.parametrize("coming", [None, 4])
def test_only_what_is_on_its_way_can_be_committed(atomic: bool, coming: int | None) -> None:
    state = ConsumerState(atomic)
    if coming is not None:
        state.begin(coming)
    with pytest.raises(InternalError, match=f"version 5 is committed while {coming} is on its way"):
        state.commit(5)
    assert state.version is None
