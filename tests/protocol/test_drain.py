"""The drain of a job and those of its nodes, where both come at once."""

from tests.protocol.simulated_job import SimulatedJob

from keepstep.protocol.messages import NodeDraining
from keepstep.protocol.recovery import Stage


def test_the_nodes_of_a_job_that_drains_keep_their_ranks() -> None:
    """A scheduler that ends a job signals all of its nodes."""
    job = SimulatedJob(world_size=2, num_spares=1, nodes={"node-a": 1, "node-b": 1, "node-c": 1}).settle()
    assert [spare.node for spare in job.machine.roster.spares() if spare.ready is not None] == ["node-c"]
    job.machine.drain_asked("SIGTERM", job.now_s)
    for node in ("node-b", "node-a"):
        assert job.machine.receive(node, NodeDraining(node, "SIGTERM"), job.now_s) == []
    assert job.machine.stage is Stage.TRAINING


def test_the_only_node_that_drains_gives_its_rank_away() -> None:
    job = SimulatedJob(world_size=2, num_spares=1, nodes={"node-a": 1, "node-b": 1, "node-c": 1}).settle()
    job.machine.receive("node-b", NodeDraining("node-b", "SIGTERM"), job.now_s)
    assert job.machine.stage is Stage.STOPPING
