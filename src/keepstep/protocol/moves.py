"""The next move of a worker's training thread, as decided by `keepstep.protocol.worker.WorkerMachine`."""

from __future__ import annotations

import dataclasses

from keepstep.protocol import messages as msg
from keepstep.protocol.resume import Action


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """Wait for another order."""


@dataclasses.dataclass(frozen=True, slots=True)
class SendReport:
    """Send a report."""

    report: msg.WorkerReport


@dataclasses.dataclass(frozen=True, slots=True)
class Build:
    """Run the script up to its first step, then call `WorkerMachine.built`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Connect:
    """Connect all groups in this generation, then call `connected` or `fell_out`."""

    generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Undo:
    """Restore the state of the interrupted step's start, then call `undone`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """Every rank had complete gradients: leave the barrier, run the optimizer step and complete the step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Get to the resume step, or send state to others; then call `loaded` or `fell_out`."""

    order: msg.Recover
    action: Action

    def receives(self, rank: int | None) -> tuple[msg.Transfer, ...]:
        """The transfer, if there is one, in which this rank gets its state."""
        return tuple(each for each in (*self.order.transfers, *self.order.from_buddies) if rank in each.receivers)

    def sends(self, rank: int | None) -> tuple[msg.Transfer, ...]:
        """The transfer, if there is one, in which this rank sends its own state."""
        return tuple(each for each in self.order.transfers if rank in each.sources)

    def sends_copies(self, rank: int | None) -> tuple[msg.Transfer, ...]:
        """The transfers in which this rank sends other ranks' snapshots."""
        return tuple(each for each in self.order.from_buddies if rank in each.sources)


@dataclasses.dataclass(frozen=True, slots=True)
class Train:
    """Every rank is at the resume step: continue training."""


@dataclasses.dataclass(frozen=True, slots=True)
class Save:
    """The job ends at this step: write a checkpoint, if this rank is to, and call `saved`."""

    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """The loop is over, and the script's code after it may run: every rank has completed its last step, or the job is
    drained and the script has handled SIGTERM."""


@dataclasses.dataclass(frozen=True, slots=True)
class SaveAndEnd:
    """The job cannot continue: save the shard, report it, end."""

    order: msg.Rescue


Move = Wait | SendReport | Build | Connect | Undo | Update | Load | Train | Save | End | SaveAndEnd
