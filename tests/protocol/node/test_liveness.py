"""Who is to blame: the agent's machine, fed with looks at given times."""

import dataclasses
import math

import pytest

from keepstep.protocol.deadlines import Deadlines
from keepstep.protocol.messages import Cause, JobStalled, SuspicionLifted, Tag, WorkerSuspected
from keepstep.protocol.node.liveness import MEASURED, WINDOW, LivenessMachine, Observation, Verdict, was_passed
from keepstep.protocol.phases import Phase

HANG_S, FACTOR, LONG_S, RECOVERY_S = 1.0, 3.0, 600.0, 30.0
DEADLINES = Deadlines(
    hang_after_s=HANG_S,
    hang_factor=FACTOR,
    long_s=LONG_S,
    recovery_s=RECOVERY_S,
    blind_s=math.inf,  # most tests look only when something has changed
)
BIT_S = 0.001
IN_A_STEP = [Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED, Phase.OPTIMIZER]


class Node:
    """A liveness machine with looks that are told in short, at times that only go forward."""

    def __init__(self, num_ranks: int = 2, num_spares: int = 0, blind_s: float = math.inf) -> None:
        self.machine = LivenessMachine("node-a", dataclasses.replace(DEADLINES, blind_s=blind_s))
        self.machine.is_initialised = True
        self.now_s = 100.0
        self.shown: dict[int, tuple[Tag, float]] = {}
        """What the worker's page has shown last, and since when."""
        for worker in range(num_ranks + num_spares):
            self.machine.watch(worker, worker if worker < num_ranks else None, self.now_s)

    def look(
        self,
        worker: int,
        phase: Phase,
        step: int = 5,
        *,
        generation: int = 1,
        progress: int = 0,
        waiting: bool = False,
        collective: bool = False,
        stopped: bool = False,
        unread: bool = False,
    ) -> None:
        tag = Tag(generation, step, phase)
        self.machine.observe(worker, Observation(tag, progress, waiting, collective, stopped, unread), self.now_s)
        before, since_s = self.shown.get(worker, (tag, self.now_s))
        if tag == before:
            self.shown.setdefault(worker, (tag, since_s))
            return
        if was_passed(before, tag):
            self.machine.passed(worker, before.phase, since_s, self.now_s)
        self.shown[worker] = tag, self.now_s

    def judge_after(self, seconds: float) -> list[Verdict]:
        self.now_s += seconds
        return self.machine.judge(self.now_s)

    def train(self, worker: int, phase_s: float = 0.1, num_steps: int = 1) -> None:
        """One worker goes through whole steps, each phase as long as told, and is left at the start of a forward."""
        for step in range(num_steps):
            for phase in (*IN_A_STEP, Phase.UPDATED):
                self.look(worker, phase, step)
                self.now_s += phase_s
        self.look(worker, Phase.FORWARD, num_steps)


def suspected(verdicts: list[Verdict]) -> list[tuple[int, Cause]]:
    assert all(isinstance(verdict, WorkerSuspected) for verdict in verdicts), verdicts
    return [(verdict.worker, verdict.cause) for verdict in verdicts if isinstance(verdict, WorkerSuspected)]


def beside_stalls(verdicts: list[Verdict]) -> list[Verdict]:
    """Whose ranks all wait for too long says so; that blames no process."""
    return [verdict for verdict in verdicts if not isinstance(verdict, JobStalled)]


# ---- Standing still outside of a collective -------------------------------------------------------------------------


@pytest.mark.parametrize(("phase_s", "allowed_s"), [(0.1, HANG_S), (2.0, 2.0 * FACTOR)], ids=["floor", "learned"])
def test_a_rank_without_progress_is_suspected_past_its_deadline_and_only_once(phase_s: float, allowed_s: float) -> None:
    node = Node(num_ranks=2)
    node.train(0, phase_s)
    node.look(1, Phase.FORWARD, waiting=True)
    node.look(0, Phase.FORWARD, 1, progress=1)
    assert node.machine.deadline_s(0) == pytest.approx(allowed_s)
    assert node.judge_after(allowed_s - BIT_S) == []
    assert suspected(node.judge_after(2 * BIT_S)) == [(0, Cause.HANG)]
    assert node.judge_after(10 * allowed_s) == []


