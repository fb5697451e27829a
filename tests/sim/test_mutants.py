"""The simulator is an oracle: each fault planted in the machines must be found, and by the check that it is for.

A mutant is looked for from seed 0 on, in the same seeds that `test_seeds` runs unmutated.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec
import pytest

from keepstep.errors import RemoteProtocolError
from keepstep.protocol import controller, conversation, resume
from keepstep.protocol import messages as msg
from keepstep.protocol.agent import AgentMachine
from keepstep.protocol.controller import ControllerMachine, JournalEntry
from keepstep.protocol.conversation import Conversation
from keepstep.protocol.liveness import LivenessMachine
from keepstep.protocol.phases import Phase, StepEvent, StepMachine
from keepstep.protocol.recovery import RecoveryMachine, RecoverySettings, Stage, decision, ending, invariants
from keepstep.protocol.recovery.roster import Roster, Worker
from keepstep.protocol.resume import Action
from keepstep.protocol.worker import Doing, Load, Move, Train, Update, WorkerMachine
from keepstep.sim.cluster.worker import SimulatedWorker
from keepstep.sim.oracle import Check
from keepstep.sim.run import case_of, run

MAX_SEEDS = 20_000

Plant = Callable[[pytest.MonkeyPatch], None]
Answers = list[msg.GroupAnswer]


# ---- The entrances: what is stale, doubled or lost ------------------------------------------------------------------


def reports_of_old_generations_are_heard(patch: pytest.MonkeyPatch) -> None:
    def receive(self: RecoveryMachine, node: str, message: msg.Report, now_s: float) -> list[Any]:
        if self.stage is Stage.ENDED:
            return []
        self._dispatch(node, message, now_s)
        return self._proceed(now_s)

    patch.setattr(RecoveryMachine, "receive", receive)


def an_answer_counts_in_any_stage(patch: pytest.MonkeyPatch) -> None:
    def answered_in(self: RecoveryMachine, _: Stage, numbers: Iterable[int]) -> None:
        self.awaited.difference_update(numbers)

    patch.setattr(RecoveryMachine, "_answered_in", answered_in)


def a_recover_is_carried_out_once_more(patch: pytest.MonkeyPatch) -> None:
    right = WorkerMachine._stand

    def stand(self: WorkerMachine, after: int) -> Move:
        order = self._order
        move = right(self, after)
        self._order = self._order or order
        return move

    patch.setattr(WorkerMachine, "_stand", stand)


def a_packet_that_came_twice_is_new(patch: pytest.MonkeyPatch) -> None:
    right = Conversation.receive

    def receive(self: Conversation, packet: msg.Packet, now_s: float) -> Any:
        if packet.messages and packet.first < self.received:
            packet = msgspec.structs.replace(packet, first=self.received)
        return right(self, packet, now_s)

    patch.setattr(Conversation, "receive", receive)


def what_is_lost_is_not_sent_again(patch: pytest.MonkeyPatch) -> None:
    right = Conversation.receive

    def receive(self: Conversation, packet: msg.Packet, now_s: float) -> Any:
        transmitted = self._transmitted
        new = right(self, packet, now_s)
        self._transmitted = max(self._transmitted, transmitted)
        return new

    patch.setattr(Conversation, "receive", receive)
    patch.setattr(conversation, "RESEND_S", float("inf"))


def the_last_entry_of_the_journal_is_lost(patch: pytest.MonkeyPatch) -> None:
    right = ControllerMachine.from_journal

    def from_journal(settings: RecoverySettings, entries: list[JournalEntry], now_s: float) -> ControllerMachine:
        return right(settings, entries[:-1], now_s)

    patch.setattr(ControllerMachine, "from_journal", from_journal)


def a_restarted_controller_forgets_what_it_has_heard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Conversation, "resume_at", lambda self, received: None)


# ---- The resume rule ------------------------------------------------------------------------------------------------


def reach_by(patch: pytest.MonkeyPatch, phase: Phase, wrong: Callable[[int], set[int]]) -> None:
    right = resume.reach
    patch.setattr(resume, "reach", lambda step, at: frozenset(wrong(step)) if at is phase else right(step, at))


def a_synced_rank_takes_the_barrier_for_passed(patch: pytest.MonkeyPatch) -> None:
    reach_by(patch, Phase.SYNCED, lambda step: {step + 1})


def a_synced_rank_cannot_advance(patch: pytest.MonkeyPatch) -> None:
    reach_by(patch, Phase.SYNCED, lambda step: {step})


def a_rank_that_has_completed_a_step_can_go_back(patch: pytest.MonkeyPatch) -> None:
    reach_by(patch, Phase.UPDATED, lambda step: {step})


def no_copy_needs_to_be_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(resume, "common_step", lambda reaches: None)


def the_resume_step_is_the_least(patch: pytest.MonkeyPatch) -> None:
    def common_step(reaches: Iterable[frozenset[int]]) -> int | None:
        return min(frozenset.intersection(*reaches), default=None)

    patch.setattr(resume, "common_step", common_step)


def the_resume_step_is_the_greatest_of_all(patch: pytest.MonkeyPatch) -> None:
    def common_step(reaches: Iterable[frozenset[int]]) -> int | None:
        return max(frozenset().union(*reaches), default=None)

    patch.setattr(resume, "common_step", common_step)


def the_least_of_all_shards(patch: pytest.MonkeyPatch) -> None:
    def resume_step(shards: dict[str, Iterable[frozenset[int]]]) -> int | None:
        reachable = [frozenset().union(*holders) for holders in shards.values()]
        return min(frozenset.intersection(*reachable), default=None) if reachable else None

    patch.setattr(resume, "resume_step", resume_step)


def the_resume_step_is_that_of_one_shard(patch: pytest.MonkeyPatch) -> None:
    def resume_step(shards: dict[str, Iterable[frozenset[int]]]) -> int | None:
        reachable = [frozenset().union(*holders) for holders in shards.values()]
        return max(frozenset().union(*reachable), default=None) if all(reachable) else None

    patch.setattr(resume, "resume_step", resume_step)


def a_half_restored_copy_is_whole(patch: pytest.MonkeyPatch) -> None:
    right = WorkerMachine._loading

    def loading(self: WorkerMachine) -> Move:
        move = right(self)
        if isinstance(move, Load) and self.torn:
            self.torn = False
            self.steps.restored(move.order.resume_step)
        return move

    patch.setattr(WorkerMachine, "_loading", loading)


def checkpoints_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decision, "_reaches", lambda word: frozenset(word[0]) if word is not None else frozenset())


def what_was_trained_is_not_remembered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecoveryMachine, "trained_to", property(lambda self: 0, lambda self, step: None), raising=False)


# ---- The barrier, and how a rank gets to the resume step ------------------------------------------------------------


def a_rank_passes_the_barrier_alone(patch: pytest.MonkeyPatch) -> None:
    def go_to_barrier(self: SimulatedWorker, step: int) -> None:
        if self.machine.interrupted:
            self.go()
        else:
            self._update()

    patch.setattr(SimulatedWorker, "_go_to_barrier", go_to_barrier)


def a_synced_rank_always_advances(patch: pytest.MonkeyPatch) -> None:
    right = WorkerMachine._carry_out

    def carry_out(self: WorkerMachine, order: msg.Recover) -> Move:
        if self.steps.phase is Phase.SYNCED and not self.is_over(order.generation):
            return Update()
        return right(self, order)

    patch.setattr(WorkerMachine, "_carry_out", carry_out)


def a_synced_rank_advances_and_does_not_mind(patch: pytest.MonkeyPatch) -> None:
    """That it is not where it was to go."""
    right = WorkerMachine._action

    def action(self: WorkerMachine, order: msg.Recover) -> Action:
        try:
            return right(self, order)
        except RemoteProtocolError:
            return Action.STAY

    a_synced_rank_always_advances(patch)
    patch.setattr(WorkerMachine, "_action", action)


def an_undone_step_counts(patch: pytest.MonkeyPatch) -> None:
    right = StepMachine.advance

    def advance(self: StepMachine, event: StepEvent) -> Phase:
        step = self.step
        phase = right(self, event)
        if event is StepEvent.STEP_UNDONE:
            self.step = step
        return phase

    patch.setattr(StepMachine, "advance", advance)


def a_receiver_does_not_wait_for_its_state(patch: pytest.MonkeyPatch) -> None:
    right = WorkerMachine._loading

    def loading(self: WorkerMachine) -> Move:
        move = right(self)
        return dataclasses.replace(move, transfer=None) if isinstance(move, Load) else move

    patch.setattr(WorkerMachine, "_loading", loading)


def a_recovered_rank_does_not_wait_for_the_others(patch: pytest.MonkeyPatch) -> None:
    right = WorkerMachine.next_move

    def next_move(self: WorkerMachine) -> Move:
        if self.doing is Doing.RECOVERED and not self._sayings and not self.is_over(self.generation):
            self.doing = Doing.TRAINING
            return Train()
        return right(self)

    patch.setattr(WorkerMachine, "next_move", next_move)


def a_torn_copy_is_a_source(patch: pytest.MonkeyPatch) -> None:
    right = decision.Transfer

    def transfer(sources: tuple[int, ...], receivers: tuple[int, ...]) -> msg.Transfer:
        return right((*sources, receivers[0]), receivers[1:]) if len(receivers) > 1 else right(sources, receivers)

    patch.setattr(decision, "Transfer", transfer)


def a_shard_is_restored_from_another(patch: pytest.MonkeyPatch) -> None:
    def decide(roster: Roster, shard_of: dict[int, str], step: int, generation: int) -> decision.Decision:
        return right(roster, dict.fromkeys(shard_of, "one"), step, generation)

    right = decision.decide
    patch.setattr("keepstep.protocol.recovery.machine.decide", decide)


# ---- One holder of each rank ----------------------------------------------------------------------------------------


def a_fence_is_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "unfenced", lambda _: ())


def an_agent_says_that_it_has_fenced_and_has_not(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentMachine, "_fence", lambda self, number: self._say(msg.WorkerFenced(number)))


def a_spare_is_given_twice(patch: pytest.MonkeyPatch) -> None:
    right = Roster.give_rank

    def give_rank(self: Roster, worker: Worker, rank: int) -> None:
        right(self, worker, rank)
        self._spares[worker.worker] = worker

    patch.setattr(Roster, "give_rank", give_rank)


def eviction_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentMachine, "_begin_new_life", lambda self, now_s: None)


def a_lost_node_keeps_its_spares(patch: pytest.MonkeyPatch) -> None:
    def remove_node(self: Roster, name: str) -> list[Worker]:
        there = [self.workers[number] for number in sorted(self.nodes[name].workers)] if name in self.nodes else []
        there = [worker for worker in there if worker.rank is not None]
        live = [worker for worker in there if not worker.lost]
        for worker in there:
            self.mark_lost(worker, gone=True)
        return live

    patch.setattr(Roster, "remove_node", remove_node)


def a_nested_failure_keeps_the_generation(patch: pytest.MonkeyPatch) -> None:
    right = RecoveryMachine._interrupt

    def interrupt(self: RecoveryMachine, *arguments: Any) -> None:
        if self.stage is Stage.RECOVERING:
            self.generation -= 1
        right(self, *arguments)

    patch.setattr(RecoveryMachine, "_interrupt", interrupt)


# ---- Time -----------------------------------------------------------------------------------------------------------


def no_deadline_ever_comes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecoveryMachine, "next_deadline", lambda self: None)


def no_lease_ever_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ControllerMachine, "_look_at_leases", lambda self, *_: setattr(self, "_look_at_leases_s", None))


def a_controller_that_is_cut_off_gives_everybody_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(controller, "ISOLATED_S", 0.0)


def who_waits_for_a_peer_is_to_blame(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LivenessMachine, "_at_fault", lambda self, watched: True)


def an_agent_that_was_held_up_blames_its_workers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LivenessMachine, "_forgive_blindness", lambda self, now_s: None)


def nobody_is_ever_hung(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LivenessMachine, "judge", lambda self, now_s: [])


# ---- How a job ends -------------------------------------------------------------------------------------------------


def one_exception_is_the_scripts_own(patch: pytest.MonkeyPatch) -> None:
    right = RecoveryMachine._stopped

    def stopped(self: RecoveryMachine, now_s: float) -> None:
        if self._record.failures and all(each.cause == msg.Cause.EXCEPTION for each in self._record.failures):
            self._ending.end(ending.failed_everywhere(self._record.detail))
        else:
            right(self, now_s)

    patch.setattr(RecoveryMachine, "_stopped", stopped)


def the_job_ends_when_one_rank_is_through(patch: pytest.MonkeyPatch) -> None:
    right = RecoveryMachine._answered

    def answered(self: RecoveryMachine, node: str, message: msg.GroupAnswer) -> None:
        right(self, node, message)
        if isinstance(message, msg.StepsFinished):
            self.awaited.clear()

    patch.setattr(RecoveryMachine, "_answered", answered)


MUTANTS: dict[Plant, Check] = {}
