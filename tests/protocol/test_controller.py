"""The controller's machine between its nodes: leases, incarnations, what it refuses, a restart from its journal."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Collection
from typing import NoReturn

import msgspec
import pytest
from tests.protocol.toy_cluster import Crashed, ToyCluster

from keepstep.errors import ConfigurationError, RemoteProtocolError
from keepstep.protocol import messages as msg
from keepstep.protocol.controller import (
    LEASE_CHECK_SHARE,
    ControllerMachine,
    DeadlineCame,
    JournalEntry,
    LeaseExpired,
    ReportsReceived,
    Restarted,
)
from keepstep.protocol.deadlines import LEASE_S, Deadlines
from keepstep.protocol.messages import Cause, Packet
from keepstep.protocol.node.agent import HEARTBEAT_S, SOONEST
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import RecoveryMachine, RecoverySettings, Stage
from keepstep.protocol.recovery.orders import Orders
from keepstep.protocol.recovery.suspicion import Left
from keepstep.protocol.waiting.operations import ALL_MEMBERS, Operation, OperationCount, Standing, WaitsFor

ALL_AT_1 = {0: 1, 1: 1, 2: 1}


def where(cluster: ToyCluster) -> tuple[Stage, int]:
    return cluster.controller.job.stage, cluster.controller.job.generation


# ---- A job on several nodes -----------------------------------------------------------------------------------------


def test_a_job_runs_and_ends_on_all_nodes() -> None:
    cluster = ToyCluster().go()
    assert where(cluster) == (Stage.TRAINING, 1)
    assert cluster.steps() == ALL_AT_1
    cluster.finish()
    ended = cluster.controller.job.ended
    assert ended is not None
    assert ended.exit_code == 0, ended.reason
    assert all(node.has_left for node in cluster.nodes.values())


def test_a_lost_rank_is_replaced_on_another_node_and_a_spare_started_where_it_was() -> None:
    cluster = ToyCluster().go().kill_rank(1)
    assert where(cluster) == (Stage.TRAINING, 2)
    assert cluster.holder(1)[0].name == "node-3"
    assert cluster.steps() == {0: 2, 1: 2, 2: 2}
    (spare,) = cluster.nodes["node-1"].workers.values()
    assert spare.rank is None


def test_the_job_waits_for_room() -> None:
    cluster = ToyCluster(world_size=2, num_spares=0)
    cluster.nodes["node-1"].is_cut_off = True
    cluster.go()
    assert not cluster.nodes["node-0"].workers
    cluster.nodes["node-1"].is_cut_off = False
    cluster.wait(HEARTBEAT_S * (1 + SOONEST))
    assert where(cluster) == (Stage.TRAINING, 1)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_job_that_no_node_joins_ends(is_restarted: bool) -> None:
    settings = RecoverySettings(world_size=2, num_spares=0)
    machine = ControllerMachine.from_journal(settings, [], 5.0) if is_restarted else ControllerMachine(settings)
    machine.begin(5.0)
    assert machine.next_deadline() == 5.0 + settings.deadlines.start_s
    machine.tick(4.9 + settings.deadlines.start_s)
    assert machine.job.ended is None
    machine.tick(5.0 + settings.deadlines.start_s)
    assert machine.job.ended is not None
    assert machine.job.ended.reason == "2 ranks were asked for, and the nodes that have joined hold 0"


def test_two_heartbeats_may_be_lost() -> None:
    """However late the third arrives that a network delivers at all within a tenth of a second."""
    assert 3 * HEARTBEAT_S + 0.1 < LEASE_S


# ---- Leases ---------------------------------------------------------------------------------------------------------


def test_a_node_that_is_heard_of_keeps_its_lease() -> None:
    cluster = ToyCluster().go().wait(10 * LEASE_S)
    assert where(cluster) == (Stage.TRAINING, 1)
    assert [entry for entry in cluster.entries() if not isinstance(entry.event, ReportsReceived)] == []


def test_a_silent_node_is_evicted_and_its_rank_is_taken() -> None:
    cluster = ToyCluster().go()
    cluster.nodes["node-1"].is_cut_off = True
    cluster.wait(LEASE_S * 0.8)
    assert where(cluster) == (Stage.TRAINING, 1)
    cluster.wait(LEASE_S * 0.4)
    assert where(cluster) == (Stage.TRAINING, 2)
    (record,) = cluster.controller.job.records
    assert (record.cause, record.detail) == (Cause.NODE, "rank 1 lost: node node-1 lost: no heartbeat for 3 s")
    assert cluster.holder(1)[0].name == "node-3"
    assert cluster.refused == []


def test_of_nodes_that_are_cut_off_together_none_is_evicted() -> None:
    """Found by simulation: their leases end one after the other, and each had a replica on the next one."""
    cluster = ToyCluster().go()
    for name in ("node-0", "node-1", "node-2"):
        cluster.nodes[name].is_cut_off = True
        cluster.wait(HEARTBEAT_S / 2)
    cluster.wait(10 * LEASE_S)
    assert [entry for entry in cluster.entries() if isinstance(entry.event, LeaseExpired)] == []
    for node in cluster.nodes.values():
        node.is_cut_off = False
    cluster.wait(LEASE_S)
    assert where(cluster)[0] is Stage.TRAINING


def test_what_nodes_have_sent_before_the_controller_was_held_up_is_no_sign_of_life() -> None:
    """Found by simulation: a replica had died meanwhile, and its node's last packet lay in the controller's socket."""
    controller = watching("node-0", "node-1")
    controller.tick(100.5)
    controller.receive(Packet("node-1", 1, 1, 0, (), misses=False), 110.0)
    controller.tick(110.0)
    controller.receive(Packet("node-1", 1, 1, 0, (), misses=False), 110.01)
    assert controller._not_heard_since(100.0) == ["node-0", "node-1"]
    controller.receive(Packet("node-1", 1, 1, 0, (), misses=False), 110.5)
    assert controller._not_heard_since(100.0) == ["node-0"]


def test_without_leases_a_node_may_be_silent_for_ever() -> None:
    """As where controller and agent are one process, which may have stood still."""
    cluster = ToyCluster(lease_s=None).go()
    cluster.nodes["node-1"].is_cut_off = True
    assert cluster.controller.next_deadline() is None
    cluster.wait(100.0)
    assert where(cluster) == (Stage.TRAINING, 1)
    cluster.nodes["node-1"].is_cut_off = False
    cluster.wait(2.0).finish()
    assert cluster.controller.job.ended is not None
    assert cluster.controller.job.ended.exit_code == 0


def test_leases_of_a_controller_that_was_paused_are_looked_at_after_what_has_come_meanwhile() -> None:
    cluster = ToyCluster().go()
    cluster.now_s += 100.0
    cluster.go()  # what lay in the sockets
    cluster.controller.tick(cluster.now_s)
    assert where(cluster) == (Stage.TRAINING, 1)


def test_a_controller_that_was_held_up_cannot_tell_who_was_silent_meanwhile() -> None:
    """Their packets may lie in its sockets, or may have been refused by them: a whole lease begins for all."""
    for wakes_with_a_look in (True, False):
        cluster = ToyCluster().go()
        cluster.nodes["node-1"].is_cut_off = True
        cluster.now_s += 10 * LEASE_S
        if wakes_with_a_look:
            cluster.controller.tick(cluster.now_s)
        cluster.go()  # what lay in the sockets; of the silent node there is nothing
        cluster.controller.tick(cluster.now_s)
        assert where(cluster) == (Stage.TRAINING, 1)
        cluster.wait(LEASE_S * 0.8)
        assert where(cluster) == (Stage.TRAINING, 1)
        cluster.wait(LEASE_S * 0.4)
        assert where(cluster) == (Stage.TRAINING, 2)


def watching(*names: str, restarted_s: float | None = None) -> ControllerMachine:
    """A controller that heard of these nodes at second 100, and never again; restarted later, where that is said."""
    controller = ControllerMachine(RecoverySettings(1, 0))
    for name in names:
        controller.receive(Packet(name, 1, 0, 0, (msg.NodeJoined(name, 1, "x", 0, 0, (), 0),), misses=False), 100.0)
    journal = controller.take_entries()
    if restarted_s is not None:
        controller = ControllerMachine.from_journal(controller.job.settings, journal, restarted_s)
        controller.take_entries()
    return controller


def given_up_s(controller: ControllerMachine, *, heard: Collection[str] = (), late_s: float = 0.0) -> float:
    """When it gives a node up, if it looks ``late_s`` after it is due; others are heard of whenever it looks."""
    for _ in range(1000):
        due = controller.next_deadline()
        assert due is not None
        for name in heard:
            controller.receive(Packet(name, 1, 1, 0, (), misses=False), due + late_s)
        controller.tick(due + late_s)
        if any(isinstance(entry.event, LeaseExpired) for entry in controller.take_entries()):
            return due + late_s
    raise AssertionError("no process is ever given up")


def test_leases_are_looked_at_often_and_when_one_runs_out() -> None:
    controller = watching("node-0", "node-1")
    assert controller.next_deadline() == 100.0 + LEASE_S / 4
    controller.receive(Packet("node-1", 1, 1, 0, (), misses=False), 100.1)
    assert given_up_s(controller, heard=["node-0"]) == pytest.approx(100.1 + LEASE_S)


@pytest.mark.parametrize("silent", ["node-0", "node-1"])
def test_the_lease_of_the_node_that_joins_first_is_as_long_as_the_others(silent: str) -> None:
    """Before it there was nothing to look at, which is no pause of the controller."""
    controller = watching("node-0", "node-1")
    other = "node-1" if silent == "node-0" else "node-0"
    assert given_up_s(controller, heard=[other]) == pytest.approx(100.0 + LEASE_S)


@pytest.mark.parametrize("wakes_with_a_look", [True, False])
def test_the_time_in_which_the_controller_was_held_up_counts_as_no_nodes_silence(wakes_with_a_look: bool) -> None:
    """One node was silent for 2 s before it: with the 2 s in which none could be heard that is no lease of 3 s."""
    controller = watching("node-0", "node-1")
    for now_s in (101.0, 102.0, 104.0):
        if now_s < 104.0 or not wakes_with_a_look:
            controller.receive(Packet("node-0", 1, 1, 0, (), misses=False), now_s)
        controller.tick(now_s)
    assert controller.take_entries() == []
    assert given_up_s(controller, heard=["node-0"]) == pytest.approx(100.0 + LEASE_S + 2.0)


def test_a_controller_that_is_a_little_late_each_time_gives_up_all_the_same() -> None:
    late_s = 0.9 * LEASE_S * LEASE_CHECK_SHARE
    expired_s = given_up_s(watching("node-0", "node-1"), heard=["node-0"], late_s=late_s)
    assert 100.0 + LEASE_S <= expired_s <= 100.0 + LEASE_S * (1 + 2 * LEASE_CHECK_SHARE)


def test_what_nodes_have_said_while_the_controller_was_held_up_is_read_before_any_is_given_up() -> None:
    """Held up for a second, it looks at the leases before it reads what waits: one node was silent before, too."""
    controller = watching("node-0", "node-1")
    controller.receive(Packet("node-0", 1, 1, 0, (), misses=False), 102.0)
    controller.tick(102.2)
    controller.receive(Packet("node-0", 1, 1, 0, (), misses=False), 103.3)
    controller.tick(103.3)
    assert controller.take_entries() == []
    controller.receive(Packet("node-1", 1, 1, 0, (), misses=False), 103.3)
    controller.tick(controller.next_deadline() or 0.0)
    assert controller.take_entries() == []


def test_a_controller_that_hears_no_node_waits_longer_before_it_gives_nodes_up() -> None:
    assert given_up_s(watching("node-0", "node-1")) == pytest.approx(
        100.0 + Deadlines().isolated_s, abs=LEASE_S * LEASE_CHECK_SHARE
    )


@pytest.mark.parametrize(("num_nodes", "num_silent", "are_kept"), [(2, 1, False), (4, 2, True), (5, 2, False)])
def test_half_of_the_nodes_that_fall_silent_together_have_as_long(
    num_nodes: int, num_silent: int, *, are_kept: bool
) -> None:
    """A switch, or the controller's own network: of several nodes at once it is hardly each node. Of two it is."""
    names = [f"node-{number}" for number in range(num_nodes)]
    controller = watching(*names)
    expired_s = given_up_s(controller, heard=names[num_silent:])
    waited_s = Deadlines().isolated_s if are_kept else LEASE_S
    assert expired_s == pytest.approx(100.0 + waited_s, abs=LEASE_S * LEASE_CHECK_SHARE)


