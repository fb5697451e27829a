"""The simulator is an oracle: each fault planted in the machines must be found, and by the check that it is for.

A mutant is looked for from seed 0 on, in the same seeds that `test_seeds` runs unmutated.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec
import pytest

from keepstep.protocol import messages as msg
from keepstep.protocol import reliable_channel, resume
from keepstep.protocol import snapshots as protocol_snapshots
from keepstep.protocol.controller import AnswersReceived, ControllerMachine, DrainAsked, JournalEntry, LeaseExpired
from keepstep.protocol.kept_groups import GroupClaim
from keepstep.protocol.messages import Membership
from keepstep.protocol.moves import Load, Move, Update
from keepstep.protocol.node import agent
from keepstep.protocol.node.agent import AgentMachine
from keepstep.protocol.node.liveness import LivenessMachine, Observation
from keepstep.protocol.phases import Phase, StepEvent, StepMachine
from keepstep.protocol.recovery import RecoveryMachine, RecoverySettings, Stage, transitions
from keepstep.protocol.recovery.end.drain import JobDrain
from keepstep.protocol.recovery.job import JobState
from keepstep.protocol.recovery.orders import Orders
from keepstep.protocol.recovery.placement import roster
from keepstep.protocol.recovery.placement.kept import SnapshotRegister
from keepstep.protocol.recovery.placement.roster import Node, Roster, Worker
from keepstep.protocol.recovery.placement.topology import Placement, choose_spare
from keepstep.protocol.recovery.processes import Processes
from keepstep.protocol.recovery.progress import Progress
from keepstep.protocol.recovery.scripts.once import Claims
from keepstep.protocol.recovery.scripts.startup import StartUp
from keepstep.protocol.recovery.stages import decision, last, recovering, starting, stopping, training
from keepstep.protocol.recovery.stages.recovering import Recovering
from keepstep.protocol.recovery.stages.stage import JobStage, RecoveryStage
from keepstep.protocol.recovery.stages.starting import Starting
from keepstep.protocol.recovery.stages.stopping import Stopping
from keepstep.protocol.recovery.stages.training import Training
from keepstep.protocol.recovery.standstill import Standstill
from keepstep.protocol.recovery.suspicion import Left, Silence, Suspicions
from keepstep.protocol.relay.bundle import PacketBundle, Row
from keepstep.protocol.reliable_channel import ReliableChannel
from keepstep.protocol.resume import Action
from keepstep.protocol.snapshots import SnapshotSchedule
from keepstep.protocol.waiting.explanation import RankState
from keepstep.protocol.worker import Urgency, WorkerMachine
from keepstep.sim.cluster import snapshots as sim_snapshots
from keepstep.sim.cluster import worker as sim_worker
from keepstep.sim.cluster.collectives import WORLD
from keepstep.sim.cluster.groups import registry
from keepstep.sim.cluster.groups.registry import SimulatedGroup, SimulatedGroups
from keepstep.sim.cluster.layout import SETTINGS, ClusterLayout, NodeLayout, SimulatedDurations
from keepstep.sim.cluster.process import SimulatedProcess
from keepstep.sim.cluster.snapshots import SimulatedMemory, SimulatedSnapshots, Snapshot
from keepstep.sim.cluster.transfers import SimulatedSecondCopies
from keepstep.sim.cluster.values import INCOMPLETE, LocalValue, Rows
from keepstep.sim.faults import SHORT_PHASES, SILENCES, SimulatedFault
from keepstep.sim.oracle import Check
from keepstep.sim.run import Case, case_of, run

MAX_SEEDS = 20_000

Plant = Callable[[pytest.MonkeyPatch], None]
Answers = list[msg.GroupAnswer]


# ---- The entrances: what is stale, doubled or lost ------------------------------------------------------------------


def a_packet_that_came_twice_is_new(patch: pytest.MonkeyPatch) -> None:
    right = ReliableChannel.receive

    def receive(self: ReliableChannel, packet: msg.Packet, now_s: float) -> Any:
        if packet.messages and packet.first < self.received:
            packet = msgspec.structs.replace(packet, first=self.received)
        return right(self, packet, now_s)

    patch.setattr(ReliableChannel, "receive", receive)


def a_bundle_that_came_too_early_is_new(patch: pytest.MonkeyPatch) -> None:
    right = ControllerMachine.receive_bundle

    def receive_bundle(self: ControllerMachine, bundle: PacketBundle, now_s: float) -> Any:
        known = self.connections
        rows = zip(bundle.nodes, bundle.firsts, strict=True)
        firsts = (known[node].channel.received if node in known else first for node, first in rows)
        return right(self, msgspec.structs.replace(bundle, firsts=tuple(firsts)), now_s)

    patch.setattr(ControllerMachine, "receive_bundle", receive_bundle)


def a_bundle_loses_the_workers_of_a_node(patch: pytest.MonkeyPatch) -> None:
    right = PacketBundle.of

    def of(rows: Iterable[Row], messages: Any) -> PacketBundle:
        listed = list(rows)
        if len(listed) > 1 and listed[0][-1]:
            listed[-1] = (*listed[-1][:-1], listed[0][-1])
        return right(listed, messages)

    patch.setattr(PacketBundle, "of", of)


def the_numbers_of_a_bundle_count_twice(patch: pytest.MonkeyPatch) -> None:
    right = ControllerMachine.receive_bundle

    def receive_bundle(self: ControllerMachine, bundle: PacketBundle, now_s: float) -> Any:
        refused = right(self, bundle, now_s)
        for node in bundle.nodes[1:]:
            if bundle.messages and node in self.connections:
                channel = self.connections[node].channel
                channel.resume_at(channel.received + 1)
        return refused

    patch.setattr(ControllerMachine, "receive_bundle", receive_bundle)


def a_restarted_controller_forgets_what_came_in_bundles(patch: pytest.MonkeyPatch) -> None:
    right = ControllerMachine.from_journal

    def from_journal(settings: RecoverySettings, entries: list[JournalEntry], now_s: float) -> ControllerMachine:
        return right(settings, [each for each in entries if not isinstance(each.event, AnswersReceived)], now_s)

    patch.setattr(ControllerMachine, "from_journal", from_journal)


def a_node_that_joins_again_is_not_told_the_membership(patch: pytest.MonkeyPatch) -> None:
    right = Orders.send

    def send(self: Orders, node: str | None, order: msg.AgentOrder, reason: str) -> None:
        if not isinstance(order, msg.MembershipTold):
            right(self, node, order, reason)

    patch.setattr(Orders, "send", send)


def what_is_lost_is_not_sent_again(patch: pytest.MonkeyPatch) -> None:
    right = ReliableChannel.receive

    def receive(self: ReliableChannel, packet: msg.Packet, now_s: float) -> Any:
        transmitted = self._transmitted
        new = right(self, packet, now_s)
        self._transmitted = max(self._transmitted, transmitted)
        return new

    patch.setattr(ReliableChannel, "receive", receive)
    patch.setattr(reliable_channel, "RESEND_S", float("inf"))


def the_last_entry_of_the_journal_is_lost(patch: pytest.MonkeyPatch) -> None:
    right = ControllerMachine.from_journal

    def from_journal(settings: RecoverySettings, entries: list[JournalEntry], now_s: float) -> ControllerMachine:
        return right(settings, entries[:-1], now_s)

    patch.setattr(ControllerMachine, "from_journal", from_journal)


def a_restarted_controller_forgets_what_it_has_heard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReliableChannel, "resume_at", lambda self, received: None)


def reports_of_old_generations_are_heard(patch: pytest.MonkeyPatch) -> None:
    def receive(self: RecoveryMachine, node: str, message: msg.Report, now_s: float) -> Any:
        if self.stage is Stage.ENDED:
            return []
        self._dispatch(node, message, now_s)
        return self._proceed(now_s)

    patch.setattr(RecoveryMachine, "receive", receive)


def a_recover_is_carried_out_once_more(patch: pytest.MonkeyPatch) -> None:
    right_standing, right_stand = WorkerMachine._standing, WorkerMachine._stand

    def standing(self: WorkerMachine) -> Move:
        if self._stop_generation > self._reported or self._order is None:
            return right_standing(self)
        return self._carry_out(self._order)

    def stand(self: WorkerMachine, after: int) -> Move:
        order = self._order
        move = right_stand(self, after)
        self._order = order
        return move

    patch.setattr(WorkerMachine, "_standing", standing)
    patch.setattr(WorkerMachine, "_stand", stand)


# ---- Once per job -------------------------------------------------------------------------------------------


def a_claim_ends_with_its_process(patch: pytest.MonkeyPatch) -> None:
    right = Claims.follow

    def follow(self: Claims) -> None:
        right(self)
        for name, claim in list(self._claims.items()):
            if claim.is_done and claim.holder is not None and self._roster.workers[claim.holder].gone:
                del self._claims[name]

    patch.setattr(Claims, "follow", follow)


def what_one_holds_another_may_begin(patch: pytest.MonkeyPatch) -> None:
    right = Claims._give_on

    def give_on(self: Claims, name: str) -> None:
        self._claims[name].holder = None
        right(self, name)

    patch.setattr(Claims, "_give_on", give_on)


def the_last_proposal_is_the_answer(patch: pytest.MonkeyPatch) -> None:
    right = Claims.requested

    def requested(self: Claims, request: msg.OnceRequested) -> None:
        if request.operation == "agree":
            self._agreed.pop(request.name, None)
        right(self, request)

    patch.setattr(Claims, "requested", requested)


# ---- The record of the start-up -------------------------------------------------------------------------------------


def what_was_exchanged_is_never_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StartUp, "starts_over", lambda self, stage, generation: False)


def only_the_record_of_a_complete_start_up_is_dropped(patch: pytest.MonkeyPatch) -> None:
    right = StartUp.starts_over

    def starts_over(self: StartUp, stage: Stage, generation: int) -> bool:
        return self._is_complete and right(self, stage, generation)

    patch.setattr(StartUp, "starts_over", starts_over)


def a_former_controllers_record_counts_though_its_start_up_was_interrupted(patch: pytest.MonkeyPatch) -> None:
    right, right_starts_over, taken_over = StartUp.__init__, StartUp.starts_over, set[StartUp]()

    def init(self: StartUp, written: Iterable[msg.StoreRequested] = ()) -> None:
        right(self, written)
        if self.values:
            taken_over.add(self)

    def starts_over(self: StartUp, stage: Stage, generation: int) -> bool:
        if stage is Stage.STARTING and self in taken_over:
            taken_over.remove(self)
            self._start = generation
        return right_starts_over(self, stage, generation)

    patch.setattr(StartUp, "__init__", init)
    patch.setattr(StartUp, "starts_over", starts_over)


def a_restarted_controller_does_not_read_the_record(patch: pytest.MonkeyPatch) -> None:
    right = StartUp.__init__
    patch.setattr(StartUp, "__init__", lambda self, written=(): right(self))


def a_value_of_an_earlier_generation_is_kept(patch: pytest.MonkeyPatch) -> None:
    right = StartUp.request

    def request(self: StartUp, request: msg.StoreRequested, generation: int) -> list[msg.StoreAnswered]:
        return right(self, request, request.generation)

    patch.setattr(StartUp, "request", request)


def a_replacement_is_given_what_another_rank_kept(patch: pytest.MonkeyPatch) -> None:
    right = StartUp._answer

    def answer(self: StartUp, request: msg.StoreRequested) -> msg.StoreAnswered:
        kind = request.keys[0].split("/")[0]
        name = next((name for name in self.values if name.startswith(kind)), request.keys[0])
        return right(self, msgspec.structs.replace(request, keys=(name,)))

    patch.setattr(StartUp, "_answer", answer)


def what_was_kept_is_given_before_all_stand_ready(patch: pytest.MonkeyPatch) -> None:
    right = StartUp.request

    def request(self: StartUp, request: msg.StoreRequested, generation: int) -> list[msg.StoreAnswered]:
        return [self._answer(request)] if request.operation == "kept" else right(self, request, generation)

    patch.setattr(StartUp, "request", request)


# ---- The resume rule ------------------------------------------------------------------------------------------------


def reach_by(patch: pytest.MonkeyPatch, phase: Phase, wrong: Callable[[int], set[int]]) -> None:
    right = resume.reach
    patch.setattr(resume, "reach", lambda step, at: frozenset(wrong(step)) if at is phase else right(step, at))


def a_rank_that_has_completed_a_step_can_go_back(patch: pytest.MonkeyPatch) -> None:
    reach_by(patch, Phase.UPDATED, lambda step: {step})


def a_synced_rank_takes_the_barrier_for_passed(patch: pytest.MonkeyPatch) -> None:
    reach_by(patch, Phase.SYNCED, lambda step: {step + 1})


def a_synced_rank_cannot_advance(patch: pytest.MonkeyPatch) -> None:
    reach_by(patch, Phase.SYNCED, lambda step: {step})


def the_common_step_is_the_least(patch: pytest.MonkeyPatch) -> None:
    def common_step(reaches: Iterable[frozenset[int]], *, would_repeat: bool) -> int | None:
        live = list(reaches)
        return min(frozenset.intersection(*live), default=None) if live else None

    patch.setattr(resume, "common_step", common_step)


def a_rank_that_is_restored_is_a_source_too(patch: pytest.MonkeyPatch) -> None:
    right = decision.decide

    def decide(workers: Roster, snapshots: Any, membership: Any, step: int, generation: int) -> decision.Decision:
        found = right(workers, snapshots, membership, step, generation)
        groups = [
            (membership.replicas[membership.shard(each.receivers[0])], each.receivers) for each in found.transfers
        ]
        return dataclasses.replace(found, transfers=tuple(msg.Transfer(ranks, to) for ranks, to in groups))

    patch.setattr(recovering, "decide", decide)


def a_missing_value_does_no_harm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerMachine, "found_partially_updated", lambda self, *_why: self.found_whole())


def a_written_value_is_nothing_but_a_doubt(patch: pytest.MonkeyPatch) -> None:
    right = WorkerMachine.found_partially_updated
    patch.setattr(
        WorkerMachine, "found_partially_updated", lambda self, doubt, flaw: right(self, doubt or "written", flaw)
    )


def _doubted(*arguments: Any) -> Iterable[dict[int, decision.Report]]:
    for held in decision._doubted(*arguments):
        yield {number: ((safe.step + 1,), safe.step + 1, safe.snapshots) for number, safe in held.items()}


def a_lone_copy_in_doubt_counts(patch: pytest.MonkeyPatch) -> None:
    def equal_in_doubt(*arguments: Any) -> dict[int, decision.Report]:
        alone = {number: word for held in _doubted(*arguments) if len(held) == 1 for number, word in held.items()}
        return {**decision.equal_in_doubt(*arguments), **alone}

    patch.setattr(stopping, "equal_in_doubt", equal_in_doubt)


def copies_in_doubt_count_though_they_differ(patch: pytest.MonkeyPatch) -> None:
    def equal_in_doubt(*arguments: Any) -> dict[int, decision.Report]:
        return {number: word for held in _doubted(*arguments) if len(held) > 1 for number, word in held.items()}

    patch.setattr(stopping, "equal_in_doubt", equal_in_doubt)


def copies_in_doubt_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stopping, "equal_in_doubt", lambda *_: {})


def copies_in_doubt_are_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stopping, "is_in_doubt", lambda *_: False)


def a_rank_keeps_its_doubt(patch: pytest.MonkeyPatch) -> None:
    right = WorkerMachine.receive

    def receive(self: WorkerMachine, order: msg.WorkerOrder) -> Urgency:
        return Urgency.NONE if isinstance(order, msg.DoubtLifted) else right(self, order)

    patch.setattr(WorkerMachine, "receive", receive)


def a_copy_in_doubt_is_not_saved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(last, "is_in_doubt", lambda *_: False)


def the_resume_step_is_one_too_great(patch: pytest.MonkeyPatch) -> None:
    def reachable_step(*arguments: Any) -> int | None:
        step = decision.reachable_step(*arguments)
        return None if step is None else step + 1

    def decide(*arguments: Any) -> decision.Decision:
        return dataclasses.replace(decision.decide(*arguments), transfers=(), copies=())

    patch.setattr(starting, "reachable_step", reachable_step)
    patch.setattr(stopping, "reachable_step", reachable_step)
    patch.setattr(recovering, "decide", decide)


def a_half_restored_copy_is_whole(patch: pytest.MonkeyPatch) -> None:
    right = WorkerMachine._loading

    def loading(self: WorkerMachine) -> Move:
        move = right(self)
        if isinstance(move, Load) and self.partially_updated:
            self.partially_updated = False
            self.steps.restored(move.order.resume_step)
        return move

    patch.setattr(WorkerMachine, "_loading", loading)


def checkpoints_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decision, "_reaches", lambda word: frozenset(word[0]) if word is not None else frozenset())


def what_was_trained_is_not_remembered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Progress, "trained_to", property(lambda self: 0, lambda self, step: None), raising=False)


# ---- The barrier, and how a rank gets to the resume step ------------------------------------------------------------


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
    patch.setattr(Load, "receives", lambda self, rank: ())


def a_rank_goes_back_to_another_checkpoint_than_the_others(patch: pytest.MonkeyPatch) -> None:
    right = WorkerMachine._loading

    def loading(self: WorkerMachine) -> Move:
        order = self._order
        move = right(self)
        if isinstance(move, Load) and move.action is Action.REWIND and self.rank == 1:
            assert order is not None
            self._order = msgspec.structs.replace(order, resume_step=min(self._snapshots))
            return dataclasses.replace(move, order=self._order)
        return move

    patch.setattr(WorkerMachine, "_loading", loading)


def a_torn_copy_is_a_source(patch: pytest.MonkeyPatch) -> None:
    right = decision.Transfer

    def transfer(sources: tuple[int, ...], receivers: tuple[int, ...]) -> msg.Transfer:
        return right((*sources, receivers[0]), receivers[1:]) if len(receivers) > 1 else right(sources, receivers)

    patch.setattr(decision, "Transfer", transfer)


def a_shard_is_restored_from_another(patch: pytest.MonkeyPatch) -> None:
    def decide(roster: Roster, snapshots: Any, membership: msg.Membership, *arguments: int) -> decision.Decision:
        same = msgspec.structs.replace(membership, shard_numbers=(0,) * membership.world_size)
        return decision.decide(roster, snapshots, same, *arguments)

    patch.setattr(recovering, "decide", decide)


def a_barrier_that_was_cut_off_was_passed(patch: pytest.MonkeyPatch) -> None:
    right = WorkerMachine._stand

    def stand(self: WorkerMachine, after: int) -> Move:
        return Update() if self.steps.phase is Phase.SYNCED else right(self, after)

    patch.setattr(WorkerMachine, "_stand", stand)


def a_rank_does_not_break_its_groups(patch: pytest.MonkeyPatch) -> None:
    def stop(self: WorkerMachine, order: msg.Stop) -> Urgency:
        self._stop_generation = order.generation
        return Urgency.NONE

    patch.setattr(WorkerMachine, "_stop", stop)


def a_recovered_rank_does_not_wait_for_the_others(patch: pytest.MonkeyPatch) -> None:
    right = WorkerMachine.loaded

    def loaded(self: WorkerMachine, received_bytes: int, *, from_checkpoint: bool = False) -> None:
        right(self, received_bytes, from_checkpoint=from_checkpoint)
        self._resumed = self.generation

    patch.setattr(WorkerMachine, "loaded", loaded)


# ---- Each rank's own values -----------------------------------------------------------------------------------------


def a_replacement_takes_the_value_of_a_peer(patch: pytest.MonkeyPatch) -> None:
    right = LocalValue.restored
    patch.setattr(LocalValue, "restored", lambda self, rank, rows: right(self, (rank + 1) % len(rows), rows))


def own_values_leave_a_rank_behind_the_barrier(patch: pytest.MonkeyPatch) -> None:
    """So a rank that has passed it holds what the others had when the step began."""
    right = LocalValue.gathered

    def gathered(self: LocalValue, rows: Rows) -> None:
        right(self, self.rows or rows)

    patch.setattr(LocalValue, "gathered", gathered)


def an_undone_step_keeps_its_own_value(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LocalValue, "undo", lambda self: None)


def an_undone_step_keeps_the_values_of_others(patch: pytest.MonkeyPatch) -> None:
    right = LocalValue.undo

    def undo(self: LocalValue) -> None:
        rows = self.rows
        right(self)
        self.rows = rows

    patch.setattr(LocalValue, "undo", undo)


# ---- One holder of each rank ----------------------------------------------------------------------------------------


def a_fence_is_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "unfenced", lambda _: ())


def a_lost_rank_is_not_fenced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Orders, "fence", lambda self, worker, reason: None)


def an_agent_says_that_it_has_fenced_and_has_not(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentMachine, "_fence", lambda self, number: self._say(msg.WorkerFenced(number)))


def a_spare_is_given_twice(patch: pytest.MonkeyPatch) -> None:
    right = Roster.give_rank

    def give_rank(self: Roster, worker: Worker, rank: int) -> None:
        right(self, worker, rank)
        self._spares[worker.worker] = worker

    patch.setattr(Roster, "give_rank", give_rank)


def a_recovery_tells_the_membership_before_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "change_since", lambda self, before: msg.MembershipChange(()))


def every_replacement_is_the_first_of_its_node(patch: pytest.MonkeyPatch) -> None:
    right = Orders.assign

    def assign(self: Orders, worker: Worker, generation: int, first_phases: msg.FirstPhases, reason: str) -> None:
        right(self, worker, generation, first_phases, reason)
        effect = self._effects.pop()
        if generation > 1:
            effect = dataclasses.replace(effect, order=msgspec.structs.replace(effect.order, local_rank=0))
        self._effects.append(effect)

    patch.setattr(Orders, "assign", assign)


def eviction_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentMachine, "_join_again_if_empty", lambda self, now_s: None)


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
    right = Recovering.interrupted

    def interrupted(self: Recovering, *arguments: Any) -> Any:
        self.job.generation -= 1
        return right(self, *arguments)

    patch.setattr(Recovering, "interrupted", interrupted)


# ---- The choice of a spare ------------------------------------------------------------------------------------------


def the_preference_of_spares_is_turned_around(patch: pytest.MonkeyPatch) -> None:
    def choose(lost: Placement, spares: Mapping[int, Placement], node_at_fault: bool) -> int | None:
        return choose_spare(lost, spares, not node_at_fault)

    patch.setattr(roster, "choose_spare", choose)


def spares_are_taken_by_their_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(roster, "choose_spare", lambda lost, spares, node_at_fault: min(spares, default=None))


def a_spare_close_to_a_lost_node_is_preferred(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(roster, "choose_spare", lambda lost, spares, node_at_fault: choose_spare(lost, spares, False))


# ---- Time -----------------------------------------------------------------------------------------------------------


def no_deadline_ever_comes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecoveryMachine, "next_deadline", lambda self: None)


def a_survivor_that_does_not_stop_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stopping, "overdue", lambda self, now_s: None)


def an_agent_that_was_held_up_blames_its_workers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LivenessMachine, "_discount_own_pause", lambda self, now_s: None)


def no_lease_ever_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ControllerMachine, "_check_leases", lambda self, *_: setattr(self, "_check_leases_s", None))


def a_controller_that_is_cut_off_gives_all_nodes_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ControllerMachine, "_check_leases", gives_up_all_that_are_silent)


def gives_up_all_that_are_silent(self: ControllerMachine, lease_s: float, now_s: float) -> None:
    for node, connection in list(self.connections.items()):
        if now_s >= connection.end_s(lease_s):
            self._happened(LeaseExpired(node, "silent", connection.heard_s), now_s)
    self._schedule_lease_check(lease_s, now_s)


def only_all_nodes_can_fall_silent_together(patch: pytest.MonkeyPatch) -> None:
    right = ControllerMachine._check_leases

    def check_leases(self: ControllerMachine, lease_s: float, now_s: float) -> None:
        if any(connection.is_heard(lease_s, now_s) for connection in self.connections.values()):
            gives_up_all_that_are_silent(self, lease_s, now_s)
        else:
            right(self, lease_s, now_s)

    patch.setattr(ControllerMachine, "_check_leases", check_leases)


def who_waits_for_a_peer_is_to_blame(patch: pytest.MonkeyPatch) -> None:
    right = LivenessMachine.observe

    def observe(self: LivenessMachine, worker: int, look: Observation, now_s: float) -> None:
        right(self, worker, dataclasses.replace(look, in_collective=False), now_s)

    patch.setattr(LivenessMachine, "observe", observe)


def a_fresh_process_is_judged_by_the_pace_of_warm_ones(patch: pytest.MonkeyPatch) -> None:
    right = LivenessMachine.passed

    def passed(self: LivenessMachine, worker: int, phase: Phase, began_s: float, ended_s: float) -> None:
        right(self, worker, phase, began_s, ended_s)
        self._first_s[phase] = ended_s - began_s

    patch.setattr(LivenessMachine, "passed", passed)


def no_rank_is_ever_hung(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LivenessMachine, "judge", lambda self, now_s: [])


# ---- Silence --------------------------------------------------------------------------------------------------------


def a_suspected_rank_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Training, "left_without", lambda self, silence: Left.MEMORY)


def none_have_fallen_silent_together(patch: pytest.MonkeyPatch) -> None:
    right = Suspicions.compare

    def compare(self: Suspicions, holders: Collection[Worker], busy: Collection[int], now_s: float) -> None:
        right(self, holders, busy, now_s)
        for each in self:
            each.together = ()

    patch.setattr(Suspicions, "compare", compare)


def copies_of_others_that_are_silent_count(patch: pytest.MonkeyPatch) -> None:
    right = Training.left_without

    def left_without(self: Training, silence: Silence) -> Left | None:
        lost = {worker.worker for worker in silence.lost}
        return right(self, dataclasses.replace(silence, silent=lost))

    patch.setattr(Training, "left_without", left_without)
    none_have_fallen_silent_together(patch)


def a_survivor_that_does_not_stop_is_lost_though_it_has_the_last_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stopping, "left_without", lambda self, silence: Left.MEMORY)


def a_source_that_is_silent_is_lost_though_it_has_the_last_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recovering, "left_without", lambda self, silence: Left.MEMORY)


def a_silent_node_is_lost_though_it_has_the_last_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecoveryMachine, "left_without_node", lambda self, node, silent_nodes: Left.MEMORY)


def a_checkpoint_that_is_not_written_counts(patch: pytest.MonkeyPatch) -> None:
    always = property(lambda self: self.writes_checkpoints, lambda self, value: None)
    patch.setattr(JobState, "has_checkpoint", always, raising=False)


# ---- How a job ends -------------------------------------------------------------------------------------------------


def the_job_ends_when_one_rank_is_through(patch: pytest.MonkeyPatch) -> None:
    right = RecoveryMachine._answered

    def answered(self: RecoveryMachine, nodes: Any, workers: Any, message: msg.GroupAnswer, now_s: float) -> None:
        right(self, nodes, workers, message, now_s)
        if isinstance(message, msg.StepsFinished):
            self.awaited.clear()

    patch.setattr(RecoveryMachine, "_answered", answered)


def a_job_that_has_trained_is_taken_for_new(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Progress, "has_trained", property(lambda self: False, lambda self, value: None), raising=False)


def loops_that_end_unevenly_are_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Standstill, "uneven", lambda self: None)


def a_rank_in_its_last_step_has_begun_another(patch: pytest.MonkeyPatch) -> None:
    right = RankState.has_begun
    patch.setattr(RankState, "has_begun", lambda self, step: right(self, step - 1))


def a_drain_is_not_in_the_journal(patch: pytest.MonkeyPatch) -> None:
    right = ControllerMachine.from_journal

    def from_journal(settings: RecoverySettings, entries: list[JournalEntry], now_s: float) -> ControllerMachine:
        return right(settings, [entry for entry in entries if not isinstance(entry.event, DrainAsked)], now_s)

    patch.setattr(ControllerMachine, "from_journal", from_journal)


def a_drain_sends_the_signal_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JobStage, "drain_asked", lambda self: transitions.ToDraining("at once"))
    for stage in (Training, Starting, RecoveryStage):
        patch.delattr(stage, "drain_asked")


def a_drain_ends_where_the_first_rank_holds(patch: pytest.MonkeyPatch) -> None:
    def answered(self: JobDrain, workers: Collection[int], message: msg.Holding | msg.Drained) -> str | None:
        if isinstance(message, msg.Holding) and self._step is None:
            self._agree(message.step, message.generation)
            return None
        return right(self, workers, message)

    right = JobDrain.answered
    patch.setattr(JobDrain, "answered", answered)


def an_answer_to_a_drain_in_a_bundle_counts_for_no_rank(patch: pytest.MonkeyPatch) -> None:
    right = JobDrain.answered
    patch.setattr(JobDrain, "answered", lambda self, workers, message: right(self, message.workers, message))


def a_drain_breaks_the_collectives_off(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(training, "HOLDING", 0.0)


def a_drained_node_keeps_its_ranks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Processes, "close_node", lambda self, name, reason: None)


def a_drained_node_leaves_before_its_last_reports_are_heard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agent, "DELIVER_S", 0.0)


# ---- Sick devices ---------------------------------------------------------------------------------------------------


def a_closed_device_is_used_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Node, "devices", lambda self: split(set(range(self.most)) - set(self.workers.values()), self.slots))
    patch.setattr(
        Node, "num_free", property(lambda self: self.slots - sum(d < self.slots for d in self.workers.values()))
    )


def split(free: Collection[int], slots: int) -> tuple[list[int], list[int]]:
    return [each for each in sorted(free) if each < slots], [each for each in sorted(free) if each >= slots]


def a_rank_stays_on_a_closed_device(patch: pytest.MonkeyPatch) -> None:
    right = Roster.close_devices

    def close_devices(self: Roster, name: str, devices: Collection[int], reason: str) -> list[Worker]:
        before, spares = dict(self._displaced), right(self, name, devices, reason)
        self._displaced = before
        return spares

    patch.setattr(Roster, "close_devices", close_devices)


def a_node_that_joins_again_has_forgotten_what_it_has_closed(patch: pytest.MonkeyPatch) -> None:
    right = Roster.add_node
    patch.setattr(Roster, "add_node", lambda self, joined: right(self, msgspec.structs.replace(joined, closed=())))


def the_rank_of_a_failed_device_is_not_lost(patch: pytest.MonkeyPatch) -> None:
    """It trains on until a spare is warm."""
    patch.setattr(
        AgentMachine, "devices_failed", lambda self, devices, reason, tags, now_s: self.close_devices(devices, reason)
    )


# ---- Snapshots ------------------------------------------------------------------------------------------------------


def a_rank_is_synced_before_its_snapshot_is_complete(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedSnapshots, "is_complete", lambda self, step: True)


def a_slot_counts_before_all_is_in_it(patch: pytest.MonkeyPatch) -> None:
    right = SimulatedSnapshots.hand_out

    def hand_out(self: SimulatedSnapshots, snapshot: Snapshot, *, is_compared: bool) -> int | None:
        copy = right(self, snapshot, is_compared=is_compared)
        if copy is not None and self._copy is not None:
            torn = dataclasses.replace(snapshot, parameters=(*snapshot.parameters[:-1], INCOMPLETE))
            self._memory.seal(self._copy[1], torn)
        return copy

    patch.setattr(SimulatedSnapshots, "hand_out", hand_out)


def a_copy_goes_into_the_newer_slot(patch: pytest.MonkeyPatch) -> None:
    def slot_to_replace(held: Mapping[int, tuple[int, int]], rank: int, kept_step: int | None) -> int | None:
        own = {slot: step for slot, (whose, step) in held.items() if whose == rank}
        return max(own, key=own.__getitem__) if len(own) > 1 else None

    patch.setattr(sim_snapshots, "slot_to_replace", slot_to_replace)


def a_copy_goes_on_while_the_state_is_restored(patch: pytest.MonkeyPatch) -> None:
    """Then half of it is of one step, and half of the other."""

    def cancel(self: SimulatedSnapshots) -> None:
        if self._copy is not None:
            number, slot, snapshot = self._copy
            self._copy = number, slot, dataclasses.replace(snapshot, parameters=(*snapshot.parameters, INCOMPLETE))

    patch.setattr(SimulatedSnapshots, "cancel", cancel)


def some_ranks_only_rewind(patch: pytest.MonkeyPatch) -> None:
    right = WorkerMachine._action

    def action(self: WorkerMachine, order: msg.Recover) -> Action:
        chosen = right(self, order)
        return Action.STAY if chosen is Action.REWIND and not self.partially_updated else chosen

    patch.setattr(WorkerMachine, "_action", action)


def snapshots_of_a_past_that_is_computed_again_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SnapshotRegister, "resumed", lambda self, step: None)
    patch.setattr(sim_snapshots, "outdated", lambda held, step: [])


def what_a_process_has_left_is_released_at_once(patch: pytest.MonkeyPatch) -> None:
    right = JobState.begin_generation

    def begin_generation(self: JobState, cause: str, detail: str, now_s: float) -> None:
        right(self, cause, detail, now_s)
        self.release_snapshots("too early")

    patch.setattr(JobState, "begin_generation", begin_generation)


def a_lost_node_still_has_its_snapshots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SnapshotRegister, "node_lost", lambda self, node: None)


def a_replacement_may_be_anywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stopping, "tied_ranks", lambda *_: {})


def a_replacement_is_not_told_of_the_snapshots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SnapshotRegister, "on_node", lambda self, rank, node: [])


def a_rank_does_not_wait_for_its_second_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SnapshotSchedule, "is_second_copy_due", lambda self, step: False)


def a_second_copy_counts_before_all_is_in_it(patch: pytest.MonkeyPatch) -> None:
    send, open_slot = SimulatedSecondCopies.send, SimulatedMemory.open
    under_way: list[Snapshot] = []

    def sends(self: SimulatedSecondCopies, sender: SimulatedProcess, snapshot: Snapshot) -> None:
        under_way.append(dataclasses.replace(snapshot, parameters=(*snapshot.parameters[:-1], INCOMPLETE)))
        send(self, sender, snapshot)
        under_way.clear()

    def opens(self: SimulatedMemory, rank: int, kept_step: int | None) -> int:
        slot = open_slot(self, rank, kept_step)
        for torn in under_way:
            self.seal(slot, torn)
        return slot

    patch.setattr(SimulatedSecondCopies, "send", sends)
    patch.setattr(SimulatedMemory, "open", opens)
    patch.setattr(SimulatedMemory, "discard", lambda self, slot: None)


def a_buddy_is_on_the_same_node(patch: pytest.MonkeyPatch) -> None:
    def close(membership: Membership) -> dict[int, int]:
        found = {}
        for rank, node in enumerate(membership.node_numbers):
            there = [other for other, its in enumerate(membership.node_numbers) if its == node and other != rank]
            found |= dict.fromkeys([rank], there[0]) if there else {}
        return found

    patch.setattr(protocol_snapshots, "buddies", close)


def the_snapshot_that_must_stay_is_written_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovering, "kept_step", lambda *_: None)


def second_copies_of_the_last_generation_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SnapshotRegister, "forget_live", lambda self: None)
    patch.setattr(SnapshotRegister, "forget", lambda self, worker: None)
    patch.setattr(SnapshotRegister, "node_lost", lambda self, node: None)


def second_copies_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedProcess, "second_copies", lambda self: ())


def snapshots_that_no_process_can_read_count(patch: pytest.MonkeyPatch) -> None:
    def readable(
        roster: Roster, snapshots: SnapshotRegister, membership: Membership, generation: int
    ) -> dict[int, list[Any]]:
        return {rank: list(snapshots.all_of(rank)) for rank in snapshots.ranks}

    patch.setattr(decision, "readable", readable)


# ---- State that is not what was loaded ------------------------------------------------------------------------------


def what_was_refused_counts_as_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerMachine, "refused", lambda self, _error: self.loaded(1, from_checkpoint=False))


def the_first_load_that_is_refused_ends_the_job(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stopping, "_TIMES_LOADED", 1)


def replicas_are_not_compared_after_a_recovery(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sim_worker, "follows_recovery", lambda step, at, generation: False)


def only_the_restored_state_is_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sim_worker, "follows_recovery", lambda step, at, generation: generation > 1 and step == at)


def the_state_is_compared_only_after_an_update(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sim_worker, "follows_recovery", lambda step, at, generation: generation > 1 and step == at + 1)


def the_ranks_that_stayed_are_refused(patch: pytest.MonkeyPatch) -> None:
    right = sim_worker.judge
    patch.setattr(sim_worker, "judge", lambda said: right([each._replace(is_restored=not each[2]) for each in said]))


def a_rank_that_refuses_its_state_keeps_it(patch: pytest.MonkeyPatch) -> None:
    right = WorkerMachine.refused

    def refused(machine: WorkerMachine, error: str) -> None:
        right(machine, error)
        machine.partially_updated = False

    patch.setattr(WorkerMachine, "refused", refused)


# ---- Devices of parked spares ---------------------------------------------------------------------------------------


def a_parked_spare_takes_a_sick_device(patch: pytest.MonkeyPatch) -> None:
    right = agent.device_for
    patch.setattr(agent, "device_for", lambda own, taken, closed, num: right(own, taken, (), num))


def a_parked_spare_takes_the_device_of_another_rank(patch: pytest.MonkeyPatch) -> None:
    right = agent.device_for
    patch.setattr(agent, "device_for", lambda own, taken, closed, num: right(own, (), closed, num))


def a_parked_spare_keeps_the_number_that_it_was_started_with(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agent, "device_for", lambda own, taken, closed, num: own)


# ---- Groups that stay -----------------------------------------------------------------------------------------------


def decide_by(patch: pytest.MonkeyPatch, wrong: Callable[[GroupClaim], GroupClaim]) -> None:
    """Claims are read wrongly."""
    right = registry.why_rebuilt
    patch.setattr(
        registry, "why_rebuilt", lambda claims: right([None if claim is None else wrong(claim) for claim in claims])
    )


def what_is_under_way_at_a_stop_is_claimed(patch: pytest.MonkeyPatch) -> None:
    def close(self: SimulatedGroup) -> None:
        self.is_open, self.under_way = False, None

    patch.setattr(SimulatedGroup, "close", close)


def collectives_of_a_group_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    decide_by(patch, lambda claim: msgspec.structs.replace(claim, collectives=0))


def messages_of_a_group_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    decide_by(patch, lambda claim: msgspec.structs.replace(claim, sent={}, received={}))


def generations_of_a_group_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    decide_by(patch, lambda claim: msgspec.structs.replace(claim, generation=0))


def a_group_stays_though_a_member_was_replaced(patch: pytest.MonkeyPatch) -> None:
    right = registry.why_rebuilt
    patch.setattr(registry, "why_rebuilt", lambda claims: right([claim for claim in claims if claim is not None]))
    none_is = property(lambda self: frozenset(), lambda self, ranks: None)
    patch.setattr(WorkerMachine, "replaced", none_is, raising=False)


def a_rank_keeps_what_it_claims_itself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(registry, "why_rebuilt", lambda claims: None)


def one_rank_rebuilds_what_the_others_keep(patch: pytest.MonkeyPatch) -> None:
    right = SimulatedGroups.connect

    def connect(self: SimulatedGroups, generation: int, cohort: int, said: Mapping[int, Mapping[int, Any]]) -> None:
        heard = {0: {}} if self._member.rank == 0 else {}
        right(self, generation, cohort, {cohort: {**said.get(cohort, {}), **heard}})

    patch.setattr(SimulatedGroups, "connect", connect)


def the_world_stays_though_a_collective_was_broken_off(patch: pytest.MonkeyPatch) -> None:
    close_well = SimulatedGroup.close

    def close(self: SimulatedGroup) -> None:
        if self.under_way is not None and self.under_way[2] == WORLD:
            self.under_way = None
        close_well(self)

    patch.setattr(SimulatedGroup, "close", close)


def the_world_stays_though_state_was_under_way(patch: pytest.MonkeyPatch) -> None:
    close_well = SimulatedGroup.close

    def close(self: SimulatedGroup) -> None:
        if self.group.name == WORLD and self.under_way is not None and self.under_way[2] != WORLD:
            self.under_way = None
        close_well(self)

    patch.setattr(SimulatedGroup, "close", close)


def the_world_stays_though_second_copies_have_moved(patch: pytest.MonkeyPatch) -> None:
    begin_well = SimulatedGroups.begin_second_copy

    def begin_second_copy(self: SimulatedGroups) -> None:
        was_whole = self._groups[WORLD].is_whole
        begin_well(self)
        self._groups[WORLD].is_whole = was_whole

    patch.setattr(SimulatedGroups, "begin_second_copy", begin_second_copy)


def no_group_ever_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(registry, "why_rebuilt", lambda claims: "it is new")


MUTANTS: dict[Plant, Check] = {
    what_was_refused_counts_as_loaded: Check.UPDATES,
    the_first_load_that_is_refused_ends_the_job: Check.ENDED,
    replicas_are_not_compared_after_a_recovery: Check.UPDATES,
    only_the_restored_state_is_compared: Check.UPDATES,
    the_state_is_compared_only_after_an_update: Check.UPDATES,
    the_ranks_that_stayed_are_refused: Check.STEPS_DIFFER,
    a_rank_that_refuses_its_state_keeps_it: Check.UPDATES,
    a_closed_device_is_used_again: Check.DEVICE,
    a_rank_stays_on_a_closed_device: Check.DEVICE,
    a_node_that_joins_again_has_forgotten_what_it_has_closed: Check.DEVICE,
    the_rank_of_a_failed_device_is_not_lost: Check.DEVICE,
    snapshots_that_no_process_can_read_count: Check.RAISED,
    a_parked_spare_takes_a_sick_device: Check.DEVICE,
    a_parked_spare_takes_the_device_of_another_rank: Check.DEVICE,
    a_parked_spare_keeps_the_number_that_it_was_started_with: Check.DEVICE,
    what_is_under_way_at_a_stop_is_claimed: Check.GROUPS,
    collectives_of_a_group_are_not_compared: Check.GROUPS,
    messages_of_a_group_are_not_compared: Check.GROUPS,
    generations_of_a_group_are_not_compared: Check.GROUPS,
    a_group_stays_though_a_member_was_replaced: Check.GROUPS,
    a_rank_keeps_what_it_claims_itself: Check.GROUPS,
    one_rank_rebuilds_what_the_others_keep: Check.GROUPS,
    the_world_stays_though_a_collective_was_broken_off: Check.GROUPS,
    the_world_stays_though_state_was_under_way: Check.GROUPS,
    the_world_stays_though_second_copies_have_moved: Check.GROUPS,
    no_group_ever_stays: Check.GROUPS,
    a_rank_does_not_wait_for_its_second_copy: Check.SNAPSHOT,
    a_second_copy_counts_before_all_is_in_it: Check.WRONG_SOURCE,
    a_buddy_is_on_the_same_node: Check.SNAPSHOT,
    the_snapshot_that_must_stay_is_written_over: Check.SNAPSHOT,
    second_copies_of_the_last_generation_count: Check.RAISED,
    second_copies_are_not_told: Check.ENDED,
    a_rank_is_synced_before_its_snapshot_is_complete: Check.SNAPSHOT,
    a_slot_counts_before_all_is_in_it: Check.WRONG_SOURCE,
    a_copy_goes_into_the_newer_slot: Check.SNAPSHOT,
    a_copy_goes_on_while_the_state_is_restored: Check.SNAPSHOT,
    some_ranks_only_rewind: Check.RAISED,
    snapshots_of_a_past_that_is_computed_again_count: Check.SNAPSHOT,
    what_a_process_has_left_is_released_at_once: Check.ENDED,
    a_lost_node_still_has_its_snapshots: Check.RAISED,
    a_replacement_may_be_anywhere: Check.RAISED,
    a_replacement_is_not_told_of_the_snapshots: Check.ENDED,
    reports_of_old_generations_are_heard: Check.RECOMPUTED,
    a_recover_is_carried_out_once_more: Check.RAISED,
    a_synced_rank_takes_the_barrier_for_passed: Check.HEALTHY_FENCED,
    a_synced_rank_cannot_advance: Check.RECOMPUTED,
    the_common_step_is_the_least: Check.OLD_COMMIT,
    a_barrier_that_was_cut_off_was_passed: Check.HEALTHY_FENCED,
    a_rank_does_not_break_its_groups: Check.HEALTHY_FENCED,
    a_recovered_rank_does_not_wait_for_the_others: Check.ENDED,
    a_lost_rank_is_not_fenced: Check.ENDED,
    a_survivor_that_does_not_stop_is_waited_for: Check.STUCK,
    an_agent_that_was_held_up_blames_its_workers: Check.NO_CAUSE,
    a_job_that_has_trained_is_taken_for_new: Check.ENDED,
    a_packet_that_came_twice_is_new: Check.RAISED,
    a_bundle_that_came_too_early_is_new: Check.RAISED,
    a_bundle_loses_the_workers_of_a_node: Check.NO_CAUSE,
    the_numbers_of_a_bundle_count_twice: Check.RAISED,
    a_restarted_controller_forgets_what_came_in_bundles: Check.RAISED,
    a_node_that_joins_again_is_not_told_the_membership: Check.RAISED,
    what_is_lost_is_not_sent_again: Check.ENDED,
    the_last_entry_of_the_journal_is_lost: Check.HEALTHY_FENCED,
    a_restarted_controller_forgets_what_it_has_heard: Check.STUCK,
    a_rank_that_has_completed_a_step_can_go_back: Check.RAISED,
    the_resume_step_is_one_too_great: Check.RAISED,
    a_half_restored_copy_is_whole: Check.WRONG_SOURCE,
    a_missing_value_does_no_harm: Check.WRONG_SOURCE,
    a_written_value_is_nothing_but_a_doubt: Check.WRONG_SOURCE,
    a_lone_copy_in_doubt_counts: Check.WRONG_SOURCE,
    copies_in_doubt_count_though_they_differ: Check.WRONG_SOURCE,
    copies_in_doubt_are_not_compared: Check.ENDED,
    copies_in_doubt_are_given_up: Check.ENDED,
    a_rank_keeps_its_doubt: Check.RAISED,
    a_copy_in_doubt_is_not_saved: Check.ENDED,
    a_rank_that_is_restored_is_a_source_too: Check.NO_CAUSE,
    checkpoints_are_ignored: Check.ENDED,
    what_was_trained_is_not_remembered: Check.RECOMPUTED,
    an_undone_step_counts: Check.WRONG_SOURCE,
    a_receiver_does_not_wait_for_its_state: Check.UPDATES,
    a_rank_goes_back_to_another_checkpoint_than_the_others: Check.STEPS_DIFFER,
    a_torn_copy_is_a_source: Check.RAISED,
    a_shard_is_restored_from_another: Check.WRONG_SOURCE,
    a_replacement_takes_the_value_of_a_peer: Check.LOCAL,
    own_values_leave_a_rank_behind_the_barrier: Check.LOCAL,
    an_undone_step_keeps_its_own_value: Check.LOCAL,
    an_undone_step_keeps_the_values_of_others: Check.LOCAL,
    a_fence_is_not_awaited: Check.TWO_HOLDERS,
    an_agent_says_that_it_has_fenced_and_has_not: Check.TWO_HOLDERS,
    a_spare_is_given_twice: Check.RAISED,
    a_claim_ends_with_its_process: Check.ONCE,
    what_one_holds_another_may_begin: Check.ONCE,
    the_last_proposal_is_the_answer: Check.ONCE,
    what_was_exchanged_is_never_dropped: Check.START_UP,
    only_the_record_of_a_complete_start_up_is_dropped: Check.START_UP,
    a_former_controllers_record_counts_though_its_start_up_was_interrupted: Check.START_UP,
    a_restarted_controller_does_not_read_the_record: Check.START_UP,
    a_value_of_an_earlier_generation_is_kept: Check.START_UP,
    a_replacement_is_given_what_another_rank_kept: Check.START_UP,
    what_was_kept_is_given_before_all_stand_ready: Check.START_UP,
    a_recovery_tells_the_membership_before_it: Check.MEMBERSHIP,
    every_replacement_is_the_first_of_its_node: Check.LOCAL_RANKS,
    eviction_is_ignored: Check.ENDED,
    a_lost_node_keeps_its_spares: Check.RAISED,
    a_nested_failure_keeps_the_generation: Check.HEALTHY_FENCED,
    the_preference_of_spares_is_turned_around: Check.SPARE_CHOICE,
    spares_are_taken_by_their_number: Check.SPARE_CHOICE,
    a_spare_close_to_a_lost_node_is_preferred: Check.SPARE_CHOICE,
    no_deadline_ever_comes: Check.STUCK,
    no_lease_ever_ends: Check.ENDED,
    a_controller_that_is_cut_off_gives_all_nodes_up: Check.HEALTHY_FENCED,
    only_all_nodes_can_fall_silent_together: Check.HEALTHY_FENCED,
    who_waits_for_a_peer_is_to_blame: Check.HEALTHY_FENCED,
    a_fresh_process_is_judged_by_the_pace_of_warm_ones: Check.HEALTHY_FENCED,
    no_rank_is_ever_hung: Check.STUCK,
    a_suspected_rank_is_lost: Check.LAST_COPY,
    none_have_fallen_silent_together: Check.HEALTHY_FENCED,
    copies_of_others_that_are_silent_count: Check.NO_CAUSE,
    a_survivor_that_does_not_stop_is_lost_though_it_has_the_last_copy: Check.LAST_COPY,
    a_source_that_is_silent_is_lost_though_it_has_the_last_copy: Check.LAST_COPY,
    a_silent_node_is_lost_though_it_has_the_last_copy: Check.LAST_COPY,
    a_checkpoint_that_is_not_written_counts: Check.LAST_COPY,
    the_job_ends_when_one_rank_is_through: Check.ENDED,
    loops_that_end_unevenly_are_not_noticed: Check.NO_CAUSE,
    a_rank_in_its_last_step_has_begun_another: Check.ENDED,
    a_drain_is_not_in_the_journal: Check.RAISED,
    a_drain_sends_the_signal_at_once: Check.DRAIN,
    a_drain_ends_where_the_first_rank_holds: Check.DRAIN,
    an_answer_to_a_drain_in_a_bundle_counts_for_no_rank: Check.DRAIN,
    a_drain_breaks_the_collectives_off: Check.DRAIN,
    a_drained_node_keeps_its_ranks: Check.DRAIN,
    a_drained_node_leaves_before_its_last_reports_are_heard: Check.ENDED,
}


def a_node_is_cut_off_in_the_barrier(seed: int) -> Case:
    """The ranks of the other nodes wait for it until its lease is over. Then it is back, and still in the barrier."""
    settings = dataclasses.replace(SETTINGS, world_size=3, num_spares=1, ranks_per_node=1)
    nodes = tuple(NodeLayout(f"node-{number}", 1, f"rack-{number}") for number in range(4))
    durations = SimulatedDurations(collective_s=0.05)
    layout = ClusterLayout(nodes, ("0",) * 3, settings, durations=durations, num_steps=12)
    return Case(seed, layout, (SimulatedFault("cut off", 2.0, None, Phase.SYNCED, seed % 4, 8.0),))


def a_clock_jumps_in_a_long_forward(seed: int) -> Case:
    """The ranks of one node seem to stand still, and make no progress before the controller judges them."""
    settings = dataclasses.replace(SETTINGS, world_size=2, num_spares=1, ranks_per_node=1)
    nodes = tuple(NodeLayout(f"node-{number}", 2, f"rack-{number}") for number in range(2))
    layout = ClusterLayout(nodes, ("0",) * 2, settings, durations=SimulatedDurations(forward_s=5.0), num_steps=8)
    return Case(seed, layout, (SimulatedFault("clock jump", 12.0 + seed % 50 / 10, pick=seed % 2, lasts_s=40.0),))


def a_value_is_cut_off_after_the_update(seed: int) -> Case:
    """One of two or three replicas is killed there, and now and then another one a little later."""
    world_size = 2 + seed % 2
    settings = dataclasses.replace(SETTINGS, world_size=world_size, num_spares=2, ranks_per_node=1)
    nodes = tuple(NodeLayout(f"node-{number}", 2, f"rack-{number}") for number in range(world_size))
    durations = SimulatedDurations(collective_s=0.05)
    layout = ClusterLayout(
        nodes, ("0",) * world_size, settings, durations=durations, num_steps=12, reduces_after_update=True
    )
    kill = SimulatedFault("kill", 2.0 + seed % 20 / 10, None, Phase.OPTIMIZER, seed % world_size)
    again = SimulatedFault("kill", seed % 40 / 100, 1, None, seed // 2 % world_size)
    return Case(seed, layout, (kill, again) if seed % 5 == 0 else (kill,))


def all_ranks_are_stopped(seed: int) -> Case:
    """For a time past the deadline, and on several nodes, whose agents notice it one after the other."""
    settings = dataclasses.replace(SETTINGS, world_size=3, num_spares=1, ranks_per_node=1)
    nodes = tuple(NodeLayout(f"node-{number}", 1, f"rack-{number}") for number in range(4))
    layout = ClusterLayout(nodes, ("0",) * 3, settings, num_steps=40)
    return Case(seed, layout, (SimulatedFault("suspend", 3.0 + seed % 50 / 10, lasts_s=8.0 + seed % 37 / 10),))


def some_ranks_are_stopped(seed: int) -> Case:
    """Two of three, past the deadline."""
    case = all_ranks_are_stopped(seed)
    (fault,) = case.plan
    return dataclasses.replace(case, plan=(dataclasses.replace(fault, pick=2 + 4 * 1),))


def two_of_which_one(seed: int, shards: tuple[str, str], *faults: SimulatedFault, every: int | None = None) -> Case:
    """Two ranks on two nodes, with spares on a third one."""
    settings = dataclasses.replace(SETTINGS, world_size=2, num_spares=2, ranks_per_node=1)
    nodes = tuple(NodeLayout(f"node-{number}", 1 + number // 2, f"rack-{number}") for number in range(3))
    return Case(seed, ClusterLayout(nodes, shards, settings, num_steps=40, checkpoint_every=every), faults)


def a_rank_is_silent_without_replica(seed: int) -> Case:
    """It goes on after a while; a checkpoint is not yet written."""
    stop = SimulatedFault("stop", 3.0 + seed % 30 / 10, pick=1 + 2 * (seed % 2), lasts_s=45.0)
    return two_of_which_one(seed, ("0", "1"), stop, every=35)


def a_node_is_cut_off_without_replica(seed: int) -> Case:
    return two_of_which_one(
        seed, ("0", "1"), SimulatedFault("cut off", 3.0 + seed % 30 / 10, pick=seed % 2, lasts_s=9.0)
    )


def the_last_copy_is_silent_in_a_recovery(seed: int) -> Case:
    """One of two replicas was killed, and the other is stopped while it stops or sends its state."""
    kill = SimulatedFault("kill", 3.0 + seed % 30 / 10, pick=0)
    return two_of_which_one(seed, ("0", "0"), kill, SimulatedFault("stop", seed % 40 / 1000, 1, None, 1, 15.0))


def a_node_is_lost_and_two_have_spares(seed: int) -> Case:
    """One of the two stands in the same rack as the lost node, and its spare has the lower number."""
    settings = dataclasses.replace(SETTINGS, world_size=2, num_spares=2, ranks_per_node=1)
    racks = ("rack-0", "rack-1", "rack-0", "rack-2")
    nodes = tuple(NodeLayout(f"node-{number}", 1, rack) for number, rack in enumerate(racks))
    layout = ClusterLayout(nodes, ("0",) * 2, settings, num_steps=12)
    return Case(seed, layout, (SimulatedFault("node loss", 2.0 + seed % 10 / 10, pick=0),))


def two_ranks(seed: int, num_nodes: int, ends_early: int | None, fault: SimulatedFault) -> Case:
    settings = dataclasses.replace(SETTINGS, world_size=2, num_spares=1, ranks_per_node=2 // num_nodes)
    nodes = tuple(NodeLayout(f"node-{number}", 2, f"rack-{number}") for number in range(num_nodes))
    return Case(seed, ClusterLayout(nodes, ("0",) * 2, settings, num_steps=4, ends_early=ends_early), (fault,))


def a_rank_leaves_its_loop_early(seed: int) -> Case:
    """On one node or on two, and now and then a rank is killed as well."""
    return two_ranks(seed, 1 + seed % 2, seed % 4 // 2, SimulatedFault("kill", 0.5 + seed % 50 / 10, pick=seed))


def data_is_cut_off_in_the_last_step(seed: int) -> Case:
    """One rank has left the last barrier and is through, the other one waits in it, but not so long that it is stuck
    there again when the groups are connected anew, which ends a job."""
    return two_ranks(seed, 2, None, SimulatedFault("cut data", 1.0 + seed % 20 / 10, None, Phase.SYNCED, 1, 12.0))


def a_node_is_drained(seed: int) -> Case:
    """Spares of other nodes are warm, and training continues for longer than the node may stay."""
    settings = dataclasses.replace(SETTINGS, world_size=2, num_spares=2, ranks_per_node=1)
    nodes = tuple(NodeLayout(f"node-{number}", 1, f"rack-{number}") for number in range(4))
    layout = ClusterLayout(nodes, ("0",) * 2, settings, num_steps=40)
    return Case(seed, layout, (SimulatedFault("node drain", 6.0 + seed % 10 / 10, pick=seed % 2, lasts_s=5.0),))


def a_node_is_drained_as_the_job_completes(seed: int) -> Case:
    """No other node has room for its rank, and the node may stay for longer than the job takes."""
    settings = dataclasses.replace(SETTINGS, world_size=2, num_spares=0, ranks_per_node=1)
    nodes = tuple(NodeLayout(f"node-{number}", 1, f"rack-{number}") for number in range(2))
    layout = ClusterLayout(nodes, ("0",) * 2, settings, num_steps=10)
    return Case(seed, layout, (SimulatedFault("node drain", 3.0 + seed % 20 / 10, pick=seed % 2, lasts_s=30.0),))


def a_device_is_sick(seed: int) -> Case:
    """In half of the jobs another node has a warm spare. Else there is no room, and a failed device loses its rank."""
    num_spares = seed % 2
    settings = dataclasses.replace(SETTINGS, world_size=2, num_spares=num_spares, ranks_per_node=1)
    nodes = tuple(NodeLayout(f"node-{number}", 1, f"rack-{number}") for number in range(2 + num_spares))
    layout = ClusterLayout(nodes, ("0",) * 2, settings, num_steps=60)
    return Case(seed, layout, (SimulatedFault("sick device", 6.0 + seed % 10 / 10, pick=seed // 2 % 4, lasts_s=8.0),))


def a_node_with_a_sick_device_comes_back(seed: int) -> Case:
    """Its agent is started again, and there is no other room for the rank that was there."""
    settings = dataclasses.replace(SETTINGS, world_size=2, num_spares=0, ranks_per_node=1)
    nodes = tuple(NodeLayout(f"node-{number}", 2, f"rack-{number}") for number in range(2))
    layout = ClusterLayout(nodes, ("0",) * 2, settings, num_steps=60)
    sick = SimulatedFault("sick device", 6.0 + seed % 10 / 10, pick=seed % 4, lasts_s=8.0)
    return Case(seed, layout, (sick, SimulatedFault("agent restart", 9.0, pick=seed % 2)))


def a_job_is_drained_while_ranks_reduce(seed: int) -> Case:
    """After the update, into the state: what is broken off there leaves every copy torn."""
    settings = dataclasses.replace(SETTINGS, world_size=3, num_spares=0, ranks_per_node=3)
    nodes = (NodeLayout("node-0", 3, "rack"),)
    durations = SimulatedDurations(collective_s=0.2)
    layout = ClusterLayout(nodes, ("0",) * 3, settings, durations=durations, num_steps=20, reduces_after_update=True)
    return Case(seed, layout, (SimulatedFault("drain", 6.0 + seed % 97 / 97),))


def a_job_is_drained_while_one_rank_is_ahead(seed: int) -> Case:
    """Updates take so long that some rank is in its next step before the others have completed theirs."""
    settings = dataclasses.replace(SETTINGS, world_size=3, num_spares=0, ranks_per_node=3)
    durations = SimulatedDurations(optimizer_s=0.5)
    layout = ClusterLayout((NodeLayout("node-0", 3, "rack"),), ("0",) * 3, settings, durations=durations, num_steps=20)
    return Case(seed, layout, (SimulatedFault("drain", 6.0 + seed % 97 / 97),))


def a_job_whose_answers_are_bundled_is_drained(seed: int) -> Case:
    """One relay gathers the answers of all nodes, whose ranks reach the step that they hold at together."""
    settings = dataclasses.replace(SETTINGS, world_size=4, num_spares=0, ranks_per_node=1)
    nodes = tuple(NodeLayout(f"node-{number}", 1, f"rack-{number}") for number in range(4))
    layout = ClusterLayout(nodes, ("0",) * 4, settings, num_steps=20, num_relays=1)
    return Case(seed, layout, (SimulatedFault("drain", 6.0 + seed % 97 / 97),))


def all_are_interrupted_while_second_copies_are_under_way(seed: int) -> Case:
    """They take as long as two steps, and no rank is lost: all go on from where they stand."""
    settings = dataclasses.replace(SETTINGS, world_size=2, num_spares=0, ranks_per_node=1)
    nodes = tuple(NodeLayout(f"node-{number}", 1, f"rack-{number}") for number in range(2))
    layout = ClusterLayout(
        nodes,
        ("0", "1"),
        settings,
        durations=SimulatedDurations(second_copy_s=1.0),
        num_steps=20,
        snapshot_every=4,
    )
    return Case(seed, layout, (SimulatedFault("false hint", 3.0 + seed % 40 / 10, pick=seed),))


def a_node_is_lost_while_second_copies_are_under_way(seed: int) -> Case:
    """Its ranks' snapshots of that step are whole there, and not yet anywhere else."""
    settings = dataclasses.replace(SETTINGS, world_size=2, num_spares=1, ranks_per_node=1)
    nodes = tuple(NodeLayout(f"node-{number}", 1, f"rack-{number}") for number in range(3))
    durations = SimulatedDurations(snapshot_s=0.02, second_copy_s=0.6)
    layout = ClusterLayout(nodes, ("0", "1"), settings, durations=durations, num_steps=20, snapshot_every=1)
    return Case(seed, layout, (SimulatedFault("node loss", 3.0 + seed % 40 / 10, pick=seed % 2),))


