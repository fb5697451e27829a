"""The agent's machine: what a node does on orders, what it says of its workers, and when it lets go of answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from keepstep.errors import RemoteProtocolError
from keepstep.protocol import messages as msg
from keepstep.protocol.deadlines import Deadlines
from keepstep.protocol.messages import Cause, Tag
from keepstep.protocol.node.agent import DELIVER_S, HEARTBEAT_S, HOLD_S, SOONEST, AgentMachine
from keepstep.protocol.node.effects import (
    AgentEffect,
    Depart,
    HandOver,
    Kill,
    Leave,
    LookCloser,
    PassMemory,
    ReleaseMemory,
    Signal,
    Spawn,
)
from keepstep.protocol.node.liveness import Observation
from keepstep.protocol.phases import Phase
from keepstep.protocol.reliable_channel import ReliableChannel
from keepstep.protocol.waiting.operations import ALL_MEMBERS, MAX_DOING, Operation, OperationCount, WaitsFor

NODE, INCARNATION = "node-a", 5
JOINED = msg.NodeJoined(NODE, 4, "rack-1", 0, 0, (), 0)
IN_A_STEP = Tag(1, 3, Phase.BACKWARD)
BETWEEN = Tag(1, 3, Phase.UPDATED)
DEADLINES = Deadlines()
POLL_INTERVAL_S = DEADLINES.blind_s / 2
EVICTED = msg.NodeEvicted(NODE, INCARNATION, "not heard of", False)


class Node:
    """An agent's machine with its controller's end of the line, on a clock of the test's own."""

    def __init__(self, ranks: int = 0, spares: int = 0) -> None:
        self.now_s = 100.0
        self.agent = AgentMachine(JOINED, INCARNATION, DEADLINES)
        self.controller = ReliableChannel(NODE, INCARNATION)
        assert self.heard() == [JOINED]
        for number in range(ranks + spares):
            rank = number if number < ranks else None
            self.order(msg.StartWorker(number, rank, number, rank, 3, "the job starts"))
            self.agent.spawned(number, 4000 + number)
        self.heard()

    def order(self, *orders: msg.AgentOrder) -> list[AgentEffect]:
        """The controller gives orders; returns what is to be done."""
        self.controller.say(orders)
        for packet in self.controller.packets(self.now_s):
            self.agent.receive(packet, self.now_s)
        return self.agent.take()

    def heard(self) -> list[object]:
        """What has reached the controller since the last call."""
        return [
            report
            for packet in self.agent.packets(self.now_s)
            for report in self.controller.receive(packet, self.now_s)
        ]

    def said(self, number: int, report: msg.AnyMessage) -> list[object]:
        """A worker reports; returns what reaches the controller at once."""
        self.agent.said(number, report, self.now_s)
        return self.heard()

    def wait(self, duration_s: float) -> list[object]:
        """Time goes by, look by look; returns what reaches the controller."""
        end_s, heard = self.now_s + duration_s, []
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + POLL_INTERVAL_S)
            self.agent.tick(self.now_s)
            heard += self.heard()
        return heard

    def exit(self, number: int, detail: str = "", tag: Tag = BETWEEN) -> list[object]:
        """A process ends; returns what reaches the controller."""
        self.agent.exited(number, Cause.EXIT, detail, tag, self.now_s)
        return self.heard()


def safe(*workers: int, step: int = 3) -> msg.SafePointReached:
    return msg.SafePointReached(workers, 2, step, Phase.BACKWARD, (step,), step, (), False, (), None, None)


# ---- Orders ---------------------------------------------------------------------------------------------------------


def test_a_worker_is_started_and_reported() -> None:
    node = Node()
    assert node.order(msg.StartWorker(0, 0, 0, 0, 3, "the job starts")) == [Spawn(0, 0, 0, 0, 3)]
    node.agent.spawned(0, 4000)
    assert node.heard() == [msg.WorkerStarted(0, 4000)]


def test_what_concerns_all_ranks_goes_to_those_that_hold_one() -> None:
    node = Node(ranks=2, spares=1)
    stop = msg.Stop(2, "rank 0 lost", None)
    assert node.order(stop) == [HandOver((0, 1), stop)]
    assign, recover = (
        msg.Assign(2, 2, 0, 0, 3, None, ()),
        msg.Recover(2, 3, (), msg.Membership.of([msg.Member(0, "n", "0")]), (), None),
    )
    assert node.order(assign, recover) == [HandOver((2,), assign), HandOver((0, 1, 2), recover)]


def test_a_node_of_spares_hands_nothing_over() -> None:
    assert Node(spares=2).order(msg.Stop(2, "rank 0 lost", None), msg.Resume(2)) == []