def test_the_suspicion_says_who_where_and_since_when() -> None:
    node = Node(num_ranks=1)
    node.train(0)
    since_s = node.now_s
    (verdict,) = node.judge_after(2.5)
    assert isinstance(verdict, WorkerSuspected)
    assert (verdict.worker, verdict.tag) == (0, Tag(1, 1, Phase.FORWARD))
    assert verdict.since_s == pytest.approx(since_s)
    assert (
        verdict.detail == "no progress in forward of step 1 for 2.5 s (allowed 1.0 s), and it waits for no other rank"
    )


def test_progress_within_a_phase_is_no_standing_still() -> None:
    node = Node(num_ranks=1)
    node.train(0)
    for progress in range(1, 6):
        node.look(0, Phase.FORWARD, 1, progress=progress)
        assert node.judge_after(HANG_S - BIT_S) == []
    assert suspected(node.judge_after(2 * BIT_S)) == [(0, Cause.HANG)]


@pytest.mark.parametrize("how", ["progress", "collective", "waiting"])
def test_a_suspicion_ends_when_the_rank_goes_on_or_waits_for_others(how: str) -> None:
    node = Node(num_ranks=1)
    node.train(0)
    assert suspected(node.judge_after(HANG_S + BIT_S)) == [(0, Cause.HANG)]
    for _ in range(2):
        assert node.judge_after(HANG_S) == []
    node.look(0, Phase.FORWARD, 1, progress=how == "progress", collective=how == "collective", waiting=how == "waiting")
    assert beside_stalls(node.judge_after(BIT_S)) == [SuspicionLifted(0)]
    node.look(0, Phase.FORWARD, 1, progress=2)
    assert beside_stalls(node.judge_after(BIT_S)) == []
    assert suspected(node.judge_after(HANG_S)) == [(0, Cause.HANG)], "it may fall silent again"


def test_several_may_be_suspected_at_once() -> None:
    node = Node(num_ranks=3)
    node.train(0)
    for worker in range(3):
        node.look(worker, Phase.BACKWARD, 9, collective=worker == 1)
    assert suspected(node.judge_after(HANG_S + BIT_S)) == [(0, Cause.HANG), (2, Cause.HANG)]


@pytest.mark.parametrize("phase", IN_A_STEP)
def test_the_first_phase_of_its_kind_in_a_job_has_the_long_deadline(phase: Phase) -> None:
    node = Node(num_ranks=1)
    node.look(0, phase, 0)
    assert node.judge_after(LONG_S - BIT_S) == []
    assert suspected(node.judge_after(2 * BIT_S)) == [(0, Cause.HANG)]


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.OPTIMIZER, Phase.UPDATED])
def test_what_a_script_does_outside_of_forward_and_backward_has_the_long_deadline(phase: Phase) -> None:
    """It evaluates and saves there, also behind the update in the step, and what its steps took says nothing of it."""
    node = Node(num_ranks=1)
    node.train(0)
    node.look(0, phase, 1)
    assert node.judge_after(LONG_S - BIT_S) == []
    assert suspected(node.judge_after(2 * BIT_S)) == [(0, Cause.HANG)]


def test_before_any_has_called_init_nothing_is_known_of_what_scripts_do() -> None:
    """One that never does trains for days, and shows nothing of it."""
    node = Node(num_ranks=1)
    node.machine.is_initialised = False
    node.look(0, Phase.STARTING, -1)
    assert node.judge_after(1000 * LONG_S) == []
    node.machine.is_initialised = True
    assert suspected(node.judge_after(BIT_S)) == [(0, Cause.HANG)]


# ---- Waiting for others ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [*IN_A_STEP, Phase.UPDATED])
def test_a_rank_inside_a_collective_is_a_victim(phase: Phase) -> None:
    node = Node(num_ranks=2)
    node.train(1)
    node.look(0, phase, collective=True)
    node.look(1, Phase.BACKWARD)
    assert suspected(node.judge_after(10 * LONG_S)) == [(1, Cause.HANG)]
    assert node.judge_after(10 * LONG_S) == []


