"""The agent's machine: carries out the controller's orders on one node, and reports on the node's workers.

The shell around it owns processes and sockets. It passes their events to the machine, performs the effects, and sends
the packets. `keepstep.protocol.node.liveness` decides which workers are suspected to hang.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence

import msgspec

from keepstep.errors import RemoteProtocolError
from keepstep.protocol import messages as msg
from keepstep.protocol.deadlines import Deadlines
from keepstep.protocol.messages import Cause, Tag
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
from keepstep.protocol.node.liveness import LivenessMachine, Observation
from keepstep.protocol.node.parked import device_for
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import EXIT_FAILED
from keepstep.protocol.reliable_channel import ReliableChannel
from keepstep.protocol.waiting.operations import MAX_DOING, MAX_TOLD, OperationCount, Standing, WaitsFor
from keepstep.protocol.waiting.watch import StandingWatch

HEARTBEAT_S = 0.9
"""Interval of heartbeats: a third of the default lease, less a packet's travel time. Two in a row may be lost."""
SOONEST = 0.25
"""The least time between a packet and the next heartbeat, as a share of `HEARTBEAT_S`."""
MIDDLE_OF_A_STEP = "exit code 0 in the middle of a step"
DELIVER_S = 1.0
"""How long a node that leaves tries to deliver its last reports. Then it leaves without their acknowledgement: the
launcher waits twice as long for the agent, and the controller should still get `NodeLeft`."""
HOLD_S = 0.05
"""How long an answer waits for those of the node's other ranks, to be sent with them as one."""


@dataclasses.dataclass(slots=True)
class _Process:
    rank: int | None
    device: int
    told_lost: bool = False
    fenced: bool = False


@dataclasses.dataclass(slots=True)
class _Farewell:
    """What the node says when it leaves the job."""

    message: msg.NodeLeft
    by_s: float
    """When it is said even if reports before it are not acknowledged."""
    is_said: bool = False


@dataclasses.dataclass(slots=True)
class _FirstSteps:
    """The first step of each rank of the node in one generation."""

    at_s: float = 0.0
    step_s: float = 0.0
    workers: set[int] = dataclasses.field(default_factory=set)


