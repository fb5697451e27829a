"""A simulated machine does what a real agent does with orders for its processes."""

import dataclasses

from keepstep.protocol import messages as msg
from keepstep.sim.cluster.control.network import CONTROLLER
from keepstep.sim.cluster.layout import SETTINGS, ClusterLayout, NodeLayout
from keepstep.sim.world import World


def test_an_order_for_a_process_that_is_being_started_waits_for_it() -> None:
    """The two come in one packet where the first of them was lost. A rank that never hears of a stop never answers."""
    settings = dataclasses.replace(SETTINGS, world_size=1, ranks_per_node=1)
    world = World(ClusterLayout((NodeLayout("node-0", 1, "rack"),), ("0",), settings), seed=0)
    world.freeze(CONTROLLER)
    node = world.nodes["node-0"]
    node.boot()
    orders = (msg.StartWorker(0, 0, 0, 0, 1, "the job starts"), msg.Stop(2, "rank 1 lost", None))
    node.hear(msg.Packet("node-0", 1, 0, 0, orders, misses=False))
    assert not world.workers
    while not world.workers or not world.workers[1].machine.owes_safe_point:
        event = world.schedule.next()
        assert event is not None
        assert world.schedule.now_s < 1.0, "the stop has not come to the process"
        world.happen(event)