@pytest.mark.parametrize("phase", list(Phase))
def test_a_rank_that_waits_for_the_controller_is_not_at_fault(phase: Phase) -> None:
    node = Node(num_ranks=1)
    node.look(0, phase, waiting=True)
    assert beside_stalls(node.judge_after(10 * LONG_S)) == []
    node.machine.stopping((0,), node.now_s)
    node.look(0, phase, progress=1, waiting=True)
    assert beside_stalls(node.judge_after(10 * LONG_S)) == []
    node.machine.recovering(0, node.now_s)
    node.look(0, phase, progress=2, waiting=True)
    assert beside_stalls(node.judge_after(10 * LONG_S)) == []


def test_a_rank_that_ignores_the_order_that_it_waits_for_hangs() -> None:
    """Found by simulation: its page says for ever that it waits, and each recovery waits for it."""
    node = Node(num_ranks=1)
    node.look(0, Phase.UPDATED, waiting=True)
    node.machine.recovering(0, node.now_s)
    assert node.judge_after(RECOVERY_S - BIT_S) == []
    assert suspected(node.judge_after(2 * BIT_S)) == [(0, Cause.HANG)]
    node.machine.stopping((0,), node.now_s)
    assert suspected(node.judge_after(BIT_S)) == [(0, Cause.HANG)], "the controller has forgotten it with the stop"
    assert node.judge_after(BIT_S) == [], "it is no better than before"

    node = Node(num_ranks=1)
    node.look(0, Phase.UPDATED, waiting=True)
    node.machine.stopping((0,), node.now_s)
    assert beside_stalls(node.judge_after(LONG_S - BIT_S)) == [], "it may be reading a checkpoint"
    assert suspected(node.judge_after(2 * BIT_S)) == [(0, Cause.HANG)]


def test_an_answer_ends_a_suspicion_though_no_look_has_shown_progress() -> None:
    """Found by simulation: a stopped process went on, answered, and was stopped again between two looks."""
    node = Node(num_ranks=1)
    node.look(0, Phase.FORWARD, stopped=True)
    assert suspected(node.judge_after(HANG_S + BIT_S)) == [(0, Cause.STOPPED)]
    assert node.machine.answered(0, node.now_s) == SuspicionLifted(0)
    assert node.judge_after(0.0) == []
    assert node.judge_after(HANG_S - BIT_S) == []
    assert suspected(node.judge_after(2 * BIT_S)) == [(0, Cause.STOPPED)]


def stalled(num_ranks: int, generation: int = 1) -> JobStalled:
    return JobStalled("node-a", generation, f"all {num_ranks} ranks of node-a wait for others past their deadline")


def test_a_rank_that_hangs_in_the_last_barrier_stalls_the_node_whose_others_have_finished() -> None:
    """Found by simulation: the others wait for the controller, which waits for a rank that no process looked for."""
    node = Node(num_ranks=2)
    node.train(1)
    node.look(0, Phase.SYNCED, collective=True)
    node.look(1, Phase.UPDATED, waiting=True)
    assert node.judge_after(2 * HANG_S - BIT_S) == []
    assert node.judge_after(2 * BIT_S) == [stalled(2)]
    assert node.judge_after(10 * LONG_S) == []


def test_a_node_whose_ranks_have_all_finished_does_not_hide_that_one_of_another_node_hangs() -> None:
    """The controller stops a job of which every node is stalled, so this one must say that it is."""
    node = Node(num_ranks=2)
    for worker in range(2):
        node.look(worker, Phase.UPDATED, waiting=True)
    assert node.judge_after(2 * HANG_S - BIT_S) == []
    assert node.judge_after(2 * BIT_S) == [stalled(2)]
    assert node.judge_after(10 * LONG_S) == []


def test_a_rank_that_computes_is_blamed_though_the_others_wait_for_the_controller() -> None:
    node = Node(num_ranks=3)
    node.train(0)
    node.look(0, Phase.SYNCED, collective=True)
    node.look(1, Phase.UPDATED, waiting=True)
    node.look(2, Phase.BACKWARD)
    assert suspected(node.judge_after(LONG_S + BIT_S)) == [(2, Cause.HANG)]
    assert node.judge_after(10 * LONG_S) == []


