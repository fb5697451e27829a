"""What must hold of the controller's machine in every stage that it enters; a breach is a bug of keepstep and raises.

The roster keeps what is asked often up to date. Here it is counted anew, from the workers themselves.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from keepstep.errors import InternalError
from keepstep.protocol.resume import Action

if TYPE_CHECKING:
    from keepstep.protocol.recovery import RecoveryMachine


def check(machine: RecoveryMachine) -> None:
    """Checks everything that the machine's own state must satisfy.

    Raises:
        InternalError: naming the invariant and the generation.
    """
    roster = machine.roster
    workers = roster.workers.values()
    holders = {each.worker: each.rank for each in workers if each.rank is not None and not each.lost and not each.done}
    ranks = set(holders.values())
    if len(ranks) < len(holders):
        twice = [rank for rank, num_holders in Counter(holders.values()).items() if num_holders > 1]
        _hold(False, machine, f"two live workers hold the same rank: {twice}")
    outside = ranks - set(range(roster.world_size))
    _hold(not outside, machine, f"a rank outside the world of {roster.world_size}: {sorted(outside)}")
    _hold(roster.holder_numbers() == holders.keys(), machine, "the list of rank holders is not that of the workers")
    _check_local_ranks(machine)
    spares = {each.worker for each in workers if each.rank is None and not each.lost and not each.done}
    _hold(spares == {worker.worker for worker in roster.spares()}, machine, "the list of spares is wrong")
    there = set().union(*(node.workers for node in roster.nodes.values()))
    exist = {each.worker for each in workers if not each.gone}
    if there != exist:
        _hold(False, machine, f"processes that are on no node or exist no more: {sorted(there ^ exist)}")
    if machine.stage in ("training", "recovering"):
        _hold(
            not roster.missing_ranks() or any(worker.done for worker in roster.workers.values()),
            machine,
            f"{machine.stage} without ranks {roster.missing_ranks()}",
        )
        unfenced = [worker for worker in roster.unfenced() if worker.rank is not None]
        _hold(not unfenced, machine, f"{machine.stage} while a lost worker may still run")
    highest, rewound = 0, False
    for record in machine.records:
        # A rank that has loaded a checkpoint stays there, also where another loss begins the recovery anew.
        rewound = rewound or Action.REWIND in record.actions.values()
        if record.resume_step is None or record.restored_s is None:
            continue
        what = f"training went back from step {highest} to {record.resume_step}, and not to a checkpoint"
        _hold(rewound or record.resume_step >= highest, machine, what)
        highest, rewound = record.resume_step, False


def _check_local_ranks(machine: RecoveryMachine) -> None:
    """Scripts have lists of ``LOCAL_WORLD_SIZE`` entries, and the first rank of a node saves for all of it."""
    taken: set[tuple[str, int]] = set()
    for worker in machine.roster.holders():
        local_rank = worker.local_rank
        is_right = local_rank is not None and 0 <= local_rank < worker.local_world_size
        what = f"rank {worker.rank} has local rank {local_rank} of {worker.local_world_size} on {worker.node}"
        _hold(is_right and (worker.node, local_rank) not in taken, machine, what)
        taken.add((worker.node, local_rank or 0))


def _hold(condition: bool, machine: RecoveryMachine, what: str) -> None:
    if not condition:
        raise InternalError(f"generation {machine.generation}, stage {machine.stage}: {what}")
