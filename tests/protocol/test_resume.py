"""The resume rule against an oracle that knows nothing of it: what could each rank do alone from where it stopped?

The oracle walks a rank's possible next moves, as a worker's code allows them without anybody's help, and notes the
steps at which its parameters can come to rest. Both parts of the rule are then compared with plain search on every
combination of safe points, losses and shards for up to four ranks; with checkpoints beside them for up to three.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

import pytest
from tests.protocol.positions import (
    PHASE_OF,
    POSITIONS,
    At,
    Position,
    permitted_positions,
    rests_at,
    shardings,
    standing_at,
    with_losses,
)

from keepstep.protocol.resume import Action, action, common_step, reach, resume_step

# ---- The oracle -----------------------------------------------------------------------------------------------------

CHECKPOINTS: list[int | None] = [None, 0, 1, 2, 5]  # older than, at, and newer than everything alive

Holders = list[list[frozenset[int]]]
"""For each shard, where each of its copies can come to rest."""


def searched(holders: Holders) -> int | None:
    """Tries every step from high to low: does some copy of every shard come to rest there?"""
    for step in range(9, -1, -1):
        if all(any(step in rests for rests in copies) for copies in holders):
            return step
    return None


# ---- The cases ------------------------------------------------------------------------------------------------------


def holders_of(sharding: tuple[int, ...], positions: tuple[Position, ...]) -> tuple[Holders, dict[str, Holders]]:
    """The same case for the oracle and for the rule: where copies come to rest, and what each of them reports."""
    by_oracle: Holders = [[] for _ in set(sharding)]
    reported: dict[str, list[frozenset[int]]] = {f"shard {number}": [] for number in set(sharding)}
    for shard, position in zip(sharding, positions, strict=True):
        if position is not None:
            by_oracle[shard].append(rests_at(position))
            reported[f"shard {shard}"].append(reported_reach(position))
    return by_oracle, reported


@functools.cache
def reported_reach(position: tuple[int, At]) -> frozenset[int]:
    return reach(position[0], PHASE_OF[position[1]])


Rule = Callable[[dict[str, list[frozenset[int]]]], int | None]


def disagreements(num_ranks: int, rule: Rule) -> Iterator[str]:
    """Every case in which the rule differs from the search, told so that it can be read."""
    for sharding in shardings(num_ranks):
        for positions in itertools.product(POSITIONS, repeat=num_ranks):
            by_oracle, reported = holders_of(sharding, positions)
            expected, got = searched(by_oracle), rule(reported)
            if expected != got:
                yield f"shards {sharding}, ranks at {positions}: expected {expected}, got {got}"


# ---- The rule is the search -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_rule_agrees_with_search_on_every_combination(num_ranks: int) -> None:
    assert list(itertools.islice(disagreements(num_ranks, resume_step), 3)) == []


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_checkpoints_count_as_holders_in_every_combination(num_ranks: int) -> None:
    for sharding in shardings(num_ranks):
        choices = list(itertools.product(CHECKPOINTS, repeat=max(sharding) + 1))
        for positions in itertools.product(POSITIONS, repeat=num_ranks):
            by_oracle, reported = holders_of(sharding, positions)
            for steps in choices:
                extra = [[] if step is None else [frozenset({step})] for step in steps]
                expected = searched([live + saved for live, saved in zip(by_oracle, extra, strict=True)])
                holders = {shard: [*reported[shard], *extra[int(shard[-1])]] for shard in reported}
                assert resume_step(holders) == expected, (sharding, positions, steps)


@pytest.mark.parametrize("position", POSITIONS[1:], ids=str)
def test_reach_is_where_a_rank_can_come_to_rest_alone(position: tuple[int, At]) -> None:
    assert reported_reach(position) == rests_at(position)


def least(shards: dict[str, list[frozenset[int]]]) -> int | None:
    return min(frozenset.intersection(*[frozenset().union(*holders) for holders in shards.values()]), default=None)


def without_lost_shards(shards: dict[str, list[frozenset[int]]]) -> int | None:
    return resume_step({shard: holders for shard, holders in shards.items() if holders})


def every_holder_must(shards: dict[str, list[frozenset[int]]]) -> int | None:
    all_members = [holder for holders in shards.values() for holder in holders]
    return max(frozenset.intersection(*all_members), default=None) if all_members and all(shards.values()) else None


def greatest_of_any(shards: dict[str, list[frozenset[int]]]) -> int | None:
    return max((step for holders in shards.values() for holder in holders for step in holder), default=None)


@pytest.mark.parametrize("mutant", [least, without_lost_shards, every_holder_must, greatest_of_any])
def test_a_wrong_rule_is_caught(mutant: Rule) -> None:
    assert next(disagreements(3, mutant), None) is not None


# ---- Where all can be -----------------------------------------------------------------------------------------------

Copies = tuple[frozenset[int], ...]
CommonRule = Callable[[Copies], int | None]


def searched_for_all(copies: Copies) -> int | None:
    """Tries every step from high to low: does every copy come to rest there?"""
    return next((step for step in range(9, -1, -1) if copies and all(step in rests for rests in copies)), None)


def common_disagreements(num_copies: int, rule: CommonRule) -> Iterator[str]:
    """Every case in which the rule differs from the search, with at most one checkpoint for each copy."""
    saved = [frozenset() if step is None else frozenset({step}) for step in CHECKPOINTS]
    rests = {rests_at(position) | extra for position in POSITIONS[2:] for extra in saved}
    for copies in itertools.product(sorted(rests, key=sorted), repeat=num_copies):
        if rule(copies) != searched_for_all(copies):
            yield f"copies {copies}: expected {searched_for_all(copies)}, got {rule(copies)}"


@pytest.mark.parametrize("num_copies", [0, 1, 2, 3, 4])
def test_the_common_step_agrees_with_search_on_every_combination(num_copies: int) -> None:
    assert list(itertools.islice(common_disagreements(num_copies, common_step), 3)) == []


def least_of_common(copies: Copies) -> int | None:
    return min(frozenset.intersection(*copies), default=None) if copies else None


def greatest_of_one(copies: Copies) -> int | None:
    return max(frozenset().union(*copies), default=None)


def least_of_greatest(copies: Copies) -> int | None:
    return min((max(copy) for copy in copies), default=None)


@pytest.mark.parametrize("mutant", [least_of_common, greatest_of_one, least_of_greatest])
def test_a_wrong_common_step_is_caught(mutant: CommonRule) -> None:
    assert next(common_disagreements(2, mutant), None) is not None


@pytest.mark.parametrize(
    ("reaches", "expected"),
    [
        ([], None),
        ([frozenset({4, 5}), frozenset({4})], 4),
        ([frozenset({4, 5}), frozenset({5})], 5),
        ([frozenset({4, 5}), frozenset({4, 5})], 5),
        ([frozenset({4}), frozenset({5})], None),
        ([frozenset({4, 2}), frozenset({2}), frozenset({5, 2})], 2),
        (iter([frozenset({7})]), 7),
    ],
    ids=["no process", "synced and backward", "synced and updated", "synced", "apart", "a checkpoint", "any iterable"],
)
def test_the_common_step_at_its_edges(reaches: list[frozenset[int]], expected: int | None) -> None:
    assert common_step(reaches) == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_between_whole_copies_there_always_is_a_common_step(num_ranks: int) -> None:
    """Whichever ranks are lost; and then no rank goes back before its update, nor needs state."""
    num_undone = 0
    for positions in {positions for joint in permitted_positions(num_ranks) for positions in with_losses(joint)}:
        live = [position for position in positions if position is not None]
        step = common_step(map(rests_at, live))
        if not live:
            assert step is None
            continue
        assert step is not None, positions
        for position in live:
            assert step >= min(rests_at(position)), (positions, step)
            what = action(step, rests_at(position), standing_at(position), frozenset())
            assert what in (Action.STAY, Action.ADVANCE), (positions, step, what)
        greatest = resume_step({"0": map(rests_at, live)})
        assert greatest in (step, step + 1), (positions, step, greatest)
        num_undone += greatest > step
    assert (num_undone > 0) == (num_ranks > 1), "undoing what is synced is what tells this rule from the other"


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_loss_on_the_way_to_the_common_step_leaves_one_that_is_no_smaller(num_ranks: int) -> None:
    """Each survivor is there already, or still where it stopped; then any of them are lost as well."""
    for positions in {positions for joint in permitted_positions(num_ranks) for positions in with_losses(joint)}:
        live = [rests_at(position) for position in positions if position is not None]
        step = common_step(live)
        if step is None:
            continue
        for later in itertools.product(*[(rests, frozenset({step}), None) for rests in live]):
            survivors = [rests for rests in later if rests is not None]
            again = common_step(survivors)
            assert again is None if not survivors else again is not None and again >= step, (positions, later)


# ---- What the gradient barrier gives --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_barrier_lets_no_survivor_go_back(num_ranks: int) -> None:
    """As long as each shard has one live rank there is a resume step, and what a survivor has updated stays."""
    cases = {positions for joint in permitted_positions(num_ranks) for positions in with_losses(joint)}
    for sharding, positions in itertools.product(shardings(num_ranks), cases):
        by_oracle, reported = holders_of(sharding, positions)
        step = resume_step(reported)
        if not all(by_oracle):
            assert step is None, (sharding, positions)
            continue
        assert step is not None, (sharding, positions)
        assert step >= max(min(rests_at(position)) for position in positions if position), (sharding, positions, step)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_nothing_is_computed_again_once_a_rank_has_begun_the_update(num_ranks: int) -> None:
    """Even where the only rank that had left the barrier is lost: the others are synced, and finish the update."""
    num_checked = 0
    for joint in permitted_positions(num_ranks):
        furthest, at = max(joint)
        if at < At.UPDATING:
            continue
        num_checked += 1
        for positions in with_losses(joint):
            survivors = [position for position in positions if position is not None]
            if survivors:
                step = resume_step(holders_of((0,) * num_ranks, positions)[1])
                assert step == common_step(map(rests_at, survivors)) == furthest + 1, (joint, positions)
                assert all(step in rests_at(position) for position in survivors), (joint, positions)
    assert num_checked > 0


def test_the_model_of_the_barrier_lets_ranks_be_one_step_apart() -> None:
    """The set of permitted positions is neither empty of spread nor everything."""
    permitted = permitted_positions(2)
    assert ((1, At.BACKWARD), (0, At.SYNCED)) in permitted
    assert ((1, At.SYNCED), (0, At.SYNCED)) not in permitted
    assert ((0, At.UPDATING), (0, At.BACKWARD)) not in permitted


# ---- Getting there --------------------------------------------------------------------------------------------------


def after(what: Action, step: int, position: Position, snapshots: frozenset[int], live_source: bool) -> int | None:
    """Where a rank's parameters are when it has done what it was told; None where it cannot be done."""
    match what:
        case Action.STAY:
            return standing_at(position)
        case Action.ADVANCE:
            return position[0] + 1 if position is not None and position[1] is At.SYNCED else None
        case Action.REWIND:
            return step if step in snapshots else None
        case Action.RESTORE:
            return step if live_source else None


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_actions_bring_every_rank_to_the_step(num_ranks: int) -> None:
    """Lost ranks are replaced by empty ones. Rank 0 can read checkpoints where there are any."""
    for sharding, saved in itertools.product(shardings(num_ranks), [frozenset[int](), frozenset({0}), frozenset({1})]):
        for positions in itertools.product(POSITIONS, repeat=num_ranks):
            snapshots = [saved if rank == 0 else frozenset[int]() for rank in range(num_ranks)]
            copies: dict[int, list[frozenset[int]]] = {shard: [] for shard in sharding}
            for rank, shard in enumerate(sharding):
                copies[shard].append(rests_at(positions[rank]) | snapshots[rank])
            step = searched(list(copies.values()))
            if step is not None:
                assert_all_get_there(step, sharding, positions, snapshots)


