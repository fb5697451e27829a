"""Where ranks can be when one of them is lost, told without the code that is under test.

A rank is at a step and at a place in it. What it can do alone from there, and where it has to wait for the others, is
written down here a second time.
"""

import enum
import functools
import itertools
from collections.abc import Iterator

from keepstep.protocol.phases import Phase


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


def standing_at(position: Position) -> int | None:
    """The step of a live rank's parameters as they are when it reports; an interrupted update is finished first."""
    if position is None or position[1] is At.NOWHERE:
        return None
    step, at = position
    return step + 1 if at in (At.UPDATING, At.DONE) else step


def shardings(num_ranks: int) -> Iterator[tuple[int, ...]]:
    """Every assignment of ranks to 1, 2 or 3 shards that uses all of them, one for each way to name the shards."""
    for assignment in itertools.product(range(3), repeat=num_ranks):
        names = list(dict.fromkeys(assignment))
        if names == sorted(names) and names[-1] == len(names) - 1:
            yield assignment


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
