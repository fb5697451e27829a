"""What the oracle says of groups that stay: it judges by what it has seen on their connections, and reads no claim."""

from __future__ import annotations

import dataclasses

import pytest

from keepstep.protocol.node.effects import Spawn
from keepstep.sim.cluster.collectives import WORLD
from keepstep.sim.cluster.groups.registry import SimulatedGroup
from keepstep.sim.cluster.layout import SETTINGS, ClusterLayout, NodeLayout
from keepstep.sim.cluster.process import SimulatedProcess
from keepstep.sim.oracle.checks import Check, ViolationError
from keepstep.sim.oracle.groups import GroupWatch
from keepstep.sim.run import case_of, run
from keepstep.sim.world import World

GROUP = "0-1.0"
OPERATION = (1, 7, GROUP)
"""The seventh since its connections were made in cohort 1."""


@pytest.fixture
def world() -> World:
    """Ranks 0 to 3 are processes 1 to 4, and there is a fifth."""
    settings = dataclasses.replace(SETTINGS, world_size=4, num_spares=1, ranks_per_node=4)
    layout = ClusterLayout((NodeLayout("node-0", 5, "rack"),), ("0", "1") * 2, settings, has_mesh=True)
    world = World(layout, seed=0)
    for number in range(5):
        world.add_process(world.nodes["node-0"], Spawn(number, number if number < 4 else None, 1, None, 0))
    return world


@pytest.fixture
def watch(world: World) -> GroupWatch:
    """All are connected in cohort 1, and operations have ended there."""
    watch = GroupWatch(world)
    watch.met(1, members(world))
    for process in (1, 2):
        watch.connects(process, GROUP, 1, stays=False)
    for _member in range(2):
        watch.began(GROUP, (1, 6, GROUP), 2)
    for _member in range(2):
        watch.ended(GROUP, (1, 6, GROUP))
    return watch


def members(world: World, rank_1: int = 2) -> dict[int, SimulatedProcess]:
    return {0: world.workers[1], 1: world.workers[rank_1], 2: world.workers[3], 3: world.workers[4]}


def test_a_group_with_nothing_under_way_stays(world: World, watch: GroupWatch) -> None:
    watch.met(2, members(world))
    for process in (1, 2):
        watch.connects(process, GROUP, 2, stays=True)
    assert watch.num_kept == 1


def test_a_group_that_could_have_stayed_is_not_rebuilt(world: World, watch: GroupWatch) -> None:
    watch.met(2, members(world))
    with pytest.raises(ViolationError, match="which could have stayed") as raised:
        watch.connects(1, GROUP, 2, stays=False)
    assert raised.value.check is Check.GROUPS


def test_a_member_that_has_left_an_operation_is_not_all_of_them(world: World, watch: GroupWatch) -> None:
    watch.began(GROUP, OPERATION, 2)
    watch.ended(GROUP, OPERATION)
    watch.met(2, members(world))
    with pytest.raises(ViolationError, match="are under way"):
        watch.connects(1, GROUP, 2, stays=True)


@pytest.mark.parametrize("process", [1, 2])
def test_connections_that_broke_on_one_member_stay_on_none(world: World, watch: GroupWatch, process: int) -> None:
    watch.cut(GROUP, 1, 2)
    watch.met(2, members(world))
    with pytest.raises(ViolationError, match=r"processes \[2\] have broken"):
        watch.connects(process, GROUP, 2, stays=True)


def test_a_process_that_has_ended_has_no_connections(world: World, watch: GroupWatch) -> None:
    watch.died(2)
    watch.met(2, members(world))
    with pytest.raises(ViolationError, match=r"processes \[2\] have broken"):
        watch.connects(1, GROUP, 2, stays=True)


def test_a_group_with_a_new_member_does_not_stay(world: World, watch: GroupWatch) -> None:
    watch.met(2, members(world, rank_1=5))
    with pytest.raises(ViolationError, match="some were never connected"):
        watch.connects(1, GROUP, 2, stays=True)


