"""The rule for silence: which ranks the controller may give up although their processes may still go on.

An exit, a closed lifeline and a closed link are evidence, and act at once. A rank without progress, a stopped process
and a silent node are not: storage may stall, a compiler may run, a scheduler may have suspended the job. The controller
gives such ranks up only if the job loses nothing by it:

======================================================  ===========================================
without them, all shards reach a common step            they are given up
======================================================  ===========================================
in memory: by a replica, a snapshot or a second copy    as soon as their deadline has passed
only in a checkpoint                                    after `Deadlines.long_s` (a node: `isolated_s`)
nowhere                                                 never (a node: after `Deadlines.long_s`)
======================================================  ===========================================

Copies of other silent ranks do not count: ranks that stand still together may do so for one reason, and the last of
them must not be given up for it. Ranks that have *fallen silent together* are not given up at all: the cause is hardly
in one of them (`Suspicions.compare`). And where a rank falls silent at the place at which one was just replaced, the
cause is probably in that place, and not in a device: from then on the job has four times the patience.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterator, Mapping, Set
from typing import TYPE_CHECKING

from keepstep.protocol import resume
from keepstep.protocol.deadlines import Deadlines
from keepstep.protocol.messages import SnapshotsByRank, WorkerSuspected
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery.placement.roster import Worker
from keepstep.protocol.recovery.stages.decision import Report, readable

if TYPE_CHECKING:
    from keepstep.protocol.recovery.job import JobState


TOGETHER_S = 5.0
"""Ranks that have fallen silent within this time, or in one phase of one step, have done so together. Pauses of storage
reach ranks at their next batch or log line, and steps of small models are a fraction of a second long."""
PATIENCE = 4.0
"""The factor by which the deadline grows when ranks fall silent at one place in turn."""
AGAIN_SHARE = 0.1
"""A rank that may not be given up yet is judged again after this share of the time for which it has been silent."""
AGAIN_S = 60.0
"""... and after this time at most."""


class Left(enum.StrEnum):
    """Where the greatest step that all ranks can reach would be, without some of them."""

    MEMORY = "memory"
    CHECKPOINT = "checkpoint"
    NOTHING = "nothing"


Place = tuple[int, Phase]
"""A step and a phase."""


@dataclasses.dataclass(slots=True)
class Suspicion:
    """A rank that is suspected to hang."""

    report: WorkerSuspected
    told_s: float
    """When the controller last heard of it, or of the end of another one."""
    due_s: float
    """When it is to be judged next. Not at once: ranks that fell silent together must be judged together."""
    patient_until_s: float
    """The rank is not given up before. Later than ``due_s`` where ranks have fallen silent in turn."""
    together: tuple[int, ...] = ()
    """The ranks that have fallen silent together, if it is one of them, as last judged."""

    @property
    def place(self) -> Place | None:
        """Where the rank is; None if the suspicion is the controller's own, and no agent has seen it there."""
        tag = self.report.tag
        return None if tag is None else (tag.step, tag.phase)