def test_an_order_for_a_worker_that_is_gone_is_dropped() -> None:
    node = Node(spares=1)
    node.exit(0)
    assert node.order(msg.Assign(0, 2, 0, 0, 3, None, ())) == []


def test_the_job_ends() -> None:
    assert Node(ranks=1).order(msg.EndJob(75, "nothing is left")) == [Leave(75, "nothing is left")]


def test_a_controller_that_reports_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="a controller sent WorkerFenced"):
        Node().order(msg.WorkerFenced(0))  # type: ignore[arg-type]  # that it is no order is the point


# ---- Fencing --------------------------------------------------------------------------------------------------------


def test_a_fence_is_confirmed_when_the_process_is_gone() -> None:
    node = Node(ranks=1)
    assert node.order(msg.FenceWorker(0, "it hangs")) == [Kill(0)]
    assert node.heard() == []
    assert node.exit(0, "killed by SIGKILL", IN_A_STEP) == [msg.WorkerFenced(0)]


def test_a_fence_of_what_is_gone_is_confirmed_at_once() -> None:
    node = Node()
    assert node.order(msg.FenceWorker(9, "it hangs")) == []
    assert node.heard() == [msg.WorkerFenced(9)]


def test_a_fence_that_comes_before_the_process_is_there_still_kills_it() -> None:
    node = Node()
    assert node.order(msg.StartWorker(0, 0, 0, 0, 3, "start"), msg.FenceWorker(0, "no")) == [
        Spawn(0, 0, 0, 0, 3),
        Kill(0),
    ]
    node.agent.spawned(0, 4000)
    assert node.agent.take() == [Kill(0)]


def test_a_process_that_dies_before_its_id_is_known_is_killed_with_its_group() -> None:
    node = Node()
    node.order(msg.StartWorker(0, 0, 0, 0, 3, "the job starts"))
    assert node.agent.training_thread_died(0, IN_A_STEP, node.now_s)
    assert node.agent.take() == [Kill(0)]
    node.agent.spawned(0, 4000)
    assert node.agent.take() == [Kill(0)]


def test_a_script_gets_sigterm_even_if_the_order_comes_before_its_process_is_there() -> None:
    node = Node(ranks=1)
    node.order(msg.StartWorker(1, 1, 1, 1, 3, "the job starts"))
    assert Signal((0, 1)) in node.order(msg.Terminate("ended by SIGTERM"))
    node.agent.spawned(1, 4001)
    assert node.agent.take() == [Signal((1,))]


# ---- How processes end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", Phase)
def test_exit_code_0_is_well_only_outside_of_a_step(phase: Phase) -> None:
    node = Node(ranks=1)
    tag = Tag(1, 3, phase)
    (report,) = node.exit(0, "", tag)
    if phase in (Phase.STARTING, Phase.UPDATED):
        assert report == msg.WorkerDone(0, 4 if phase is Phase.UPDATED else None)
    else:
        what = "exit code 0 in the middle of a step"
        assert report == msg.WorkerLost(0, Cause.EXIT, what, True, tag, node.now_s)


@pytest.mark.parametrize("tag", [IN_A_STEP, BETWEEN])
def test_any_other_end_is_a_loss(tag: Tag) -> None:
    node = Node(ranks=1)
    node.agent.exited(0, Cause.SIGNAL, "killed by SIGSEGV", tag, 99.5)
    assert node.heard() == [msg.WorkerLost(0, Cause.SIGNAL, "killed by SIGSEGV", True, tag, 99.5)]


def test_a_dead_training_thread_is_a_loss_before_the_process_is_gone() -> None:
    node = Node(ranks=1)
    assert node.agent.training_thread_died(0, IN_A_STEP, node.now_s)
    assert node.agent.take() == [Kill(0)]
    assert node.heard() == [msg.WorkerLost(0, Cause.DIED, "its process died", True, IN_A_STEP, node.now_s)]
    assert node.exit(0, "killed by SIGKILL", IN_A_STEP) == [msg.WorkerEnded(0, Cause.EXIT, "killed by SIGKILL")]


def test_a_training_thread_that_ends_outside_of_a_step_may_have_ended_well() -> None:
    node = Node(ranks=1)
    assert not node.agent.training_thread_died(0, BETWEEN, node.now_s)
    assert (node.agent.take(), node.heard()) == ([], [])


def test_a_fenced_worker_that_dies_is_no_news() -> None:
    node = Node(ranks=1)
    node.order(msg.FenceWorker(0, "it hangs"))
    assert not node.agent.training_thread_died(0, IN_A_STEP, node.now_s)


# ---- Reports --------------------------------------------------------------------------------------------------------


def test_a_report_of_one_worker_goes_up_at_once() -> None:
    report = msg.WorkerReady(0, 1, (0,), (), False, False, "0", 0.0)
    assert Node(ranks=2).said(0, report) == [report]


