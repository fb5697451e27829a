"""What must hold of the controller's machine in every stage that it enters; a breach is a bug of keepstep and raises.

The roster keeps what is asked often up to date. Here it is counted anew, from the workers themselves.
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
    """Checks everything that must hold of a job that enters a stage.

    Raises:
        InternalError: naming the invariant, the stage and the generation.
    """
    for breaches in (_of_roster(roster), _of_local_ranks(roster), _of_stage(stage, roster), _of_records(records)):
        for what in breaches:
            raise InternalError(f"generation {generation}, stage {stage}: {what}")


def _of_roster(roster: Roster) -> Iterator[str]:
    workers = roster.workers.values()
    holders = {each.worker: each.rank for each in workers if each.rank is not None and not each.lost and not each.done}
    ranks = set(holders.values())
    if len(ranks) < len(holders):
        twice = [rank for rank, num_holders in Counter(holders.values()).items() if num_holders > 1]
        yield f"two live workers hold the same rank: {twice}"
    if outside := ranks - set(range(roster.world_size)):
        yield f"a rank outside the world of {roster.world_size}: {sorted(outside)}"
    if roster.holder_numbers() != holders.keys():
        yield "the list of rank holders is not that of the workers"
    spares = {each.worker for each in workers if each.rank is None and not each.lost and not each.done}
    if spares != {worker.worker for worker in roster.spares()}:
        yield "the list of spares is wrong"
    there = set().union(*(node.workers for node in roster.nodes.values()))
    exist = {each.worker for each in workers if not each.gone}
    if there != exist:
        yield f"processes that are on no node or exist no more: {sorted(there ^ exist)}"


def _of_local_ranks(roster: Roster) -> Iterator[str]:
    """Scripts have lists of ``LOCAL_WORLD_SIZE`` entries, and the first rank of a node saves for all of it."""
    taken: set[tuple[str, int]] = set()
    for worker in roster.holders():
        local_rank = worker.local_rank
        is_right = local_rank is not None and 0 <= local_rank < worker.local_world_size
        if not is_right or (worker.node, local_rank or 0) in taken:
            yield f"rank {worker.rank} has local rank {local_rank} of {worker.local_world_size} on {worker.node}"
        taken.add((worker.node, local_rank or 0))


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
        # A rank that has loaded a checkpoint stays there, also where another loss begins the recovery anew.
        rewound = rewound or Action.REWIND in record.actions.values()
        if record.resume_step is None or record.restored_s is None:
            continue
        if not rewound and record.resume_step < highest:
            yield f"training went back from step {highest} to {record.resume_step}, and not to a checkpoint"
        highest, rewound = record.resume_step, False