class Suspicions:
    """The suspected ranks of a job, and who of them may be given up."""

    def __init__(self, deadlines: Deadlines, give_up_after_s: float | None) -> None:
        """Args:
        deadlines: those of the job.
        give_up_after_s: when the job ends because of a rank that is not given up; None: never.
        """
        self.deadlines = deadlines
        self._give_up_after_s = give_up_after_s
        self._by_worker: dict[int, Suspicion] = {}
        self._replaced_at: set[Place] = set()
        """Where ranks were given up, in the steps that are not completed yet."""
        self._patience = 1.0
        """The factor for all deadlines of this job."""

    def __len__(self) -> int:
        return len(self._by_worker)

    def __iter__(self) -> Iterator[Suspicion]:
        return iter(self._by_worker.values())

    @property
    def workers(self) -> Set[int]:
        """The workers that hold the suspected ranks."""
        return self._by_worker.keys()

    @property
    def next_s(self) -> float | None:
        """When the suspicions are to be judged next; None if there are none."""
        return min((each.due_s for each in self), default=None)

    def add(self, report: WorkerSuspected, now_s: float, *, is_due: bool = False) -> None:
        """Records a suspicion. ``is_due``: it is judged at once."""
        if report.worker in self._by_worker:
            return
        due_s = now_s if is_due else now_s + self.deadlines.together_s
        suspicion = Suspicion(report, now_s, due_s, patient_until_s=report.since_s)
        if suspicion.place in self._replaced_at:
            self._patience *= PATIENCE
        if self._patience > 1.0:
            deadline_s = now_s - report.since_s
            suspicion.patient_until_s += min(self._patience * deadline_s, max(deadline_s, self.deadlines.long_s))
        self._by_worker[report.worker] = suspicion

    def lift(self, worker: int, now_s: float) -> None:
        """Ends a suspicion. Others that fell silent with it may be about to go on as well, so they are judged later."""
        if self._by_worker.pop(worker, None) is None:
            return
        for each in self:
            each.told_s = now_s
            wait_s = self.deadlines.hang_after_s if each.together else self.deadlines.together_s
            each.due_s = max(each.due_s, now_s + wait_s)

    def clear(self) -> None:
        """Drops all suspicions."""
        self._by_worker.clear()

    def given_up(self, worker: int) -> None:
        """Records that a suspected rank was given up."""
        place = self._by_worker.pop(worker).place
        if place is not None:
            self._replaced_at.add(place)

    def completed(self, step: int) -> None:
        """Records that all ranks have completed a step: nothing holds them up there any more."""
        self._replaced_at = {each for each in self._replaced_at if each[0] > step}

    def compare(self, holders: Collection[Worker], busy: Collection[int], now_s: float) -> None:
        """Finds those that have fallen silent together, and says when all are judged next. Call it before `may_fence`.

        They are at least two, and at least half of those that are busy. Storage that does not answer, a scheduler, or a
        machine that swaps stop several ranks at once; a broken device stops one, for which the others then wait.

        Args:
            holders: the workers that hold ranks. A suspicion of any other one ends.
            busy: the workers among them that do not wait for other processes, as far as the controller knows.
            now_s: the present time.
        """
        ranks = {each.worker: each.rank or 0 for each in holders}
        self._by_worker = {number: each for number, each in self._by_worker.items() if number in ranks}
        seen = {number: each for number, each in self._by_worker.items() if each.place is not None}
        for one in self:
            alike = {
                number
                for number, each in seen.items()
                if each.place == one.place or abs(each.report.since_s - one.report.since_s) <= TOGETHER_S
            }
            are_together = one.place is not None and len(alike) >= max(2, len(alike | set(busy)) / 2)
            one.together = tuple(sorted(ranks[number] for number in alike)) if are_together else ()
            one.due_s = self._again_s(one, now_s)

    def _again_s(self, suspicion: Suspicion, now_s: float) -> float:
        """Returns when a rank is judged again that was judged now: often in the beginning, and at its deadlines."""
        since_s = suspicion.report.since_s
        again_s = now_s + max(self.deadlines.together_s, min(AGAIN_S, AGAIN_SHARE * (now_s - since_s)))
        dues_s = [since_s + self.deadlines.long_s, suspicion.patient_until_s]
        if self._give_up_after_s is not None:
            dues_s.append(since_s + self._give_up_after_s)
        return min([again_s, *(due_s for due_s in dues_s if due_s > now_s)])

    def may_fence(self, suspicion: Suspicion, left: Left, now_s: float, *, hears_all: bool) -> bool:
        """Returns whether a silent rank may be given up now.

        Args:
            suspicion: the rank's.
            left: what would be left of the job without it.
            now_s: the present time.
            hears_all: whether the controller hears all nodes.
        """
        if suspicion.together or now_s < suspicion.patient_until_s:
            return False
        is_long = now_s >= suspicion.report.since_s + self.deadlines.long_s
        return left is Left.MEMORY or (left is Left.CHECKPOINT and is_long and hears_all)

    def ends_job(self, now_s: float) -> str | None:
        """Returns why the job ends, if a rank has been silent for too long that could not be given up; else None."""
        if self._give_up_after_s is None:
            return None
        over = (each for each in self if now_s >= each.report.since_s + self._give_up_after_s)
        first = min(over, key=lambda each: each.report.since_s, default=None)
        return None if first is None else f"--give-up-after {self._give_up_after_s:g}: {first.report.detail}"

    def explain(self, worker: Worker, left: Left, now_s: float) -> str | None:
        """Returns why a suspected rank is not given up. None if the sentence about a lower rank says it, too."""
        suspicion = self._by_worker[worker.worker]
        detail = f"rank {worker.rank}: {suspicion.report.detail}"
        if suspicion.together:
            ranks = ", ".join(map(str, suspicion.together))
            what = f"ranks {ranks} have fallen silent together, so the cause is hardly in one of them"
            said = f"{detail}; {what}, and none is replaced. They go on as soon as they can"
            return said if worker.rank == suspicion.together[0] else None
        if left is Left.MEMORY and now_s < suspicion.patient_until_s:
            until_s = suspicion.patient_until_s - suspicion.report.since_s
            what = f"ranks were replaced for silence in turn, so this one is replaced only after {until_s:.0f} s"
            return f"{detail}; {what}. --hang-after is how long a rank may be silent at first"
        if left is Left.CHECKPOINT:
            long_s = f"{self.deadlines.long_s:g} s"
            what = f"only a checkpoint has its state, so it is not replaced before it has been silent for {long_s}"
        else:
            what = "no other rank, snapshot or checkpoint has its state, so it is not replaced"
        return f"{detail}; {what}. It goes on as soon as it can"


