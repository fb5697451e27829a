"""DECIDE: the resume rule applied to what the live workers reported, and the order that each of them gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from keepstep.protocol import topology
from keepstep.protocol.messages import Recover
from keepstep.protocol.resume import Action, action, resume_step
from keepstep.protocol.roster import Roster, Worker


def ready_now(worker: Worker, generation: int) -> bool:
    """Whether the worker came to its first step in this generation (and not in one that is over)."""
    return worker.ready is not None and worker.ready.generation == generation


def reachable_step(roster: Roster, shard_of: Mapping[int, str], generation: int) -> int | None:
    """The step at which all live workers together can resume; None if some shard has no holder left.

    Args:
        roster: the workers with their last safe points.
        shard_of: rank -> shard, for every rank that was ever ready.
        generation: the present one.
    """
    if len(shard_of) < roster.world_size:
        return None
    shards: dict[str, list[frozenset[int]]] = {shard: [] for shard in shard_of.values()}
    for worker in roster.holders():
        if worker.rank is not None and worker.rank in shard_of:
            shards[shard_of[worker.rank]].append(_reach(worker, generation) | _snapshots(worker))
    return resume_step(shards)


def recovery_orders(
    holders: list[Worker], shard_of: Mapping[int, str], step: int, generation: int
) -> Iterator[tuple[Worker, Recover]]:
    """For each rank holder: stay, advance, rewind or restore, and who sends to whom within its replica group."""
    actions = {worker.worker: _action(worker, step, generation) for worker in holders}
    for ranks in topology.replica_groups(shard_of).values():
        group = [worker for worker in holders if worker.rank in ranks]
        receivers = tuple(worker.rank or 0 for worker in group if actions[worker.worker] is Action.RESTORE)
        sources = topology.sources_of(ranks, [rank for rank in ranks if rank not in receivers])
        for worker in group:
            yield worker, Recover(worker.worker, generation, step, actions[worker.worker], sources, receivers)


def _action(worker: Worker, step: int, generation: int) -> Action:
    current = worker.safe.current_step if worker.safe else 0
    return action(step, _reach(worker, generation), current, _snapshots(worker))


def _reach(worker: Worker, generation: int) -> frozenset[int]:
    if worker.safe is not None:
        return frozenset(worker.safe.reach)
    if worker.ready is not None and ready_now(worker, generation):
        return frozenset(worker.ready.reach)
    return frozenset()


def _snapshots(worker: Worker) -> frozenset[int]:
    report = worker.safe or worker.ready
    return frozenset(report.snapshots) if report is not None else frozenset()
