"""What must hold of the controller's machine after every event; a breach is a bug of keepstep and raises."""

from __future__ import annotations

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
    ranks = [worker.rank for worker in machine.roster.holders()]
    _hold(len(ranks) == len(set(ranks)), machine, f"two live workers hold the same rank: {ranks}")
    _hold(
        all(rank is not None and 0 <= rank < machine.roster.world_size for rank in ranks),
        machine,
        f"a rank outside the world of {machine.roster.world_size}: {ranks}",
    )
    if machine.stage in ("training", "recovering"):
        _hold(
            not machine.roster.missing_ranks() or any(worker.done for worker in machine.roster.workers.values()),
            machine,
            f"{machine.stage} without ranks {machine.roster.missing_ranks()}",
        )
        unfenced = [worker for worker in machine.roster.unfenced() if worker.rank is not None]
        _hold(not unfenced, machine, f"{machine.stage} while a lost worker may still run")
    highest = 0
    for record in machine.records:
        if record.resume_step is None or record.restored_s is None:
            continue
        rewound = Action.REWIND in record.actions.values()
        what = f"training went back from step {highest} to {record.resume_step}, and not to a checkpoint"
        _hold(rewound or record.resume_step >= highest, machine, what)
        highest = record.resume_step


def _hold(condition: bool, machine: RecoveryMachine, what: str) -> None:
    if not condition:
        raise InternalError(f"generation {machine.generation}, stage {machine.stage}: {what}")
