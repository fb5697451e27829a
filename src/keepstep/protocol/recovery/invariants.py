"""Invariants of the controller's machine in every stage that it enters; a violation is a bug in keepstep and raises.

The roster updates frequently used counts incrementally. This module recounts them from the workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from keepstep.errors import InternalError
from keepstep.protocol.recovery.placement.roster import Roster
from keepstep.protocol.recovery.records import RecoveryRecord
from keepstep.protocol.recovery.transitions import Stage
from keepstep.protocol.resume import Action


def check(stage: Stage, generation: int, roster: Roster, records: Iterable[RecoveryRecord]) -> None:
    """Checks all invariants of a job that enters a stage.

    Raises:
        InternalError: an invariant does not hold. The message names it, the stage and the generation.
    """
    for breaches in (_of_roster(stage, roster), _of_stage(stage, roster), _of_records(records)):
        for what in breaches:
            raise InternalError(f"generation {generation}, stage {stage}: {what}")


def _of_roster(stage: Stage, roster: Roster) -> Iterator[str]:
    """Yields what is wrong in the roster. It counts all workers, which takes tens of milliseconds in a large job.

    So a recovery runs it only once, before the order to resume. `Stop` and `Recover` do not wait for it.
    """
    if stage in (Stage.STOPPING, Stage.RECOVERING):
        return
    live = [each for each in roster.workers.values() if not each.lost and not each.done]
    holders = {each.worker: each.rank for each in live if each.rank is not None}
    ranks = set(holders.values())
    if len(ranks) < len(holders):
        twice = [rank for rank, num_holders in Counter(holders.values()).items() if num_holders > 1]
        yield f"two live workers hold the same rank: {twice}"
    if ranks and not (min(ranks) >= 0 and max(ranks) < roster.world_size):
        yield f"a rank outside the world of {roster.world_size}: {sorted(ranks - set(range(roster.world_size)))}"
    if roster.holder_numbers() != holders.keys():
        yield "the list of rank holders is not that of the workers"
    if {each.worker for each in live if each.rank is None} != {worker.worker for worker in roster.spares()}:
        yield "the list of spares is wrong"
    there = set().union(*(node.workers for node in roster.nodes.values()))
    exist = {each.worker for each in roster.workers.values() if not each.gone}
    if there != exist:
        yield f"processes that are on no node or exist no more: {sorted(there ^ exist)}"
    yield from _of_local_ranks(roster)


def _of_local_ranks(roster: Roster) -> Iterator[str]:
    """Yields wrong local ranks. Scripts use them as indices, and the first rank of a node saves for the whole node."""
    taken = {(each.node, each.local_rank) for each in roster.holders()}
    wrong = [
        each for each in roster.holders() if each.local_rank is None or not 0 <= each.local_rank < each.local_world_size
    ]
    if len(taken) < roster.num_holders and not wrong:
        places = Counter((each.node, each.local_rank) for each in roster.holders())
        wrong = [each for each in roster.holders() if places[each.node, each.local_rank] > 1]
    for worker in wrong:
        where = f"local rank {worker.local_rank} of {worker.local_world_size} on {worker.node}"
        yield f"rank {worker.rank} has {where}"


def _of_stage(stage: Stage, roster: Roster) -> Iterator[str]:
    if stage not in (Stage.TRAINING, Stage.RECOVERING):
        return
    if roster.missing_ranks() and not any(worker.done for worker in roster.workers.values()):
        yield f"{stage} without ranks {roster.missing_ranks()}"
    if any(worker.rank is not None for worker in roster.unfenced()):
        yield f"{stage} while a lost worker may still run"


def _of_records(records: Iterable[RecoveryRecord]) -> Iterator[str]:
    highest, rewound = 0, False
    for record in records:
        # A rank that has loaded a checkpoint stays at its step, even if another loss restarts the recovery.
        rewound = rewound or Action.REWIND in record.actions.values()
        if record.resume_step is None or record.restored_s is None:
            continue
        if not rewound and record.resume_step < highest:
            yield f"training went back from step {highest} to {record.resume_step}, and not to a checkpoint"
        highest, rewound = record.resume_step, False