def test_a_stall_while_all_recover_hides_none_of_the_training_after_it() -> None:
    """No process acts upon it in a recovery, and the generation is the same one."""
    node = Node(num_ranks=2)
    node.train(0)
    for worker in range(2):
        node.machine.recovering(worker, node.now_s)
        node.look(worker, Phase.UPDATED, generation=2, waiting=True)
    assert node.judge_after(RECOVERY_S + BIT_S) == [stalled(2, generation=2)]
    node.machine.resumed(node.now_s)
    for worker in range(2):
        node.look(worker, Phase.BACKWARD, 9, generation=2, collective=True)
    assert node.judge_after(HANG_S + BIT_S) == [stalled(2, generation=2)]
    assert node.judge_after(10.0) == []


def test_all_inside_a_collective_is_a_stalled_job_once_a_generation() -> None:
    node = Node(num_ranks=3)
    node.train(0)
    for worker in range(3):
        node.look(worker, Phase.BACKWARD, 9, collective=True)
    assert node.judge_after(HANG_S - BIT_S) == []
    assert node.judge_after(2 * BIT_S) == [stalled(3)]
    assert node.judge_after(10.0) == []

    node.machine.resumed(node.now_s)
    for worker in range(3):
        node.look(worker, Phase.BACKWARD, 9, generation=2, collective=True)
    assert node.judge_after(HANG_S + BIT_S) == [stalled(3, generation=2)]
    assert node.judge_after(10.0) == []


def test_a_stall_that_has_passed_may_come_again() -> None:
    """The ranks of another node were slow. That all of this one waited once says nothing of the next time."""
    node = Node(num_ranks=2)
    node.train(0)
    for progress in (1, 2):
        for worker in range(2):
            node.look(worker, Phase.BACKWARD, 9, progress=progress, collective=True)
        assert node.judge_after(HANG_S + BIT_S) == [stalled(2)]
        assert node.judge_after(10.0) == []
        node.look(0, Phase.BACKWARD, 9, progress=progress + 10)
        assert node.judge_after(BIT_S) == []


def test_one_rank_outside_the_collective_is_blamed_instead_of_the_job() -> None:
    node = Node(num_ranks=3)
    node.train(0)
    for worker in range(3):
        node.look(worker, Phase.BACKWARD, 9, collective=worker != 2)
    assert suspected(node.judge_after(HANG_S + BIT_S)) == [(2, Cause.HANG)]


def test_one_rank_that_is_not_overdue_keeps_the_job_from_being_stalled() -> None:
    node = Node(num_ranks=2)
    node.train(0)
    node.look(0, Phase.BACKWARD, 9, collective=True)
    node.now_s += HANG_S
    node.look(1, Phase.BACKWARD, 9, collective=True)
    assert node.judge_after(BIT_S) == []
    assert [type(verdict) for verdict in node.judge_after(HANG_S)] == [JobStalled]


def test_ranks_that_were_never_looked_at_do_not_break_the_machine() -> None:
    """Their processes are still being started."""
    node = Node(num_ranks=2)
    assert node.judge_after(LONG_S + BIT_S) == []


# ---- A stopped process ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("phase", list(Phase))
def test_a_stopped_process_is_blamed_after_its_time_in_any_phase(phase: Phase, waiting: bool, collective: bool) -> None:
    node = Node(num_ranks=2)
    node.look(0, phase, waiting=waiting, collective=collective, stopped=True)
    node.look(1, Phase.UPDATED)
    assert node.judge_after(HANG_S - BIT_S) == []
    assert suspected(node.judge_after(2 * BIT_S)) == [(0, Cause.STOPPED)]
    assert node.judge_after(HANG_S) == []


def test_a_process_that_goes_on_in_time_is_not_blamed() -> None:
    node = Node(num_ranks=1)
    node.look(0, Phase.UPDATED, stopped=True)
    node.now_s += HANG_S - BIT_S
    node.look(0, Phase.UPDATED, progress=1)
    assert node.judge_after(LONG_S - BIT_S) == []


