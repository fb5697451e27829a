"""Hugging Face Transformers: a ``Trainer`` whose training goes on where a rank is lost.

::

    keepstep.init(seed=0)                       # before TrainingArguments(...)
    trainer = KeepstepTrainer(...)              # in place of Trainer(...)
    trainer.train()

For a trainer that is derived from ``Trainer``, such as TRL's: ``protected(SFTTrainer)(...)``.

The Trainer's own loop runs, with its own callbacks, evaluation and checkpoints. It is left by an exception where a step
is interrupted, and entered again in the middle of the epoch as the Trainer does with ``resume_from_checkpoint``; but
what it continues from is the protected state and not a file. What a Trainer keeps in itself, such as its
``TrainerState``, is part of that.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerControl, TrainerState

from keepstep.errors import ConfigurationError, UsageError
from keepstep.worker.loop.foreign import ForeignLoop, warn_of_release
from keepstep.worker.loop.late_rank import have_accelerate_wait
from keepstep.worker.loop.reading import Reading
from keepstep.worker.session import current_session

TESTED = ((5, 20), (5, 25))
"""Releases of Transformers for which the tests have passed, from and below."""
_AGAIN = "the protected state"
"""Given to the Trainer as ``resume_from_checkpoint``: it skips the batches of the steps that are done."""
_FURTHER = ("_metrics", "_total_train_tokens")
"""Attributes in which derived trainers, such as TRL's, sum up what they log."""
_OF_THIS_RANK = ("is_local_process_zero", "is_world_process_zero", "log_history", "stateful_callbacks")
"""Attributes of ``TrainerState`` that are not carried to other ranks, or apart from the others."""
_SHARED = [each.name for each in dataclasses.fields(TrainerState) if each.name not in _OF_THIS_RANK]
"""Those that are."""
_NUMBERS = ("epoch", "update_step", "is_pending", "is_stopped", "grad_norm", "learning_rate")
"""Attributes of `_Progress` that are carried, too."""


have_accelerate_wait(current_session)  # before a spare makes TrainingArguments
_Base: Any = Trainer if TYPE_CHECKING else object


