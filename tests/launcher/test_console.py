"""What the console of a job shows of texts that nodes and scripts have sent."""

import io

import pytest
from rich.console import Console
from tests.protocol.simulated_job import SimulatedJob

from keepstep.cli.terminal.screen import _flat
from keepstep.launcher.cluster.node import _tell_trouble
from keepstep.launcher.cluster.service import Refusals
from keepstep.launcher.console import UNPROTECTED_S, _news, _print_news, closing_text
from keepstep.protocol.messages import Cause, WorkerJoined
from keepstep.protocol.recovery.end.verdicts import NOT_PROTECTED
from keepstep.protocol.recovery.records import Failure, RecoveryRecord
from keepstep.trace.timeline.describe import ranks_lost, recovery_s
from keepstep.trace.weights.publications import Publication, describe_publication, publication_text

SENT = "node a left: \x1b]0;title\x07\x9b2J \u202e[bold] caf\u00e9\tand\nmore"
SHOWN = "node a left: \\x1b]0;title\\x07\\x9b2J \\u202e[bold] caf\u00e9"


def test_a_terminal_finds_nothing_to_obey_in_them() -> None:
    file = io.StringIO()
    _print_news(Console(file=file, soft_wrap=True), iter([SENT, None]))
    assert file.getvalue().expandtabs() == f"keepstep: {SHOWN}\tand\nmore\n".expandtabs()
    assert _flat(SENT) == f"{SHOWN} and more"


def test_nor_in_what_is_said_of_connections_and_weights(capsys: pytest.CaptureFixture[str]) -> None:
    Refusals().tell("10.0.0.1:5", SENT)
    _tell_trouble(SENT, was_connected=True)
    _tell_trouble(SENT, was_connected=False)
    lines = f"{SHOWN}\tand\nmore\n"
    assert capsys.readouterr().err == (
        f"keepstep: refused 10.0.0.1:5: {lines}keepstep: no connection to the controller, training continues: {lines}"
        f"keepstep: no connection to a controller yet: {lines}"
    )
    assert publication_text(describe_publication(Publication(SENT), 0.0)).startswith(f"weights in {SHOWN}\tand")


@pytest.mark.parametrize(
    ("steps", "ranks_lost", "recovery_s", "text"),
    [
        (60, 1, 0.1234, "60 steps, 1 rank lost, recovered in 0.1 s"),
        (12000, 0, 0.0, "12,000 steps, no rank lost"),
        (1, 2, 3.0, "1 step, 2 ranks lost, recovered in 3.0 s"),
        (60, 0, 0.5, "60 steps, no rank lost, recovered in 0.5 s"),  # a collective failed
    ],
)
def test_what_a_job_has_done(steps: int, ranks_lost: int, recovery_s: float, text: str) -> None:
    assert closing_text({"steps": steps, "ranks_lost": ranks_lost, "recovery_s": recovery_s}) == text


def test_an_interrupted_recovery_is_part_of_the_next_one() -> None:
    def lost(rank: int, cause: Cause, since_s: float) -> list[Failure]:
        return [Failure(rank, cause, "", None, None, since_s)]

    records = [
        RecoveryRecord(2, "", "", 11.0, lost(0, Cause.SIGNAL, 10.0), resumed_s=11.5),
        RecoveryRecord(3, "", "", 21.0, lost(1, Cause.HANG, 20.0), superseded=True),
        RecoveryRecord(4, "", "", 22.0, lost(2, Cause.MOVED, 22.0), resumed_s=23.0),
        RecoveryRecord(5, "", "", 30.0, lost(2, Cause.EXIT, 30.0)),  # no step came after it
    ]
    assert (ranks_lost(records), recovery_s(records)) == (3, 4.5)


@pytest.mark.parametrize("is_protected", [True, False])
def test_scripts_have_half_a_minute_from_their_own_start_to_call_init(is_protected: bool) -> None:
    """The job may have waited for hours until its nodes had joined."""
    job, clock_s = SimulatedJob(world_size=2, num_spares=0), [1000.0]
    news = _news(job.machine, lambda: clock_s[0])
    assert next(news) is None
    clock_s[0] += 3600.0
    job.say(job.reports["agent", "node-a"].popleft())
    assert (job.machine.roster.num_holders, next(news)) == (2, None)
    clock_s[0] += UNPROTECTED_S + 1.0
    assert next(news) is None, "the ranks' processes have not started"
    for worker in (0, 1):
        job.say(job.reports[worker].popleft())
    assert next(news) is None
    if is_protected:
        job.say(WorkerJoined(0, 4000))
    clock_s[0] += UNPROTECTED_S - 1.0
    assert next(news) is None
    clock_s[0] += 2.0
    assert [next(news), next(news)] == ([None, None] if is_protected else [NOT_PROTECTED, None])


def test_a_node_that_is_lost_and_comes_back_has_a_line_for_each() -> None:
    job = SimulatedJob(world_size=2, num_spares=1, nodes={"a": 2, "b": 1}, ranks_per_node=2).settle()
    news = _news(job.machine)
    assert next(news) is None
    job.lose_node("b")
    job.settle()
    assert [next(news), next(news)] == ["node b lost: not heard of", None]
    job.offer("b", 1)
    job.settle()
    assert [next(news), next(news)] == ["node b has joined again, with room for 1 workers", None]
