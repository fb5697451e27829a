"""What must hold of the controller's machine after every event; a breach is a bug of keepstep and raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.errors import InternalError

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
        _hold(not machine.roster.unfenced(), machine, f"{machine.stage} while a lost worker may still run")
    steps = [record.resume_step for record in machine.records if record.resume_step is not None]
    _hold(steps == sorted(steps), machine, f"a resume step went back: {steps}")


def _hold(condition: bool, machine: RecoveryMachine, what: str) -> None:
    if not condition:
        raise InternalError(f"generation {machine.generation}, stage {machine.stage}: {what}")
