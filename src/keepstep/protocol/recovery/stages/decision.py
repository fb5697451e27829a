"""The decision of a recovery: applies the resume rule to the reports of live workers, and plans the transfers."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from keepstep.errors import InternalError
from keepstep.protocol import resume
from keepstep.protocol.messages import Cause, Membership, SafePointReached, Transfer
from keepstep.protocol.recovery.placement.kept import KeptSnapshots, SnapshotRegister
from keepstep.protocol.recovery.placement.roster import Roster, Worker
from keepstep.protocol.recovery.progress import Progress
from keepstep.protocol.recovery.records import RecoveryRecord
from keepstep.protocol.resume import Action
from keepstep.protocol.snapshots import lone_shards

MAX_SOURCES = 16
"""Most ranks of one replica group that send to its receivers. Two saturate a receiver's link. More only help if many
ranks restore at once, and every node gets the list."""


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """How all ranks get to the resume step."""

    step: int
    actions: dict[int, Action]
    """rank -> how it gets to the step."""
    transfers: tuple[Transfer, ...]
    copies: tuple[tuple[Transfer, KeptSnapshots], ...]
    """(transfer, snapshot) for each shard that no rank holds at that step: the source sends a snapshot from its node's
    memory."""


def begins_again(progress: Progress, roster: Roster, step: int, *, resumes: bool) -> bool:
    """Returns whether fresh ranks would begin at step 0, without a checkpoint, although the job has trained before.

    With ``resumes`` they may: their script has looked for a checkpoint of its own, and has found none.
    """
    if resumes or not progress.would_begin_again(step):
        return False
    return not any(step in snapshots_of(worker) for worker in roster.holders())


def ready_now(worker: Worker, generation: int) -> bool:
    """Returns whether the worker has reached its first step in this generation, not in a former one."""
    return worker.ready is not None and worker.ready.generation == generation


def snapshots_of(worker: Worker) -> frozenset[int]:
    """Returns the steps of the snapshots and checkpoints that the worker can load, by its last report."""
    report = worker.safe or worker.ready
    return frozenset(report.snapshots) if report is not None else frozenset()


def reachable_step(
    roster: Roster, snapshots: SnapshotRegister, membership: Membership | None, generation: int
) -> int | None:
    """Returns the step at which the job resumes; None if there is no step that all shards can reach.

    Args:
        roster: the workers with their last safe points.
        snapshots: the kept snapshots in the memory of nodes.
        membership: the last membership in which all ranks were ready; None: there was none.
        generation: the current generation.
    """
    if membership is None:
        return None
    numbers = membership.shard_numbers
    # All ranks of a bundle share one answer object, so there are few different ones. One rank represents each.
    spoken = {(numbers[each.rank or 0], id(each.safe or each.ready)): each for each in roster.holders()}
    shards: dict[str, set[Report | None]] = {shard: set() for shard in membership.shards}
    for (number, _), worker in spoken.items():
        shards[membership.shards[number]].add(last_word(worker, generation))
    reaches = {shard: set(map(_reaches, said)) for shard, said in shards.items()}
    live = {shard: [frozenset(word[0]) for word in said if word and word[0]] for shard, said in shards.items()}
    live_step = resume.resume_step(live)
    if live_step is None:
        for rank, listed in readable(roster, snapshots, membership, generation).items():
            reaches[membership.shard(rank)] |= {kept.steps for kept in listed}
    greatest = resume.resume_step(reaches)
    if greatest is None or greatest != live_step:
        return greatest  # a checkpoint or snapshot reaches further than the live copies
    would_repeat = any(worker.safe is not None and worker.safe.would_repeat for worker in spoken.values())
    each_live = (reach for of_shard in live.values() for reach in of_shard)
    common = resume.common_step(each_live, would_repeat=would_repeat)
    return greatest if common is None else common


def equal_in_doubt(
    roster: Roster, membership: Membership | None, generation: int, but: Collection[int] = ()
) -> dict[int, Report]:
    """Returns the workers whose copies are in doubt and nevertheless the state, each with what its report means then.

    They are those of a shard of which no whole copy is left, and at least two in doubt, which are all equal. All of
    them have decided the same by the missing value, as a rank does that decides by one that is there. A single copy, or
    copies that differ, may be what no job without a failure would have.

    Args:
        roster: the workers with their last safe points.
        membership: the last membership in which all ranks were ready; None: there was none.
        generation: the current generation.
        but: numbers of workers that do not count.
    """
    return {
        worker: ((safe.step + 1,), safe.step + 1, safe.snapshots)
        for held in _doubted(roster, membership, generation, but)
        if len(held) > 1 and len({(safe.step, safe.doubt) for safe in held.values()}) == 1
        for worker, safe in held.items()
    }


def is_in_doubt(roster: Roster, membership: Membership | None, generation: int) -> bool:
    """Returns whether nothing but copies in doubt is left of some shard in the ranks' own memory."""
    return any(_doubted(roster, membership, generation))


