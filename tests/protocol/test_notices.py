"""What the user is told of failures that end in no recovery: in the start, and of spares."""

from tests.protocol.simulated_job import SimulatedJob

from keepstep.protocol.messages import Cause, StartWorker, WorkerJoined, WorkerLost, WorkerReady
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import Stage

HANG = "no progress before the first step for 1801.0 s (allowed 1800.0 s), and it waits for no other rank"


def starting(**settings: object) -> SimulatedJob:
    """A job of which rank 1 does not come to its first step, in any generation."""
    job = SimulatedJob(world_size=2, num_spares=0, **settings)
    job.join()
    for number in range(1, 60, 2):
        job._withheld.add((number, WorkerReady))
    return job.settle()


def lose(job: SimulatedJob, rank: int, cause: Cause, detail: str, *, gone: bool = False) -> None:
    worker = job.holder(rank)
    if gone:
        job._exit(worker)
    job.say(WorkerLost(worker.number, cause, detail, gone, None, job.now_s))
    job.settle()


def test_a_rank_that_is_fenced_in_its_start_is_told_at_once_with_the_remedy() -> None:
    job = starting()
    lose(job, 1, Cause.HANG, HANG)
    assert job.where == (Stage.STARTING, 2)
    assert job.machine.notices == [
        f"rank 1 lost: {HANG}; this was before the first step, so all ranks start again (failure 1 in a row without a "
        "completed step; 9 end the job). What takes so long has to be prepared before the job"
    ]


def test_each_round_of_starts_is_told() -> None:
    job = starting()
    for _ in range(3):
        lose(job, 1, Cause.SIGNAL, "killed by SIGKILL", gone=True)
    assert [text.partition("(")[2][:9] for text in job.machine.notices] == ["failure 1", "failure 2", "failure 3"]
    assert not any("prepared" in text for text in job.machine.notices)
    assert [record.superseded for record in job.machine.records] == [True, True, False]


def test_both_ranks_that_are_lost_in_one_round_are_named() -> None:
    job = starting()
    first = job.holder(0)
    lost = WorkerLost(first.number, Cause.SIGNAL, "killed by SIGSEGV", True, None, job.now_s)
    job._exit(first)
    job.machine.receive(first.node, lost, job.now_s)
    lose(job, 1, Cause.SIGNAL, "killed by SIGKILL", gone=True)
    assert len(job.machine.notices) == 1
    assert job.machine.notices[0].startswith("rank 0 lost: killed by SIGSEGV; rank 1 lost: killed by SIGKILL; this was")


def test_a_restart_from_a_checkpoint_is_told_when_it_begins() -> None:
    job = SimulatedJob(world_size=2, num_spares=0, checkpoint_every=2).bring_all(4, Phase.BACKWARD)
    for rank in range(2):
        job.kill(job.holder(rank))
    while job.machine.stage is not Stage.STARTING:
        next(job.moves(training=False))[1]()
    (text,) = job.machine.notices
    assert text.startswith(
        "ranks 0 and 1 lost: killed by SIGKILL; no live rank holds the state, so all ranks start again from the newest "
        "checkpoint (failure 1 in a row"
    )


def test_a_restart_that_has_waited_for_a_node_is_told() -> None:
    job = starting(nodes={"a": 1, "b": 1}, ranks_per_node=1)
    job.lose_node("b")
    job.settle()
    assert job.machine.notices == []
    job.offer("c", 1)
    job.settle()
    assert [text.partition(" (")[0] for text in job.machine.notices] == [
        "rank 1 lost: node b lost: not heard of; this was before the first step, so all ranks start again"
    ]


# ---- spares ---------------------------------------------------------------------------------------------------------


def fail_spare(job: SimulatedJob) -> None:
    """The newest spare calls init() and raises before its first step."""
    number = max(job.workers)
    job.say(WorkerJoined(number, 4000 + number))
    job._exit(job.workers[number])
    job.say(WorkerLost(number, Cause.EXIT, "exit code 1", True, None, job.now_s))


def test_spares_that_keep_failing_are_told_once_they_are_given_up() -> None:
    job = SimulatedJob(world_size=2, num_spares=1)
    job._withheld |= {(number, WorkerJoined) for number in range(2, 20)}
    job.settle()
    for _ in range(4):
        assert job.machine.notices == []
        fail_spare(job)
    assert len(job.workers) == 2
    assert job.machine.notices == [
        "no spare can be started: 4 in a row have ended before their first step, the last one with: exit code 1; the "
        "next loss will wait for a fresh process"
    ]
    num_started = len(job.orders(StartWorker))
    job.bring_all(3, Phase.BACKWARD)
    job.kill(job.holder(1))
    job.settle()
    assert len(job.orders(StartWorker)) == num_started + 1


def test_a_budget_that_allows_no_further_spare_is_told_once() -> None:
    job = SimulatedJob(world_size=2, num_spares=2, max_restarts=0).settle()
    for step in range(2):
        job.bring_all(step, Phase.UPDATED)
        job.kill(job.holder(1))
        job.settle()
    assert job.machine.notices == [
        "no further spare is started: --max-restarts is used up; 1 is left, and the loss after it ends the job"
    ]