def a_rank_falls_out_while_others_connect(seed: int) -> Case:
    """In the first step, where some ranks have not entered an operation of their groups that others wait in."""
    settings = dataclasses.replace(SETTINGS, world_size=6, num_spares=2, ranks_per_node=6)
    durations = SimulatedDurations(connect_s=0.3)
    nodes = (NodeLayout("node-0", 8, "rack"),)
    layout = ClusterLayout(nodes, ("0", "1") * 3, settings, durations=durations, has_mesh=True)
    kills = (
        SimulatedFault("kill", 0.0, phase=Phase.BACKWARD, pick=seed),
        SimulatedFault("kill", 0.2 + seed % 20 / 100, recovery=1, pick=seed),
    )
    return Case(seed, layout, kills)


def all_are_interrupted_while_state_moves(seed: int) -> Case:
    """A replacement is there and is sent its state, and no other rank is lost."""
    settings = dataclasses.replace(SETTINGS, world_size=3, num_spares=1, ranks_per_node=3)
    durations = SimulatedDurations(restore_s=0.5)
    layout = ClusterLayout((NodeLayout("node-0", 4, "rack"),), ("0",) * 3, settings, durations=durations)
    error = SimulatedFault("group error", 0.1 + seed % 20 / 20, recovery=1, pick=seed)
    return Case(seed, layout, (SimulatedFault("kill", 0.0, phase=Phase.BACKWARD, pick=seed), error))