def _doubted(
    roster: Roster, membership: Membership | None, generation: int, but: Collection[int] = ()
) -> Iterator[dict[int, SafePointReached]]:
    """Yields the workers that hold a copy in doubt, with their reports, for each shard of which no other is left."""
    found: dict[str, dict[int, SafePointReached]] = defaultdict(dict)
    holders = [worker for worker in roster.holders() if worker.worker not in but]
    for worker in holders:
        if membership is not None and worker.safe is not None and worker.safe.doubt is not None:
            found[membership.shard(worker.rank or 0)][worker.worker] = worker.safe
    if not found or membership is None:
        return
    for worker in holders:
        if (word := last_word(worker, generation)) is not None and word[0]:
            found.pop(membership.shard(worker.rank or 0), None)
    yield from found.values()


def readable(
    roster: Roster, snapshots: SnapshotRegister, membership: Membership, generation: int
) -> dict[int, list[KeptSnapshots]]:
    """Returns the kept snapshots of each rank that a process can read.

    Only processes on a node can read its memory. A snapshot of a lost rank counts if a rank is on its node, or can be
    placed there, and that of a live rank if a rank of another shard is there, which can send it. What a dead process
    has left of a live rank counts only while that rank reaches no step: it was to restore, and was interrupted. A rank
    that has read it says itself whether it is whole.
    """
    known = {rank: snapshots.all_of(rank) for rank in snapshots.ranks}
    if not known:
        return {}
    numbers = membership.shard_numbers
    on_node: dict[str, set[int]] = defaultdict(set)
    for worker in roster.holders():
        on_node[worker.node].add(numbers[worker.rank or 0])
    missing = set(roster.missing_ranks())

    def is_read(kept: KeptSnapshots) -> bool:
        if kept.rank in missing:
            return kept.node in on_node or roster.takes_in(kept.node) > 0
        counts = kept.is_live or not _reaches(last_word(roster.holder(kept.rank), generation))
        return counts and not on_node.get(kept.node, set()) <= {numbers[kept.rank]}

    return {rank: [kept for kept in listed if is_read(kept)] for rank, listed in known.items()}


def out_of_reach(
    roster: Roster, snapshots: SnapshotRegister, membership: Membership | None, generation: int
) -> str | None:
    """Returns a text that names snapshots of lost ranks that exist but cannot be read; None if there are none."""
    if membership is None:
        return None
    read, missing = readable(roster, snapshots, membership, generation), roster.missing_ranks()
    lost = [kept for rank in missing for kept in snapshots.all_of(rank) if kept.steps and kept not in read[rank]]
    if not lost:
        return None
    ranks, nodes = sorted({kept.rank for kept in lost}), sorted({kept.node for kept in lost})
    return f"the snapshots of ranks {ranks} are in memory of {', '.join(nodes)}, where no rank is and none has room"


def without_copy(
    roster: Roster,
    snapshots: SnapshotRegister,
    membership: Membership,
    records: Sequence[RecoveryRecord],
    generation: int,
) -> list[tuple[int, str]]:
    """Returns what has become of the state, rank by rank, for each shard that nobody holds.

    Args:
        roster: the workers with their last safe points.
        snapshots: the kept snapshots in the memory of nodes.
        membership: the last membership in which all ranks were ready.
        records: the recoveries of the job, with this one.
        generation: the current generation.

    Returns:
        (rank, the reason), ascending. If each shard is held, and at no common step, that of every rank.
    """
    lost: dict[int, str] = {}
    for number, record in enumerate(reversed(records)):
        if number and record.restored_s is not None:
            break  # since then all ranks held the state
        for each in record.failures:
            is_fenced = each.cause in (Cause.HANG, Cause.STOPPED)
            lost.setdefault(each.rank, f"fenced, {each.detail}" if is_fenced else each.detail)
    holders = {worker.rank or 0: worker for worker in roster.holders()}
    reaches = {rank: _reaches(last_word(worker, generation)) for rank, worker in holders.items()}
    for rank, listed in readable(roster, snapshots, membership, generation).items():
        reaches[rank] = reaches.get(rank, frozenset()).union(*(kept.steps for kept in listed))
    held = {membership.shard(rank) for rank, steps in reaches.items() if steps}
    said = []
    for rank in range(membership.world_size):
        if membership.shard(rank) in held and len(held) < len(membership.shards):
            continue
        if reaches.get(rank):
            why = f"it can go to no step but {', '.join(map(str, sorted(reaches[rank])))}"
        elif (worker := holders.get(rank)) is None:
            why = lost.get(rank, "lost")
        elif rank in lost:
            why = f"{lost[rank]}, and no replacement has received the state yet"
        else:
            flaw = worker.safe.flaw if worker.safe is not None else None
            why = flaw or "it has not yet had any state"
        said.append((rank, why))
    return said