@pytest.mark.parametrize("report", [safe(1), safe(0, 1), safe(), msg.WorkerJoined(1, 4001), JOINED, msg.Resume(1)])
def test_a_worker_reports_for_itself_only(report: msg.AnyMessage) -> None:
    with pytest.raises(RemoteProtocolError, match=f"worker 0 sent {type(report).__name__}"):
        Node(ranks=2).said(0, report)


def test_what_cannot_be_read_is_a_loss() -> None:
    node = Node(ranks=1)
    node.agent.broke_protocol(0, "not a message", IN_A_STEP, node.now_s)
    what = "it broke the protocol: not a message"
    assert node.heard() == [msg.WorkerLost(0, Cause.EXIT, what, False, IN_A_STEP, node.now_s)]


def test_equal_answers_of_all_ranks_go_up_as_one() -> None:
    node = Node(ranks=3, spares=1)
    assert node.said(2, safe(2)) == []
    assert node.said(0, safe(0)) == []
    assert node.said(1, safe(1)) == [safe(2, 0, 1)]


def test_answers_that_differ_stay_apart() -> None:
    node = Node(ranks=3)
    node.said(0, safe(0))
    node.said(1, safe(1, step=4))
    assert node.said(2, safe(2)) == [safe(0, 2), safe(1, step=4)]


def test_answers_do_not_wait_for_long() -> None:
    node = Node(ranks=2)
    node.said(0, safe(0))
    assert node.agent.next_deadline() == node.now_s + HOLD_S
    assert node.wait(HOLD_S * 0.9) == []
    assert node.wait(HOLD_S * 0.1 + 1e-9) == [safe(0)]


def test_answers_do_not_wait_for_the_lost() -> None:
    node = Node(ranks=3)
    node.agent.training_thread_died(1, IN_A_STEP, node.now_s)
    node.heard()
    node.order(msg.Stop(2, "rank 1 lost", None))
    assert node.said(0, safe(0)) == []
    assert node.said(2, safe(2)) == [safe(0, 2)]


def test_what_is_said_later_goes_up_later() -> None:
    node = Node(ranks=2)
    node.said(0, safe(0))
    assert node.exit(1, "exit code 1", IN_A_STEP)[0] == safe(0)


def test_the_last_rank_to_answer_waits_for_no_other() -> None:
    """Found as a recovery that took 50 ms longer: another report had let the first answers go already."""
    node = Node(ranks=3)
    node.said(0, safe(0))
    assert node.said(1, msg.CollectiveFailed(1, 1, "world", "closed"))[0] == safe(0)
    assert node.said(1, safe(1)) == []
    assert node.said(2, safe(2)) == [safe(1, 2)]


def test_answers_to_an_order_that_is_over_are_forgotten() -> None:
    node = Node(ranks=2)
    node.said(0, safe(0))
    node.order(msg.Stop(3, "another failure", None))
    assert node.wait(HOLD_S) == []


def test_a_node_that_has_nothing_to_say_is_heard_of_nonetheless() -> None:
    node = Node()
    node.order(msg.Stop(2, "rank 0 lost", None))
    due_s = node.agent.next_deadline()
    assert node.now_s < due_s <= node.now_s + HEARTBEAT_S * (1 + SOONEST)
    assert node.agent.packets(node.now_s) == []
    assert node.agent.packets(due_s) == [msg.Packet(NODE, INCARNATION, 1, 1, (), misses=False)]
    assert node.agent.next_deadline() == pytest.approx(due_s + HEARTBEAT_S)


def test_nodes_that_answered_at_the_same_moment_have_a_heartbeat_each_in_its_own() -> None:
    names = [f"node-{number}" for number in range(100)]
    agents = [AgentMachine(msg.NodeJoined(name, 1, name, 0, 0, (), 0), INCARNATION, DEADLINES) for name in names]
    for agent in agents:
        assert agent.packets(100.0)
    dues = [agent.next_deadline() for agent in agents]
    for tenth in range(10):
        begin_s = 100.0 + HEARTBEAT_S * (SOONEST + tenth / 10)
        assert 3 <= sum(begin_s <= due < begin_s + HEARTBEAT_S / 10 for due in dues) <= 20


def test_a_new_connection_begins_with_what_has_arrived() -> None:
    node = Node()
    node.order(msg.Resume(1))
    node.heard()
    node.agent.reconnected(node.now_s)
    assert node.agent.packets(node.now_s) == [msg.Packet(NODE, INCARNATION, 1, 1, (), misses=False)]


# ---- The first step after a recovery --------------------------------------------------------------------------------


