"""The worker's machine: the life of one step, as a table.

The table is the only description of what may follow what. `StepMachine` walks it, and the state diagram in
``docs/PROTOCOL.md`` is drawn from it.
"""

from __future__ import annotations

import dataclasses
import enum

from keepstep.errors import LocalProtocolError


class Phase(enum.StrEnum):
    """Where in a step a rank is; the same words stand in logs, reports and on the timeline."""

    STARTING = "starting"
    """Before the first step: building the model, or waiting for a rank."""
    FORWARD = "forward"
    BACKWARD = "backward"
    SYNCED = "synced"
    """All of the rank's own gradients are fully reduced; it is before, or in, the gradient barrier."""
    OPTIMIZER = "optimizer"
    """It has left the barrier: the update is local, needs no other rank, and is never interrupted."""
    UPDATED = "updated"
    """The step is complete; between two steps, or after the last."""


class StepEvent(enum.StrEnum):
    """What moves a rank from one phase to the next."""

    STEP_ENTERED = "step entered"
    FORWARD_BEGUN = "forward begun"
    BACKWARD_BEGUN = "backward begun"
    GRADIENTS_SYNCED = "gradients synced"
    BARRIER_LEFT = "barrier left"
    STEP_COMPLETED = "step completed"
    STEP_UNDONE = "step undone"
    STATE_RESTORED = "state restored"


TRANSITIONS: dict[tuple[Phase, StepEvent], Phase] = {
    (Phase.STARTING, StepEvent.STATE_RESTORED): Phase.UPDATED,
    (Phase.UPDATED, StepEvent.STATE_RESTORED): Phase.UPDATED,
    (Phase.UPDATED, StepEvent.STEP_ENTERED): Phase.FORWARD,
    (Phase.FORWARD, StepEvent.BACKWARD_BEGUN): Phase.BACKWARD,
    (Phase.BACKWARD, StepEvent.FORWARD_BEGUN): Phase.FORWARD,
    (Phase.FORWARD, StepEvent.GRADIENTS_SYNCED): Phase.SYNCED,
    (Phase.BACKWARD, StepEvent.GRADIENTS_SYNCED): Phase.SYNCED,
    (Phase.SYNCED, StepEvent.BARRIER_LEFT): Phase.OPTIMIZER,
    (Phase.OPTIMIZER, StepEvent.STEP_COMPLETED): Phase.UPDATED,
    (Phase.FORWARD, StepEvent.STEP_UNDONE): Phase.UPDATED,
    (Phase.BACKWARD, StepEvent.STEP_UNDONE): Phase.UPDATED,
    (Phase.SYNCED, StepEvent.STEP_UNDONE): Phase.UPDATED,
}
"""(phase, event) -> next phase. Any other transition is a bug and raises."""


@dataclasses.dataclass(slots=True)
class StepMachine:
    """Where one rank is: the step that its tag names, and the phase.

    ``UPDATED`` at step ``i`` means that the parameters are at step ``i + 1``; before the first step the tag is
    ``UPDATED`` at step ``-1``.
    """

    step: int = -1
    phase: Phase = Phase.STARTING

    def advance(self, event: StepEvent) -> Phase:
        """Moves along the table.

        Raises:
            LocalProtocolError: the event has no meaning in the current phase.
        """
        target = TRANSITIONS.get((self.phase, event))
        if target is None:
            raise LocalProtocolError(f"'{event}' cannot happen in phase '{self.phase}' of step {self.step}")
        if event is StepEvent.STEP_ENTERED:
            self.step += 1
        elif event is StepEvent.STEP_UNDONE:
            self.step -= 1
        self.phase = target
        return target

    def restored(self, step: int) -> None:
        """The parameters have been brought to ``step`` from outside: a replica, a snapshot, a checkpoint."""
        self.advance(StepEvent.STATE_RESTORED)
        self.step = step - 1

    @property
    def parameters_at(self) -> int | None:
        """The step whose forward would read the parameters as they are now; None while they are in between."""
        match self.phase:
            case Phase.STARTING | Phase.OPTIMIZER:
                return None
            case Phase.UPDATED:
                return self.step + 1
            case Phase.FORWARD | Phase.BACKWARD | Phase.SYNCED:
                return self.step