def all_are_interrupted_while_second_copies_move(seed: int) -> Case:
    """As `all_are_interrupted_while_second_copies_are_under_way`, and no collective is broken off."""
    case = all_are_interrupted_while_second_copies_are_under_way(seed)
    return dataclasses.replace(case, plan=(SimulatedFault("group error", 3.0 + seed % 40 / 10, pick=seed),))


def all_snapshots_are_where_no_process_can_come(seed: int) -> Case:
    """The device of one node fails, and the other node, with the buddy, is lost in the recovery. A third node is there.

    Half of the jobs have checkpoints.
    """
    settings = dataclasses.replace(SETTINGS, world_size=2, num_spares=2, ranks_per_node=1)
    nodes = (
        *(NodeLayout(f"node-{number}", 1, f"rack-{number}") for number in range(2)),
        NodeLayout("node-2", 2, "rack-2"),
    )
    layout = ClusterLayout(
        nodes, ("0", "1"), settings, num_steps=40, snapshot_every=1, checkpoint_every=3 if seed % 2 else None
    )
    fails = SimulatedFault("sick device", 5.0 + seed % 10 / 10, pick=0, lasts_s=8.0)
    return Case(seed, layout, (fails, SimulatedFault("node loss", 0.0, recovery=1, pick=1, lasts_s=30.0)))