def test_the_first_step_is_reported_once_all_have_completed_it() -> None:
    node = Node(ranks=2)
    node.order(msg.Resume(2))
    node.agent.step_completed(0, 2, 5, 101.0, 0.2)
    node.agent.step_completed(1, 1, 5, 107.0, 0.9)  # of another generation
    assert node.heard() == []
    node.agent.step_completed(1, 2, 5, 100.5, 0.3)
    assert node.heard() == [msg.StepObserved(NODE, 2, 5, 101.0, 0.3, ())]
    node.agent.step_completed(1, 2, 6, 103.0, 0.3)
    assert node.heard() == []


# ---- Liveness -------------------------------------------------------------------------------------------------------


EXPLAIN_S = DEADLINES.explain_s
COUNT = OperationCount("world", Operation.BARRIER, ALL_MEMBERS, 5, 4)


def look(
    node: Node,
    number: int,
    tag: Tag = BETWEEN,
    *,
    progress: int = 1,
    waits: bool = False,
    stopped: bool = False,
    unread: bool = False,
) -> None:
    node.agent.observe(number, Observation(tag, progress, False, waits, stopped, unread), node.now_s)


def answered(node: Node, *counts: OperationCount, snapshots: msg.SnapshotsByRank = (), doing: str = "") -> list[object]:
    """Pages are read as the machine asks; returns what reaches the controller."""
    for effect in node.agent.take():
        assert isinstance(effect, LookCloser)
        shown, kept = dict.fromkeys(effect.workers, counts), dict.fromkeys(effect.workers, snapshots)
        node.agent.looked_closer(shown, kept, dict.fromkeys(effect.workers, doing), node.now_s)
    return node.heard()


def of_liveness(reports: Sequence[object]) -> list[object]:
    """Leaves out the explanations, which come at other times."""
    return [each for each in reports if not isinstance(each, msg.RanksStand | msg.JobStalled)]


def test_a_stopped_process_is_suspected_with_the_snapshots_in_its_memory_until_it_goes_on() -> None:
    node = Node(ranks=1)
    kept = ((0, (10, 20)),)
    node.agent.clock_offset_s = 5.0
    look(node, 0, IN_A_STEP, stopped=True)
    stopped_s = node.now_s
    node.wait(DEADLINES.hang_after_s + 0.01)
    (report,) = of_liveness(answered(node, snapshots=kept))
    assert isinstance(report, msg.WorkerSuspected)
    assert (report.worker, report.cause, report.tag, report.snapshots) == (0, Cause.STOPPED, IN_A_STEP, kept)
    assert report.since_s == pytest.approx(stopped_s + 5.0), "on the controller's clock"
    look(node, 0, IN_A_STEP, progress=2)
    assert of_liveness(node.wait(0.01)) == [msg.SuspicionLifted(0)]
    assert node.order(msg.FenceWorker(0, report.detail)) == [Kill(0)]


def test_an_answer_lifts_the_suspicion_before_it_is_sent_itself() -> None:
    """The controller must not give a rank up whose answer is under way."""
    node = Node(ranks=1)
    look(node, 0, IN_A_STEP, stopped=True)
    node.wait(DEADLINES.hang_after_s + 0.01)
    answered(node)
    node.order(msg.Stop(2, "rank 1 lost", None))
    assert of_liveness(node.said(0, safe(0)))[:1] == [msg.SuspicionLifted(0)]


def test_a_worker_at_its_safe_point_is_not_judged_by_its_phase() -> None:
    node = Node(ranks=1)
    look(node, 0, IN_A_STEP)
    node.order(msg.Stop(2, "rank 1 lost", None))
    node.said(0, safe(0))
    assert node.wait(DEADLINES.recovery_s * 0.9) == []
    node.wait(DEADLINES.recovery_s)
    (report,) = of_liveness(answered(node))
    assert isinstance(report, msg.WorkerSuspected)
    assert report.cause is Cause.HANG


def test_how_long_first_phases_take_is_told_and_learnt() -> None:
    """A replacement compiles and opens its data as the first processes of the job did, maybe on other nodes."""
    node = Node(ranks=1, spares=1)
    node.order(msg.Resume(1))
    node.agent.passed(0, Phase.FORWARD, node.now_s, node.now_s + 20.0)
    node.agent.passed(0, Phase.FORWARD, node.now_s, node.now_s + 0.1)
    node.agent.step_completed(0, 1, 0, node.now_s, 20.5)
    (report,) = node.heard()
    assert isinstance(report, msg.StepObserved)
    assert report.first_phases == ((Phase.FORWARD, 20.0),)
    node.order(msg.Assign(1, 2, 1, 1, 3, None, ((Phase.FORWARD, 30.0), (Phase.BACKWARD, 7.0))))
    for phase, first_s in ((Phase.FORWARD, 30.0), (Phase.BACKWARD, 7.0)):
        look(node, 1, Tag(2, 3, phase))
        assert node.agent.liveness.deadline_s(1) == max(DEADLINES.hang_after_s, DEADLINES.hang_factor * first_s)