def test_what_is_said_of_a_stopped_process_has_its_own_limit_and_not_that_of_its_phase() -> None:
    node = Node(num_ranks=1)
    node.train(0, phase_s=2.0)
    node.look(0, Phase.FORWARD, 1, stopped=True)
    assert node.machine.deadline_s(0) == pytest.approx(2.0 * FACTOR)
    (verdict,) = node.judge_after(HANG_S + 0.2)
    assert isinstance(verdict, WorkerSuspected)
    assert verdict.detail == (
        "its process has been stopped by a signal (SIGSTOP) in forward of step 1 for 1.2 s (allowed 1.0 s)"
    )


@pytest.mark.parametrize("num_ranks", [0, 1])
def test_a_process_that_had_waited_long_may_be_stopped_as_long_as_any_other(num_ranks: int) -> None:
    """A spare waits for hours, a rank for the slowest of the others."""
    node = Node(num_ranks, num_spares=1 - num_ranks)
    node.look(0, Phase.UPDATED, waiting=True)
    node.now_s += 1000.0
    node.look(0, Phase.UPDATED, waiting=True, stopped=True)
    assert beside_stalls(node.judge_after(HANG_S - BIT_S)) == []
    assert suspected(node.judge_after(2 * BIT_S)) == [(0, Cause.STOPPED)]


# ---- Spares ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waiting", [False, True])
def test_a_spare_may_stand_still_for_ever(waiting: bool) -> None:
    node = Node(num_ranks=1, num_spares=1)
    node.look(0, Phase.UPDATED, waiting=True)
    node.look(1, Phase.STARTING, -1, waiting=waiting)
    assert beside_stalls(node.judge_after(100 * LONG_S)) == []


def test_a_spare_does_not_keep_the_job_from_being_stalled() -> None:
    node = Node(num_ranks=1, num_spares=1)
    node.train(0)
    node.look(0, Phase.SYNCED, 9, collective=True)
    node.look(1, Phase.STARTING, -1, waiting=True)
    assert [type(verdict) for verdict in node.judge_after(HANG_S + BIT_S)] == [JobStalled]


def test_a_stopped_spare_is_blamed() -> None:
    node = Node(num_ranks=1, num_spares=1)
    node.look(0, Phase.UPDATED)
    node.look(1, Phase.STARTING, -1, waiting=True, stopped=True)
    assert suspected(node.judge_after(HANG_S + BIT_S)) == [(1, Cause.STOPPED)]


def test_a_spare_that_was_given_a_rank_is_judged_like_any_other() -> None:
    node = Node(num_ranks=1, num_spares=1)
    node.look(0, Phase.UPDATED, waiting=True)
    node.look(1, Phase.STARTING, -1, waiting=True)
    node.now_s += 100 * LONG_S
    node.machine.watch(1, 0, node.now_s)
    node.machine.recovering(1, node.now_s)
    node.look(1, Phase.STARTING, -1)
    assert node.judge_after(RECOVERY_S - BIT_S) == []
    assert suspected(node.judge_after(2 * BIT_S)) == [(1, Cause.HANG)]


# ---- Through a recovery ---------------------------------------------------------------------------------------------


def test_after_stop_a_collective_is_no_excuse() -> None:
    node = Node(num_ranks=2)
    node.train(0)
    for worker in range(2):
        node.look(worker, Phase.BACKWARD, 9, collective=True)
    node.now_s += HANG_S / 2
    node.machine.stopping((0, 1), node.now_s)
    assert node.judge_after(HANG_S - BIT_S) == []
    node.look(1, Phase.BACKWARD, 9, waiting=True)
    assert suspected(node.judge_after(2 * BIT_S)) == [(0, Cause.HANG)]


def test_the_order_to_stop_excuses_no_rank_that_is_late_already() -> None:
    """Found by simulation: a rank that hung was given more time by each failure of another one."""
    node = Node(num_ranks=1)
    node.train(0)
    node.now_s += 0.9 * HANG_S
    node.machine.stopping((0,), node.now_s)
    assert suspected(node.judge_after(0.1 * HANG_S + BIT_S)) == [(0, Cause.HANG)]


def test_while_recovering_every_sign_of_progress_counts() -> None:
    node = Node(num_ranks=1)
    node.machine.stopping((0,), node.now_s)
    node.machine.safe(0)
    node.look(0, Phase.UPDATED, waiting=True)
    node.machine.recovering(0, node.now_s)
    for progress in range(1, 4):
        node.look(0, Phase.UPDATED, progress=progress)
        assert node.judge_after(RECOVERY_S - BIT_S) == []
    assert suspected(node.judge_after(2 * BIT_S)) == [(0, Cause.HANG)]