def test_connections_of_two_cohorts_are_not_the_same(world: World, watch: GroupWatch) -> None:
    """One member has reconnected, and the other one has fallen out before."""
    watch.cut(GROUP, 1, 1)
    watch.met(2, members(world))
    watch.connects(1, GROUP, 2, stays=False)
    watch.met(3, members(world))
    with pytest.raises(ViolationError, match=r"connections of cohorts \[2, 1\]"):
        watch.connects(2, GROUP, 3, stays=True)


def test_what_breaks_when_all_have_come_is_too_late_for_this_recovery(world: World, watch: GroupWatch) -> None:
    watch.met(2, members(world))
    watch.connects(1, GROUP, 2, stays=True)
    watch.died(1)
    watch.connects(2, GROUP, 2, stays=True)
    watch.met(3, members(world, rank_1=2))
    with pytest.raises(ViolationError, match=r"processes \[1\] have broken"):
        watch.connects(2, GROUP, 3, stays=True)


def test_members_do_the_same(world: World, watch: GroupWatch) -> None:
    watch.met(2, members(world))
    watch.connects(1, GROUP, 2, stays=True)
    with pytest.raises(ViolationError, match=r"process 2 rebuilds .* another member does not"):
        watch.connects(2, GROUP, 2, stays=False)


def connected(world: World) -> GroupWatch:
    """All four are connected in cohort 1."""
    watch = GroupWatch(world)
    watch.met(1, members(world))
    for process in (1, 2, 3, 4):
        watch.connects(process, WORLD, 1, stays=False)
    return watch


def test_the_world_stays_where_all_have_ended_what_they_began(world: World) -> None:
    watch = connected(world)
    for process in (1, 2, 3, 4):
        watch.began(WORLD, (1, 1, WORLD), 4)
        watch.meets(process, (1, 1, WORLD), (1, 5, "gradients"))
    for _process in (1, 2, 3, 4):
        watch.ended(WORLD, (1, 1, WORLD))
    watch.met(2, members(world))
    for process in (1, 2, 3, 4):
        watch.connects(process, WORLD, 2, stays=True)
    assert (watch.num_kept, watch.num_worlds_kept) == (1, 1)


def test_the_world_does_not_stay_where_a_receiver_lacks_what_its_source_has_sent(world: World) -> None:
    watch = connected(world)
    watch.began(WORLD, (1, 1, "transfer"), 2)
    watch.ended(WORLD, (1, 1, "transfer"))
    watch.met(2, members(world))
    with pytest.raises(ViolationError, match="are under way"):
        watch.connects(1, WORLD, 2, stays=True)


def test_collectives_of_two_attempts_do_not_meet(world: World) -> None:
    watch = connected(world)
    watch.meets(1, (1, 4, WORLD), (2, 5, "gradients"))
    with pytest.raises(ViolationError, match=r"which are in \(2, 5, 'gradients'\), and is in \(2, 5, 'barrier'\)"):
        watch.meets(2, (1, 4, WORLD), (2, 5, "barrier"))


def test_what_was_given_in_another_attempt_is_not_received(watch: GroupWatch) -> None:
    now, before = 2 << 32 | 5, 1 << 32 | 5
    watch.received(1, OPERATION, (now, now), now)
    with pytest.raises(ViolationError, match=r"given in cohorts and steps \[\(1, 5\), \(2, 5\)\], and is in \(2, 5\)"):
        watch.received(1, OPERATION, (before, now), now)


def test_an_operation_of_another_attempt_shows_in_what_a_rank_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the oracle does not look at what stays: what was left under way comes to the wrong operation."""
    monkeypatch.setattr(GroupWatch, "_why_no_longer", lambda self, group, processes: None)
    monkeypatch.setattr(GroupWatch, "connects", lambda *_, stays: None)
    monkeypatch.setattr("keepstep.sim.cluster.groups.registry.why_rebuilt", lambda claims: None)

    def close(self: SimulatedGroup) -> None:
        self.is_open, self.under_way = False, None

    monkeypatch.setattr(SimulatedGroup, "close", close)
    outcomes = (run(case) for case in map(case_of, range(1000)) if case.layout.has_mesh)
    assert any(each.check is Check.GROUPS and "receives in operation" in each.detail for each in outcomes)