# ---- Ranks that stand still -----------------------------------------------------------------------------------------


def test_where_ranks_stand_still_is_reported_after_a_while_and_taken_back_when_they_move() -> None:
    node = Node(ranks=3, spares=1)
    look(node, 0, waits=True)
    look(node, 1)
    assert node.wait(EXPLAIN_S - 1) == []
    look(node, 2, progress=1)
    assert node.agent.take() == []
    node.wait(1)
    (report,) = answered(node, COUNT)
    assert isinstance(report, msg.RanksStand)
    assert (report.node, report.generation) == (NODE, 1)
    assert [(each.worker, each.waits_for, each.step, each.phase, each.counts) for each in report.standing] == [
        (0, WaitsFor.RANKS, 3, Phase.UPDATED, (COUNT,)),
        (1, WaitsFor.NOTHING, 3, Phase.UPDATED, (COUNT,)),
    ]
    assert report.standing[0].still_s == pytest.approx(EXPLAIN_S)
    node.wait(EXPLAIN_S / 4)
    assert answered(node, COUNT) == [], "nothing has changed"
    for number in (0, 1, 2):
        look(node, number, progress=2)
    node.wait(POLL_INTERVAL_S)
    assert answered(node) == [msg.RanksStand(NODE, 1, ())]
    node.wait(EXPLAIN_S / 2)
    assert node.agent.take() == []


def test_what_their_processes_do_is_told_of_ranks_that_stand_and_of_suspected_ones() -> None:
    node = Node(ranks=3)
    for number in range(3):
        look(node, number, IN_A_STEP, waits=number == 0, unread=number < 2)
    node.wait(EXPLAIN_S)
    (report,) = (each for each in answered(node, doing="in load()" + "x" * 2000) if isinstance(each, msg.RanksStand))
    waits_for = [WaitsFor.RANKS, WaitsFor.READER, WaitsFor.NOTHING]
    assert [each.waits_for for each in report.standing] == waits_for
    assert {each.doing for each in report.standing} == {("in load()" + "x" * 2000)[:MAX_DOING]}
    node.wait(DEADLINES.long_s)
    (suspicion,) = of_liveness(answered(node, doing="in load() at data.py:17"))
    assert isinstance(suspicion, msg.WorkerSuspected)
    assert suspicion.worker == 2
    assert suspicion.detail.endswith("and it waits for no other rank: in load() at data.py:17")


def test_a_stalled_node_tells_where_its_ranks_stand_before_it_says_so() -> None:
    node = Node(ranks=2)
    for number in (0, 1):
        look(node, number, Tag(1, 3, Phase.SYNCED), waits=True)
    assert node.wait(2 * DEADLINES.hang_after_s - EXPLAIN_S / 2) == []
    node.agent.take()
    node.wait(EXPLAIN_S)
    stands, stalled = [
        report for report in answered(node, COUNT) if isinstance(report, msg.RanksStand | msg.JobStalled)
    ]
    assert isinstance(stands, msg.RanksStand)
    assert [each.worker for each in stands.standing] == [0, 1]
    assert isinstance(stalled, msg.JobStalled)


def test_ranks_that_are_being_stopped_stand_still_for_a_known_reason() -> None:
    node = Node(ranks=1)
    look(node, 0, IN_A_STEP, waits=True)
    node.order(msg.Stop(2, "rank 1 lost", None))
    node.wait(DEADLINES.hang_after_s)
    assert node.agent.take() == []


# ---- A new incarnation ----------------------------------------------------------------------------------------------


def test_a_node_that_was_evicted_joins_again_when_all_its_processes_are_gone() -> None:
    node = Node(ranks=1, spares=1)
    node.agent.receive(EVICTED, node.now_s)
    assert node.agent.take() == [Kill(0), Kill(1)]
    node.said(0, safe(0))
    node.exit(0, "killed by SIGKILL", IN_A_STEP)
    assert node.agent.incarnation == INCARNATION
    node.agent.exited(1, Cause.SIGNAL, "killed by SIGKILL", BETWEEN, node.now_s)
    assert node.agent.packets(node.now_s) == [msg.Packet(NODE, INCARNATION + 1, 0, 0, (JOINED,), misses=False)]
    assert node.agent.next_deadline() > node.now_s


def test_an_idle_node_that_was_evicted_joins_again_at_once() -> None:
    node = Node()
    node.agent.receive(EVICTED, node.now_s)
    (packet,) = node.agent.packets(node.now_s)
    assert (packet.incarnation, packet.messages) == (INCARNATION + 1, (JOINED,))


