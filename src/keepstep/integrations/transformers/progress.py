"""The progress and internal state of a Trainer as a protected object."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

from keepstep.integrations.transformers.log import TrainerLog

FURTHER = ("_metrics", "_total_train_tokens", "_initial_global_step", "_initial_num_input_tokens_seen")
"""Attributes in which derived trainers, such as TRL's, accumulate metrics for the log, and where the training began."""
_OF_THIS_RANK = ("is_local_process_zero", "is_world_process_zero", "log_history", "stateful_callbacks")
"""Attributes of ``TrainerState`` that are not sent to other ranks, or that are sent separately."""
_SHARED = [each.name for each in dataclasses.fields(TrainerState) if each.name not in _OF_THIS_RANK]
"""Those that are."""
_NUMBERS = ("epoch", "update_step", "is_pending", "is_step_end_due", "is_stopped", "grad_norm", "learning_rate")
"""Attributes of `TrainerProgress` that are part of the state."""


@dataclasses.dataclass
class WorkBehindStep:
    """How far the work is that follows a step or ends an epoch: a log, evaluations, a checkpoint.

    It is one part, or, where callbacks hear of it, several: the work up to what they hear of, and then the rest.

    Attributes:
        part: number of complete parts.
        ends_epoch: whether it ends an epoch. Known when a part is complete.
        has_evaluated: whether an evaluation is complete.
        evaluated_in: the part in which all evaluations were complete; None if they are not.
        is_best: whether the metric was then the best one so far.
        has_saved: whether the checkpoint is complete.
    """

    part: int = 0
    ends_epoch: bool = False
    has_evaluated: bool = False
    evaluated_in: int | None = None
    is_best: bool = False
    has_saved: bool = False


class TrainerProgress:
    """The progress and internal state of a Trainer, as a protected object.

    Attributes:
        epoch: the current epoch.
        update_step: number of completed steps in the epoch.
        is_pending: whether the work after the last step (log, evaluation, checkpoint) is still to be done.
        work: how far that work is.
        is_step_end_due: whether callbacks are still to hear of the end of the last step, before that work.
        is_stopped: whether the training ended before its last epoch.
        grad_norm: gradient norm of the last step.
        learning_rate: learning rate of the last step.
        own: rank-local values (`Session.state`): ``sums``, the running loss and the floating-point operations so far.
        log: the log of this rank, which is an object of the rank's own.
        was_entered: whether training has begun.
    """

    def __init__(self, trainer: Any, log: TrainerLog) -> None:
        self._trainer = trainer
        self.epoch = self.update_step = 0
        self.is_pending = self.is_step_end_due = self.is_stopped = self.was_entered = False
        self.grad_norm: float | None = None
        self.learning_rate: float | None = None
        self.own: Any = None
        self.log = log
        self.work = WorkBehindStep()

    def state_dict(self) -> dict[str, Any]:
        """The replicated part of the state."""
        trainer = self._trainer
        state: TrainerState = trainer.state
        values = {
            "state": {name: getattr(state, name) for name in _SHARED},
            "control": vars(trainer.control),
            "callbacks": [callback.state()["attributes"] for callback in self._callbacks()],
            "loss": trainer._total_loss_scalar if self.was_entered else 0.0,
            "logged": trainer._globalstep_last_logged if self.was_entered else 0,
            "progress": {name: getattr(self, name) for name in _NUMBERS},
            "work": vars(self.work),
            "further": {name: getattr(trainer, name) for name in FURTHER if hasattr(trainer, name)},
        }
        return {"values": json.dumps(values), "late": self.log.late}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Restores the replicated part. `put` restores the running loss and the number of operations."""
        trainer, state, values = self._trainer, self._trainer.state, json.loads(content["values"])
        vars(state).update(values["state"])
        self.log.late = content["late"]
        vars(trainer.control).update(values["control"])
        for callback, attributes in zip(self._callbacks(), values["callbacks"], strict=True):
            vars(callback).update(attributes)
        trainer._total_loss_scalar, trainer._globalstep_last_logged = values["loss"], values["logged"]
        vars(self).update(values["progress"])
        self.work = WorkBehindStep(**values["work"])
        for name, value in values["further"].items():
            setattr(trainer, name, _as_before(getattr(trainer, name), value))

    def _callbacks(self) -> list[ExportableState]:
        known = self._trainer.callback_handler.callbacks
        return [each for each in known if isinstance(each, ExportableState) and not isinstance(each, TrainerControl)]

    def take(self) -> None:
        """Protects the running loss, the operation count and the log as they are. Call it before a unit's barrier."""
        self.was_entered = True
        self.log.share()
        self.own.sums = (self._trainer._tr_loss.item(), float(self._trainer.current_flos))

    def put(self) -> None:
        """Copies the values in ``own`` back to the Trainer."""
        loss, self._trainer.current_flos = self.own.sums
        self._trainer._tr_loss.fill_(loss)


def _as_before(present: Any, value: Any) -> Any:
    """Converts a value from JSON to the dict types of the existing one: TRL uses a ``defaultdict`` of lists."""
    if not isinstance(present, dict):
        return value
    result = copy.copy(present)
    result.clear()
    result.update({name: _as_before(present.get(name), each) for name, each in value.items()})
    return result
