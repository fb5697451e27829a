"""Simulated relays: what the controller believes of connections comes to be what is so."""

import dataclasses

from keepstep.sim.cluster.control.network import CONTROLLER
from keepstep.sim.cluster.layout import SETTINGS, ClusterLayout, NodeLayout
from keepstep.sim.world import World


def pass_time(world: World, until_s: float) -> None:
    while world.schedule.now_s < until_s and (event := world.schedule.next()):
        world.happen(event)


def test_the_late_word_of_a_relay_that_a_node_has_left_loses_no_node() -> None:
    """It waits at the relay while the controller is held up, and comes behind that of the relay where the node is."""
    settings = dataclasses.replace(SETTINGS, world_size=2, ranks_per_node=1)
    nodes = tuple(NodeLayout(f"node-{number}", 1, "rack") for number in range(2))
    world = World(ClusterLayout(nodes, ("0", "0"), settings, num_relays=2, num_steps=40), seed=0)
    world.boot()
    pass_time(world, 4.0)
    assert world.relays.routes == {"node-0": 0, "node-1": 1}
    world.freeze(CONTROLLER)
    pass_time(world, 5.0)
    world.relays.crash(1)
    pass_time(world, 5.4)
    assert world.relays.routes == {"node-0": 0, "node-1": 0}
    pass_time(world, 5.6)
    world.network.break_connection("node-1")
    assert world.relays.routes == {"node-0": 0, "node-1": 1}
    pass_time(world, 5.7)
    world.thaw(CONTROLLER)
    pass_time(world, 6.5)
    assert world.controller._routes == world.relays.routes
