"""The phases of a step on one rank, and the table of allowed transitions.

The table is the only description of what may follow what. `StepMachine` walks it, and the state diagram in
``docs/PROTOCOL.md`` is drawn from it.
"""

from __future__ import annotations

import dataclasses
import enum

from keepstep.errors import LocalProtocolError


class Phase(enum.StrEnum):
    """The position of a rank in its step. Logs, reports and the timeline use the same words."""

    STARTING = "starting"
    """Before the first step: building the model, or waiting for a rank."""
    FORWARD = "forward"
    BACKWARD = "backward"
    SYNCED = "synced"
    """All of the rank's own gradients are fully reduced. The rank is before, or in, the gradient barrier."""
    OPTIMIZER = "optimizer"
    """The rank has left the barrier. The update is local, needs no other rank, and is never interrupted."""
    UPDATED = "updated"
    """The step is complete: the rank is between two steps, or after the last."""


class StepEvent(enum.StrEnum):
    """The events that move a rank from one phase to the next."""

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
"""(phase, event) -> next phase. Any other pair is a bug, and `StepMachine.advance` raises."""


@dataclasses.dataclass(slots=True)
class StepMachine:
    """The step and the phase of one rank, as its tag shows them.

    ``UPDATED`` at step ``i`` means that the parameters are at step ``i + 1``. Before the first step the tag is
    ``UPDATED`` at step ``-1``.
    """

    step: int = -1
    phase: Phase = Phase.STARTING

    def advance(self, event: StepEvent) -> Phase:
        """Goes to the phase that follows on an event, and returns it.

        Raises:
            LocalProtocolError: the table has no transition for the event in the current phase.
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
        """Records that the parameters are at ``step`` now: loaded from a replica, a snapshot or a checkpoint.

        Raises:
            LocalProtocolError: the rank is in the middle of a step.
        """
        self.advance(StepEvent.STATE_RESTORED)
        self.step = step - 1

    @property
    def parameters_at(self) -> int | None:
        """The step whose forward would read the current parameters. None in the update, and before the first step."""
        match self.phase:
            case Phase.STARTING | Phase.OPTIMIZER:
                return None
            case Phase.UPDATED:
                return self.step + 1
            case Phase.FORWARD | Phase.BACKWARD | Phase.SYNCED:
                return self.step