def assert_all_get_there(
    step: int, sharding: tuple[int, ...], positions: tuple[Position, ...], snapshots: list[frozenset[int]]
) -> None:
    ranks = range(len(sharding))
    actions = [action(step, rests_at(positions[rank]), standing_at(positions[rank]), snapshots[rank]) for rank in ranks]
    for rank in ranks:
        sources = [
            other for other in ranks if sharding[other] == sharding[rank] and actions[other] is not Action.RESTORE
        ]
        reached = after(actions[rank], step, positions[rank], snapshots[rank], bool(sources))
        assert reached == step, (sharding, positions, snapshots, actions)


def test_a_live_copy_is_preferred_to_a_snapshot_of_the_same_step() -> None:
    assert action(3, frozenset({3}), 3, frozenset({3})) is Action.STAY
    assert action(4, frozenset({3, 4}), 3, frozenset({4})) is Action.ADVANCE


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        ({}, None),
        ({"0": []}, None),
        ({"0": [frozenset({4})], "1": []}, None),
        ({"0": [frozenset({4})], "1": [frozenset()]}, None),
        ({"0": [frozenset({4})], "1": [frozenset({5})]}, None),
        ({"0": [frozenset({4, 5})], "1": [frozenset({4}), frozenset({5})]}, 5),
        ({"0": iter([frozenset({7})])}, 7),
    ],
    ids=["no shard", "no holder", "one shard lost", "one shard torn", "no common step", "greatest", "any iterable"],
)
def test_the_rule_at_its_edges(shards: dict[str, list[frozenset[int]]], expected: int | None) -> None:
    assert resume_step(shards) == expected


def test_a_synced_rank_that_would_repeat_has_all_compute_the_step_again() -> None:
    both, later = frozenset({5, 6}), frozenset({6})
    assert common_step([both, both], would_repeat=True) == 5
    assert common_step([both, later], would_repeat=True) == 6
    assert common_step([frozenset({5}), later], would_repeat=True) is None
    assert common_step([], would_repeat=True) is None