@dataclasses.dataclass(frozen=True, slots=True)
class Silence:
    """What might be given up, and what remains in memory if it is."""

    lost: Collection[Worker]
    """The workers that might be given up. They hold ranks."""
    silent: Collection[int]
    """Numbers of all workers whose copies do not count, among them the lost ones."""
    snapshots: SnapshotsByRank = ()
    """The snapshots that lost processes leave in the memory of their node."""
    node: str | None = None
    """The node that might be given up; None: only processes."""
    silent_nodes: Collection[str] = ()
    """All silent nodes. Snapshots in their memory do not count."""


def left_in_training(job: JobState, silence: Silence) -> Left | None:
    """Returns what would be left of a job that trains.

    Each live copy is complete, so all shards reach a common step if each has a holder. All ranks take their snapshots
    at the same steps, and keep those to which the others can go back.

    Returns:
        None: it is not known whether other nodes have second copies of what is on this one. The ranks must stop and
        report them.
    """
    assert job.membership is not None
    shard = job.membership.shard
    held = {shard(worker.rank or 0) for worker in job.roster.holders() if worker.worker not in silence.silent}
    kept = {shard(rank) for rank, steps in silence.snapshots if steps}
    if {shard(worker.rank or 0) for worker in silence.lost} <= held | kept:
        return Left.MEMORY
    if silence.node is not None:
        return None
    return Left.CHECKPOINT if job.has_checkpoint else Left.NOTHING


def left_in_recovery(job: JobState, silence: Silence, words: Mapping[int, Report | None]) -> Left:
    """Returns what would be left of a job in a recovery, by the resume rule.

    Args:
        job: the job.
        silence: what might be given up.
        words: worker -> its last report, for all workers that hold a rank and are not silent.
    """
    if job.membership is None:
        return Left.MEMORY  # the ranks have not come together since they were started
    shard = job.membership.shard
    reaches: dict[str, set[frozenset[int]]] = {each: set() for each in job.membership.shards}
    doubted = {shard(worker.rank or 0) for worker in silence.lost}
    may_hold = set()
    for worker in job.roster.holders():
        where = shard(worker.rank or 0)
        if worker.worker in silence.silent:
            may_hold.add(where)
        elif (word := words[worker.worker]) is not None:
            # A step that a rank can load may be that of a checkpoint, which does not count for the shards in question.
            reaches[where].add(frozenset(word[0]) | (frozenset() if where in doubted else frozenset(word[2])))
    for rank, listed in readable(job.roster, job.snapshots, job.membership, job.generation).items():
        for each in listed:
            if each.node in silence.silent_nodes:
                may_hold.add(shard(rank))
            else:
                reaches[shard(rank)].add(each.steps)
    for rank, steps in silence.snapshots:
        reaches[shard(rank)].add(frozenset(steps))
    if resume.resume_step(reaches) is not None:
        return Left.MEMORY
    if any(where not in may_hold and not any(found) for where, found in reaches.items()):
        return Left.MEMORY  # what is in doubt could not save the job: another shard is lost already
    return Left.CHECKPOINT if job.has_checkpoint else Left.NOTHING
