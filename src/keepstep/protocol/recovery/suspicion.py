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
them must not be given up for it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from keepstep.protocol import resume
from keepstep.protocol.deadlines import Deadlines
from keepstep.protocol.messages import SnapshotsByRank, WorkerSuspected
from keepstep.protocol.recovery.placement.roster import Worker
from keepstep.protocol.recovery.stages.decision import Report, readable

if TYPE_CHECKING:
    from keepstep.protocol.recovery.job import JobState


AGAIN_SHARE = 0.1
"""A rank that may not be given up yet is judged again after this share of the time for which it has been silent."""
AGAIN_S = 60.0
"""... and after this time at most."""


class Left(enum.StrEnum):
    """Where the greatest step that all ranks can reach would be, without some of them."""

    MEMORY = "memory"
    CHECKPOINT = "checkpoint"
    NOTHING = "nothing"


@dataclasses.dataclass(slots=True)
class Suspicion:
    """A rank that is suspected to hang."""

    report: WorkerSuspected
    told_s: float
    """When the controller last heard of it, or of the end of another one."""
    due_s: float
    """When it is to be judged next. Not at once: ranks that fell silent together must be judged together."""

    def next_s(self, deadlines: Deadlines, now_s: float) -> float:
        """Returns when a rank is to be judged again that was judged now: often in the beginning, and at the long
        deadline."""
        silent_s = now_s - self.report.since_s
        again_s = now_s + max(deadlines.together_s, min(AGAIN_S, AGAIN_SHARE * silent_s))
        long_s = self.report.since_s + deadlines.long_s
        return min(again_s, long_s) if now_s < long_s else again_s


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


def explanation(worker: Worker, suspicion: Suspicion, left: Left, long_s: float) -> str:
    """Returns why the controller does not give up a suspected rank."""
    if left is Left.CHECKPOINT:
        what = f"only a checkpoint has its state, so it is not replaced before it has been silent for {long_s:g} s"
    else:
        what = "no other rank, snapshot or checkpoint has its state, so it is not replaced"
    return f"rank {worker.rank}: {suspicion.report.detail}; {what}. It goes on as soon as it can"