def test_it_says_that_it_waits_for_silent_nodes() -> None:
    controller = watching("node-0", "node-1")
    standstill = controller.job.standstill
    controller.tick(controller.next_deadline() or 0.0)
    while controller.next_deadline() <= 100.0 + LEASE_S:
        controller.tick(controller.next_deadline() or 0.0)
    assert standstill.text == (
        "no heartbeat from node-0, node-1; at least half of the nodes are silent, so the cause is probably the "
        "network: none is given up before they have been silent for 60 s"
    )
    controller.tick(controller.next_deadline() or 0.0)
    assert len(standstill.published) == 1
    for name in ("node-0", "node-1"):
        controller.receive(Packet(name, 1, 1, 0, (), misses=False), 105.0)
    while standstill.text is not None:
        controller.tick(controller.next_deadline() or 0.0)
    assert (controller.take_entries(), len(standstill.published)) == ([], 1)


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (
            Left.CHECKPOINT,
            "only a checkpoint has the state of the ranks there, so it is given up after 60 s of silence",
        ),
        (Left.NOTHING, "no other node has the state of the ranks there, so it is given up after 1800 s of silence"),
    ],
)
def test_it_says_why_it_waits_for_the_last_copy(left: Left, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = watching("node-0", "node-1", "node-2")
    monkeypatch.setattr(controller.job, "left_without_node", lambda _node, _silent: left)
    while (due_s := controller.next_deadline()) <= 100.0 + LEASE_S:
        for name in ("node-0", "node-1"):
            controller.receive(Packet(name, 1, 1, 0, (), misses=False), due_s)
        controller.tick(due_s)
    assert controller.job.standstill.published == [f"no heartbeat from node-2; {said}"]


def test_what_a_silent_node_has_said_is_told_as_old() -> None:
    cluster = ToyCluster().go()
    cluster.nodes["node-1"].is_cut_off = True
    cluster.wait(1.5)
    waiting, _ = cluster.holder(0)
    (worker,) = (each.number for each in waiting.workers.values() if each.rank == 0)
    counts = (OperationCount("world", Operation.BARRIER, ALL_MEMBERS, 1, 0),)
    standing = Standing(worker, 1, Phase.SYNCED, WaitsFor.RANKS, 1.5, counts, "")
    waiting.agent._say(msg.RanksStand(waiting.name, 1, (standing,)))
    cluster.wait(1.2)
    (said,) = cluster.controller.job.standstill.published
    assert re.search(
        r"; rank 1 has moved by the last report of its node, 2\.\d s ago; rank 2 has moved lately", said
    ), said


def test_the_loss_of_a_relay_is_no_sign_that_its_nodes_are_heard() -> None:
    """The lease of one node starts over, and yet the controller has heard none for one lease: it may be cut off."""
    controller = watching("node-0", "node-1")
    controller.relay_lost(["node-0"], 102.0)
    assert given_up_s(controller) == pytest.approx(100.0 + Deadlines().isolated_s, abs=LEASE_S * LEASE_CHECK_SHARE)


def test_a_node_that_has_not_come_back_after_a_restart_is_not_heard() -> None:
    """One came back and fell silent again, the other is still awaited: there is no node that the controller hears."""
    controller = watching("node-0", "node-1", restarted_s=200.0)
    controller.receive(Packet("node-0", 1, 1, 0, (), misses=False), 201.0)
    assert given_up_s(controller) == pytest.approx(201.0 + Deadlines().isolated_s, abs=LEASE_S * LEASE_CHECK_SHARE)


def test_a_deadline_that_has_come_is_not_the_next_one_again() -> None:
    """Whatever is rounded between the time a node was heard at and the end of its lease: else no process goes on."""
    rng = random.Random(105)
    for _ in range(300):
        controller = watching("node-0", "node-1")
        heard_s = rng.uniform(125.0, 128.0)  # and three seconds later another number of bits is left
        for node in ("node-0", "node-1"):
            controller.receive(Packet(node, 1, 1, 0, (), misses=False), heard_s)
        expired: list[float] = []
        while not expired:
            due_s = controller.next_deadline()
            assert due_s is not None
            controller.receive(Packet("node-0", 1, 1, 0, (), misses=False), due_s)
            controller.tick(due_s)
            following_s = controller.next_deadline()
            assert following_s is not None
            assert following_s > due_s, f"heard at {heard_s!r}"
            expired = [due_s for entry in controller.take_entries() if isinstance(entry.event, LeaseExpired)]
        assert expired == [pytest.approx(heard_s + LEASE_S)]


def test_without_nodes_nothing_is_looked_at() -> None:
    controller = watching("node-0")
    given_up_s(controller)
    deadline_of_the_job = controller.job.next_deadline()
    assert controller.next_deadline() == deadline_of_the_job


# ---- Lives of a node ------------------------------------------------------------------------------------------------


def test_a_node_that_comes_back_kills_what_it_has_and_is_of_use_again() -> None:
    cluster = ToyCluster().go()
    node = cluster.nodes["node-1"]
    node.is_cut_off = True
    cluster.wait(LEASE_S * 1.2)
    (orphan,) = node.workers
    node.is_cut_off = False
    cluster.wait(1.0)
    assert {(each.node, each.incarnation) for each in cluster.refused} == {("node-1", 1)}
    assert cluster.refused[0].reason == "no heartbeat for 3 s"
    (spare,) = node.workers.values()
    assert spare.number != orphan
    assert (node.agent.incarnation, spare.rank) == (2, None)
    cluster.kill_rank(0)
    assert cluster.holder(0) == (node, spare)
    assert where(cluster) == (Stage.TRAINING, 3)


def test_a_node_that_takes_its_leave_is_replaced_at_once_and_not_blamed() -> None:
    cluster = ToyCluster().go()
    leaving = cluster.nodes["node-1"]
    began_s = cluster.now_s
    for _ in range(2):  # it could be lost twice, and come back
        leaving.agent.depart("ended by SIGTERM", cluster.now_s)
        cluster.go()
        cluster.wait(HEARTBEAT_S * SOONEST)
        assert leaving.has_left
        assert leaving.workers == {}
        leaving = cluster.add_node("node-1", incarnation=leaving.agent.incarnation + 1)
        cluster.go()
    assert cluster.now_s < began_s + LEASE_S
    (record,) = cluster.controller.job.records
    assert record.detail == "rank 1 lost: node node-1 has left: ended by SIGTERM"
    assert where(cluster) == (Stage.TRAINING, 2)
    assert cluster.controller.job.quarantine.held == {}
    cluster.restart_controller().go()
    assert where(cluster) == (Stage.TRAINING, 2)


def test_an_unknown_node_may_leave() -> None:
    controller = ControllerMachine(RecoverySettings(2, 0))
    controller.left(msg.NodeLeft("node-7", 3, "ended by SIGTERM"), 100.0)
    assert controller.packets(100.0) == [msg.NodeEvicted("node-7", 3, "ended by SIGTERM", is_final=True)]
    assert controller.take_entries() == []


def test_an_agent_that_was_started_again_is_another_one() -> None:
    cluster = ToyCluster().go()
    cluster.add_node("node-2", incarnation=9)
    cluster.go()
    (record,) = cluster.controller.job.records
    assert record.detail == "rank 2 lost: node node-2 lost: its agent was started again"
    assert where(cluster) == (Stage.TRAINING, 2)
    assert [type(worker.rank) for worker in cluster.nodes["node-2"].workers.values()] == [type(None)]


def test_a_packet_of_an_earlier_life_is_refused_and_changes_nothing() -> None:
    cluster = ToyCluster().go()
    cluster.add_node("node-2", incarnation=9)
    cluster.go()
    num_entries = len(cluster.journal)
    for incarnation in (1, 5):
        cluster.controller.receive(
            Packet("node-2", incarnation, 0, 0, (msg.NodeJoined("node-2", 1, "x", 0, 0, (), 0),), misses=False),
            cluster.now_s,
        )
        (answer,) = cluster.controller.packets(cluster.now_s)
        why = "another agent is connected as node node-2; each node needs a unique name"
        assert answer == msg.NodeEvicted("node-2", incarnation, why, is_final=True)
    assert len(cluster.journal) == num_entries
    assert cluster.controller.take_entries() == []


def test_a_node_that_was_started_for_a_job_of_another_size_is_sent_away() -> None:
    controller = ControllerMachine(RecoverySettings(2, 0))
    controller.receive(Packet("node-0", 1, 0, 0, (msg.NodeJoined("node-0", 1, "x", 0, 3, (), 0),), misses=False), 100.0)
    (answer,) = controller.packets(100.0)
    assert answer == msg.NodeEvicted(
        "node-0", 1, "node node-0 was started for 3 ranks, and this job has 2", is_final=True
    )
    assert (controller.take_entries(), controller.connections) == ([], {})
    controller.receive(Packet("node-0", 1, 0, 0, (msg.NodeJoined("node-0", 1, "x", 0, 2, (), 0),), misses=False), 100.0)
    assert list(controller.connections) == ["node-0"]


def test_a_job_can_be_called_off() -> None:
    cluster = ToyCluster().go()
    cluster.controller.call_off(msg.EndJob(143, "ended by SIGTERM"), cluster.now_s)
    assert not cluster.controller.is_heard
    cluster.go()
    assert cluster.controller.is_heard
    assert cluster.controller.job.ended == msg.EndJob(143, "ended by SIGTERM")
    assert all(node.has_left for node in cluster.nodes.values())


def test_a_node_is_not_known_before_its_first_words() -> None:
    controller = ControllerMachine(RecoverySettings(1, 0))
    controller.receive(Packet("node-0", 1, 3, 0, (msg.WorkerFenced(0),), misses=False), 100.0)
    controller.receive(Packet("node-0", 1, 0, 0, (), misses=False), 100.0)
    nothing_came = Packet("node-0", 1, 0, 0, (), misses=True)
    assert (controller.take_entries(), controller.packets(100.0)) == ([], [nothing_came, nothing_came])
    assert controller.next_deadline() is None


def test_a_node_of_another_run_is_refused() -> None:
    controller = ControllerMachine(RecoverySettings(1, 0))
    with pytest.raises(RemoteProtocolError, match=r"node node-0 is in the middle of a run of which .* holds nothing"):
        controller.receive(Packet("node-0", 1, 1, 1, (msg.WorkerFenced(0),), misses=False), 100.0)
    assert (controller.take_entries(), controller.packets(100.0)) == ([], [])


# ---- What is refused ------------------------------------------------------------------------------------------------

FORGED: list[tuple[int, msg.Report | msg.AgentOrder]] = [
    (0, msg.NodeJoined("node-2", 8, "x", 0, 0, (), 0)),
    (0, msg.WorkerFenced(0)),
    (3, msg.NodeJoined("node-1", 8, "x", 0, 0, (), 0)),
    (3, msg.StepObserved("node-2", 1, 5, 1.0, 1.0, ())),
    (3, msg.JobStalled("node-2", 1, "all wait")),
    (3, msg.StoreRequested(1, 1, 0, "get", ("key",), b"")),
    (3, msg.Stop(7, "I say so", None)),
]


@pytest.mark.parametrize(("number", "forged"), FORGED, ids=lambda value: getattr(type(value), "__name__", ""))
def test_what_is_not_for_a_node_to_send_is_refused_with_all_that_comes_with_it(
    number: int, forged: msg.Report | msg.AgentOrder
) -> None:
    cluster = ToyCluster().go()
    before = cluster.controller.job.stage, len(cluster.journal)
    good = msg.WorkerLost(1, Cause.EXIT, "exit code 1", True, None, 1.0)
    with pytest.raises(RemoteProtocolError, match=re.escape(f"node node-1 sent {type(forged).__name__} of")):
        cluster.controller.receive(Packet("node-1", 1, number - 1, 0, (good, forged), misses=False), cluster.now_s)
    assert cluster.controller.take_entries() == []
    assert (cluster.controller.job.stage, len(cluster.journal)) == before
    assert cluster.kill_rank(1).controller.job.generation == 2


def test_a_node_cannot_speak_for_the_workers_of_another() -> None:
    cluster = ToyCluster().go()
    (other,) = cluster.nodes["node-0"].workers
    controller = cluster.controller
    node = cluster.nodes["node-1"]
    for report in (
        msg.WorkerLost(other, Cause.EXIT, "exit code 1", True, None, 1.0),
        msg.CollectiveFailed(other, 1, "world", "closed"),
        msg.StepsFinished((other,), 1, 99, "forged"),
        msg.WorkerDone(other, 3),
    ):
        node.agent.channel.say([report])
    cluster.go()
    assert where(cluster) == (Stage.TRAINING, 1)
    assert (controller.job.progress.trained_to, controller.job.digests) == (1, {})
    assert cluster.finish().controller.job.digests == {0: "d", 1: "d", 2: "d"}


# ---- The journal ----------------------------------------------------------------------------------------------------


def story(crash_at: int | None = None, crash_again: int | None = None) -> ToyCluster:
    """A rank is lost, then a node, which comes back; then the job ends. The controller crashes as often as it is to."""
    cluster = ToyCluster()
    cluster.crash_at = crash_at
    again = [crash_again]

    def do(what: str, *arguments: float) -> None:
        try:
            getattr(cluster, what)(*arguments)
        except Crashed:
            cluster.restart_controller()
            cluster.crash_at = again.pop() if again else None
            do("wait", arguments[0] if what == "wait" else 0.5)

    do("go")
    do("kill_rank", 1)
    cluster.nodes["node-2"].is_cut_off = True
    do("wait", LEASE_S * 1.4)
    cluster.nodes["node-2"].is_cut_off = False
    do("wait", 1.0)
    do("finish")
    do("wait", 1.0)
    return cluster


@functools.cache
def undisturbed() -> ToyCluster:
    return story()


NUM_ENTRIES = len(undisturbed().journal)
EVERY_ENTRY = range(1, NUM_ENTRIES + 1)


def orders_of(entries: list[JournalEntry], node: str) -> list[msg.AgentOrder]:
    return [order for entry in entries for name, order, _ in entry.orders if name in (None, node)]


def test_the_journal_has_all_that_the_story_is_to_have() -> None:
    cluster = undisturbed()
    kinds = {type(entry.event) for entry in cluster.entries()}
    assert kinds == {ReportsReceived, LeaseExpired}
    stages = {entry.stage for entry in cluster.entries()}
    assert stages == {str(stage) for stage in Stage} - {Stage.RESCUING, Stage.DRAINING}
    assert cluster.controller.job.ended is not None
    assert cluster.controller.job.ended.exit_code == 0


@pytest.mark.parametrize("length", EVERY_ENTRY)
def test_a_journal_gives_back_the_state_and_every_order_with_its_number(length: int) -> None:
    entries = undisturbed().entries()[:length]
    machine = ControllerMachine.from_journal(undisturbed().settings, entries, 1000.0)
    (last,) = machine.take_entries()
    assert isinstance(last.event, Restarted)
    interrupts = any(entry.orders for entry in entries) and entries[-1].stage in (Stage.STARTING, Stage.RECOVERING)
    assert last.generation == entries[-1].generation + interrupts
    heard = [entry.event for entry in entries if isinstance(entry.event, ReportsReceived)]
    for node in ("node-0", "node-1"):
        num_reports = sum(len(event.reports) for event in heard if event.node == node)
        if num_reports:
            machine.receive(Packet(node, 1, num_reports, 0, (), misses=False), 1000.0)
            (packet,) = machine.packets(1000.0) or [Packet(node, 1, 0, num_reports, (), misses=False)]
            assert isinstance(packet, Packet)
            assert (packet.first, packet.received) == (0, num_reports)
            assert list(packet.messages) == orders_of([*entries, last], node)


def test_a_machine_that_decides_otherwise_does_not_take_a_journal_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one of another version, which restores ranks from the step before."""
    entries = undisturbed().entries()
    recovers = [any(isinstance(order, msg.Recover) for _, order, _ in entry.orders) for entry in entries]
    right = Orders.send

    def send(self: Orders, node: str | None, order: msg.AgentOrder, reason: str) -> None:
        if isinstance(order, msg.Recover):
            order = msgspec.structs.replace(order, resume_step=order.resume_step - 1)
        right(self, node, order, reason)

    monkeypatch.setattr(Orders, "send", send)
    what = rf"^entry {recovers.index(True) + 1} of the journal .*the order was .*Recover.*, now .*Recover"
    with pytest.raises(ConfigurationError, match=what):
        ControllerMachine.from_journal(undisturbed().settings, entries, 1000.0)


def test_another_reason_for_the_same_orders_is_no_other_decision() -> None:
    entries = [
        msgspec.structs.replace(entry, orders=tuple((node, order, "said otherwise") for node, order, _ in entry.orders))
        for entry in undisturbed().entries()
    ]
    machine = ControllerMachine.from_journal(undisturbed().settings, entries, 1000.0)
    assert machine.job.records == undisturbed().controller.job.records


@pytest.mark.parametrize("error", [RemoteProtocolError("nobody"), KeyError(7), AssertionError("a rank")])
def test_an_entry_that_the_machine_cannot_apply_is_named(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it came to another state before, without another order."""

    def receive(*_arguments: object) -> NoReturn:
        raise error

    monkeypatch.setattr(RecoveryMachine, "receive", receive)
    with pytest.raises(ConfigurationError, match=r"^entry 1 of the journal .* cannot be replayed: ") as caught:
        ControllerMachine.from_journal(undisturbed().settings, undisturbed().entries(), 1000.0)
    assert caught.value.__cause__ is error


def test_nothing_is_transmitted_to_a_node_before_it_has_said_what_it_has_heard() -> None:
    cluster = ToyCluster().go().kill_rank(1)
    cluster.restart_controller()
    assert cluster.controller.packets(cluster.now_s) == []


@pytest.mark.parametrize("crash_at", EVERY_ENTRY)
def test_a_crash_at_any_entry_changes_no_order(crash_at: int) -> None:
    """But that ranks on their way have to meet again, as they met in the memory that is gone."""
    cluster = story(crash_at)
    job, expected = cluster.controller.job, undisturbed().controller.job
    assert job.ended == expected.ended
    assert all(node.has_left for node in cluster.nodes.values())
    interrupted = [record for record in job.records if record.cause == Cause.CONTROLLER]
    if not interrupted:
        assert [each.detail for each in job.records] == [each.detail for each in expected.records]
        assert job.digests == expected.digests
        for name, node in cluster.nodes.items():
            assert node.orders == undisturbed().nodes[name].orders
    else:
        stage = cluster.entries()[crash_at - 1].stage
        assert stage in (Stage.STARTING, Stage.RECOVERING)


@pytest.mark.parametrize("crash_at", EVERY_ENTRY[::4])
def test_a_controller_may_crash_again(crash_at: int) -> None:
    for after in (1, 2, 3, 5):
        cluster = story(crash_at, crash_at + after)
        assert cluster.controller.job.ended == undisturbed().controller.job.ended
        assert all(node.has_left for node in cluster.nodes.values())


def test_a_deadline_is_an_event() -> None:
    cluster = ToyCluster(world_size=2, num_spares=0, lease_s=None)
    cluster.nodes["node-1"].is_cut_off = True
    cluster.go()
    due = cluster.controller.next_deadline()
    assert due is not None
    cluster.now_s = due
    cluster.controller.tick(due)
    cluster.go()
    assert isinstance(cluster.entries()[-1].event, DeadlineCame)
    ended = cluster.controller.job.ended
    assert ended is not None
    again = ControllerMachine.from_journal(cluster.settings, cluster.entries(), due)
    assert (again.job.ended, again.job.stage) == (ended, Stage.ENDED)


def test_leases_start_over_after_a_crash() -> None:
    """And an agent has twice as long to find the controller again."""
    cluster = ToyCluster().go()
    cluster.now_s += 100 * LEASE_S
    cluster.restart_controller()
    cluster.controller.tick(cluster.now_s)
    assert where(cluster) == (Stage.TRAINING, 1)
    cluster.nodes["node-1"].is_cut_off = True
    cluster.wait(LEASE_S * 1.4)
    assert where(cluster) == (Stage.TRAINING, 1)
    cluster.wait(LEASE_S)
    assert cluster.controller.job.records[-1].cause == Cause.NODE
