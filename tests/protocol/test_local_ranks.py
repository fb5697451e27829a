"""LOCAL_RANK: one number for each rank of a node, the lost rank's for its replacement, and inside of scripts' lists."""

from tests.protocol.simulated_job import SimulatedJob

from keepstep.protocol.messages import Assign, StartWorker
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery.placement.topology import choose_local_rank


def started(job: SimulatedJob) -> list[tuple[int | None, int]]:
    """Local rank and local world size that each worker's process was started with."""
    orders = [order for order in job.orders(StartWorker) if isinstance(order, StartWorker)]
    return [(order.local_rank, order.local_world_size) for order in orders]


def assigned(job: SimulatedJob) -> dict[int, tuple[int, int]]:
    """Rank -> local rank and local world size that its last spare was given."""
    orders = [order for order in job.orders(Assign) if isinstance(order, Assign) and order.generation > 1]
    return {order.rank: (order.local_rank, order.local_world_size) for order in orders}


def test_the_smallest_that_is_free_unless_it_was_here_before() -> None:
    assert choose_local_rank(None, set(), 2) == 0
    assert choose_local_rank(None, {0, 2}, 4) == 1
    assert choose_local_rank(2, {0, 1, 3}, 4) == 2
    assert choose_local_rank(2, {0, 2}, 4) == 1  # another rank has taken it meanwhile
    assert choose_local_rank(3, {0}, 2) == 1  # from a time when the node held more ranks than belong on it


def test_ranks_are_numbered_on_each_node() -> None:
    job = SimulatedJob(world_size=4, num_spares=2, nodes={"a": 3, "b": 3}, ranks_per_node=2).settle()
    assert started(job) == [(0, 2), (1, 2), (0, 2), (1, 2), (None, 2), (None, 2)]


def test_a_replacement_on_the_same_node_takes_the_lost_ranks_number() -> None:
    job = SimulatedJob(world_size=3, num_spares=1, ranks_per_node=3).bring_all(3, Phase.BACKWARD)
    job.kill(job.holder(1))
    job.settle()
    assert assigned(job) == {1: (1, 3)}


def test_a_rank_that_stays_on_its_node_comes_before_one_that_moves_there() -> None:
    """Rank 1 moves to the node on which rank 2 is lost as well: its number must still be there for its replacement."""
    job = SimulatedJob(world_size=4, num_spares=3, nodes={"a": 2, "b": 5}, ranks_per_node=2).bring_all(
        3, Phase.BACKWARD
    )
    job.kill(job.holder(1))
    job.kill(job.holder(2))
    job.settle()
    assert assigned(job) == {1: (2, 3), 2: (0, 2)}
    job.finish_well()


def test_ranks_that_share_a_node_are_counted_with_it() -> None:
    job = SimulatedJob(world_size=4, num_spares=0, nodes={"a": 2}, most_per_node=4, ranks_per_node=2).join()
    job.deadline()
    assert started(job) == [(0, 4), (1, 4), (2, 4), (3, 4)]
