"""A controller with relays: they die in the middle of a job, and the job loses nothing by that."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from tests.launcher.test_succession import Succession, succession, undisturbed
from tests.support.nodes import await_output

from keepstep.protocol.controller import AnswersReceived, LeaseExpired, ReportsReceived
from keepstep.protocol.messages import NodeJoined
from keepstep.trace.record import journal, runfolder
from keepstep.trace.timeline.run import opened
from keepstep.transports.relay.connections import PROGRAM

__all__ = ["succession", "undisturbed"]


def relays_of(controller: int) -> list[int]:
    """The process ids of a controller's relays."""
    return [child.pid for child in psutil.Process(controller).children() if PROGRAM in child.cmdline()]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that is dead may wait for its parent."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def begin(succession: Succession, num_relays: int) -> int:
    """A job on two nodes in the middle of its training; returns the process id of its controller."""
    succession.num_relays = num_relays
    succession.begin()
    return succession.nodes.started["first"].pid


@pytest.mark.parametrize("when", ["before", "with"])
def test_a_relay_is_killed_and_no_rank_is_lost_by_that(succession: Succession, undisturbed: str, when: str) -> None:
    """Before a rank is lost, and in the middle of its recovery: with a single relay no agent has a connection then."""
    controller = begin(succession, 1)
    (relay,) = relays_of(controller)
    if when == "with":
        succession.kill_rank(1)
    os.kill(relay, signal.SIGKILL)
    await_output(succession.nodes, "first", "relay 0 has ended (killed by SIGKILL)")
    if when == "before":
        succession.kill_rank(1)
    succession.go_on()
    succession.wait_for_the_end("first", "node-a", "node-b")
    assert succession.digests() == [undisturbed] * 2
    with opened(succession.run_dir) as run:
        (record,) = run.job.records
        assert [failure.rank for failure in record.failures] == [1]
    events = [entry.event for entry in journal.read(succession.run_dir / runfolder.JOURNAL)]
    assert not any(isinstance(event, LeaseExpired) for event in events)
    reports = [report for event in events if isinstance(event, ReportsReceived) for report in event.reports]
    assert sum(isinstance(report, NodeJoined) for report in reports) == 2
    assert not is_alive(relay)


def test_relays_end_with_their_controller(succession: Succession) -> None:
    controller = begin(succession, 2)
    relays = relays_of(controller)
    assert len(relays) == 2
    os.kill(controller, signal.SIGKILL)
    await_output(succession.nodes, "second", "controller listens")
    assert not any(is_alive(relay) for relay in relays)
    events = [entry.event for entry in journal.read(succession.run_dir / runfolder.JOURNAL)]
    assert any(isinstance(event, AnswersReceived) for event in events)
