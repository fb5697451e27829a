"""What happens once per job: the controller grants it, and remembers that it has."""

from tests.protocol.simulated_job import SimulatedJob

from keepstep.protocol.messages import OnceAnswered, OnceRequested
from keepstep.protocol.phases import Phase


def training() -> SimulatedJob:
    """Three ranks, workers 0 to 2, and a spare, worker 3."""
    return SimulatedJob(world_size=3, num_spares=1, ranks_per_node=3).bring_all(3, Phase.BACKWARD)


def ask(job: SimulatedJob, worker: int, operation: str, request: int = 0, name: str = "log") -> dict[int, bool]:
    """A worker says something; returns who is answered by it, and what."""
    effects = job.say(OnceRequested(worker, request, operation, name, b""))
    answers = [effect.order for effect in effects]
    return {order.worker: order.is_mine for order in answers if isinstance(order, OnceAnswered)}


def test_a_claim_is_granted_to_the_first_and_never_again() -> None:
    job = training()
    assert ask(job, 3, "claim") == {3: True}
    assert ask(job, 0, "claim") == {0: False}
    assert ask(job, 3, "claim", request=1) == {3: False}
    assert ask(job, 0, "claim", name="other") == {0: True}


def test_a_claim_outlives_its_worker_and_the_controller() -> None:
    job = training()
    assert ask(job, 1, "claim") == {1: True}
    job.kill(job.holder(1))
    job.settle()
    job.restart_controller()
    assert ask(job, 0, "claim") == {0: False}
    assert ask(job, 2, "hold") == {2: False}


def test_what_is_held_is_waited_for() -> None:
    job = training()
    assert ask(job, 0, "hold") == {0: True}
    assert ask(job, 1, "hold", request=7) == {}
    assert ask(job, 2, "hold") == {}
    assert ask(job, 2, "done") == {}  # it does not hold it
    assert ask(job, 0, "done") == {1: False, 2: False}
    assert ask(job, 3, "hold") == {3: False}
    assert ask(job, 3, "claim") == {3: False}


def test_who_gives_up_lets_the_next_one_try() -> None:
    job = training()
    ask(job, 0, "hold")
    ask(job, 1, "hold")
    assert ask(job, 0, "give_up") == {1: True}
    assert ask(job, 0, "hold") == {}
    assert ask(job, 1, "give_up") == {0: True}
    assert ask(job, 0, "give_up") == {}
    assert ask(job, 2, "hold") == {2: True}


def test_the_next_one_begins_when_the_process_of_the_first_is_gone() -> None:
    job = training()
    ask(job, 1, "hold")
    ask(job, 2, "hold")
    ask(job, 0, "hold")
    job.kill(job.holder(1))
    job.settle()
    granted = [order for order in job.orders(OnceAnswered) if isinstance(order, OnceAnswered) and order.is_mine]
    assert [order.worker for order in granted] == [1, 2]
    assert ask(job, 2, "done") == {0: False}


# ---- values ---------------------------------------------------------------------------------------------------------


def propose(job: SimulatedJob, worker: int, value: bytes, name: str = "folder") -> tuple[bool, bytes]:
    """A worker proposes a value; returns what it is answered."""
    (answer,) = (effect.order for effect in job.say(OnceRequested(worker, 0, "agree", name, value)))
    assert isinstance(answer, OnceAnswered)
    return answer.is_mine, answer.value


def test_the_first_proposal_is_the_answer_to_all() -> None:
    job = training()
    assert propose(job, 3, b"") == (True, b"")
    assert propose(job, 0, b"a") == (False, b"")
    assert propose(job, 0, b"a", name="other") == (True, b"a")
    assert ask(job, 0, "claim", name="folder") == {0: True}


def test_what_is_agreed_outlives_all_ranks_and_the_controller() -> None:
    job = SimulatedJob(world_size=2, num_spares=0, checkpoint_every=2).bring_all(4, Phase.BACKWARD)
    assert propose(job, 1, b"first") == (True, b"first")
    for rank in range(2):
        job.kill(job.holder(rank))
    job.settle()
    job.restart_controller()
    assert propose(job, job.holder(0).number, b"later") == (False, b"first")
