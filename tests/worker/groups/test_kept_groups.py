"""Groups that stay as they are in a recovery, over real gloo in real processes: same object, same connections."""

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.groups.collectives import own
from tests.worker.ranks import Watcher, join, meet, registry_of, run_ranks
from torch import distributed as dist

from keepstep.worker.groups.group import SurvivingGroup


def established(group: SurvivingGroup) -> set[str]:
    """Both ends of each connection of a group that is open now, as the kernel has them."""
    communicator: Any = group._communicators.own
    inodes = {str(os.fstat(each.fileno()).st_ino) for each in communicator._connections._sockets}
    table = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {" ".join([*row[1:3], row[9]]) for row in table if row[9] in inodes and row[3] == "01"}


def inside(group: SurvivingGroup) -> tuple[Any, Any, set[str]]:
    """What makes a group the same as before."""
    communicator: Any = group._communicators.own
    return communicator, communicator._communicator, established(group)


def sum_of(group: dist.ProcessGroup, rank: int) -> list[float]:
    tensor = own(rank, 3)
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


# ---- a lost rank ----------------------------------------------------------------------------------------------------

SHARDS, REPLICAS = ((0, 1), (2, 3)), ((0, 2), (1, 3))
LOST, REPLACEMENT = 1, 4


def on_a_mesh(process: int, _num: int, path: Path) -> Any:
    """Four ranks on a mesh of 2 x 2. Rank 1 is killed, and the fifth process takes its place in generation 2."""
    rank, watcher = LOST if process == REPLACEMENT else process, Watcher()
    registry = registry_of(path, 4, watcher)
    registry.join_world(rank, 4, lambda: rank)
    made = {members: dist.new_group(list(members)) for members in (*SHARDS, *REPLICAS)}
    groups = {members: group for members, group in made.items() if isinstance(group, SurvivingGroup)}
    if process == REPLACEMENT:
        meet(path, 4, "rank 1 is gone")
        registry.connect(2, rank)
        return {}, {members: sum_of(group, rank) for members, group in groups.items()}, {}, []
    registry.connect(1, rank)
    before = {members: (sum_of(group, rank), inside(group)) for members, group in groups.items()}
    meet(path, 4, "all have trained")
    if process == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    meet(path, 4, "rank 1 is gone")
    registry.take_down()
    assert all(group.is_down for group in groups.values())
    dist.all_reduce(torch.ones(1), group=next(iter(groups.values())))  # an echo is not counted
    registry.drain()
    registry.connect(2, rank, frozenset({LOST}))
    kept = {members: inside(group) == before[members][1] for members, group in groups.items()}
    return kept, {members: sum_of(group, rank) for members, group in groups.items()}, registry.rebuilt, watcher.errors


def test_a_lost_rank_leaves_groups_without_it_as_they_are(tmp_path: Path) -> None:
    answers = run_ranks(5, on_a_mesh, tmp_path, silent=frozenset({LOST}))
    assert [answer[0] for answer in (answers[0], answers[2], answers[3])] == [
        {(0, 1): False, (0, 2): True},
        {(2, 3): True, (0, 2): True},
        {(2, 3): True, (1, 3): False},
    ]
    for process in (0, 2, 3, REPLACEMENT):
        _kept, sums, rebuilt, errors = answers[process]
        for members in sums:
            assert sums[members] == (own(members[0], 3) + own(members[1], 3)).tolist()
        assert (rebuilt, errors) == ({}, [])


# ---- what does not stay ---------------------------------------------------------------------------------------------


def nothing(pair: Any, rank: int) -> None:
    """No member does anything."""


def messages_that_were_received(pair: Any, rank: int) -> None:
    dist.send(own(rank, 2), 1, pair) if rank == 0 else dist.recv(torch.zeros(2), 0, pair)


def one_more_collective(pair: Any, rank: int) -> None:
    if rank == 0:
        dist.all_reduce(own(rank, 2), group=pair, async_op=True)


def a_collective_that_one_has_left_alone(pair: Any, rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.empty(0), group=pair)  # of no elements: nothing has to be sent


def a_message_that_nobody_received(pair: Any, rank: int) -> None:
    if rank == 0:
        dist.isend(own(rank, 2), 1, pair)


def a_recv_without_a_message(pair: Any, rank: int) -> None:
    if rank == 0:
        dist.irecv(torch.zeros(2), 1, pair)


def a_message_from_any_rank(pair: Any, rank: int) -> None:
    dist.send(own(rank, 2), 1, pair) if rank == 0 else dist.recv(torch.zeros(2), None, pair)


def a_wrong_call(pair: Any, rank: int) -> None:
    if rank == 0:
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_gather([torch.zeros(2), torch.zeros(3)], torch.zeros(2), group=pair)


def aborted(pair: Any, rank: int) -> None:
    if rank == 0:
        pair.inner.abort()


def destroyed(pair: Any, rank: int) -> None:
    if rank == 0:
        dist.destroy_process_group(pair)