def test_the_order_to_recover_restarts_the_deadline() -> None:
    """The rank has waited for it, and is looked at again only when it has not moved on."""
    node = Node(num_ranks=1)
    node.look(0, Phase.UPDATED)
    node.now_s += 10 * RECOVERY_S
    node.machine.recovering(0, node.now_s)
    assert node.judge_after(RECOVERY_S - BIT_S) == []
    assert suspected(node.judge_after(2 * BIT_S)) == [(0, Cause.HANG)]


def test_a_spare_that_was_parked_has_the_time_of_a_start() -> None:
    """It has its rank, and the order to recover, before the script's first line."""
    node = Node(num_ranks=0, num_spares=1)
    node.machine.builds(0, is_building=True)
    node.machine.watch(0, 1, node.now_s)
    node.machine.recovering(0, node.now_s)
    node.look(0, Phase.STARTING, -1)
    assert node.judge_after(RECOVERY_S + BIT_S) == []
    node.machine.builds(0, is_building=False)
    assert suspected(node.judge_after(BIT_S)) == [(0, Cause.HANG)]


def test_the_order_to_resume_restarts_the_deadline() -> None:
    node = Node(num_ranks=1)
    node.look(0, Phase.UPDATED)
    node.now_s += 0.9 * LONG_S
    node.machine.resumed(node.now_s)
    assert node.judge_after(LONG_S - BIT_S) == []
    assert suspected(node.judge_after(2 * BIT_S)) == [(0, Cause.HANG)]


def test_a_second_stop_finds_the_rank_in_its_recovery() -> None:
    """Its page still shows the phase in which the first one has stopped it, which says nothing of what it does now."""
    node = Node(num_ranks=1)
    node.train(0)
    node.machine.stopping((0,), node.now_s)
    assert node.machine.deadline_s(0) == HANG_S
    node.machine.safe(0)
    node.machine.stopping((0,), node.now_s)
    assert node.machine.deadline_s(0) == RECOVERY_S
    node.machine.resumed(node.now_s)
    node.machine.stopping((0,), node.now_s)
    assert node.machine.deadline_s(0) == HANG_S


def test_after_resume_a_collective_is_an_excuse_again() -> None:
    node = Node(num_ranks=2)
    node.train(0)
    for worker in range(2):
        node.machine.recovering(worker, node.now_s)
    node.now_s += RECOVERY_S - BIT_S
    node.machine.resumed(node.now_s)
    node.look(0, Phase.FORWARD, 9, generation=2, collective=True)
    node.look(1, Phase.FORWARD, 9, generation=2)
    assert node.judge_after(HANG_S - BIT_S) == []
    assert suspected(node.judge_after(2 * BIT_S)) == [(1, Cause.HANG)]


# ---- What is learned ------------------------------------------------------------------------------------------------


def test_the_longest_of_late_is_the_measure_of_a_phase() -> None:
    node = Node(num_ranks=1)
    node.train(0, 0.5, num_steps=3)
    node.train(0, 4.0)
    node.train(0, 0.5, num_steps=WINDOW - 1)
    assert node.machine.deadline_s(0) == pytest.approx(4.0 * FACTOR)
    node.train(0, 0.5)
    assert node.machine.deadline_s(0) == pytest.approx(0.5 * FACTOR)


def test_a_warm_process_says_nothing_about_a_fresh_one() -> None:
    """A fresh one opens its data, compiles and allocates in its first step. That was the first step of others once."""
    node = Node(num_ranks=2)
    node.train(0, 20.0)
    node.train(0, 0.1, num_steps=WINDOW)
    assert node.machine.deadline_s(0) == HANG_S
    node.look(1, Phase.FORWARD, 0)
    assert node.machine.deadline_s(1) == pytest.approx(20.0 * FACTOR)


