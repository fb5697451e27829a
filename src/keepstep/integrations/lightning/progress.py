"""The progress of a Lightning training as a protected object: the replicated state inside a trainer."""

from __future__ import annotations

import functools
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ProgressBar, Timer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.utilities.model_helpers import is_overridden

from keepstep.integrations.lightning.metrics import monitors

_FLAGS = ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint", "_restart_stage")
"""Attributes of loops that say how a Lightning checkpoint was loaded; they count until the first batch is done."""


class LightningProgress:
    """The object that represents a trainer in `Session.protect`.

    Attributes:
        unit: number of the present unit (`keepstep.worker.loop.foreign`) in the job.
        is_in_epoch: whether the current epoch has begun.
        is_pending: whether the work after the last batch, such as validation, is still to be done.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.unit = 0
        self.is_in_epoch = self.is_pending = False

    def state_dict(self) -> dict[str, Any]:
        """The progress, as plain values."""
        trainer = self._trainer
        fit_loop = trainer.fit_loop
        return {
            "place": {name: getattr(self, name) for name in ("unit", "is_in_epoch", "is_pending")},
            "loops": _state_of(fit_loop),
            "flags": [{name: vars(loop).get(name) for name in _FLAGS} for loop in self._loops],
            "has_validated": fit_loop.epoch_loop.val_loop._has_run,
            "stops": trainer.should_stop,
            "accumulate": trainer.accumulate_grad_batches,
            "callbacks": [callback.state_dict() for callback in self._callbacks],
        }

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Restores the progress."""
        trainer = self._trainer
        fit_loop = trainer.fit_loop
        vars(self).update(content["place"])
        fit_loop.load_state_dict(content["loops"])
        for loop, flags in zip(self._loops, content["flags"], strict=True):
            vars(loop).update({name: value for name, value in flags.items() if name in vars(loop)})
        fit_loop.epoch_loop._skip_next_val = False
        fit_loop.epoch_loop.val_loop._has_run = content["has_validated"]
        trainer.should_stop = content["stops"]
        trainer.accumulate_grad_batches = content["accumulate"]
        for callback, state in zip(self._callbacks, content["callbacks"], strict=True):
            callback.load_state_dict(state)

    @functools.cached_property
    def _loops(self) -> list[_Loop]:
        return _loops(self._trainer.fit_loop)

    @functools.cached_property
    def _callbacks(self) -> list[Callback]:
        """Those with a state of their own that is the same on all ranks."""
        apart = monitors(self._trainer)
        return [
            callback
            for callback in self._trainer.callbacks
            if callback not in apart
            and not isinstance(callback, Timer | ProgressBar)
            and is_overridden("state_dict", callback, parent=Callback)
        ]


def _state_of(loop: _Loop, prefix: str = "") -> dict[str, Any]:
    """As ``_Loop.state_dict``, in a third of the time: at every step that would be 0.3 ms."""
    state: dict[str, Any] = {f"{prefix}state_dict": loop.on_save_checkpoint()}
    for name, value in vars(loop).items():
        if isinstance(value, _BaseProgress):
            state[prefix + name] = _fields_of(value)
        elif isinstance(value, _Loop):
            state |= _state_of(value, f"{prefix}{name}.")
    return state


def _fields_of(progress: _BaseProgress) -> dict[str, Any]:
    return {
        name: _fields_of(value) if isinstance(value, _BaseProgress) else value for name, value in vars(progress).items()
    }


def _loops(loop: _Loop) -> list[_Loop]:
    """A loop, and those in it."""
    inner = [each for each in vars(loop).values() if isinstance(each, _Loop)]
    return [loop, *(found for each in inner for found in _loops(each))]
