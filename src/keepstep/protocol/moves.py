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
    """Restore the state from the start of the interrupted step, then call `undone`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """Every rank has complete gradients: leave the barrier, run the optimizer step, and complete the step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Go to the resume step, send state to other ranks, or both; then call `loaded` or `fell_out`."""

    order: msg.Recover
    action: Action

    def receives(self, rank: int | None) -> tuple[msg.Transfer, ...]:
        """Returns the transfer in which this rank receives its state, if there is one."""
        return tuple(each for each in (*self.order.transfers, *self.order.from_buddies) if rank in each.receivers)

    def sends(self, rank: int | None) -> tuple[msg.Transfer, ...]:
        """Returns the transfer in which this rank sends its own state, if there is one."""
        return tuple(each for each in self.order.transfers if rank in each.sources)

    def sends_copies(self, rank: int | None) -> tuple[msg.Transfer, ...]:
        """Returns the transfers in which this rank sends other ranks' snapshots."""
        return tuple(each for each in self.order.from_buddies if rank in each.sources)


@dataclasses.dataclass(frozen=True, slots=True)
class Train:
    """Every rank is at the resume step: continue training."""


@dataclasses.dataclass(frozen=True, slots=True)
class Save:
    """The job ends at this step: write a checkpoint if it is this rank's task, then call `saved`."""

    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """Leave the loop, so that the script's code after it runs.

    Every rank has completed its last step, or the job is drained and the agents send SIGTERM to the scripts.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class SaveAndEnd:
    """The job cannot continue: save the shard, report it, and end."""

    order: msg.Rescue


Move = Wait | SendReport | Build | Connect | Undo | Update | Load | Train | Save | End | SaveAndEnd
