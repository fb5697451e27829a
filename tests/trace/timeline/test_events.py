"""What log, page and terminal are told of an entry of the journal."""

import pytest
from tests.protocol.simulated_job import SimulatedJob

from keepstep.protocol import messages as msg
from keepstep.protocol.controller import DrainAsked, Event, JournalEntry, ReportsReceived
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import RecoveryMachine, RecoverySettings
from keepstep.protocol.recovery.records import RecoveryRecord
from keepstep.trace.timeline.events import Teller, recovery_text
from keepstep.trace.timeline.scene import is_over


def told(event: Event, *orders: tuple[msg.AgentOrder, str]) -> list[tuple[str, str, str]]:
    entry = JournalEntry(1.0, event, "training", 1, tuple((None, order, reason) for order, reason in orders))
    events = Teller(RecoveryMachine(RecoverySettings(2, 0))).tell(entry)
    return [(event.kind, event.level, event.text) for event in events]


def test_the_beginning_of_a_drain_is_reported() -> None:
    assert told(DrainAsked("ended by SIGTERM"), (msg.Hold(1), "ended by SIGTERM")) == [
        ("drain begun", "warning", "ended by SIGTERM")
    ]


@pytest.mark.parametrize(
    ("order", "kind"), [(msg.Drain(1, 7), "drain decided"), (msg.Terminate("SIGTERM"), "scripts told to end")]
)
def test_what_is_decided_in_a_drain_is_reported_with_its_reason(order: msg.AgentOrder, kind: str) -> None:
    answers = ReportsReceived("node-0", 0, (msg.Holding((0, 1), 1, 7),))
    assert told(answers, (order, "SIGTERM: why")) == [(kind, "info", "SIGTERM: why")]


def test_a_node_that_drains_is_reported() -> None:
    assert told(ReportsReceived("node-1", 0, (msg.NodeDraining("node-1", "ended by SIGTERM"),))) == [
        ("node draining", "warning", "node-1: ended by SIGTERM")
    ]


def test_devices_that_were_closed() -> None:
    closed = msg.DevicesClosed("node-1", (1, 3), "GPU 1: Xid 79")
    assert told(ReportsReceived("node-1", 0, (closed,))) == [
        ("devices closed", "warning", "node-1, devices [1, 3]: GPU 1: Xid 79")
    ]


@pytest.mark.parametrize(
    ("actions", "read", "text"),
    [
        ({0: "stay", 1: "restore"}, set(), ""),
        ({0: "stay", 1: "rewind"}, set(), "rank 1 from a snapshot in memory"),
        ({0: "rewind", 1: "rewind"}, set(), "all ranks from snapshots in memory"),
        ({0: "rewind", 1: "rewind", 2: "stay"}, set(), "ranks 0, 1 from snapshots in memory"),
        ({0: "rewind", 1: "rewind"}, {0, 1}, "all ranks from checkpoints"),
        ({0: "rewind", 1: "rewind"}, {1}, "rank 0 from a snapshot in memory, rank 1 from a checkpoint"),
    ],
)
def test_where_states_came_from_is_said(actions: dict[int, str], read: set[int], text: str) -> None:
    record = RecoveryRecord(2, "signal", "rank 1 lost", 10.0, resume_step=4, resumed_s=11.0)
    record.actions, record.read_checkpoint = actions, read
    loaded = f", {text}," if text else ""
    assert recovery_text(record) == f"rank 1 lost; training continues from step 4{loaded} after 1000 ms"


@pytest.fixture
def resumed() -> SimulatedJob:
    """Rank 1 was lost, and training goes on before anyone knows how its process ended."""
    job = SimulatedJob(world_size=2, num_spares=1).bring_all(3, Phase.BACKWARD)
    lost = job.holder(1)
    job.die(lost)
    while not job.machine.records or not job.machine.records[-1].observed_on:
        next(job.moves(training=True))[1]()
    return job


def test_a_recovery_is_over_when_it_is_known_how_the_process_ended(resumed: SimulatedJob) -> None:
    (record,) = resumed.machine.records
    assert record.cause == "process died"
    assert not is_over(resumed.machine, record)
    number = next(each.worker for each in resumed.machine.roster.workers.values() if each.rank == 1 and each.lost)
    resumed.say(msg.WorkerEnded(number, msg.Cause.SIGNAL, "killed by SIGKILL"))
    assert (record.cause, record.failures[0].cause) == ("signal", "signal")
    assert is_over(resumed.machine, record)


def test_a_recovery_is_over_when_nobody_can_tell_any_more_how_the_process_ended(resumed: SimulatedJob) -> None:
    (record,) = resumed.machine.records
    resumed.machine.node_lost("another", "node another lost", resumed.now_s, resumed.now_s)
    assert record.cause == "process died"
    assert is_over(resumed.machine, record)
