"""All interleavings around one failure, and that the exploration would find what is wrong."""

import pytest

from keepstep.cli import simulate
from keepstep.protocol import resume
from keepstep.protocol.phases import Phase
from keepstep.protocol.resume import reach
from keepstep.sim.exhaustive.explorer import Explorer, small_job
from keepstep.sim.oracle import Check


def test_two_ranks_and_a_spare() -> None:
    found = Explorer(small_job(2)).explore()
    assert found.violation is None, "\n".join((found.violation, *found.path))
    numbers = found.num_states, found.num_transitions, found.num_ends
    assert numbers == (2_998, 7_745, 85), "docs/SIMULATION.md cites these, and must change with them"


@pytest.mark.parametrize(("snapshot_every", "numbers"), [(2, (2_910, 7_819, 93)), (1, (18_932, 54_151, 548))])
def test_two_ranks_with_a_shard_each(snapshot_every: int, numbers: tuple[int, int, int]) -> None:
    """One that is lost comes back from its snapshot: the newest one is of the step before, or is being taken."""
    found = Explorer(small_job(2, snapshot_every)).explore()
    assert found.violation is None, "\n".join((found.violation, *found.path))
    assert (found.num_states, found.num_transitions, found.num_ends) == numbers, "docs/SIMULATION.md cites these"


@pytest.mark.parametrize(("max_delays", "numbers"), [(0, (9_946, 12_060, 273)), (1, (26_230, 53_406, 741)), (2, None)])
def test_two_shards_with_two_replicas_each(max_delays: int, numbers: tuple[int, int, int] | None) -> None:
    """They have the groups of HSDP, of which some are kept."""
    found = Explorer(small_job(4, num_shards=2), max_delays).explore()
    assert found.violation is None, "\n".join((found.violation, *found.path))
    print(f"{found.num_states} states, {found.num_transitions} transitions, {found.num_ends} ways to resume")
    if numbers is not None:
        assert (found.num_states, found.num_transitions, found.num_ends) == numbers, "docs/SIMULATION.md cites these"


def test_more_delays_reach_more() -> None:
    none, one = (Explorer(small_job(2), max_delays).explore() for max_delays in (0, 1))
    assert none.num_states < one.num_states < 2_998, "what all interleavings reach"
    assert none.num_ends < one.num_ends


def test_a_bound_that_nothing_exceeds_changes_nothing() -> None:
    """What follows from a world that is reached again with fewer delays is explored again: it has to be the same."""
    found = Explorer(small_job(2), max_delays=10**6).explore()
    assert found.violation is None, "\n".join((found.violation, *found.path))
    assert (found.num_states, found.num_ends) == (2_998, 85), "as without a bound"


def test_three_ranks_and_a_spare() -> None:
    found = Explorer(small_job(3)).explore()
    assert found.violation is None, "\n".join((found.violation, *found.path))
    print(f"{found.num_states} states, {found.num_transitions} transitions, {found.num_ends} ways to resume")


def test_the_number_of_states_does_not_depend_on_the_run() -> None:
    first, second = (Explorer(small_job(2)).explore(limit=500) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(("num_ranks", "num_shards", "max_delays"), [(2, 1, None), (4, 2, 0)])
def test_a_fault_in_a_machine_is_found(
    num_ranks: int, num_shards: int, max_delays: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has completed step i says that it can be at i, where it is not any more."""

    def wrong_reach(step: int, phase: Phase) -> frozenset[int]:
        return frozenset({step}) if phase is Phase.UPDATED and step > 0 else reach(step, phase)

    monkeypatch.setattr(resume, "reach", wrong_reach)
    found = Explorer(small_job(num_ranks, num_shards=num_shards), max_delays).explore()
    assert found.violation is not None
    assert Check.RAISED in found.violation
    assert "is killed in" in "\n".join(found.path)


def test_the_command_says_how_much_it_explored(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    explore = Explorer.explore
    monkeypatch.setattr(Explorer, "explore", lambda self: explore(self, limit=50))
    assert simulate.main(["--exhaustive", "2"]) == 0
    assert "2 ranks and a spare" in capsys.readouterr().out