@pytest.mark.parametrize("how", ["stopped", "the agent was paused"])
def test_a_phase_that_was_cut_short_teaches_nothing_about_first_ones(how: str) -> None:
    """Found by simulation: what it has opened by then is not opened again, so the next one is quick."""
    node = Node(num_ranks=1, num_spares=1, blind_s=0.5 if how == "the agent was paused" else math.inf)
    node.look(0, Phase.FORWARD, 0)
    if how == "stopped":
        node.now_s += 7.0
        node.machine.stopping((0,), node.now_s)
        node.machine.recovering(0, node.now_s)
        node.machine.resumed(node.now_s)
        node.look(0, Phase.FORWARD, 0, generation=2)
    else:
        node.now_s += 7.0
        node.look(0, Phase.FORWARD, 0, progress=1)
    node.now_s += 0.1
    node.look(0, Phase.BACKWARD, 0, generation=2 if how == "stopped" else 1)
    for step in (1, 2):
        node.look(0, Phase.FORWARD, step, generation=2)
        node.now_s += 0.1
        node.look(0, Phase.BACKWARD, step, generation=2)
    assert Phase.FORWARD not in dict(node.machine.first_phases)
    node.machine.watch(1, 1, node.now_s)
    node.look(1, Phase.FORWARD, 2, generation=2)
    assert node.machine.deadline_s(1) == LONG_S


def test_the_first_phases_on_other_nodes_count_too() -> None:
    node = Node(num_ranks=1)
    node.look(0, Phase.FORWARD, 0)
    assert node.machine.deadline_s(0) == LONG_S
    node.machine.learn(((Phase.FORWARD, 7.0), (Phase.BACKWARD, 0.1)))
    node.machine.learn(((Phase.FORWARD, 4.0),))
    assert node.machine.deadline_s(0) == pytest.approx(7.0 * FACTOR)
    assert node.machine.first_phases == ((Phase.BACKWARD, 0.1), (Phase.FORWARD, 7.0))
    node.look(0, Phase.BACKWARD, 0)
    assert node.machine.deadline_s(0) == HANG_S


def test_the_first_phase_is_no_measure_of_later_ones() -> None:
    """Else a hang would be found late for as long as the first step is among the recent ones."""
    node = Node(num_ranks=1)
    node.train(0, 30.0)
    assert node.machine.deadline_s(0) == pytest.approx(30.0 * FACTOR), "until a second one has ended"
    node.train(0, 0.1)
    assert node.machine.deadline_s(0) == HANG_S


def test_each_phase_has_its_own_measure() -> None:
    node = Node(num_ranks=1)
    node.train(0, 2.0, num_steps=2)
    node.look(0, Phase.BACKWARD, 1)
    node.now_s += 5.0
    node.look(0, Phase.SYNCED, 1)
    assert node.machine.deadline_s(0) == pytest.approx(2.0 * FACTOR)
    node.look(0, Phase.BACKWARD, 2)
    assert node.machine.deadline_s(0) == pytest.approx(5.0 * FACTOR)


def test_nothing_is_learned_from_a_phase_that_was_cut_off() -> None:
    node = Node(num_ranks=1)
    node.train(0)
    node.machine.stopping((0,), node.now_s)
    node.now_s += 50.0
    node.look(0, Phase.UPDATED, 0)
    node.machine.resumed(node.now_s)
    node.look(0, Phase.FORWARD, 1, generation=2)
    assert node.machine.deadline_s(0) == HANG_S


def test_phases_that_no_look_finds_are_measured_too() -> None:
    """Looks come every 20 ms: in a job with shorter steps most phases are over before the next one."""
    node = Node(num_ranks=1)
    node.look(0, Phase.UPDATED, 0)
    phases = sorted(MEASURED)
    for phase, took_s in zip(phases, (0.002, 0.5, 2.0), strict=True):
        for each_s in (100.0, took_s):
            node.machine.passed(0, phase, node.now_s, node.now_s + each_s)
    for phase, limit_s in zip(phases, (HANG_S, 0.5 * FACTOR, 2.0 * FACTOR), strict=True):
        node.look(0, phase, 7)
        assert node.machine.deadline_s(0) == pytest.approx(limit_s)