def two_spares_are_parked_where_one_device_is_left(seed: int) -> Case:
    """The first takes it, and the other one that of a rank that is lost later; one of the devices fails or is sick."""
    settings = dataclasses.replace(SETTINGS, world_size=2, num_spares=2, ranks_per_node=2)
    nodes = (NodeLayout("node-0", 4, "rack", num_devices=3),)
    layout = ClusterLayout(nodes, ("0",) * 2, settings, num_steps=40, needs_rank=True, parks_spares=True)
    kills = [SimulatedFault("kill", at_s + seed % 10 / 10, pick=seed // 2) for at_s in (3.0, 9.0, 12.0)]
    sick = SimulatedFault("sick device", 6.0 + seed % 10 / 10, pick=4 * (seed % 3) + seed % 2, lasts_s=8.0)
    return Case(seed, layout, (*kills, sick))


def a_replacement_refuses_what_it_has_loaded(seed: int) -> Case:
    """Once, or twice in a row, which ends the job."""
    settings = dataclasses.replace(SETTINGS, world_size=3, num_spares=2, ranks_per_node=3)
    layout = ClusterLayout((NodeLayout("node-0", 5, "rack"),), ("0",) * 3, settings)
    kill = SimulatedFault("kill", 3.0 + seed % 10 / 10, phase=SHORT_PHASES[seed % 4], pick=seed)
    return Case(seed, layout, (SimulatedFault("refused load", 1.0, pick=seed), kill))


def a_replacement_differs_from_its_replicas(seed: int) -> Case:
    """In what it has loaded, or after the next update, once or twice in a row."""
    case = a_replacement_refuses_what_it_has_loaded(seed)
    _refused, kill = case.plan
    layout = dataclasses.replace(case.layout, compares=True)
    return Case(seed, layout, (SimulatedFault("wrong load", 1.0, pick=seed), kill))


CASES: dict[Plant, Callable[[int], Case]] = {
    a_missing_value_does_no_harm: a_value_is_cut_off_after_the_update,
    a_written_value_is_nothing_but_a_doubt: a_value_is_cut_off_after_the_update,
    a_lone_copy_in_doubt_counts: a_value_is_cut_off_after_the_update,
    copies_in_doubt_count_though_they_differ: a_value_is_cut_off_after_the_update,
    copies_in_doubt_are_not_compared: a_value_is_cut_off_after_the_update,
    copies_in_doubt_are_given_up: a_value_is_cut_off_after_the_update,
    a_rank_keeps_its_doubt: a_value_is_cut_off_after_the_update,
    a_copy_in_doubt_is_not_saved: a_value_is_cut_off_after_the_update,
    replicas_are_not_compared_after_a_recovery: a_replacement_differs_from_its_replicas,
    only_the_restored_state_is_compared: a_replacement_differs_from_its_replicas,
    the_state_is_compared_only_after_an_update: a_replacement_differs_from_its_replicas,
    the_ranks_that_stayed_are_refused: a_replacement_differs_from_its_replicas,
    a_rank_that_refuses_its_state_keeps_it: a_replacement_differs_from_its_replicas,
    what_was_refused_counts_as_loaded: a_replacement_refuses_what_it_has_loaded,
    the_first_load_that_is_refused_ends_the_job: a_replacement_refuses_what_it_has_loaded,
    snapshots_that_no_process_can_read_count: all_snapshots_are_where_no_process_can_come,
    a_parked_spare_takes_a_sick_device: two_spares_are_parked_where_one_device_is_left,
    a_parked_spare_takes_the_device_of_another_rank: two_spares_are_parked_where_one_device_is_left,
    a_parked_spare_keeps_the_number_that_it_was_started_with: two_spares_are_parked_where_one_device_is_left,
    the_world_stays_though_state_was_under_way: all_are_interrupted_while_state_moves,
    the_world_stays_though_second_copies_have_moved: all_are_interrupted_while_second_copies_move,
    a_rank_stays_on_a_closed_device: a_device_is_sick,
    the_rank_of_a_failed_device_is_not_lost: a_device_is_sick,
    a_node_that_joins_again_has_forgotten_what_it_has_closed: a_node_with_a_sick_device_comes_back,
    generations_of_a_group_are_not_compared: a_rank_falls_out_while_others_connect,
    a_second_copy_counts_before_all_is_in_it: a_node_is_lost_while_second_copies_are_under_way,
    the_snapshot_that_must_stay_is_written_over: all_are_interrupted_while_second_copies_are_under_way,
    loops_that_end_unevenly_are_not_noticed: a_rank_leaves_its_loop_early,
    a_rank_in_its_last_step_has_begun_another: data_is_cut_off_in_the_last_step,
    the_common_step_is_the_least: a_node_is_cut_off_in_the_barrier,
    none_have_fallen_silent_together: some_ranks_are_stopped,
    copies_of_others_that_are_silent_count: all_ranks_are_stopped,
    a_suspected_rank_is_lost: a_rank_is_silent_without_replica,
    a_checkpoint_that_is_not_written_counts: a_rank_is_silent_without_replica,
    an_agent_that_was_held_up_blames_its_workers: a_clock_jumps_in_a_long_forward,
    a_silent_node_is_lost_though_it_has_the_last_copy: a_node_is_cut_off_without_replica,
    a_survivor_that_does_not_stop_is_lost_though_it_has_the_last_copy: the_last_copy_is_silent_in_a_recovery,
    a_source_that_is_silent_is_lost_though_it_has_the_last_copy: the_last_copy_is_silent_in_a_recovery,
    a_spare_close_to_a_lost_node_is_preferred: a_node_is_lost_and_two_have_spares,
    a_drained_node_keeps_its_ranks: a_node_is_drained,
    a_drained_node_leaves_before_its_last_reports_are_heard: a_node_is_drained_as_the_job_completes,
    a_drain_breaks_the_collectives_off: a_job_is_drained_while_ranks_reduce,
    a_drain_ends_where_the_first_rank_holds: a_job_is_drained_while_one_rank_is_ahead,
    an_answer_to_a_drain_in_a_bundle_counts_for_no_rank: a_job_whose_answers_are_bundled_is_drained,
}
"""Where among all seeds too few have what it takes: seeds of a cluster and a fault that have."""


QUICKEST_SEED: dict[Plant, int] = {
    copies_in_doubt_count_though_they_differ: 407,
    copies_in_doubt_are_not_compared: 167,
    a_rank_keeps_its_doubt: 167,
    collectives_of_a_group_are_not_compared: 922,
    a_restarted_controller_forgets_what_came_in_bundles: 183,
    a_rank_is_synced_before_its_snapshot_is_complete: 107,
    a_copy_goes_on_while_the_state_is_restored: 648,
    a_replacement_is_not_told_of_the_snapshots: 393,
    the_world_stays_though_a_collective_was_broken_off: 169,
    snapshots_of_a_past_that_is_computed_again_count: 178,
    a_lost_node_still_has_its_snapshots: 254,
    reports_of_old_generations_are_heard: 870,
    a_synced_rank_takes_the_barrier_for_passed: 172,
    a_synced_rank_cannot_advance: 793,
    a_barrier_that_was_cut_off_was_passed: 172,
    a_recovered_rank_does_not_wait_for_the_others: 163,
    the_last_entry_of_the_journal_is_lost: 16,
    a_half_restored_copy_is_whole: 147,
    a_fence_is_not_awaited: 139,
    only_the_record_of_a_complete_start_up_is_dropped: 129,
    a_former_controllers_record_counts_though_its_start_up_was_interrupted: 420,
    a_value_of_an_earlier_generation_is_kept: 981,
    eviction_is_ignored: 106,
    the_preference_of_spares_is_turned_around: 421,
    spares_are_taken_by_their_number: 522,
    no_lease_ever_ends: 907,
    a_controller_that_is_cut_off_gives_all_nodes_up: 927,
    the_job_ends_when_one_rank_is_through: 2229,
    a_drain_is_not_in_the_journal: 3176,
    a_drain_sends_the_signal_at_once: 1300,
    what_a_process_has_left_is_released_at_once: 293,
    second_copies_of_the_last_generation_count: 254,
    second_copies_are_not_told: 193,
}
"""The seed at which the search from 0 on ends, where it takes more than some seconds. It is tried first."""


def as_it_was_drawn(case: Case) -> Case:
    """A case without what is drawn since these seeds were found; nothing else of it has changed."""
    plan = tuple(fault for fault in case.plan if fault.kind not in SILENCES)
    return dataclasses.replace(case, layout=dataclasses.replace(case.layout, first_batch_s=0.0), plan=plan)


@pytest.mark.parametrize("plant", MUTANTS, ids=lambda plant: plant.__name__)
def test_a_mutant_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some seed fails by the check that the mutant is for. What it does elsewhere is its own."""
    plant(monkeypatch)
    case = CASES.get(plant, case_of)
    first = [as_it_was_drawn(case(QUICKEST_SEED[plant]))] if plant in QUICKEST_SEED else []
    for outcome in (run(each) for each in itertools.chain(first, map(case, range(MAX_SEEDS)))):
        if outcome.check is not None:
            print(f"seed {outcome.case.seed}: {outcome.check}: {outcome.detail}")
        if outcome.check is MUTANTS[plant]:
            return
    raise AssertionError(f"{MAX_SEEDS} seeds, and no check failed")


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.__name__)
def test_a_case_of_its_own_passes_without_a_mutant(case: Callable[[int], Case]) -> None:
    for seed in range(100):
        outcome = run(case(seed))
        assert outcome.check is None, f"seed {seed}: {outcome.detail}"


def test_every_check_has_fired() -> None:
    assert set(Check) == set(MUTANTS.values())