def test_a_process_that_comes_up_after_its_node_was_given_up_is_killed() -> None:
    node = Node()
    node.order(msg.StartWorker(0, 0, 0, 0, 3, "the job starts"))
    node.agent.receive(EVICTED, node.now_s)
    node.agent.take()
    node.agent.spawned(0, 4000)
    assert node.agent.take() == [Kill(0)]
    node.exit(0, "killed by SIGKILL")
    assert node.agent.incarnation == INCARNATION + 1


def test_a_node_that_was_evicted_obeys_and_judges_nothing_until_it_is_empty() -> None:
    node = Node(ranks=2)
    node.said(0, safe(0))
    node.agent.receive(EVICTED, node.now_s)
    node.agent.take()
    assert node.order(msg.StartWorker(7, 0, 0, 0, 3, "start")) == []
    assert node.said(1, safe(1)) == []
    assert node.wait(1000.0) == []
    assert node.agent.next_deadline() > node.now_s  # it does not wait for answers that no process is to hear


def test_a_node_that_is_not_wanted_any_more_leaves() -> None:
    node = Node(ranks=1)
    node.agent.receive(msg.NodeEvicted(NODE, INCARNATION, "another agent speaks for it", is_final=True), node.now_s)
    assert node.agent.take() == [Leave(1, "another agent speaks for it"), Kill(0)]


def test_a_node_that_takes_its_leave_says_so_until_it_was_heard_and_nothing_else() -> None:
    node = Node(ranks=1)
    node.order()
    node.wait(HEARTBEAT_S)
    node.order()
    node.agent.depart("ended by SIGTERM", node.now_s)
    farewell = Depart(msg.NodeLeft(NODE, INCARNATION, "ended by SIGTERM"))
    assert node.agent.take() == [Kill(0), farewell]
    assert node.exit(0, "killed by SIGKILL", IN_A_STEP) == []
    assert node.wait(1000.0) == []
    node.agent.reconnected(node.now_s)
    assert node.agent.take() == [farewell]
    node.agent.receive(msg.NodeEvicted(NODE, INCARNATION, "ended by SIGTERM", is_final=True), node.now_s)
    assert node.agent.take() == [Leave(1, "ended by SIGTERM")]
    assert node.agent.packets(node.now_s + 1000.0) == []


FAREWELL = Depart(msg.NodeLeft(NODE, INCARNATION, "ended by SIGTERM"))


def drained(node: Node) -> None:
    """The node drains, and the controller has heard of it."""
    node.agent.drain("ended by SIGTERM", node.now_s)
    assert msg.NodeDraining(NODE, "ended by SIGTERM") in node.heard()
    node.order()
    node.now_s += 1.0
    node.heard()
    node.order()


def test_a_drained_node_whose_rank_ends_the_job_tells_that_before_it_leaves() -> None:
    node = Node(ranks=1)
    drained(node)
    assert node.exit(0) == [msg.WorkerDone(0, 4)]
    assert node.agent.take() == []
    assert node.order(msg.EndJob(0, "all ranks are done")) == [Leave(0, "all ranks are done")]
    node.now_s += 1000.0
    node.agent.tick(node.now_s)
    assert node.agent.take() == []


def test_a_drained_node_leaves_as_soon_as_its_last_report_is_acknowledged() -> None:
    node = Node(ranks=1)
    drained(node)
    node.exit(0)
    node.order()
    assert node.agent.take() == []
    assert node.wait(HEARTBEAT_S * SOONEST + POLL_INTERVAL_S) == []
    assert node.order() == [FAREWELL]
    assert node.agent.packets(node.now_s + 1000.0) == []


def test_a_node_that_leaves_at_once_delivers_what_its_workers_have_said() -> None:
    node = Node(ranks=2)
    node.order()
    node.agent.said(0, safe(0), node.now_s)  # held, because rank 1 may give the same answer
    node.agent.depart("ended by SIGTERM", node.now_s)
    assert node.agent.take() == [Kill(0), Kill(1)]
    assert node.heard() == [safe(0)]
    assert node.order(msg.FenceWorker(0, "rank 1 is lost")) == [FAREWELL]


def test_a_node_whose_reports_are_not_acknowledged_leaves_after_its_deadline() -> None:
    node = Node(ranks=1)
    drained(node)
    node.exit(0)
    due_s = node.now_s + DELIVER_S
    while (next_s := node.agent.next_deadline()) < due_s:
        node.agent.tick(next_s)
        node.agent.packets(next_s)
        assert node.agent.take() == []
    assert next_s == due_s
    node.agent.tick(due_s)
    assert node.agent.take() == [FAREWELL]


