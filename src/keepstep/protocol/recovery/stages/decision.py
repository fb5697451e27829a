"""DECIDE: the resume rule applied to what the live workers reported, and what moves to whom."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from keepstep.protocol import resume
from keepstep.protocol.messages import Membership, Transfer
from keepstep.protocol.recovery.placement.kept import SnapshotRegister
from keepstep.protocol.recovery.placement.roster import Roster, Worker
from keepstep.protocol.recovery.progress import Progress
from keepstep.protocol.resume import Action

MAX_SOURCES = 16
"""Ranks of one replica group that send to its receivers. Two fill a receiver's line; more only help when many restore
at once, and the list is part of an order that goes to every node."""


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """How all ranks get to the resume step."""

    step: int
    actions: dict[int, Action]
    """rank -> what it does."""
    transfers: tuple[Transfer, ...]


def begins_again(progress: Progress, roster: Roster, step: int) -> bool:
    """Whether fresh ranks would begin at step 0 what has trained before."""
    if not progress.would_begin_again(step):
        return False
    return not any(step in snapshots_of(worker) for worker in roster.holders())


def ready_now(worker: Worker, generation: int) -> bool:
    """Whether the worker came to its first step in this generation (and not in one that is over)."""
    return worker.ready is not None and worker.ready.generation == generation


def snapshots_of(worker: Worker) -> frozenset[int]:
    """The steps of the checkpoints that the worker can load, by its last word."""
    report = worker.safe or worker.ready
    return frozenset(report.snapshots) if report is not None else frozenset()


def reachable_step(
    roster: Roster, snapshots: SnapshotRegister, membership: Membership | None, generation: int
) -> int | None:
    """The step at which all live workers together can resume; None if some shard has no holder left.

    Args:
        roster: the workers with their last safe points.
        snapshots: what nodes still hold of lost ranks.
        membership: in which all ranks stood ready last; None: they never have.
        generation: the present one.
    """
    if membership is None:
        return None
    numbers = membership.shard_numbers
    # A bundle of answers is one object for all its ranks, so there are few that differ: these stand for the others.
    spoken = {(numbers[each.rank or 0], id(each.safe or each.ready)): each for each in roster.holders()}
    shards: dict[str, set[Report | None]] = {shard: set() for shard in membership.shards}
    for (number, _), worker in spoken.items():
        shards[membership.shards[number]].add(_last_word(worker, generation))
    for rank in roster.missing_ranks():
        if steps := snapshots.steps(rank):
            shards[membership.shard(rank)].add(((), None, tuple(sorted(steps))))
    greatest = resume.resume_step({shard: map(_reaches, said) for shard, said in shards.items()})
    live = {shard: [frozenset(word[0]) for word in said if word and word[0]] for shard, said in shards.items()}
    if greatest is None or greatest != resume.resume_step(live):
        return greatest  # a checkpoint leads further than what is alive
    would_communicate = any(worker.safe is not None and worker.safe.would_communicate for worker in spoken.values())
    reaches = (reach for of_shard in live.values() for reach in of_shard)
    common = resume.common_step(reaches, would_communicate=would_communicate)
    return greatest if common is None else common


def tied_ranks(
    roster: Roster, snapshots: SnapshotRegister, membership: Membership, step: int, generation: int
) -> dict[int, frozenset[str]]:
    """The lost ranks that only the memory of some node brings to ``step``, and those nodes.

    One for each shard that no live rank has at that step: the shard's other ranks get it from that one.
    """
    missing = roster.missing_ranks()
    if not any(snapshots.of(rank) for rank in missing):
        return {}
    words = {each.rank or 0: _last_word(each, generation) for each in roster.holders()}
    tied: dict[int, frozenset[str]] = {}
    held = {membership.shard(rank) for rank, word in words.items() if step in _reaches(word)}
    for rank in missing:
        nodes = frozenset(kept.node for kept in snapshots.of(rank) if step in kept.steps)
        if nodes and membership.shard(rank) not in held:
            tied[rank] = nodes
            held.add(membership.shard(rank))
    return tied


def decide(roster: Roster, membership: Membership, step: int, generation: int) -> Decision:
    """For each rank: stay, advance, rewind or restore, and who sends to whom within its replica group."""
    spoken = {(id(each.safe or each.ready), each.inherits): each for each in roster.holders()}
    by_report = {report: _action(_last_word(worker, generation), step) for report, worker in spoken.items()}
    actions = {each.rank or 0: by_report[id(each.safe or each.ready), each.inherits] for each in roster.holders()}
    receivers: dict[str, list[int]] = defaultdict(list)
    for rank in [rank for rank, action in actions.items() if action is Action.RESTORE]:
        receivers[membership.shard(rank)].append(rank)
    sources: dict[str, list[int]] = {shard: [] for shard in receivers}
    num_missing = MAX_SOURCES * len(sources)
    for rank in range(membership.world_size) if sources else ():
        of_shard = sources.get(membership.shard(rank))
        if of_shard is not None and actions[rank] is not Action.RESTORE and len(of_shard) < MAX_SOURCES:
            of_shard.append(rank)
            num_missing -= 1
            if not num_missing:
                break
    transfers = tuple(Transfer(tuple(sources[shard]), tuple(sorted(ranks))) for shard, ranks in receivers.items())
    return Decision(step, actions, transfers)


Report = tuple[tuple[int, ...], int | None, tuple[int, ...]]
"""What a rank has said: its reach, the step it is at, and its snapshots. Most ranks say the same."""


def _last_word(worker: Worker, generation: int) -> Report | None:
    if (safe := worker.safe) is not None:
        return safe.reach, safe.current_step, safe.snapshots
    if (ready := worker.ready) is not None:
        reach = ready.reach if ready.generation == generation else ()
        return reach, min(reach, default=None), (*ready.snapshots, *worker.inherits)
    return ((), None, tuple(worker.inherits)) if worker.inherits else None


def _reaches(word: Report | None) -> frozenset[int]:
    return frozenset(word[0]) | frozenset(word[2]) if word is not None else frozenset()


def _action(word: Report | None, step: int) -> Action:
    reach, current, snapshots = word or ((), 0, ())
    return resume.action(step, frozenset(reach), current, frozenset(snapshots))