class KeepstepMixin(_Base):
    """What makes a class derived from ``Trainer`` go on after a failure. It stands in front of that class.

    Attributes:
        session: that of this process.
        keepstep_options: further arguments for `Session.protect`, such as ``snapshot_every``. To be set before
            ``train()``.
    """

    control: TrainerControl
    """Of ``Trainer``."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        session = current_session()
        if session is None:
            raise ConfigurationError(
                "KeepstepTrainer without keepstep.init(): call it first, before TrainingArguments(...), which make a "
                "process group of their own otherwise"
            )
        warn_of_release("Transformers", transformers.__version__, TESTED)
        self.keepstep_options: dict[str, Any] = {}
        self.session = session
        with session.pretending():
            super().__init__(*arguments, **keywords)
        _refuse(self)
        self._progress = _Progress(self)
        self._loop = ForeignLoop(session.begin)
        self._data: _StepData | None = None
        self._epoch_arguments: dict[str, Any] = {}
        self._told_later: Callable[[], Any] | None = None
        """Tells the callbacks of the beginning, where a spare comes to it before it has a rank."""
        self.callback_handler: Any = _listening(self.callback_handler, self._hear)

    # ---- the Trainer's methods, in the order in which it calls them -----------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """That of the Trainer, whose batches are found again by their number in an epoch."""
        loader = super().get_train_dataloader()
        session = self.session
        base = getattr(loader, "base_dataloader", loader)
        # A step seeds what it draws, behind the reading of its batches.
        reading = Reading(base, sys.maxsize, 1, self.args.seed, lambda: session.data_rank, restores=False)
        self._data = _StepData(base.dataset, reading)
        return _EpochLoader(self._data)

    def _get_dataloader(self, dataset: Any, *arguments: Any, sampler_fn: Any = None, **keywords: Any) -> Any:
        """That of the Trainer. On a spare the batches are shared out when they are read, and the rank is known; what a
        sampler does with the rank, and the user's own method, needs it at once."""
        make = super()._get_dataloader
        if make.__func__ is not Trainer._get_dataloader or isinstance(dataset, IterableDataset):
            return make(dataset, *arguments, sampler_fn=sampler_fn, **keywords)

        def sampler(data: Any) -> Any:
            with self.session.pretending(False):
                return sampler_fn(data)

        with self.session.pretending():
            return make(dataset, *arguments, sampler_fn=sampler_fn and sampler, **keywords)

    def _init_training_state(self, *arguments: Any) -> tuple[Any, int]:
        if self._progress.was_entered:
            raise UsageError("train() is called a second time in this process: keepstep protects one training")
        if self.args.eval_on_start:  # its collectives come before the first step
            _ = self.session.rank
        with self.session.pretending():
            epochs, batches = super()._init_training_state(*arguments)
        self._progress.epoch, self._progress.update_step = epochs, batches // self.args.gradient_accumulation_steps
        return _WhenAsked(self._enter), batches

    def _prepare_for_training(self, *arguments: Any) -> tuple[Any, Any]:
        model, loader = super()._prepare_for_training(*arguments)
        others = {"scheduler": self.lr_scheduler, "scaler": getattr(self.accelerator, "scaler", None)}
        protected = {name: thing for name, thing in others.items() if thing is not None}
        self._progress.own = self.session.state("trainer", per_rank=True, sums=(0.0, 0.0))
        self.session.protect(
            model=model, optimizer=self.optimizer, trainer=self._progress, **protected, **self.keepstep_options
        )
        return model, loader

    def _enter(self) -> int:
        """The Trainer asks for its first epoch. A spare comes here, too, and waits for its rank."""
        self._progress.take()
        self._loop.enter()
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        if self._told_later is not None:
            present = self._progress.state_dict()
            self._told_later()
            self._progress.load_state_dict(present)  # the job's, not what a callback begins with
        self._progress.put()
        for number, logs in enumerate(self._progress.lines):  # of a unit after which the former rank may have died
            self._say(self._loop.index - 1, number, functools.partial(self._tell, logs))
        return sys.maxsize if self._is_over() else self._progress.epoch

    def _run_epoch(self, *, epoch: int, **common: Any) -> None:
        """Runs the Trainer's epoch, and enters it again where it is interrupted."""
        self._epoch_arguments = common
        progress = self._progress
        while progress.epoch <= epoch and not self._is_over():
            try:
                self._run_rest_of_epoch()
                if progress.epoch <= epoch and not self._is_over():  # the job had gone back to an earlier epoch
                    self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
            except BaseException as error:  # an interruption may be of any kind
                if not self._loop.is_interruption(error):
                    raise
                self._loop.go_back()
                progress.put()

    def _run_rest_of_epoch(self) -> None:
        progress, common = self._progress, dict(self._epoch_arguments)
        epoch = progress.epoch
        if progress.is_pending:
            self._work_behind_step(common)
        if self.control.should_epoch_stop or self.control.should_training_stop:
            progress.update_step = common["num_update_steps_per_epoch"]  # the rest of the epoch is left out
        common |= {
            "epochs_trained": epoch,
            "steps_trained_in_current_epoch": progress.update_step * self.args.gradient_accumulation_steps,
            "resume_from_checkpoint": _AGAIN if progress.update_step else None,
        }
        super()._run_epoch(epoch=epoch, **common)
        self._end_epoch(epoch)

    def _end_epoch(self, epoch: int) -> None:
        progress = self._progress
        progress.epoch, progress.update_step = epoch + 1, 0
        progress.is_stopped = self.control.should_training_stop

    def _work_behind_step(self, common: dict[str, Any]) -> None:
        """Logs, evaluates and saves behind a step whose own loop has been left."""
        names = ("trial", "ignore_keys_for_eval", "start_time")
        self._maybe_log_save_evaluate(
            self._tr_loss, None, common["model"], epoch=self._progress.epoch, **{name: common[name] for name in names}
        )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Each step has random numbers of its own."""

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        """That of the Trainer; the first one of a step begins it."""
        if not self._loop.is_inside:
            self._loop.begin(draws_as=self.state.global_step)
        return super().training_step(*arguments, **keywords)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """That of the Trainer. It notes the folder as the best checkpoint next, if it is there; where shards are saved,
        another rank may make it later."""
        super().save_model(output_dir, _internal_call)
        if output_dir is not None and self.is_fsdp_enabled and self.args.should_save:
            os.makedirs(output_dir, exist_ok=True)

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: Any,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        """A step is done, or an epoch. What the Trainer does behind it is a unit of its own."""
        progress = self._progress
        if self._loop.is_inside:
            progress.update_step += 1
            progress.grad_norm = None if grad_norm is None else float(grad_norm)
            progress.learning_rate = learning_rate
            progress.is_pending = self._wants_more()
            progress.lines = []
            self._loop.commit()
        if not self._wants_more():
            return
        progress.lines = []
        self._loop.controller.seed(self.state.global_step)
        super()._maybe_log_save_evaluate(
            tr_loss,
            progress.grad_norm,
            model,
            trial,
            epoch,
            ignore_keys_for_eval,
            start_time,
            learning_rate=progress.learning_rate,
        )
        progress.take()
        if progress.is_pending:
            progress.is_pending = False
        else:
            self._end_epoch(progress.epoch)
        self._loop.commit()

    def _finalize_training(self, *arguments: Any) -> Any:
        while not self._loop.finish():
            self._progress.put()
            while not self._is_over():
                self._run_epoch(epoch=self._progress.epoch, **self._epoch_arguments)
        return super()._finalize_training(*arguments)

    # ---- what they need -------------------------------------------------------------------------------------------

    def _wants_more(self) -> bool:
        control = self.control
        return bool(control.should_log or control.should_evaluate or control.should_save)

    def _is_over(self) -> bool:
        return self._progress.is_stopped or self._progress.epoch >= self.state.num_train_epochs

    def _say(self, index: int, number: int, call: Callable[[], Any]) -> None:
        """Tells the callbacks of a line of the log of a unit that counts; on rank 0, which writes it, exactly once."""
        if self.session.rank > 0:
            call()
            return
        with self.session.once(f"transformers: unit {index}, line {number}") as mine:
            if mine:
                call()

    def _tell(self, logs: dict[str, Any]) -> None:
        self.callback_handler.tell("on_log", self.args, self.state, self.control, logs=logs)

    def _hear(self, event: str, call: Callable[[], Any], control: TrainerControl, logs: dict[str, Any] | None) -> Any:
        """An event for the callbacks: those hear of a line of the log when it counts."""
        progress = self._progress
        if event == "on_train_begin" and self.session.is_waiting_spare:  # callbacks ask which process this is
            self._told_later = call
            return control
        if event == "on_log" and progress.was_entered:
            index, number = self._loop.index, len(progress.lines)
            progress.lines.append(_without_times(logs or {}))
            self.session.defer(self._say, index, number, call)
            return control
        if event == "on_pre_optimizer_step":
            self._progress.take()
        return call()


class KeepstepTrainer(KeepstepMixin, Trainer):
    """``transformers.Trainer`` for jobs that lose ranks. Takes the same arguments."""


def protected(trainer: type[Trainer]) -> type[Any]:
    """The class derived from another one than ``Trainer``, such as TRL's ``SFTTrainer``; it takes the same arguments.

    Args:
        trainer: that class.
    """
    return type(f"Keepstep{trainer.__name__}", (KeepstepMixin, trainer), {})


class _WhenAsked:
    """The number of the first epoch, which is known when ``range()`` asks for it."""

    def __init__(self, ask: Callable[[], int]) -> None:
        self._ask = ask

    def __index__(self) -> int:
        return self._ask()


class _Progress:
    """What a Trainer keeps in itself of its training, as a protected object.

    Attributes:
        epoch: in which the loop stands.
        update_step: steps that are done in it.
        is_pending: whether what the Trainer does behind the last step is not done yet.
        is_stopped: whether the training ended before its last epoch.
        grad_norm: of the last step.
        learning_rate: likewise.
        own: what this rank has for itself (`Session.state`): ``sums``, its running loss and number of operations.
        lines: of the log, in the last unit.
        was_entered: whether a training has begun.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.epoch = self.update_step = 0
        self.is_pending = self.is_stopped = self.was_entered = False
        self.grad_norm: float | None = None
        self.learning_rate: float | None = None
        self.own: Any = None
        self.lines: list[dict[str, Any]] = []
        self._log = (-1, "[]")
        """The length of the log, and the log."""

    def state_dict(self) -> dict[str, Any]:
        """All of it that is the same on all ranks."""
        trainer = self._trainer
        state: TrainerState = trainer.state
        if len(state.log_history) != self._log[0]:
            self._log = len(state.log_history), json.dumps([_without_times(line) for line in state.log_history])
        values = {
            "state": {name: getattr(state, name) for name in _SHARED},
            "lines": self.lines,
            "control": vars(trainer.control),
            "callbacks": [callback.state()["attributes"] for callback in self._callbacks()],
            "loss": trainer._total_loss_scalar if self.was_entered else 0.0,
            "logged": trainer._globalstep_last_logged if self.was_entered else 0,
            "progress": {name: getattr(self, name) for name in _NUMBERS},
            "further": {name: getattr(trainer, name) for name in _FURTHER if hasattr(trainer, name)},
        }
        return {"values": json.dumps(values), "log": self._log[1]}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Puts it back. The Trainer's tensors follow with `put`."""
        trainer, state, values = self._trainer, self._trainer.state, json.loads(content["values"])
        vars(state).update(values["state"])
        lines, own = json.loads(content["log"]), state.log_history
        is_own = [_without_times(line) for line in own[: len(lines)]] == lines
        own[:] = own[: len(lines)] if is_own else lines
        vars(trainer.control).update(values["control"])
        for callback, attributes in zip(self._callbacks(), values["callbacks"], strict=True):
            vars(callback).update(attributes)
        trainer._total_loss_scalar, trainer._globalstep_last_logged = values["loss"], values["logged"]
        vars(self).update(values["progress"])
        self.lines = values["lines"]
        for name, value in values["further"].items():
            setattr(trainer, name, _as_before(getattr(trainer, name), value))

    def _callbacks(self) -> list[ExportableState]:
        known = self._trainer.callback_handler.callbacks
        return [each for each in known if isinstance(each, ExportableState) and not isinstance(each, TrainerControl)]

    def take(self) -> None:
        """Takes over what this rank has for itself, before its step or unit counts."""
        self.was_entered = True
        self.own.sums = (self._trainer._tr_loss.item(), float(self._trainer.current_flos))

    def put(self) -> None:
        """Gives it back to the Trainer."""
        loss, self._trainer.current_flos = self.own.sums
        self._trainer._tr_loss.fill_(loss)


