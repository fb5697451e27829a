"""Which spare ought to take a rank: judged by what the controller could know when it chose."""

from __future__ import annotations

import dataclasses

import pytest

from keepstep.protocol import messages as msg
from keepstep.protocol.controller import JournalEntry, ReportsReceived
from keepstep.protocol.node.effects import Spawn
from keepstep.sim.cluster.layout import SETTINGS, ClusterLayout, NodeLayout
from keepstep.sim.oracle.checks import Check, ViolationError
from keepstep.sim.oracle.placement import Loss, SpareChoice
from keepstep.sim.world import World

STOPPED = msg.SafePointReached((1,), 2, 0, "updated", (1,), 1, (), False, (), None, None)
LOSS = Loss("node-1", is_of_node=False)


def ready(worker: int) -> msg.WorkerReady:
    return msg.WorkerReady(worker, 0, (), (), False, False, "0", 0.0)


@pytest.fixture
def choice() -> SpareChoice:
    """Of a job that has lost a process of node-1: spare 8 is on node-0 and spare 9 on node-1."""
    settings = dataclasses.replace(SETTINGS, world_size=2, num_spares=2, ranks_per_node=1)
    nodes = tuple(NodeLayout(f"node-{number}", 2, f"rack-{number}") for number in range(2))
    world = World(ClusterLayout(nodes, ("0", "0"), settings), seed=0)
    for number, node in ((8, "node-0"), (9, "node-1")):
        world.add_process(world.nodes[node], Spawn(number, None, 1, None, 0))
    return SpareChoice(world)


def lives_through(choice: SpareChoice, *reports: msg.Report, given: int | None = None) -> None:
    orders = () if given is None else (("node-0", msg.Assign(given, 2, 0, 0, 1, None, ()), "takes rank 0"),)
    entry = JournalEntry(3.0, ReportsReceived("node-1", 1, reports), orders=orders)
    choice.check(choice.given(entry), LOSS)


def test_a_nearer_spare_that_was_known_before_is_to_be_taken(choice: SpareChoice) -> None:
    for number in (8, 9):
        choice.heard((ready(number),))
        lives_through(choice, ready(number))
    choice.heard((STOPPED,))
    with pytest.raises(ViolationError) as raised:
        lives_through(choice, STOPPED, given=8)
    assert raised.value.check is Check.SPARE_CHOICE


def test_a_later_report_of_the_same_packet_is_not_known_yet(choice: SpareChoice) -> None:
    """They come together where the packet with the first was lost."""
    choice.heard((ready(8),))
    lives_through(choice, ready(8))
    choice.heard((STOPPED, ready(9)))
    lives_through(choice, STOPPED, ready(9), given=8)


def test_what_became_known_so_counts_at_the_next_choice(choice: SpareChoice) -> None:
    choice.heard((ready(8),))
    lives_through(choice, ready(8))
    choice.heard((STOPPED, ready(9)))
    lives_through(choice, STOPPED, ready(9))
    with pytest.raises(ViolationError):
        lives_through(choice, STOPPED, given=8)


def test_the_first_report_of_a_packet_is_known_at_all_others(choice: SpareChoice) -> None:
    choice.heard((ready(8),))
    lives_through(choice, ready(8))
    choice.heard((ready(9), STOPPED))
    with pytest.raises(ViolationError):
        lives_through(choice, ready(9), STOPPED, given=8)
