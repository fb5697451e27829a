"""A script that never calls `keepstep.init()`: a job like under torchrun, and nothing is done in its midst."""

from tests.protocol.simulated_job import SimulatedJob

from keepstep.protocol.messages import Cause, EndJob, StartWorker, Stop, Tag, WorkerDone, WorkerJoined, WorkerLost
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import Stage

NOT_PROTECTED = "no rank has called keepstep.init(), so the job is not protected: a lost rank ends it"


def unprotected(num_nodes: int = 1) -> SimulatedJob:
    """Two ranks on each node whose scripts run, and say nothing."""
    nodes = dict.fromkeys("ab"[:num_nodes], 3)
    job = SimulatedJob(world_size=2 * num_nodes, num_spares=1, nodes=nodes, ranks_per_node=2)
    for source in [source for source in job.reports if isinstance(source, tuple) and source[0] == "agent"]:
        while job.reports[source]:
            job.say(job.reports[source].popleft())
    return job


def end_of(job: SimulatedJob) -> tuple[int, str] | None:
    ended = job.machine.ended
    return None if ended is None else (ended.exit_code, ended.reason)


def test_no_spare_is_started_before_a_rank_has_called_init() -> None:
    job = unprotected()
    assert [order.worker for order in job.orders(StartWorker) if isinstance(order, StartWorker)] == [0, 1]
    job.say(WorkerJoined(1, 4001))
    job.say(WorkerJoined(0, 4000))
    assert [order.worker for order in job.orders(StartWorker) if isinstance(order, StartWorker)] == [0, 1, 2]


def test_a_node_that_joins_meanwhile_gets_no_spare() -> None:
    job = unprotected()
    job.offer("late", 3)
    while job.reports["agent", "late"]:
        job.say(job.reports["agent", "late"].popleft())
    assert len(job.orders(StartWorker)) == 2


def test_it_may_take_as_long_as_it_likes_until_a_rank_has_called_init() -> None:
    job = unprotected()
    assert job.machine.next_deadline() is None
    job.say(WorkerJoined(0, 4000))
    assert job.machine.next_deadline() == job.now_s + job.machine.settings.deadlines.start_s


def test_any_lost_rank_ends_it_at_once() -> None:
    for cause, detail in ((Cause.EXIT, "exit code 3"), (Cause.SIGNAL, "killed by SIGKILL")):
        job = unprotected()
        job.say(WorkerLost(1, cause, detail, True, Tag(0, -1, Phase.STARTING), job.now_s))
        assert end_of(job) == (1, f"rank 1 ended: {detail}; {NOT_PROTECTED}")
        assert job.orders(Stop) == []
        assert len(job.orders(EndJob)) == 1


def test_a_lost_node_ends_it_at_once() -> None:
    job = unprotected(num_nodes=2)
    job.machine.node_lost("b", "node b lost: no heartbeat for 3 s", job.now_s, job.now_s)
    assert end_of(job) == (1, f"rank 2 ended: node b lost: no heartbeat for 3 s; {NOT_PROTECTED}")


def test_it_ends_well_when_all_scripts_have() -> None:
    job = unprotected()
    job.say(WorkerDone(0, -1))
    assert job.machine.stage is Stage.STARTING
    job.say(WorkerDone(1, -1))
    assert end_of(job) == (0, f"all scripts have ended; {NOT_PROTECTED}")