def _without_times(line: dict[str, Any]) -> dict[str, Any]:
    """A line of the log without what each rank measures for itself."""
    return {name: value for name, value in line.items() if not name.endswith(("_runtime", "_per_second"))}


def _as_before(present: Any, value: Any) -> Any:
    """A value that was JSON, as the kind of dict that is there: TRL's make lists for new names."""
    if not isinstance(present, dict):
        return value
    result = copy.copy(present)
    result.clear()
    result.update({name: _as_before(present.get(name), each) for name, each in value.items()})
    return result


def _listening(handler: CallbackHandler, hear: Callable[..., Any]) -> Any:
    """The same handler; ``hear`` is told of each event, how to call the callbacks, the control, and a line's values."""
    kind: Any = type(handler)

    class Listening(kind):
        def call_event(self, event: str, args: Any, state: Any, control: Any, **keywords: Any) -> Any:
            call = functools.partial(self.tell, event, args, state, control, **keywords)
            return hear(event, call, control, keywords.get("logs"))

        def tell(self, event: str, *values: Any, **keywords: Any) -> Any:
            return super().call_event(event, *values, **keywords)

    handler.__class__ = Listening
    return handler


class _StepData(Dataset[Any]):
    """The batches of the epoch that was set, by their number."""

    def __init__(self, dataset: Any, reading: Reading) -> None:
        self._dataset, self.reading = dataset, reading
        self.epoch = 0

    def __len__(self) -> int:
        """Samples of the user's dataset, which the Trainer counts."""
        return len(self._dataset)

    def __getitem__(self, number: int) -> Any:
        return self.reading.read(self.epoch, number)