def test_a_phase_that_began_before_training_went_on_is_no_measure() -> None:
    """A rank that advances in a recovery waits for the state of others in it."""
    node = Node(num_ranks=1)
    node.look(0, Phase.SYNCED, 0)
    node.machine.resumed(node.now_s + 5.0)
    node.machine.passed(0, Phase.SYNCED, node.now_s, node.now_s + 5.5)
    assert node.machine.deadline_s(0) == LONG_S


# ---- When it cannot have seen anything ------------------------------------------------------------------------------


def blind_for(gap_s: float, *, stopped: bool = False) -> Node:
    """It stood still for a bit before a gap in which no process looked, and is looked at all the time after it."""
    node = Node(num_ranks=1, blind_s=0.5)
    node.train(0)
    node.look(0, Phase.FORWARD, 1, stopped=stopped)
    assert node.judge_after(0.4) == []
    assert node.judge_after(gap_s) == []
    return node


@pytest.mark.parametrize("gap_s", [0.6, 50.0, 2 * LONG_S, -300.0])
def test_the_time_in_which_the_agent_did_not_look_counts_against_no_worker(gap_s: float) -> None:
    """The machine was suspended, the agent was held up, or its clock jumped; what was before and after it counts."""
    node = blind_for(gap_s)
    assert node.judge_after(0.4) == []
    assert suspected(node.judge_after(0.4)) == [(0, Cause.HANG)]


def test_a_process_seen_stopped_was_not_seen_stopped_while_the_agent_did_not_look() -> None:
    node = blind_for(50.0, stopped=True)
    assert node.judge_after(0.4) == []
    assert suspected(node.judge_after(0.4)) == [(0, Cause.STOPPED)]


def test_a_phase_did_not_take_the_time_in_which_the_agent_did_not_look() -> None:
    """Else one gap would put the deadline of that phase off for all that come after it."""
    node = Node(num_ranks=1, blind_s=0.5)
    node.train(0)
    node.now_s += 50.0
    node.look(0, Phase.BACKWARD, 1)
    node.look(0, Phase.FORWARD, 2)
    assert node.machine.deadline_s(0) == HANG_S


def test_ranks_that_were_not_looked_at_do_not_stall_the_job() -> None:
    node = Node(num_ranks=2, blind_s=0.5)
    node.train(0)
    for worker in range(2):
        node.look(worker, Phase.BACKWARD, 9, collective=True)
    assert node.judge_after(50.0) == []
    verdicts = [verdict for _ in range(3) for verdict in node.judge_after(0.4)]
    assert verdicts == [stalled(2)]


def test_looks_that_come_in_time_hide_nothing() -> None:
    node = Node(num_ranks=1, blind_s=0.5)
    node.train(0)
    verdicts = [verdict for _ in range(3) for verdict in node.judge_after(0.4)]
    assert suspected(verdicts) == [(0, Cause.HANG)]


# ---- Output that nobody reads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.OPTIMIZER, Phase.UPDATED])
@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_rank_whose_output_nobody_reads_is_waited_for(phase: Phase, is_stopping: bool) -> None:
    node = Node(num_ranks=2)
    for worker in range(2):
        node.train(worker)
    node.look(0, phase, 9)
    node.look(1, Phase.BACKWARD, 9, collective=not is_stopping, waiting=is_stopping)
    if is_stopping:
        node.machine.stopping((0,), node.now_s)
    node.look(0, phase, 9, unread=True)
    assert node.judge_after(10 * LONG_S) == []
    node.look(0, phase, 9)
    assert node.judge_after(HANG_S - BIT_S) == [], "it has its whole time again when somebody reads"
    assert suspected(node.judge_after(2 * LONG_S)) == [(0, Cause.HANG)]


# ---- Whom it watches ------------------------------------------------------------------------------------------------


def test_a_forgotten_worker_is_judged_no_more() -> None:
    node = Node(num_ranks=2)
    for worker in range(2):
        node.look(worker, Phase.UPDATED, collective=True)
    node.machine.forget(0)
    node.look(0, Phase.FORWARD)
    node.machine.stopping((0,), node.now_s)
    node.machine.safe(0)
    node.machine.recovering(0, node.now_s)
    assert node.judge_after(10 * LONG_S) == [stalled(1)]


def test_a_node_without_workers_is_quiet() -> None:
    assert Node(num_ranks=0).judge_after(10 * LONG_S) == []