STAYS = (nothing, messages_that_were_received)
NOT_WHOLE = "members [0] have no whole connections"
REBUILT: dict[Callable[[Any, int], None], list[str]] = {
    one_more_collective: ["", NOT_WHOLE],
    a_collective_that_one_has_left_alone: ["its members have entered [2, 1] collectives"] * 2,
    a_message_that_nobody_received: ["", NOT_WHOLE],
    a_recv_without_a_message: ["", NOT_WHOLE],
    a_message_from_any_rank: ["members [1] have no whole connections", ""],
    a_wrong_call: ["", NOT_WHOLE],
    aborted: ["", NOT_WHOLE],
    destroyed: ["", NOT_WHOLE],
}
"""Why each member has rebuilt the group; one that could not keep it anyway does not ask the others."""

Answers = list[dict[str, list[tuple[bool, str, list[float]]]]]


def after_each(rank: int, size: int, path: Path) -> dict[str, list[tuple[bool, str, list[float]]]]:
    """In a pair for each of them both members do something; then all are reconnected twice, though none is lost."""
    registry, _world = join(path, rank, size)
    pairs: dict[str, SurvivingGroup] = {}
    for action in (*STAYS, *REBUILT):
        pairs[action.__name__] = pair = dist.new_group([0, 1])
        sum_of(pair, rank)
        action(pair, rank)
    answers: dict[str, list[tuple[bool, str, list[float]]]] = {name: [] for name in pairs}
    for generation in (2, 3):
        meet(path, size, f"done {generation}")
        before = {name: inside(pair) for name, pair in pairs.items()}
        registry.take_down()
        meet(path, size, f"down {generation}")
        registry.drain()
        registry.connect(generation, rank)
        for name, pair in pairs.items():
            why = registry.rebuilt.get(pair.keepstep_name, "")
            answers[name].append((inside(pair) == before[name], why, sum_of(pair, rank)))
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    found: Answers = run_ranks(2, after_each, tmp_path_factory.mktemp("pairs"))
    return found


TOTAL = (own(0, 3) + own(1, 3)).tolist()


@pytest.mark.parametrize("action", STAYS)
def test_a_group_in_which_nothing_is_under_way_stays_again_and_again(
    action: Callable[[Any, int], None], answers: Answers
) -> None:
    assert [answer[action.__name__] for answer in answers] == [[(True, "", TOTAL)] * 2] * 2


@pytest.mark.parametrize(("action", "reasons"), REBUILT.items())
def test_any_other_is_rebuilt_by_all_members_and_stays_then(
    action: Callable[[Any, int], None], reasons: list[str], answers: Answers
) -> None:
    for answer, why in zip(answers, reasons, strict=True):
        assert answer[action.__name__] == [(False, why, TOTAL), (True, "", TOTAL)]


# ---- at any moment --------------------------------------------------------------------------------------------------

NUM_TRIALS = 60


def close_at_any_moment(rank: int, size: int, path: Path, seed: int) -> list[tuple[bool, str]]:
    """Each rank is taken down at a moment of its own while all run the same operations; what they give then is right
    in the next generation, whichever of the groups stays."""
    registry, world = join(path, rank, size)
    meet(path, size, "connected")  # a trial of one rank must not cut the connecting of another off
    found = []
    for trial in range(NUM_TRIALS):
        before, moment = world._communicators.own, random.Random(f"{seed} {trial} {rank}")
        timer = threading.Timer(moment.uniform(0.0, 0.004), registry.take_down)
        timer.start()
        run_until_down(world, rank, size, random.Random(f"{seed} {trial}"))
        timer.join()
        registry.drain()
        registry.connect(trial + 2, rank)
        meet(path, size, f"connected {trial}")
        tensor = torch.full((5,), float(trial))
        dist.all_reduce(tensor)
        dist.broadcast(same := own(rank, 2) + trial, src=trial % size)
        assert torch.equal(tensor, torch.full((5,), float(trial * size)))
        assert torch.equal(same, own(trial % size, 2) + trial)
        found.append((world._communicators.own is before, registry.rebuilt.get("world", "")))
    return found


def run_until_down(world: SurvivingGroup, rank: int, size: int, draw: random.Random) -> None:
    """Collectives and messages, the same on all ranks, some of them with a pause behind that leaves the group quiet."""
    while not world.is_down:
        with suppress(RuntimeError):
            match draw.randrange(4):
                case 0:
                    dist.all_reduce(torch.full((3,), -1.0))
                case 1:
                    dist.broadcast(torch.full((7,), -2.0), src=draw.randrange(size))
                case 2:
                    source = draw.randrange(size)
                    to = (source + 1) % size
                    if rank == source:
                        dist.send(torch.full((2,), -3.0), to)
                    elif rank == to:
                        dist.recv(torch.empty(2), source)
                case 3:
                    threading.Event().wait(0.002)


def test_what_stays_after_a_stop_at_any_moment_is_right(tmp_path: Path, seed: int) -> None:
    answers = run_ranks(3, close_at_any_moment, tmp_path, seed)
    kept = [{is_kept for is_kept, _ in trial} for trial in zip(*answers, strict=True)]
    assert all(len(each) == 1 for each in kept), "all members decide the same"
    assert {True} in kept
    assert {False} in kept
