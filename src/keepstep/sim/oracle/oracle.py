"""The oracle: its own model of the job, and the checks that a run must pass.

It never reads a machine's state, stage or generation. It only observes events: which processes connected with each
other (a *cohort*), which step each began and completed with which parameters, the faults and the packets.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from keepstep.protocol.controller import JournalEntry, LeaseExpired, NodeSilent
from keepstep.protocol.messages import EndJob, FenceWorker, Packet, Rescue, Stop, WorkerJoined
from keepstep.protocol.recovery import EXIT_FAILED, EXIT_NOTHING_TO_RECOVER, EXIT_TOO_FEW_RANKS
from keepstep.sim.cluster.layout import DEADLINES
from keepstep.sim.cluster.values import INCOMPLETE, right_value
from keepstep.sim.oracle.causes import Causes, most_recoveries, tells_of_step
from keepstep.sim.oracle.checks import Check, ViolationError
from keepstep.sim.oracle.devices import DeviceWatch
from keepstep.sim.oracle.drain import DrainWatch
from keepstep.sim.oracle.groups import GroupWatch
from keepstep.sim.oracle.placement import Loss, MembershipWatch, SpareChoice, check_local_ranks
from keepstep.sim.oracle.silence import FAULTS, SilenceWatch, equal_in_doubt
from keepstep.sim.oracle.snapshots import SnapshotWatch
from keepstep.sim.oracle.startup import StartUpWatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keepstep.sim.cluster.process import SimulatedProcess
    from keepstep.sim.cluster.values import History
    from keepstep.sim.world import World

LEASE_S = 3.0 - 1e-6
"""The length of a node's lease. The controller may evict a node after a silence of this length, and only then."""
ISOLATED_S = DEADLINES.isolated_s - 1e-6
"""The same if all nodes are silent, because then the controller is more likely cut off itself."""
CONNECT_S = 10.0
"""A pause of this length may begin a recovery if ranks connect in it, because each of them waits for the others for
little longer."""
SOON_S = 1.0
"""A process that is stopped for so much less than its deadline may already have stood in a phase before."""
MAX_IDLE_RECOVERIES = 8
"""The controller may end a job after this many recoveries without a completed step."""
MAX_PACKETS_PER_S = 2_000
"""Limit for one node: twice the packets of a thousand ranks that each send a different report in one second."""


@dataclasses.dataclass(slots=True)
class Cohort:
    """Processes that have connected with each other."""

    number: int
    members: dict[int, SimulatedProcess]
    """rank -> its process."""
    began: set[int] = dataclasses.field(default_factory=set)
    """Processes that have begun a step in this cohort."""
    completed: dict[int, int] = dataclasses.field(default_factory=dict)
    """step -> number of ranks that have completed it in this cohort."""
    resumed_at: int | None = None
    """The first step that a rank has begun in this cohort."""