def test_a_node_that_leaves_tells_its_reports_again_on_a_new_connection() -> None:
    node = Node(ranks=1)
    drained(node)
    node.agent.exited(0, Cause.EXIT, "", BETWEEN, node.now_s)
    node.agent.packets(node.now_s)  # lost with the connection
    node.agent.tick(node.now_s + DELIVER_S)
    assert node.agent.take() == [FAREWELL]
    node.now_s += 10.0
    node.agent.reconnected(node.now_s)
    assert node.agent.take() == []
    assert node.heard() == [msg.WorkerDone(0, 4)]
    assert node.order(msg.Resume(3)) == [FAREWELL]


def test_a_node_that_leaves_says_nothing_more_for_an_incarnation_that_was_evicted() -> None:
    node = Node(ranks=1)
    drained(node)
    node.exit(0)
    node.agent.receive(EVICTED, node.now_s)
    assert node.agent.take() == [FAREWELL]
    evicted = Node(ranks=1)
    evicted.agent.receive(EVICTED, evicted.now_s)
    evicted.agent.take()
    evicted.agent.depart("ended by SIGTERM", evicted.now_s)
    assert FAREWELL in evicted.agent.take()


def test_a_drained_node_leaves_when_its_ranks_have_moved() -> None:
    node = Node(ranks=1)
    node.agent.drain("ended by SIGTERM", node.now_s)
    assert msg.NodeDraining(NODE, "ended by SIGTERM") in node.heard()
    assert node.agent.take() == []
    node.order(msg.FenceWorker(0, "its node drains"))
    assert node.exit(0, "killed by SIGKILL", IN_A_STEP) == [msg.WorkerFenced(0)]
    assert FAREWELL in node.order(msg.Resume(2))


def test_a_drained_node_without_ranks_leaves_at_once() -> None:
    node = Node(ranks=0)
    node.agent.drain("ended by SIGTERM", node.now_s)
    assert node.heard() == [msg.NodeDraining(NODE, "ended by SIGTERM")]
    assert FAREWELL in node.order(msg.Resume(2))


def test_a_drained_node_stays_until_a_drained_job_has_ended() -> None:
    node = Node(ranks=1)
    node.agent.drain("ended by SIGTERM", node.now_s)
    assert Signal((0,)) in node.order(msg.Terminate("ended by SIGTERM"))
    node.exit(0, "killed by SIGTERM", Tag(1, 3, Phase.UPDATED))
    assert node.agent.take() == []
    assert node.order(msg.EndJob(1, "drained")) == [Leave(1, "drained")]


@pytest.mark.parametrize("timeout_s", [600.0, 7200.0])
def test_a_rank_between_steps_has_as_long_as_the_others_wait_for_it(timeout_s: float) -> None:
    """An evaluation on rank 0: the script has said with the timeout of its groups how long that may take."""
    node = Node(ranks=1)
    node.said(0, msg.WorkerReady(0, 1, (0,), (), False, False, "0", timeout_s))
    look(node, 0, Tag(1, 3, Phase.UPDATED))
    long_s = max(timeout_s, DEADLINES.long_s)
    assert of_liveness(node.wait(long_s - 1.0)) == []
    node.wait(2.0)
    (suspected,) = of_liveness(answered(node))
    assert isinstance(suspected, msg.WorkerSuspected)
    assert f"(allowed {long_s:.1f} s)" in suspected.detail


def test_a_worker_that_was_ordered_to_end_is_not_hung() -> None:
    node = Node(ranks=1)
    node.order(msg.Terminate("ended by SIGTERM"))
    assert node.wait(1000.0) == []


def test_times_go_up_on_the_controllers_clock() -> None:
    node = Node(ranks=1)
    node.agent.clock_offset_s = 1000.0
    (lost,) = node.exit(0, "killed by SIGKILL", Tag(1, 3, Phase.BACKWARD))
    assert isinstance(lost, msg.WorkerLost)
    assert lost.since_s == node.now_s + 1000.0


@pytest.mark.parametrize(
    "stale",
    [
        msg.NodeEvicted(NODE, INCARNATION - 1, "an earlier incarnation", False),
        msg.Packet(NODE, INCARNATION - 1, 0, 0, (msg.EndJob(0, "an earlier incarnation"),), misses=False),
    ],
)
def test_what_was_meant_for_an_earlier_life_is_dropped(stale: msg.Packet | msg.NodeEvicted) -> None:
    node = Node(ranks=1)
    node.agent.receive(stale, node.now_s)
    assert (node.agent.take(), node.agent.incarnation) == ([], INCARNATION)


# ---- Snapshots ------------------------------------------------------------------------------------------------------


