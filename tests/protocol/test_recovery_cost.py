"""What one report costs the controller's machine: the same in a small job as in a large one.

Counted is not time but lines of Python: every line that runs while one report is handled. What C does within one line
(a copy of a set, say) is not seen by that.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

import pytest

from keepstep import protocol
from keepstep.protocol.messages import (
    Cause,
    CollectiveFailed,
    FenceWorker,
    GroupsReset,
    JobStalled,
    NodeJoined,
    Report,
    SafePointReached,
    StartWorker,
    StateRecovered,
    StepObserved,
    StepsFinished,
    WorkerDone,
    WorkerFenced,
    WorkerJoined,
    WorkerLost,
    WorkerReady,
    WorkerStarted,
)
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import Effect, RecoveryMachine, RecoverySettings, Stage

PROTOCOL = str(Path(protocol.__file__).parent)
SLOTS = 8
SMALL, LARGE = 32, 2048
"""Ranks. Both have more than one node, so that no loop over nodes hides in the small one."""


class Lines:
    """How many lines of the protocol run inside the `with`.

    Others may run there too: a garbage collection ends what earlier tests have left.
    """

    def __init__(self) -> None:
        self.num = 0

    def __enter__(self) -> "Lines":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Callable[..., object] | None:
        if not frame.f_code.co_filename.startswith(PROTOCOL):
            return None
        self.num += event == "line"
        return self._trace


class Job:
    """A machine with many nodes, driven by hand: reports of no process but those that a test lets speak."""

    def __init__(self, world_size: int) -> None:
        self.num_nodes = world_size // SLOTS + 1
        self.machine = RecoveryMachine(RecoverySettings(world_size, num_spares=SLOTS))
        self.effects: list[Effect] = []
        for index in range(self.num_nodes):
            self.say(f"n{index}", NodeJoined(f"n{index}", SLOTS, "", 0, 0, (), 0))
        self.say("n0", WorkerJoined(0, 4000))  # which has the spares started

    def say(self, node: str, report: Report) -> None:
        self.effects += self.machine.receive(node, report, 1.0)

    def all_say(self, report: Callable[[int], Report], but: int = 0) -> None:
        """The rank holders speak one after the other, except for as many of them as are left out."""
        workers = self.machine.roster.workers
        for number in sorted(self.machine.roster.holder_numbers())[but:]:
            self.say(workers[number].node, report(number))

    def until(self, stage: Stage, but: int = 1) -> "Job":
        """Brings all ranks but some to the end of a stage."""
        if stage is Stage.STARTING:
            self.all_say(self.ready, but)
            return self
        self.all_say(self.ready)
        if stage is Stage.RECOVERING:
            self.all_say(self.recovered, but)
            return self
        self.all_say(self.recovered)
        if stage is Stage.TRAINING:
            self.all_say(lambda number: StepsFinished((number,), 1, 9, None), but)
        elif stage is Stage.STOPPING:
            self.say("n0", CollectiveFailed(0, 1, "world", "connection reset"))
            self.all_say(self.safe, but)
        else:
            self.all_say(lambda number: StepsFinished((number,), 1, 9, None))
        return self

    def cost(self, node: str, report: Report) -> int:
        """The lines that run for one report; the stage must not end with it, for that is work for all ranks."""
        before = self.machine.stage
        with Lines() as lines:
            self.say(node, report)
        assert self.machine.stage is before
        return lines.num

    def ready(self, number: int) -> WorkerReady:
        return WorkerReady(number, self.machine.generation, (0,), (), False, False, "0", 0.0)

    def safe(self, number: int) -> SafePointReached:
        return SafePointReached(
            (number,), self.machine.generation, 4, Phase.BACKWARD, (4,), 4, (), False, (), None, None
        )

    def recovered(self, number: int) -> StateRecovered:
        return StateRecovered((number,), self.machine.generation, 0, False)


FAILED = CollectiveFailed(8, 2, "world", "connection reset")
LOST = WorkerLost(8, Cause.SIGNAL, "killed by SIGKILL", True, None, 0.0)

# One report of a rank on node n1 while others are still waited for; worker 8 is the first rank there.
CASES: list[tuple[Stage, Report]] = [
    (Stage.STARTING, WorkerStarted(8, 4008)),
    (Stage.STARTING, WorkerJoined(8, 4008)),
    (Stage.STARTING, GroupsReset((8,), 1)),
    (Stage.STARTING, WorkerReady(8, 1, (0,), (), False, False, "0", 0.0)),
    (Stage.RECOVERING, GroupsReset((8,), 1)),
    (Stage.RECOVERING, StateRecovered((8,), 1, 64, False)),
    (Stage.TRAINING, StepObserved("n1", 1, 0, 1.0, 0.1, ())),
    (Stage.TRAINING, JobStalled("n1", 1, "all ranks wait")),
    (Stage.TRAINING, StepsFinished((8,), 1, 9, None)),
    (Stage.TRAINING, NodeJoined("late", 8, "", 0, 0, (), 0)),
    (Stage.TRAINING, WorkerDone(8, 3)),
    (Stage.STOPPING, SafePointReached((8,), 2, 4, Phase.BACKWARD, (4,), 4, (), False, (), None, None)),
    (Stage.STOPPING, FAILED),
    (Stage.STOPPING, LOST),
    (Stage.FINISHED, WorkerDone(8, 3)),
]


@pytest.mark.parametrize(("stage", "report"), CASES, ids=lambda case: getattr(case, "value", type(case).__name__))
def test_a_report_costs_the_same_whatever_the_world_size(stage: Stage, report: Report) -> None:
    costs = []
    for world_size in (SMALL, LARGE):
        job = Job(world_size).until(stage, but=world_size - SLOTS)
        assert job.machine.stage is stage
        costs.append(job.cost("n1", report))
    small, large = costs
    assert small == large > 3


def test_the_offer_of_a_node_costs_the_same_whatever_was_offered_before() -> None:
    costs = []
    for num_before in (2, 200):
        machine = RecoveryMachine(RecoverySettings(world_size=LARGE, num_spares=SLOTS, ranks_per_node=4))
        for index in range(num_before):
            machine.receive(f"n{index}", NodeJoined(f"n{index}", SLOTS, "", 0, 0, (), 0), 1.0)
        with Lines() as lines:
            assert machine.receive("last", NodeJoined("last", SLOTS, "", 0, 0, (), 0), 1.0) == []
        costs.append(lines.num)
    assert costs[0] == costs[1]


def test_a_loop_over_all_ranks_is_counted() -> None:
    """The count can fail: the report that ends a stage is work for all ranks."""
    costs = []
    for world_size in (SMALL, LARGE):
        job = Job(world_size).until(Stage.RECOVERING)
        with Lines() as lines:
            job.say("n0", job.recovered(0))
        assert job.machine.stage is Stage.TRAINING
        costs.append(lines.num)
    assert costs[1] > 10 * costs[0]


def test_a_whole_recovery_costs_in_proportion_to_the_world_size() -> None:
    """A node is lost before anything was trained: all ranks are fenced and restart, and spares make room."""
    costs = []
    for world_size in (LARGE // 4, LARGE // 2):
        job = Job(world_size).until(Stage.TRAINING, but=world_size)
        with Lines() as lines:
            job.effects += job.machine.node_lost("n1", "not heard of", 2.0, 2.0)
            job.all_say(
                lambda number: SafePointReached((number,), 2, -1, Phase.STARTING, (), None, (), False, (), None, None)
            )
            for effect in job.effects:  # it grows meanwhile
                if isinstance(effect.order, FenceWorker):
                    job.say(str(effect.node), WorkerFenced(effect.order.worker))
            job.say("late", NodeJoined("late", SLOTS, "", 0, 0, (), 0))
            job.all_say(job.ready)
            job.all_say(job.recovered)
        assert (job.machine.stage, job.machine.generation) == (Stage.TRAINING, 2)
        assert len([each for each in job.effects if isinstance(each.order, StartWorker)]) > 2 * world_size
        costs.append(lines.num)
    assert costs[1] < 2.1 * costs[0]