class _Numbers(Sampler[list[int]]):
    """The numbers of an epoch's batches."""

    def __init__(self, data: _StepData) -> None:
        self._data = data

    def __len__(self) -> int:
        return self._data.reading.steps_per_epoch

    def __iter__(self) -> Any:
        return iter([[number] for number in range(len(self))])

    def set_epoch(self, epoch: int) -> None:
        """From now on the batches are those of this epoch."""
        self._data.epoch = epoch


class _EpochLoader(DataLoader[Any]):
    """A loader of the Trainer's batches, of which it can skip the first ones without reading them."""

    def __init__(self, data: _StepData) -> None:
        super().__init__(data, batch_sampler=_Numbers(data), collate_fn=_only)

    def set_epoch(self, epoch: int) -> None:
        """As `_Numbers.set_epoch`."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]  # it was given one


def _only(batches: list[Any]) -> Any:
    (batch,) = batches
    return batch


def _refuse(trainer: Any) -> None:
    """Refuses what cannot be protected.

    Raises:
        ConfigurationError: says what, and why.
    """
    args = trainer.args
    refused = {
        "DeepSpeed": (trainer.is_deepspeed_enabled, "its engine owns parameters and optimizer; use FSDP2 or DDP"),
        f"n_gpu={args.n_gpu}": (
            args.n_gpu > 1,
            "it has several devices in a process; start a rank for each",
        ),
        "auto_find_batch_size": (args.auto_find_batch_size, "it starts the training over"),
        "FSDP through XLA": (trainer.is_fsdp_xla_enabled, "there is no backend for it"),
    }
    for name, (is_there, why) in refused.items():
        if is_there:
            raise ConfigurationError(f"KeepstepTrainer: {name} is not supported: {why}")