def tied_ranks(
    roster: Roster, snapshots: SnapshotRegister, membership: Membership, step: int, generation: int
) -> dict[int, str]:
    """Returns lost rank -> the node on which its replacement must be, because that memory has its snapshot of ``step``.

    That is one rank for each shard that no live rank has at that step; the other ranks of the shard get the state from
    it. If only second copies are left, or the snapshot's node has no device for the replacement, another rank on that
    node can send the snapshot. Only if no rank will be on that node, the replacement must be placed there.
    """
    read, missing = readable(roster, snapshots, membership, generation), roster.missing_ranks()
    listed = ((rank, read.get(rank, ())) for rank in missing)
    found = {rank: there for rank, kept in listed if (there := [each for each in kept if step in each.steps])}
    if not found:
        return {}
    words = {each.rank or 0: last_word(each, generation) for each in roster.holders()}
    held = {membership.shard(rank) for rank, word in words.items() if step in _reaches(word)}
    lost: dict[str, list[KeptSnapshots]] = defaultdict(list)
    for rank, there in found.items():
        if membership.shard(rank) not in held:
            lost[membership.shard(rank)] += there
    nodes = {each.node for each in roster.holders()}
    room = {each.node: roster.takes_in(each.node) for there in lost.values() for each in there}
    tied: dict[int, str] = {}
    for own in (True, False):
        for shard, there in list(lost.items()):
            place = next((each for each in there if room[each.node] and (each.is_own or not own)), None)
            if place is not None and (own or not any(each.node in nodes for each in there)):
                tied[place.rank] = place.node
                room[place.node] -= 1
                nodes.add(place.node)
                del lost[shard]
    return tied


def kept_step(
    roster: Roster, snapshots: SnapshotRegister, membership: Membership, generation: int, step: int
) -> int | None:
    """Returns the newest step, at most ``step``, to which all ranks can go back after the loss of any one node.

    Each lone shard has a snapshot of that step on two nodes. If there is no such step, returns the newest of which each
    shard has a snapshot at all. Returns None if no rank keeps second copies.
    """
    if not snapshots.has_second_copies:
        return None
    lone = lone_shards(membership)
    nodes_of: dict[str, dict[int, set[str]]] = {shard: defaultdict(set) for shard in membership.shards}
    for worker in roster.holders():
        rank, word = worker.rank or 0, last_word(worker, generation)
        nodes = nodes_of[membership.shard(rank)]
        for held in word[2] if word is not None else ():
            nodes[held].add(worker.node)
        for kept in snapshots.all_of(rank):
            for held in kept.steps:
                nodes[held].add(kept.node)
    doubled = [
        {held for held, nodes in there.items() if len(nodes) > (shard in lone)} for shard, there in nodes_of.items()
    ]
    for shards in (doubled, list(nodes_of.values())):
        common = frozenset.intersection(*map(frozenset, shards))
        if found := [held for held in common if held <= step]:
            return max(found)
    return None


def decide(roster: Roster, snapshots: SnapshotRegister, membership: Membership, step: int, generation: int) -> Decision:
    """Decides for each rank whether it stays, advances, rewinds or restores, and which ranks send to which."""
    spoken = {(id(each.safe or each.ready), each.inherits): each for each in roster.holders()}
    by_report = {report: _action(last_word(worker, generation), step) for report, worker in spoken.items()}
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
    transfers, copies = [], []
    for shard, ranks in receivers.items():
        if of_shard := sources[shard]:
            transfers.append(Transfer(tuple(of_shard), tuple(sorted(ranks))))
        else:
            source, kept = _copy(roster, snapshots, ranks, step)
            copies.append((Transfer((source,), tuple(sorted(ranks))), kept))
    return Decision(step, actions, tuple(transfers), tuple(copies))


def _copy(roster: Roster, snapshots: SnapshotRegister, ranks: Sequence[int], step: int) -> tuple[int, KeptSnapshots]:
    """Returns a rank that can send the state of ``ranks`` at a step, and the kept snapshot from which it sends.

    That is the worker that keeps the snapshot, or another rank on its node.
    """
    there = [kept for rank in ranks for kept in snapshots.of(rank, step)]
    for kept in sorted(there, key=lambda each: not each.is_live):
        on_node = [each for each in roster.holders() if each.node == kept.node and each.rank not in ranks]
        if on_node:
            source = min(
                on_node, key=lambda each: (each.worker != kept.worker, not (each.safe or each.inherits), each.rank)
            )
            assert source.rank is not None
            return source.rank, kept
    raise InternalError(f"no rank holds what ranks {list(ranks)} need to resume at step {step}")


Report = tuple[tuple[int, ...], int | None, tuple[int, ...]]
"""(reach, current step, snapshots) of a rank, by its last report. Most ranks report the same."""


def last_word(worker: Worker, generation: int) -> Report | None:
    """Returns the last report of a worker in this generation, or of its start; None if there is none."""
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