class Oracle:
    """Watches one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.cohorts: list[Cohort] = []
        self.causes = Causes()
        self.devices = DeviceWatch(world)
        self.drain = DrainWatch(world)
        self.groups = GroupWatch(world)
        self.members = MembershipWatch(world)
        self.silence = SilenceWatch(world)
        self.snapshots = SnapshotWatch(world)
        self.start_up = StartUpWatch(world)
        self._spare_choice = SpareChoice(world)
        self.furthest = 0
        """The greatest step that a process has begun since training last resumed."""
        self._evicted: set[tuple[str, int]] = set()
        """(node, incarnation of its agent) of each node that the controller has rightly evicted."""
        self._was_silent: set[tuple[str, int]] = set()
        """(node, incarnation) that the controller might have evicted, so that its messages may count or not."""
        self._incarnations: dict[str, int] = {}
        """node -> the newest incarnation of its agent in a packet. Earlier ones are over."""
        self._heard_up_to: dict[tuple[str, int], int] = {}
        """(node, incarnation of its agent) -> number of messages that the controller has received without a gap."""
        self._has_told_of_step = False
        """Whether one of these messages shows a completed step."""
        self._has_joined = False
        """Whether one of these messages shows that a script has called ``keepstep.init()``."""
        self._before_packets: list[tuple[tuple[str, int], int, bool, bool]] = []
        """For each packet that is not yet in the journal: (node, incarnation), and the three values before it."""
        self.num_failures = 0
        """Number of faults that have hit a process, a node or the controller."""
        self._trained: Cohort | None = None
        """The last cohort in which a rank has begun a step."""
        self._blamed: dict[int, str] = {}
        """process -> the fault that has hit it."""
        self._given_up_s: dict[str, float] = {}
        """node -> when the controller could last rightly evict it, with all of its processes."""
        self._heard_s: dict[str, float] = {}
        self._num_heard: dict[tuple[str, int], int] = {}
        """(node, second) -> number of its packets."""
        self._finished: dict[int, History] = {}
        self._state_lost = False
        self._harmed: set[int] = set()
        """Processes whose copy a missing value has got into since training last resumed."""
        self._excuses: set[str] = set()
        """Faults after which the job may end without a violation."""
        self._recoveries_at_last_step = 0
        self._num_loads_refused = 0
        """Loads since the last complete step after which the state was not what was loaded."""
        self._in_doubt: list[SimulatedProcess] = []
        """Processes that hold copies in doubt, and are to save them because nothing else is left."""
        self._log_of: int | None = None
        """The process that has opened the job's log."""
        self._folder: bytes | None = None
        """What the processes have agreed on."""
        self._fetching: SimulatedProcess | None = None

    # ---- reports of the world ---------------------------------------------------------------------------------------

    def connected(self, members: dict[int, SimulatedProcess]) -> Cohort:
        """Returns the new cohort of processes that are about to connect. Checks that each rank has one holder."""
        for rank, worker in members.items():
            before = next((c.members[rank] for c in reversed(self.cohorts) if rank in c.members), worker)
            if before is not worker and before.is_alive and not self.is_unreachable(before):
                raise ViolationError(
                    Check.TWO_HOLDERS, f"rank {rank} is process {worker.process}, and process {before.process} lives"
                )
        check_local_ranks(members)
        cohort = Cohort(len(self.cohorts) + 1, members)
        self.cohorts.append(cohort)
        self.groups.met(cohort.number, members)
        return cohort

    def came_twice(self, rank: int, process: int, other: int) -> None:
        """Reports two live processes at the same rendezvous with the same rank."""
        raise ViolationError(Check.TWO_HOLDERS, f"processes {other} and {process} both connect as rank {rank}")

    def stands_at(self, worker: SimulatedProcess, step: int) -> None:
        """Checks a process that is about to begin a step, or that has completed its last one."""
        cohort, rank = self._cohort_of(worker), worker.machine.rank
        assert rank is not None
        if cohort.members.get(rank) is not worker:
            raise ViolationError(Check.TWO_HOLDERS, f"process {worker.process} trains as rank {rank}, which it is not")
        if worker.process not in cohort.began:
            cohort.began.add(worker.process)
            self._resumes(worker, cohort, step)
        self._check_history(worker, step)
        if step == self._world.layout.num_steps:
            self._finished[rank] = worker.parameters
        else:
            self.furthest = max(self.furthest, step)

    def _cohort_of(self, worker: SimulatedProcess) -> Cohort:
        assert worker.cohort is not None
        return self.cohorts[worker.cohort - 1]

    def _resumes(self, worker: SimulatedProcess, cohort: Cohort, step: int) -> None:
        if cohort.resumed_at is None:
            self._check_resume_step(cohort, step)
            before = [] if self._trained is None else list(self._trained.members.values())
            is_new = all(each.is_first_holder and each not in before for each in cohort.members.values())
            self.snapshots.resumes(-1 if is_new else step)
            cohort.resumed_at = self.furthest = step
            self._harmed.clear()
            self._state_lost = False
        elif cohort.resumed_at != step:
            raise ViolationError(
                Check.STEPS_DIFFER, f"{worker} resumes at step {step}, another rank at {cohort.resumed_at}"
            )
        if self._trained is None or cohort.number > self._trained.number:
            self._trained = cohort

    def commits(self, worker: SimulatedProcess, step: int) -> None:
        """Checks a process that leaves the gradient barrier and begins to change its parameters."""
        cohort = self._cohort_of(worker)
        if cohort is self.cohorts[-1]:  # an older cohort needs no snapshots: no rank goes back to its steps
            self.snapshots.passed_barrier(worker, cohort.members.values(), step)
        self.snapshots.survives_any_node(worker, step)
        for newer in self.cohorts[cohort.number :]:
            if newer.resumed_at is None or newer.resumed_at > step:
                continue
            if self._world.layout.reduces_after_update and newer.resumed_at == step:
                continue  # the step counts when its last collective has ended, which needs all ranks
            # A whole cohort that is cut off may continue until it gets the stop, but not one with members in both.
            # If all replicas of a shard were cut off, the others have resumed from the shard's snapshot.
            both = {rank: other for rank, other in newer.members.items() if cohort.members[rank] is other}
            if self._world.shard_of(worker.machine.rank) in set(map(self._world.shard_of, both)):
                other = next(iter(both.values()))
                raise ViolationError(
                    Check.OLD_COMMIT,
                    f"{worker} commits step {step}, and {other}, which was in it, has resumed at {newer.resumed_at}",
                )

    def completed(self, worker: SimulatedProcess, step: int) -> None:
        """Checks a process that has completed a step."""
        self._check_history(worker, step + 1)
        cohort = self._cohort_of(worker)
        cohort.completed[step] = 1 + cohort.completed.get(step, 0)
        if cohort is self._trained and cohort.completed[step] == len(cohort.members):
            self._recoveries_at_last_step = self._world.num_recoveries
            if cohort.resumed_at is None or step > cohort.resumed_at:  # in the first step a rank may still differ
                self._num_loads_refused = 0

    def refuses_load(self, worker: SimulatedProcess) -> None:
        """Records that a rank has loaded its state and holds something else. It may load again once."""
        self._num_loads_refused += 1
        self._harmed.add(worker.process)
        self.causes.add(f"{worker} refuses what it has loaded at {self._world.schedule.now_s:.3f} s")

    def opens_log(self, worker: SimulatedProcess) -> None:
        """Checks that a once-per-job action has not begun before, not even on a process that did not complete it."""
        if self._log_of is not None:
            raise ViolationError(Check.ONCE, f"processes {self._log_of} and {worker.process} both open the log")
        self._log_of = worker.process

    def fetches(self, worker: SimulatedProcess) -> None:
        """Checks that no other live and reachable process holds the action that this process begins."""
        other = self._fetching
        if other is not None and other.is_alive and not self.is_unreachable(other):
            raise ViolationError(Check.ONCE, f"process {worker.process} is at what process {other.process} has begun")
        self._fetching = worker

    def has_fetched(self, worker: SimulatedProcess) -> None:
        """Records that the holder has completed the action. The controller may still not get the report."""
        if self._fetching is worker:
            self._fetching = None

    def agrees(self, worker: SimulatedProcess, folder: bytes) -> None:
        """Checks that the answer to this process's proposal is that of every process before it."""
        if self._folder not in (None, folder):
            raise ViolationError(Check.ONCE, f"{worker} is told {folder!r}, and another {self._folder!r}")
        self._folder = folder

    def harmed(self, worker: SimulatedProcess) -> None:
        """Records that a missing value has got into the copy of a process, which is partially updated now.

        If it was advancing in a recovery, it must be restored in another one. From then on it knows that its updates
        communicate, and does not advance any more.
        """
        self._harmed.add(worker.process)
        self.causes.add(f"a missing value in process {worker.process}")

    def doubt_lifted(self, worker: SimulatedProcess) -> None:
        """Records that a copy in doubt counts from now on."""
        self._harmed.discard(worker.process)

    def restored(self, worker: SimulatedProcess, step: int) -> None:
        """Checks the state of the resume step that a process has received or loaded."""
        shard = self._world.shard_of(worker.machine.rank)
        if worker.parameters != tuple(range(step)) or worker.shard != shard:
            raise ViolationError(
                Check.WRONG_SOURCE,
                f"{worker} was restored for step {step} and holds shard {worker.shard} with {worker.parameters}",
            )
        self._check_local(worker, step)

    def is_fenced(self, worker: SimulatedProcess) -> None:
        """Checks that an agent has a reason to kill a live process."""
        if (
            worker.machine.rank is None  # the loss of a spare affects no rank
            or worker.process in self._blamed
            or worker.node.name in self.drain.leaving
            or self.is_unreachable(worker)
            or len(self._finished) == self._world.layout.world_size
            or self._excuses
            or self.silence.is_alone(worker)
            or self.state_is_lost()
        ):
            return
        raise ViolationError(Check.HEALTHY_FENCED, f"{worker} has suffered nothing")

    def decided(self, entry: JournalEntry) -> None:
        """Checks an entry that the controller has written to its journal."""
        if given := self._spare_choice.given(entry):
            self._spare_choice.check(given, self._only_loss())
        stop = next((reason for _, order, reason in entry.orders if isinstance(order, Stop)), None)
        if any(isinstance(order, Rescue) for _, order, _ in entry.orders) and not self._is_held():
            members = self._trained.members.values() if self._trained is not None else ()
            self._in_doubt = [worker for worker in members if worker.is_alive and worker.is_in_doubt]
        is_given_up = False
        fences = ((node, order.worker) for node, order, _ in entry.orders if isinstance(order, FenceWorker) and node)
        for node, number in fences:
            if (fenced := self._world.nodes[node].workers.get(number)) is not None:
                self.silence.fenced(fenced)
        if isinstance(entry.event, LeaseExpired) and self.is_silent(entry.event.node):
            self.silence.evicted(entry.event.node, entry.at_s - self._heard_s[entry.event.node])
        if isinstance(entry.event, LeaseExpired) and self._may_be_given_up(entry.event.node):
            is_given_up, self._given_up_s[entry.event.node] = True, self._world.schedule.now_s
        if isinstance(entry.event, NodeSilent) and self.is_silent(entry.event.node):
            is_given_up = True
        if stop is not None and not is_given_up:
            self.causes.begins(stop)

    def _only_loss(self) -> Loss | None:
        """Returns the loss of the only fault, if the controller cannot know of another one; else None."""
        others = set(self._world.nodes)
        if len(self.causes) != 1:
            return None
        if self._blamed:
            (process,) = self._blamed
            loss = Loss(self._world.workers[process].node.name, is_of_node=False)
        elif self._given_up_s:
            loss = Loss(next(iter(self._given_up_s)), is_of_node=True)
            others.remove(loss.node)
            if self._world.nodes[loss.node].is_up:
                return None
        else:
            return None
        return None if any(node in self._given_up_s or self.is_silent(node) for node in others) else loss

    def _may_be_given_up(self, node: str) -> bool:
        return node in self._given_up_s or self.is_silent(node)

    def job_ended(self, order: EndJob) -> None:
        """Checks the end of the job, and its exit code."""
        layout = self._world.layout
        if layout.ends_early is not None and self.furthest == layout.num_steps - 1 and not self.drain.is_asked:
            if order.exit_code != EXIT_FAILED or "give session.steps() the same number" not in order.reason:
                raise ViolationError(
                    Check.ENDED, f"exit code {order.exit_code} ({order.reason}), and a loop has ended before the others"
                )
            return
        if layout.ends_early is None and (wrong := self.drain.wrong(order)):
            raise ViolationError(Check.DRAIN, wrong)
        if order.exit_code == 0:
            right = tuple(range(layout.num_steps))
            for rank in range(layout.world_size):
                if self._finished.get(rank) != right:
                    raise ViolationError(
                        Check.UPDATES, f"the job has ended well, and rank {rank} holds {self._finished.get(rank)}"
                    )
            return
        if not self.drain.is_asked and (why := self._may_not_end(order)):
            raise ViolationError(Check.ENDED, f"exit code {order.exit_code} ({order.reason}), and {why}")

    # ---- reports of the injector and the network --------------------------------------------------------------------

    def suffers(self, worker: SimulatedProcess, fault: str, lasts_s: float = 0.0) -> None:
        """Records a fault of a process, or an injected false report of its loss."""
        self.num_failures += 1
        self.drain.troubled(lasts_s)
        if not self._is_blamed_for_more(worker):
            self._blamed[worker.process] = fault
        if fault in FAULTS:
            self.silence.begins(worker)
        self.causes.add(f"{fault} of process {worker.process}", most_recoveries(fault, lasts_s))

    def suspended(self, workers: Sequence[SimulatedProcess], lasts_s: float) -> None:
        """Records processes that are stopped at once.

        Only one that is stopped alone may be given up, past its deadline. Of several, none is better than the others.
        """
        is_alone = len(workers) == 1 and lasts_s >= DEADLINES.hang_after_s - SOON_S
        for worker in workers:
            if is_alone:
                self.suffers(worker, "suspend", lasts_s)
            else:
                self.silence.begins(worker)
                self.drain.troubled(lasts_s)
        if lasts_s >= CONNECT_S:
            self.causes.add("a suspension of ranks", 1 + int(lasts_s / CONNECT_S))

    def strikes(self, fault: str, lasts_s: float = 0.0) -> None:
        """Records a fault of a node, of the network or of the controller, or a false hint."""
        if fault not in ("drain", "node drain", "sick device"):
            self.drain.troubled(lasts_s)
        if most := most_recoveries(fault, lasts_s):
            self.causes.add(f"{fault} at {self._world.schedule.now_s:.3f} s", most)

    def drains_job(self) -> None:
        """Records the request to drain the job."""
        self.drain.asked(is_calm=self.is_calm())

    def drains_node(self, node: str) -> None:
        """Records the request to drain a node."""
        self.drain.node_asked(node, is_calm=self.is_calm())
        self.causes.node_leaves(node, self._world.nodes[node].layout.slots)

    def is_calm(self) -> bool:
        """Returns whether all ranks train, and no recovery is in progress."""
        ranks = self._trained.members.values() if self._trained is not None else ()
        are_well = all(worker.is_alive and worker.process not in self._blamed for worker in ranks)
        trains = are_well and len(self._finished) < len(ranks)
        return trains and self._world.num_recoveries == self._recoveries_at_last_step

    def drains_at(self, worker: SimulatedProcess, step: int) -> None:
        """Checks a rank that is at the step at which the job ends."""
        self.stands_at(worker, step)
        self.drain.stands(worker, step)

    def excuses(self, fault: str) -> None:
        """Records a fault after which the job may end without a violation."""
        self._excuses.add(fault)

    def arrives(self, packet: Packet) -> None:
        """Records a packet that arrives at the controller, which may be paused."""
        now_s, node = self._world.schedule.now_s, packet.node
        if (node, packet.incarnation) in self._evicted:
            return
        if self.is_silent(node):
            self._was_silent.add((node, packet.incarnation))
            self._given_up_s[node] = now_s
        self._num_heard[node, int(now_s)] = number = self._num_heard.get((node, int(now_s)), 0) + 1
        if number > MAX_PACKETS_PER_S:
            raise ViolationError(Check.STUCK, f"{node} has sent {number} packets within a second")
        self._heard_s[node] = now_s

    def listens(self, packet: Packet) -> None:
        """Records a packet that the controller handles, maybe long after its arrival and after a restart."""
        line = packet.node, packet.incarnation
        if line in self._evicted or packet.incarnation < self._incarnations.get(packet.node, packet.incarnation):
            return
        self._incarnations[packet.node] = packet.incarnation
        self._heard_s[packet.node] = self._world.schedule.now_s
        if line not in self._was_silent:
            self._listen(packet)

    def written(self) -> None:
        """Records that the packets which the controller has handled are in its journal."""
        self._before_packets.clear()

    def evicted(self, node: str, incarnation: int) -> None:
        """Records an eviction that is sent to an agent. If it was right, later messages of the agent do not count."""
        if node in self._given_up_s:
            self._evicted.add((node, incarnation))
            self._heard_s[node] = -math.inf

    def _listen(self, packet: Packet) -> None:
        """Counts the messages of a packet, unless a gap precedes them."""
        line = packet.node, packet.incarnation
        known = self._heard_up_to.get(line, 0)
        self._before_packets.append((line, known, self._has_told_of_step, self._has_joined))
        if packet.first <= known:
            self._heard_up_to[line] = max(known, packet.first + len(packet.messages))
            self._has_told_of_step = self._has_told_of_step or any(map(tells_of_step, packet.messages))
            self._spare_choice.heard(packet.messages)
            self._has_joined = self._has_joined or any(isinstance(each, WorkerJoined) for each in packet.messages)

    def controller_restarted(self) -> None:
        """Restarts all leases, twice as long, except those of nodes that might have been evicted before."""
        for node in self._world.nodes:
            if self._given_up_s.get(node, -1.0) <= self._heard_s.get(node, 0.0):
                self._heard_s[node] = self._world.schedule.now_s + LEASE_S

    def controller_crashed(self) -> None:
        """Handles a crash of the controller: agents will repeat the messages that are not in its journal."""
        for line, known, *has_told in reversed(self._before_packets):
            self._heard_up_to[line], (self._has_told_of_step, self._has_joined) = known, has_told
        for node in self._world.nodes:
            if self.is_silent(node):
                self._given_up_s[node] = self._world.schedule.now_s

    @property
    def finished_ranks(self) -> set[int]:
        """The ranks whose last step is complete."""
        return set(self._finished)

    def has_other_fault(self, worker: SimulatedProcess) -> bool:
        """Whether there is another reason to end a process than that it is silent."""
        return worker.node.name in self.drain.leaving or self._is_blamed_for_more(worker)

    def _is_blamed_for_more(self, worker: SimulatedProcess) -> bool:
        return self._blamed.get(worker.process, "stop") not in FAULTS

    @property
    def is_excused(self) -> bool:
        """Whether the job may end without a violation."""
        return bool(self._excuses)

    @property
    def has_trained(self) -> bool:
        """Whether a rank has ever begun a step."""
        return self._trained is not None

    def node_began_new_life(self, node: str) -> None:
        """Records that the agent of a node was lost with its workers."""
        self._given_up_s[node] = self._world.schedule.now_s

    # ---- its own model ----------------------------------------------------------------------------------------------

    def is_unreachable(self, worker: SimulatedProcess) -> bool:
        """Returns whether the controller may evict, or might have evicted, the node of a process."""
        node = worker.node.name
        return worker.spawned_s <= self._given_up_s.get(node, -1.0) or self.is_silent(node)

    def is_silent(self, node: str) -> bool:
        """Returns whether the controller has heard nothing of a node for so long that it may evict it."""
        now_s = self._world.schedule.now_s
        heard_s = self._heard_s.get(node, now_s)
        if now_s - heard_s < LEASE_S:
            return False
        return now_s - heard_s >= ISOLATED_S or any(at_s > heard_s for at_s in self._heard_s.values())

    def silent_for_s(self, node: str) -> float:
        """Returns for how long the controller has heard nothing of a node."""
        now_s = self._world.schedule.now_s
        return now_s - self._heard_s.get(node, now_s)

    def state_is_lost(self) -> bool:
        """Returns whether some shard has neither a holder in the last cohort that trained, nor a snapshot."""
        if self._trained is None:
            return True
        if not self._state_lost:
            self._state_lost = not self._is_held() and self._newest_snapshot() is None
        return self._state_lost

    def _is_held(self) -> bool:
        """Returns whether every shard has a holder in the last cohort that trained, or several equal ones in doubt."""
        holders = self._holders()
        whole = [each for each in holders if min(each.parameters, default=0) > INCOMPLETE and not each.is_in_doubt]
        return {worker.shard for worker in (*whole, *equal_in_doubt(holders))} == set(self._world.layout.shards)

    def _holders(self) -> list[SimulatedProcess]:
        members = self._trained.members.values() if self._trained is not None else ()
        return [
            worker
            for worker in members
            if worker.is_alive
            and (worker.process not in self._blamed or self.silence.holds(worker))
            and not self.is_unreachable(worker)
        ]

    def _newest_snapshot(self) -> int | None:
        """Returns the newest step of which all shards have a snapshot on a reachable node; None if there is none."""
        return self.snapshots.newest(lambda worker: worker.node.is_read and not self.is_unreachable(worker))

    def _check_history(self, worker: SimulatedProcess, step: int) -> None:
        rank = worker.machine.rank
        if worker.parameters != tuple(range(step)) or worker.shard != self._world.shard_of(rank):
            raise ViolationError(
                Check.UPDATES, f"{worker} stands at step {step} with shard {worker.shard} and {worker.parameters}"
            )

        self._check_local(worker, step)

    def _check_local(self, worker: SimulatedProcess, step: int) -> None:
        rank = worker.machine.rank
        assert rank is not None
        if worker.local.value != right_value(rank, step):
            raise ViolationError(
                Check.LOCAL,
                f"{worker} stands at step {step} with {worker.local.value}, right is {right_value(rank, step)}",
            )

    def _check_resume_step(self, cohort: Cohort, step: int) -> None:
        if self._trained is None or step >= self.furthest:
            return
        stayed = [worker for worker in cohort.members.values() if worker in self._trained.members.values()]
        kept = {worker.shard for worker in stayed if worker.process not in self._harmed}
        if kept == set(self._world.layout.shards):
            raise ViolationError(
                Check.RECOMPUTED,
                f"step {self.furthest} was begun, and though every shard survived all resume at {step}",
            )
        newest = self._newest_snapshot()
        if newest is None and self._world.layout.snapshot_every:
            return  # a snapshot on a node that might have been evicted, or the job starts over
        if newest is None:
            newest = max(self._world.checkpoints(before_s=self._world.recovery_began_s), default=None)
        if newest is None and (step > 0 or not self._has_told_of_step):
            return  # a checkpoint that was incomplete then, or the controller knows of no step
        if newest is None or step < newest:
            raise ViolationError(
                Check.RECOMPUTED, f"training resumes at step {step}, the newest checkpoint or snapshot is of {newest}"
            )

    def _may_not_end(self, order: EndJob) -> str | None:
        """Returns why the job should have continued; None if it may end."""
        if self.drain.loses_a_finished_job and not self._excuses:
            return "every rank has ended well"
        settings = self._world.layout.settings
        has_room = self._world.room() >= settings.world_size
        idle = self._world.num_recoveries - self._recoveries_at_last_step
        was_lost = self._blamed or self._given_up_s or any(map(self.is_silent, self._world.nodes))
        needs_all = len(self._finished) == settings.world_size or not self._has_joined
        if self._excuses or idle >= MAX_IDLE_RECOVERIES or (was_lost and needs_all):
            return None
        if order.exit_code == EXIT_NOTHING_TO_RECOVER:
            if not self.state_is_lost():
                return "every shard has a live holder"
            if any(worker.is_in_doubt and worker.process not in self._blamed for worker in self._holders()):
                return "a copy in doubt is given up"
            return "there is a checkpoint" if self._world.checkpoints() else None
        if order.exit_code == EXIT_TOO_FEW_RANKS and (settings.max_restarts is not None or not has_room):
            return None
        if order.exit_code == EXIT_TOO_FEW_RANKS and self._num_loads_refused > 1:
            return None
        if order.exit_code == EXIT_TOO_FEW_RANKS and self._in_doubt:
            are_lost = all(each.process in self._blamed or self.is_unreachable(each) for each in self._in_doubt)
            return None if self.silence.is_rescue or are_lost else "a copy in doubt is not saved"
        if self._trained is None and not has_room:
            return None
        return "it could have gone on"
