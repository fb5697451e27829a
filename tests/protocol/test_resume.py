"""The resume rule against an oracle that knows nothing of it: what could each rank do alone from where it stopped?

The oracle walks a rank's possible next moves, as a worker's code allows them without anybody's help, and notes the
steps at which its parameters can come to rest. The rule is then compared with plain search on every combination of
safe points, losses and shards for up to four ranks; every checkpoint that could exist beside them for up to three.
"""

import enum
import functools
import itertools
from collections.abc import Callable, Iterator

import pytest

from keepstep.protocol.phases import Phase
from keepstep.protocol.resume import Action, action, reach, resume_step

# ---- The oracle -----------------------------------------------------------------------------------------------------


class At(enum.IntEnum):
    """Where in a step a rank was caught. Own names and numbers: `Phase` is what is being tested."""

    NOWHERE = 0  # still starting up, or its copy is torn
    FORWARD = 1
    BACKWARD = 2
    SYNCED = 3
    UPDATING = 4
    DONE = 5


Position = tuple[int, At] | None
"""Step and place of a live rank; None for a lost one."""

PHASE_OF = {
    At.NOWHERE: Phase.STARTING,
    At.FORWARD: Phase.FORWARD,
    At.BACKWARD: Phase.BACKWARD,
    At.SYNCED: Phase.SYNCED,
    At.UPDATING: Phase.OPTIMIZER,
    At.DONE: Phase.UPDATED,
}
NUM_STEPS = 2  # the gradient barrier lets ranks be at two neighbouring steps at most
POSITIONS: list[Position] = [None, (0, At.NOWHERE), *itertools.product(range(NUM_STEPS), list(At)[1:])]
CHECKPOINTS: list[int | None] = [None, 0, 1, 2, 5]  # older than, at, and newer than everything alive


def solo_moves(position: tuple[int, At]) -> list[tuple[int, At]]:
    """What a rank can do with no help: leave a step that is not yet being updated, begin or finish an update."""
    step, at = position
    match at:
        case At.FORWARD | At.BACKWARD:
            return [(step - 1, At.DONE)]
        case At.SYNCED:
            return [(step - 1, At.DONE), (step, At.UPDATING)]
        case At.UPDATING:
            return [(step, At.DONE)]
        case _:
            return []


@functools.cache
def rests_at(position: Position) -> frozenset[int]:
    """The steps at which the parameters can come to rest, found by walking all solo moves."""
    seen: set[tuple[int, At]] = set()
    frontier = [] if position is None else [position]
    while frontier:
        current = frontier.pop()
        if current not in seen:
            seen.add(current)
            frontier += solo_moves(current)
    return frozenset(step + 1 for step, at in seen if at is At.DONE)


Holders = list[list[frozenset[int]]]
"""For each shard, where each of its copies can come to rest."""


def searched(holders: Holders) -> int | None:
    """Tries every step from high to low: does some copy of every shard come to rest there?"""
    for step in range(9, -1, -1):
        if all(any(step in rests for rests in copies) for copies in holders):
            return step
    return None


# ---- The cases ------------------------------------------------------------------------------------------------------


def shardings(num_ranks: int) -> Iterator[tuple[int, ...]]:
    """Every assignment of ranks to 1, 2 or 3 shards that uses all of them, one for each way to name the shards."""
    for assignment in itertools.product(range(3), repeat=num_ranks):
        names = list(dict.fromkeys(assignment))
        if names == sorted(names) and names[-1] == len(names) - 1:
            yield assignment


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


def permitted_positions(num_ranks: int) -> set[tuple[tuple[int, At], ...]]:
    """Every joint position that ranks can get to which wait for each other as they must.

    A rank's gradients are complete when every rank has come to its backward pass of that step, and a rank begins the
    update when every rank has complete gradients.
    """
    start = ((0, At.FORWARD),) * num_ranks
    seen, frontier = {start}, [start]
    while frontier:
        ranks = frontier.pop()
        for index, (step, at) in enumerate(ranks):
            if at is At.BACKWARD and min(ranks) < (step, At.BACKWARD):
                continue
            if at is At.SYNCED and min(ranks) < (step, At.SYNCED):
                continue
            moved = (step + 1, At.FORWARD) if at is At.DONE else (step, At(at + 1))
            joint = (*ranks[:index], moved, *ranks[index + 1 :])
            if moved[0] < NUM_STEPS and joint not in seen:
                seen.add(joint)
                frontier.append(joint)
    return seen


def with_losses(joint: tuple[tuple[int, At], ...]) -> Iterator[tuple[Position, ...]]:
    """Every subset of the ranks is lost."""
    return itertools.product(*[(position, None) for position in joint])


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
    everybody = [holder for holders in shards.values() for holder in holders]
    return max(frozenset.intersection(*everybody), default=None) if everybody and all(shards.values()) else None


def greatest_of_any(shards: dict[str, list[frozenset[int]]]) -> int | None:
    return max((step for holders in shards.values() for holder in holders for step in holder), default=None)


@pytest.mark.parametrize("mutant", [least, without_lost_shards, every_holder_must, greatest_of_any])
def test_a_wrong_rule_is_caught(mutant: Rule) -> None:
    assert next(disagreements(3, mutant), None) is not None


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
                assert step == furthest + 1, (joint, positions)
                assert all(step in rests_at(position) for position in survivors), (joint, positions)
    assert num_checked > 0


def test_the_model_of_the_barrier_lets_ranks_be_one_step_apart() -> None:
    """The set of permitted positions is neither empty of spread nor everything."""
    permitted = permitted_positions(2)
    assert ((1, At.BACKWARD), (0, At.SYNCED)) in permitted
    assert ((1, At.SYNCED), (0, At.SYNCED)) not in permitted
    assert ((0, At.UPDATING), (0, At.BACKWARD)) not in permitted


# ---- Getting there --------------------------------------------------------------------------------------------------


def standing_at(position: Position) -> int | None:
    """The step of a live rank's parameters as they are when it reports; an interrupted update is finished first."""
    if position is None or position[1] is At.NOWHERE:
        return None
    step, at = position
    return step + 1 if at in (At.UPDATING, At.DONE) else step


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