def test_what_a_lost_worker_has_left_is_reported_before_its_loss() -> None:
    node = Node(ranks=2)
    node.agent.exited(0, Cause.SIGNAL, "killed by SIGKILL", IN_A_STEP, node.now_s, ((0, (3, 4)), (5, (4,))))
    lost = msg.WorkerLost(0, Cause.SIGNAL, "killed by SIGKILL", True, IN_A_STEP, node.now_s)
    assert node.heard() == [msg.SnapshotsLeft(0, ((0, (3, 4)), (5, (4,)))), lost]
    assert node.agent.training_thread_died(1, IN_A_STEP, node.now_s, ((1, (4,)),))
    died = msg.WorkerLost(1, Cause.DIED, "its process died", True, IN_A_STEP, node.now_s)
    assert node.heard() == [msg.SnapshotsLeft(1, ((1, (4,)),)), died]


def test_what_a_fenced_worker_has_left_is_reported_when_it_is_gone() -> None:
    node = Node(ranks=1)
    node.order(msg.FenceWorker(0, "it hangs"))
    assert node.heard() == []
    node.agent.exited(0, Cause.SIGNAL, "killed by SIGKILL", IN_A_STEP, node.now_s, ((0, (5,)),))
    assert node.heard() == [msg.SnapshotsLeft(0, ((0, (5,)),)), msg.WorkerFenced(0)]


def test_a_worker_whose_script_is_through_leaves_nothing() -> None:
    node = Node(ranks=1)
    node.agent.exited(0, Cause.EXIT, "", BETWEEN, node.now_s, ((0, (3,)),))
    assert node.heard() == [msg.WorkerDone(0, 4)]


def test_snapshots_are_passed_on_before_the_rank_and_let_go() -> None:
    node = Node(spares=1)
    assign = msg.Assign(0, 2, 1, 0, 3, None, ())
    orders = node.order(msg.PassSnapshots(0, 1, (7, 9)), assign)
    assert orders == [PassMemory(0, 1, (7, 9)), HandOver((0,), assign)]
    assert node.order(msg.ReleaseSnapshots((7, 9))) == [ReleaseMemory((7, 9))]


def test_a_node_that_joins_again_lets_go_of_all_snapshots() -> None:
    node = Node(ranks=1)
    node.agent.receive(EVICTED, node.now_s)
    assert node.agent.take() == [Kill(0)]
    node.agent.exited(0, Cause.SIGNAL, "killed by SIGKILL", IN_A_STEP, node.now_s, ((0, (3,)),))
    assert ReleaseMemory(None) in node.agent.take()
    assert node.heard() == []


# ---- Sick devices ---------------------------------------------------------------------------------------------------


def test_a_closed_device_is_reported_and_what_runs_there_goes_on() -> None:
    node = Node(ranks=2)
    node.agent.close_devices((1,), "row remapping pending")
    assert node.heard() == [msg.DevicesClosed(NODE, (1,), "row remapping pending")]
    assert node.agent.take() == []


def test_the_ranks_of_a_failed_device_are_lost_with_their_tags_before_it_is_closed() -> None:
    node = Node(ranks=2, spares=1)
    tags = {0: BETWEEN, 1: IN_A_STEP, 2: Tag(0, 0, Phase.STARTING)}
    node.agent.devices_failed((1, 2), "Xid 79", tags, 100.0)
    assert node.heard() == [
        msg.WorkerLost(1, Cause.DEVICE, "Xid 79", False, IN_A_STEP, 100.0),
        msg.DevicesClosed(NODE, (1, 2), "Xid 79"),
    ]
    assert node.order(msg.FenceWorker(1, "Xid 79")) == [Kill(1)]
    assert node.exit(1, "killed by SIGKILL", IN_A_STEP) == [msg.WorkerFenced(1)]


def test_a_rank_that_is_lost_already_is_not_lost_by_its_device() -> None:
    node = Node(ranks=2)
    node.order(msg.FenceWorker(0, "it hangs"))
    node.agent.training_thread_died(1, IN_A_STEP, node.now_s)
    node.heard()
    node.agent.devices_failed((0, 1), "Xid 79", {0: BETWEEN, 1: IN_A_STEP}, 100.0)
    assert node.heard() == [msg.DevicesClosed(NODE, (0, 1), "Xid 79")]


def test_a_node_that_joins_again_says_which_devices_it_has_closed() -> None:
    node = Node(ranks=1)
    node.agent.close_devices((3,), "sick")
    node.agent.receive(EVICTED, node.now_s)
    node.agent.close_devices((1,), "sick as well")
    node.agent.exited(0, Cause.SIGNAL, "killed by SIGKILL", BETWEEN, node.now_s)
    (packet,) = node.agent.packets(node.now_s)
    assert packet.messages == (msg.NodeJoined(NODE, 4, "rack-1", 0, 0, (1, 3), 0),)