class AgentMachine:
    """The agent's machine for one node of a job. It needs one thread, and reads no clock."""

    def __init__(
        self, joined: msg.NodeJoined, incarnation: int, deadlines: Deadlines, devices_of_parked: int = 0
    ) -> None:
        """Args:
        joined, incarnation: of this node.
        deadlines: of the job.
        devices_of_parked: number of the node's devices if spares are parked, and take one with the rank; else 0.
        """
        self.node = joined.node
        self.incarnation = incarnation
        self.liveness = LivenessMachine(joined.node, deadlines)
        self._joined = joined
        self._devices_of_parked = devices_of_parked
        self._deadlines = deadlines
        self.channel = ReliableChannel(joined.node, incarnation)
        self.channel.say([joined])
        self._processes: dict[int, _Process] = {}
        self._held: dict[tuple[type, int], list[msg.GroupAnswer]] = {}
        self._held_since_s = 0.0
        self._answered: dict[tuple[type, int], set[int]] = {}
        """(answer type, generation) -> the workers that have given this answer since the last `Stop`, held or sent."""
        self._membership: msg.Membership | None = None
        """The last membership from the controller."""
        self._first_steps: dict[int, _FirstSteps] = {}
        self._watch = StandingWatch(deadlines.explain_s)
        self._stall: msg.JobStalled | None = None
        """A report that waits until the agent has sent where the ranks wait."""
        self._suspicions: list[msg.WorkerSuspected] = []
        """Reports that wait until the agent has read which snapshots the workers have in memory."""
        self._evicted = False
        self._farewell: _Farewell | None = None
        """Set when the node begins to leave the job."""
        self._has_ended = False
        """Whether the controller has ended the job, so that the node no longer leaves by itself."""
        self._is_dismissed = False
        """Whether the controller has evicted the node for good, or has acknowledged that it leaves."""
        self._is_terminating = False
        """Whether a `Terminate` has come: every script gets SIGTERM."""
        self._draining: str | None = None
        """Why the node leaves as soon as it holds no rank; None if it stays."""
        self._heartbeat_s = 0.0
        self._beat_s = HEARTBEAT_S * zlib.crc32(joined.node.encode()) / 2**32
        self.clock_offset_s = 0.0
        """Estimated offset of the controller's clock: node time + offset = controller time. The shell updates it."""
        self._effects: list[AgentEffect] = []

    # ---- what the shell calls ---------------------------------------------------------------------------------------

    def take(self) -> list[AgentEffect]:
        """Returns the effects since the last call. The shell must perform them in this order."""
        effects, self._effects = self._effects, []
        return effects

    def packets(self, now_s: float) -> list[msg.Packet]:
        """Returns the packets to send to the controller now."""
        if self._is_silent:
            return []
        due = now_s >= self._heartbeat_s
        packets = self.channel.packets(now_s, heartbeat=due)
        if packets:
            soonest_s = now_s + HEARTBEAT_S * SOONEST
            # The controller acknowledges reports with the next heartbeat, and a node that leaves waits for that.
            self._heartbeat_s = soonest_s if self._farewell is not None else self._beat_after(soonest_s)
        return packets

    @property
    def _is_silent(self) -> bool:
        """Whether the node has nothing more to say to the controller."""
        has_left = self._farewell is not None and self._farewell.is_said and not self._has_ended
        return self._is_dismissed or has_left

    def _beat_after(self, earliest_s: float) -> float:
        """Returns when the next heartbeat is due. Each node has its own offset, so that heartbeats stay spread out."""
        return earliest_s + (self._beat_s - earliest_s) % HEARTBEAT_S

    def reconnected(self, now_s: float) -> None:
        """Records a new connection, maybe to another controller. The agent sends a packet at once."""
        self.channel.reconnected()
        self._heartbeat_s = 0.0
        if self._farewell is not None:
            self._farewell = _Farewell(self._farewell.message, now_s + DELIVER_S)
            self._say_farewell(now_s)

    def depart(self, reason: str, now_s: float) -> None:
        """Ends all workers and leaves the job, with the effect `Depart`.

        `Depart` comes when the controller has acknowledged what the workers have reported before, or after `DELIVER_S`.
        The effect `Leave` follows when the controller has acknowledged that the node leaves.
        """
        if self._farewell is not None:
            return
        is_void = self._evicted  # the controller takes no more reports of this incarnation
        self._release()
        self._end_everything()
        message = msg.NodeLeft(self.node, self.incarnation, reason)
        self._farewell = _Farewell(message, now_s if is_void else now_s + DELIVER_S)
        self._heartbeat_s = now_s
        self._say_farewell(now_s)

    def _say_farewell(self, now_s: float) -> None:
        farewell = self._farewell
        if farewell is None or farewell.is_said or self._has_ended or self._is_dismissed:
            return
        if self.channel.is_heard or now_s >= farewell.by_s:
            farewell.is_said = True
            self._effects.append(Depart(farewell.message))

    def drain(self, reason: str, now_s: float) -> None:
        """Begins to drain the node: it leaves when its ranks have moved to other nodes, or at once if it has none."""
        self._draining = reason
        self._say(msg.NodeDraining(self.node, reason))
        self._leave_if_drained(now_s)

    def close_devices(self, devices: tuple[int, ...], reason: str) -> None:
        """Closes unhealthy devices, counted from 0. No process starts there any more, and a rank there moves when a
        warm spare can take it."""
        closed = tuple(sorted({*self._joined.closed, *devices}))
        self._joined = msgspec.structs.replace(self._joined, closed=closed)
        self._say(msg.DevicesClosed(self.node, devices, reason))

    def devices_failed(self, devices: tuple[int, ...], reason: str, tags: Mapping[int, Tag], now_s: float) -> None:
        """Reports the ranks on failed devices as lost, and closes the devices.

        Args:
            devices: numbers of the devices, counted from 0.
            reason: the reason, for log and report.
            tags: worker -> its tag.
            now_s: when the failure was found.
        """
        for number, process in self._processes.items():
            is_told = process.fenced or process.told_lost
            if process.device in devices and process.rank is not None and number in tags and not is_told:
                self._say(msg.WorkerLost(number, Cause.DEVICE, reason, False, tags[number], now_s))
        self.close_devices(devices, reason)

    def _leave_if_drained(self, now_s: float) -> None:
        is_empty = all(process.rank is None for process in self._processes.values())
        is_ending = self._is_terminating or self._has_ended
        if self._draining is not None and is_empty and not is_ending:
            self.depart(self._draining, now_s)

    def next_deadline(self) -> float:
        """Returns when `tick` and `packets` are next due, apart from the regular `observe` calls."""
        if self._is_silent:
            return math.inf
        if self._farewell is not None and not self._farewell.is_said:
            return min(self._heartbeat_s, self._farewell.by_s)
        return min(self._heartbeat_s, self._held_since_s + HOLD_S) if self._held else self._heartbeat_s

    def tick(self, now_s: float) -> None:
        """Judges the workers by the observations so far, and sends answers that were held for too long."""
        self._say_farewell(now_s)
        if self._evicted:
            return
        for verdict in () if self._is_terminating else self.liveness.judge(now_s):
            match verdict:
                case msg.WorkerSuspected():
                    self._suspicions.append(verdict)
                case msg.SuspicionLifted():
                    self._say(verdict)
                case msg.JobStalled():
                    self._stall = verdict
        still_s = {number: duration_s for number, _, duration_s in self.liveness.standing(0.0, now_s)}
        if self._suspicions or self._stall is not None or self._watch.is_due(still_s, now_s):
            suspected = (each.worker for each in self._suspicions)
            self._effects.append(LookCloser(tuple(dict.fromkeys((*still_s, *suspected)))))
        if self._held and now_s >= self._held_since_s + HOLD_S:
            self._release()

    def receive(self, packet: msg.Packet | msg.NodeEvicted, now_s: float) -> None:
        """Processes a packet of the controller. Drops a packet for another incarnation."""
        if packet.incarnation != self.incarnation or self._is_dismissed:
            return
        if isinstance(packet, msg.NodeEvicted):
            self._was_evicted(packet, now_s)
            return
        if self._evicted and self._farewell is None:
            return
        for order in self.channel.receive(packet, now_s):
            if self._farewell is None or isinstance(order, msg.EndJob):
                self._obey(order, now_s)  # type: ignore[arg-type]  # the wrong kind is refused there
        self._say_farewell(now_s)

    def _was_evicted(self, packet: msg.NodeEvicted, now_s: float) -> None:
        if packet.is_final:
            self._is_dismissed = True
            self._effects.append(Leave(EXIT_FAILED, packet.reason))
            self._end_everything()
        elif self._farewell is not None:
            self._farewell.by_s = now_s  # the controller takes no more reports of this incarnation
            self._say_farewell(now_s)
        elif not self._evicted:
            self._leave_and_join_again(now_s)

    # ---- orders -----------------------------------------------------------------------------------------------------

    def _obey(self, order: msg.AgentOrder, now_s: float) -> None:
        match order:
            case msg.StartWorker():
                device = order.device if order.rank is None else self._device_of_rank(order.device)
                self._processes[order.worker] = _Process(order.rank, device)
                self.liveness.watch(order.worker, order.rank, now_s)
                local = (order.local_rank, order.local_world_size)
                self._effects.append(Spawn(order.worker, order.rank, device, *local))
            case msg.FenceWorker():
                self._fence(order.worker)
            case msg.EndJob():
                self._heartbeat_s = now_s  # the controller waits for the acknowledgement
                self._has_ended = True
                self._effects.append(Leave(order.exit_code, order.reason))
            case msg.Assign():
                if (process := self._processes.get(order.worker)) is not None:
                    if self._devices_of_parked and process.rank is None:
                        process.device = self._device_of_rank(process.device)
                        order = msgspec.structs.replace(order, device=process.device)
                    process.rank = order.rank
                    self.liveness.watch(order.worker, order.rank, now_s)
                    self.liveness.learn(order.first_phases)
                    self._effects.append(HandOver((order.worker,), order))
            case msg.PassSnapshots():
                self._effects.append(PassMemory(order.worker, order.rank, order.keepers))
            case msg.ReleaseSnapshots():
                self._effects.append(ReleaseMemory(order.workers))
            case msg.MembershipTold():
                self._membership = order.membership
            case msg.StoreAnswered() | msg.OnceAnswered():
                self._effects.append(HandOver((order.worker,), order))
            case msg.Terminate():
                self._is_terminating = True
                self._effects.append(Signal(tuple(self._processes)))
                self._for_holders(order, now_s)
            case _ if isinstance(order, msg.HolderOrder):
                self._for_holders(order, now_s)
            case _:
                raise RemoteProtocolError(f"a controller sent {type(order).__name__}, which is a report")

    def _for_holders(self, order: msg.HolderOrder, now_s: float) -> None:
        holders = tuple(number for number, process in self._processes.items() if process.rank is not None)
        match order:
            case msg.Stop():
                self.liveness.stopping(holders, now_s)
                self._forget_answers()  # to an order of a generation that is over
            case msg.Recover():
                order = self._with_membership(order)
                for number in holders:
                    self.liveness.recovering(number, now_s)
            case msg.Drain():
                self.liveness.resumed(now_s)  # a checkpoint may take as long as between any two steps
            case msg.Resume():
                self.liveness.resumed(now_s)
                self._first_steps = {order.generation: _FirstSteps()}
            case _:
                pass
        if holders:
            self._effects.append(HandOver(holders, order))

    def _device_of_rank(self, own: int) -> int:
        """Returns the device of a process that gets a rank. Parked spares have numbers beyond those of the devices."""
        if not self._devices_of_parked:
            return own
        taken = {other.device for other in self._processes.values() if other.rank is not None}
        return device_for(own, taken, self._joined.closed, self._devices_of_parked)

    def _with_membership(self, order: msg.Recover) -> msg.Recover:
        """Returns the order for workers, with the complete membership in place of a change."""
        change = order.membership
        if isinstance(change, msg.Membership):
            self._membership = change
            return order
        if self._membership is None:
            raise RemoteProtocolError("a controller has changed a membership that it has not told")
        self._membership = self._membership.changed(change)
        return msgspec.structs.replace(order, membership=self._membership)

    def _fence(self, number: int) -> None:
        process = self._processes.get(number)
        if process is None:
            self._say(msg.WorkerFenced(number))
            return
        process.fenced = True
        self._effects.append(Kill(number))

    def _leave_and_join_again(self, now_s: float) -> None:
        """Ends all processes of the evicted node, whose ranks belong to others; then the node joins again."""
        self._end_everything()
        self._join_again_if_empty(now_s)

    def _end_everything(self) -> None:
        self._evicted = True
        self._forget_answers()
        self._effects += [Kill(number) for number in self._processes]

    def _join_again_if_empty(self, now_s: float) -> None:
        if self._processes or self._farewell is not None or self._is_dismissed:
            return
        self._evicted = False
        self._effects.append(ReleaseMemory(None))
        self.incarnation += 1
        self.liveness = LivenessMachine(self.node, self._deadlines)
        self._watch, self._stall = StandingWatch(self._deadlines.explain_s), None
        self._suspicions.clear()
        self._first_steps.clear()
        self.channel = ReliableChannel(self.node, self.incarnation)
        self.channel.say([self._joined])
        self._heartbeat_s = now_s

    # ---- processes --------------------------------------------------------------------------------------------------

    def spawned(self, number: int, pid: int) -> None:
        """Records that a worker's process has started, and repeats a signal that came too early to reach it."""
        process = self._processes.get(number)
        if process is None:
            return
        self._say(msg.WorkerStarted(number, pid))
        if process.fenced or process.told_lost or self._evicted:
            self._effects.append(Kill(number))
        elif self._is_terminating:
            self._effects.append(Signal((number,)))

    def exited(
        self, number: int, cause: Cause, detail: str, tag: Tag, at_s: float, snapshots: msg.SnapshotsByRank = ()
    ) -> None:
        """Records that a worker's process is gone, and reports it.

        Args:
            number: the worker.
            cause: `Cause.EXIT` or `Cause.SIGNAL`.
            detail: how the process ended; empty for exit code 0.
            tag: the last tag on its page.
            at_s: when it ended, on the clock of ``now_s``.
            snapshots: the snapshots that it has left in memory.
        """
        process = self._processes.pop(number, None)
        self.liveness.forget(number)
        if process is None:
            return
        if self._evicted:
            self._join_again_if_empty(at_s)
            return
        if process.told_lost:
            self._say(msg.WorkerEnded(number, cause, detail or MIDDLE_OF_A_STEP))
        elif process.fenced:
            self._tell_of_snapshots(number, snapshots)
            self._say(msg.WorkerFenced(number))
        elif not detail and tag.phase in (Phase.STARTING, Phase.UPDATED):
            self._say(msg.WorkerDone(number, tag.step + 1 if tag.phase is Phase.UPDATED else None))
        else:
            self._tell_of_snapshots(number, snapshots)
            self._say(msg.WorkerLost(number, cause, detail or MIDDLE_OF_A_STEP, True, tag, at_s))
        self._leave_if_drained(at_s)

    def training_thread_died(self, number: int, tag: Tag, at_s: float, snapshots: msg.SnapshotsByRank = ()) -> bool:
        """Reports a worker whose training thread has died in a step as lost, and returns whether it did.

        In a step, that is a loss with any exit status. Outside of a step the script may have ended well, so the agent
        waits for the exit status.
        """
        process = self._processes.get(number)
        if process is None or process.fenced or self._evicted or tag.phase in (Phase.STARTING, Phase.UPDATED):
            return False
        process.told_lost = True
        self.liveness.forget(number)
        self._effects.append(Kill(number))
        self._tell_of_snapshots(number, snapshots)
        self._say(msg.WorkerLost(number, Cause.DIED, "its process died", True, tag, at_s))
        return True

    def _tell_of_snapshots(self, number: int, snapshots: msg.SnapshotsByRank) -> None:
        if snapshots:
            self._say(msg.SnapshotsLeft(number, snapshots))

    # ---- reports and observations of workers ------------------------------------------------------------------------

    def said(self, number: int, report: msg.AnyMessage, now_s: float) -> None:
        """Processes a worker's report.

        Raises:
            RemoteProtocolError: it is no report of a worker, or it names another worker.
        """
        speaks_for = getattr(report, "workers", None) or (getattr(report, "worker", None),)
        if not isinstance(report, msg.WorkerReport) or speaks_for != (number,):
            raise RemoteProtocolError(f"worker {number} sent {type(report).__name__}, which is not for it to send")
        if self._evicted:
            return
        if isinstance(report, msg.RankAwaited | msg.WorkerReady):
            self.liveness.builds(number, is_building=isinstance(report, msg.RankAwaited))
        if isinstance(report, msg.WorkerJoined):
            self.liveness.is_initialised = True
        if isinstance(report, msg.WorkerReady):
            self.liveness.deadlines = self.liveness.deadlines.for_timeout(report.timeout_s)
        if isinstance(report, msg.SafePointReached):
            self.liveness.safe(number)
        if isinstance(report, msg.GroupAnswer):
            if not isinstance(report, msg.Holding):  # which the thread of the link says
                lifted = self.liveness.answered(number, now_s)
                if lifted is not None:
                    self._say(lifted)
            self._hold(report, now_s)
        else:
            self._say(report)

    def broke_protocol(self, number: int, error: str, tag: Tag, now_s: float) -> None:
        """Reports a worker as lost because it has broken the protocol."""
        self._say(msg.WorkerLost(number, Cause.EXIT, msg.text(f"it broke the protocol: {error}"), False, tag, now_s))

    def observe(self, number: int, look: Observation, now_s: float) -> None:
        """Records an observation of a worker's page and process."""
        self.liveness.observe(number, look, now_s)

    def passed(self, number: int, phase: Phase, began_s: float, ended_s: float) -> None:
        """Records that a worker has completed a phase; see `LivenessMachine.passed`."""
        self.liveness.passed(number, phase, began_s, ended_s)

    def looked_closer(
        self,
        counts: Mapping[int, Sequence[OperationCount]],
        snapshots: Mapping[int, msg.SnapshotsByRank],
        doing: Mapping[int, str],
        now_s: float,
    ) -> None:
        """Reports where ranks wait, and suspected workers.

        Args:
            counts: worker -> the operation counts that `LookCloser` requested.
            snapshots: worker -> the snapshots in its memory that `LookCloser` requested.
            doing: worker -> what its process does, in words; absent or empty if that is not known.
            now_s: the present time.
        """
        still = self.liveness.standing(0.0, now_s)
        least_s = self._watch.least_s(max((each[2] for each in still), default=0.0), is_stalled=self._stall is not None)
        found = (
            _standing(*each, counts.get(each[0], ()), doing.get(each[0], "")) for each in still if each[2] >= least_s
        )
        news = self._watch.news(found, now_s)
        if news is not None:
            generation = max((look.tag.generation for _, look, _ in still), default=0)
            self._say(msg.RanksStand(self.node, generation, news))
        for suspicion in self._suspicions:
            number, detail = suspicion.worker, suspicion.detail
            if told := doing.get(number):
                detail = msg.text(f"{detail}: {told}")
            self._say(msgspec.structs.replace(suspicion, detail=detail, snapshots=snapshots.get(number, ())))
        self._suspicions.clear()
        if self._stall is not None:
            self._say(self._stall)
            self._stall = None

    def step_completed(self, number: int, generation: int, step: int, at_s: float, step_s: float) -> None:
        """Records a worker's first step of a generation. Reports it when all ranks of the node have completed it."""
        first = self._first_steps.get(generation)
        if first is None:
            return
        first.workers.add(number)
        first.at_s, first.step_s = max(first.at_s, at_s), max(first.step_s, step_s)
        if first.workers >= self._speakers():
            del self._first_steps[generation]
            first_phases = self.liveness.first_phases
            self._say(msg.StepObserved(self.node, generation, step, first.at_s, first.step_s, first_phases))

    # ---- to the controller ------------------------------------------------------------------------------------------

    def _speakers(self) -> set[int]:
        """Returns the workers that must answer before the node's answer is complete."""
        return {
            number
            for number, process in self._processes.items()
            if process.rank is not None and not process.fenced and not process.told_lost
        }

    def _hold(self, answer: msg.GroupAnswer, now_s: float) -> None:
        """Holds an answer until all ranks of the node have answered. Equal answers are then sent as one."""
        if not self._held:
            self._held_since_s = now_s
        kind = (type(answer), answer.generation)
        self._held.setdefault(kind, []).append(answer)
        answered = self._answered.setdefault(kind, set())
        answered.update(answer.workers)
        if answered >= self._speakers():
            self._release()

    def _forget_answers(self) -> None:
        self._held.clear()
        self._answered.clear()

    def _release(self) -> None:
        for answers in self._held.values():
            together: dict[msg.GroupAnswer, list[int]] = {}
            for answer in answers:
                together.setdefault(msgspec.structs.replace(answer, workers=()), []).extend(answer.workers)
            self.channel.say(
                msgspec.structs.replace(answer, workers=tuple(workers)) for answer, workers in together.items()
            )
        self._held.clear()

    def _say(self, report: msg.Report) -> None:
        self._release()
        match report:
            case msg.WorkerLost() | msg.WorkerSuspected():
                report = msgspec.structs.replace(report, since_s=report.since_s + self.clock_offset_s)
            case msg.StepObserved():
                report = msgspec.structs.replace(report, at_s=report.at_s + self.clock_offset_s)
            case _:
                pass
        if not self._evicted:
            self.channel.say([report])


def _standing(worker: int, look: Observation, still_s: float, counts: Sequence[OperationCount], doing: str) -> Standing:
    if look.stopped:
        waits_for = WaitsFor.SIGNAL
    elif look.waiting:
        waits_for = WaitsFor.CONTROLLER
    elif look.in_collective:
        waits_for = WaitsFor.RANKS
    else:
        waits_for = WaitsFor.READER if look.unread else WaitsFor.NOTHING
    told = tuple(counts[:MAX_TOLD]), doing[:MAX_DOING]
    return Standing(worker, look.tag.step, look.tag.phase, waits_for, max(0.0, still_s), *told)
