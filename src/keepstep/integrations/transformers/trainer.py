"""Leaves the Trainer's own loop when a step is interrupted, and enters it again in the middle of the epoch."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler, TrainerControl

from keepstep.errors import ConfigurationError, UsageError
from keepstep.integrations.transformers.attributes import KeptAttributes, hear_of_work, set_by
from keepstep.integrations.transformers.batches import EpochLoader, StepData
from keepstep.integrations.transformers.log import MAX_MAIN_BYTES, MAX_OTHER_BYTES, TrainerLog, plain
from keepstep.integrations.transformers.progress import FURTHER, TrainerProgress, WorkBehindStep
from keepstep.protocol.messages import MAX_AGREED_BYTES
from keepstep.worker.loop.foreign import ForeignLoop, warn_of_release, warn_of_tensors
from keepstep.worker.loop.late_rank import have_accelerate_wait
from keepstep.worker.loop.reading import Reading
from keepstep.worker.session import current_session

TESTED = ((5, 20), (5, 25))
"""Releases of Transformers for which the tests have passed, from and below."""
_AGAIN = "the protected state"
"""The value of ``resume_from_checkpoint`` that makes the Trainer skip the batches of completed steps."""
_HEARD = frozenset(
    {"on_train_begin", "on_epoch_begin", "on_log", "on_evaluate", "on_save", "on_pre_optimizer_step", "on_step_end"}
)
"""Callback events that `KeepstepMixin` intercepts."""


have_accelerate_wait(current_session)  # before a spare makes TrainingArguments
_Base: Any = Trainer if TYPE_CHECKING else object


class KeepstepMixin(_Base):
    """Adds fault tolerance to a class derived from ``Trainer``. It must precede that class among the bases.

    Attributes:
        session: the session of this process.
        keepstep_options: further arguments for `Session.protect`, such as ``snapshot_every``. Set them before
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
        self._progress = TrainerProgress(self, TrainerLog(self, self._log_bytes))
        self._num_told = self._begun_at = 0
        """Lines of the current unit that were logged, and the steps of the epoch that were complete when it began."""
        self._splits = False
        """Whether callbacks hear of the end of a step in a unit of its own."""
        self._has_parts = False
        """Whether the work behind a step has parts, because callbacks hear of evaluations and checkpoints."""
        self._part: int | None = None
        """The part of that work that this process has reached; None outside of it, and while callbacks hear of it."""
        self._evaluations: list[dict[str, Any]] = []
        """The metrics of the evaluations in committed parts of it, which belong to this rank."""
        self._is_put = False
        """Whether this process has not itself completed the unit before the current one."""
        self._is_in_epoch = False
        """Whether this process has joined in the middle of an epoch of which its callbacks have not heard yet."""
        self._loop = ForeignLoop(session.begin, lambda: self.state.global_step, "the Trainer's global_step")
        self._data: StepData | None = None
        self._epoch_arguments: dict[str, Any] = {}
        self._told_later: Callable[[], Any] | None = None
        """The deferred ``on_train_begin`` of a spare. The spare calls it when it has a rank."""
        self.callback_handler: Any = _listening(self.callback_handler, self._hear)

    # ---- the Trainer's methods, in the order in which it calls them -----------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any) -> Any:
        """As ``Trainer.train``, but a replacement loads no checkpoint.

        With ``resume_from_checkpoint=True`` fresh ranks load the newest one, also if all ranks are lost.
        """
        if resume_from_checkpoint is True:
            self.session.resume(lambda: None)
        if self.session.is_late:
            resume_from_checkpoint = None
        return super().train(resume_from_checkpoint, *arguments, **keywords)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """As ``Trainer.get_train_dataloader``, with batches that can be read by number."""
        loader = super().get_train_dataloader()
        session = self.session
        base = getattr(loader, "base_dataloader", loader)
        # restores=False: each step seeds the generators after it has read its batches.
        reading = Reading(base, sys.maxsize, 1, self.args.seed, lambda: session.data_rank, restores=False)
        self._data = StepData(base.dataset, reading)
        return EpochLoader(self._data)

    def _get_dataloader(self, dataset: Any, *arguments: Any, sampler_fn: Any = None, **keywords: Any) -> Any:
        """As ``Trainer._get_dataloader``. A spare splits the batches by rank only when it reads them.

        A spare waits for its rank here if the user overrides this method, or if a sampler function reads the rank.
        """
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
        options = dict(self.keepstep_options)
        per_rank = options.pop("per_rank", {})
        self._attributes = KeptAttributes(
            self,
            {*set_by(KeepstepMixin), *FURTHER} - {"_evaluations"},
            [*self.keepstep_options.values(), *per_rank.values()],
        )
        per_rank = {**per_rank, "log_history": self._progress.log, "attributes": self._attributes}
        self.session.protect(
            model=model,
            optimizer=self.optimizer,
            trainer=self._progress,
            per_rank=per_rank,
            **protected,
            **options,
        )
        return model, loader

    def _enter(self) -> int:
        """Begins the training and returns the number of the first epoch. A spare waits here for a rank."""
        if not self.session.is_late:
            self._progress.log.begin()  # callbacks have heard, or shall not hear, of what the history begins with
        self._take()
        self._loop.enter()
        if self.session.is_main:
            self._warn_of_callbacks()
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        if self._told_later is not None:
            present = self._progress.state_dict()
            self._told_later()
            self._progress.load_state_dict(present)  # the job's, not what a callback begins with
        self._splits = self.session.agree("transformers: split steps", self._attributes.change_behind_update)
        self._has_parts = self.session.agree("transformers: parts", hear_of_work(self.callback_handler.callbacks))
        self._put()
        self._is_in_epoch = self._loop.index > 0 and bool(self._progress.update_step or self._progress.is_pending)
        return sys.maxsize if self._is_over() else self._progress.epoch

    def _run_epoch(self, *, epoch: int, **common: Any) -> None:
        """Runs the Trainer's epoch, and enters it again after an interruption."""
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
                self._put()

    def _run_rest_of_epoch(self) -> None:
        progress, common = self._progress, dict(self._epoch_arguments)
        epoch = progress.epoch
        if progress.is_pending:
            self._work_behind_step(common)
            if progress.epoch > epoch:
                return
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
        """Logs, evaluates and saves after a committed step, if an interruption has left the step's loop."""
        names = ("trial", "ignore_keys_for_eval", "start_time")
        self._maybe_log_save_evaluate(
            self._tr_loss, None, common["model"], epoch=self._progress.epoch, **{name: common[name] for name in names}
        )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restores nothing: keepstep seeds the generators for each step."""

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        """As ``Trainer.training_step``. The first call of a step begins the unit."""
        if not self._loop.is_inside:
            self._loop.begin(draws_as=self.state.global_step)
        return super().training_step(*arguments, **keywords)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As ``Trainer.save_model``. Under FSDP it also creates the folder.

        The Trainer records the folder as the best checkpoint next, but only if the folder exists. When ranks save
        shards, another rank may create it later.
        """
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
        """Commits a completed step. Then it logs, evaluates and saves in a separate unit."""
        progress = self._progress
        if self._loop.is_inside:
            progress.update_step += 1
            progress.grad_norm = None if grad_norm is None else float(grad_norm)
            progress.learning_rate = learning_rate
            progress.is_step_end_due = self._splits
            progress.is_pending = self._splits or self._wants_more()
            self._commit()
        if progress.is_step_end_due:
            self._end_step()
        if not self._wants_more():
            if progress.is_pending:
                progress.is_pending = False
                self._take()
                self._commit()
            return
        self._loop.controller.seed(self.state.global_step)
        self.control.should_evaluate |= progress.work.has_evaluated  # for the parts that are not complete
        self.control.should_save |= progress.work.has_saved
        self._part = 0
        try:
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
        finally:
            self._part = None
        self._evaluations.clear()
        self._take()
        if progress.work.ends_epoch or not progress.is_pending:
            self._end_epoch(progress.epoch)
        progress.is_pending, progress.work = False, WorkBehindStep()
        self._commit()

    def _evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        if self._part is None or self._progress.work.evaluated_in is None:
            return super()._evaluate(*arguments, **keywords)
        self._part, self.control.should_evaluate = self._progress.work.evaluated_in, False
        return {}

    def evaluate(self, eval_dataset: Any = None, *arguments: Any, **keywords: Any) -> Any:
        """As ``Trainer.evaluate``, but not again in the work behind a step if all ranks have done so there."""
        part = self._part
        of_several = isinstance(self.eval_dataset if eval_dataset is None else eval_dataset, dict)
        if part is None or part >= len(self._evaluations) or of_several:
            return super().evaluate(eval_dataset, *arguments, **keywords)
        metrics = self._evaluations[part]
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return dict(metrics)

    def _determine_best_metric(self, *arguments: Any, **keywords: Any) -> Any:
        if self._part is None:
            return super()._determine_best_metric(*arguments, **keywords)
        work = self._progress.work
        if work.evaluated_in is None:
            work.is_best, work.evaluated_in = super()._determine_best_metric(*arguments, **keywords), self._part
        return work.is_best

    def _save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        if self._part:  # callbacks have heard of an evaluation, and are not to hear of it again
            self._end_part()
        if self._is_in_present_part:
            super()._save_checkpoint(*arguments, **keywords)

    @property
    def _is_in_present_part(self) -> bool:
        return self._part is None or self._part == self._progress.work.part

    def _end_part(self) -> None:
        """Commits a part of the work behind a step, if it is not complete."""
        progress = self._progress
        assert self._part is not None
        if self._is_in_present_part:
            progress.work.part += 1
            progress.work.ends_epoch |= not progress.is_pending
            progress.is_pending = True
            self._take()
            self._commit()
            self._loop.controller.seed(self.state.global_step)
        self._part += 1

    def _tell_of_work(self, event: str, call: Callable[[], Any], control: TrainerControl, metrics: Any) -> Any:
        """Tells callbacks of an evaluation or a checkpoint in a part of its own, when all ranks have completed it."""
        if event == "on_save":
            self._progress.work.has_saved = True
        elif self._is_in_present_part:
            self._progress.work.has_evaluated = True
            self._evaluations.append(plain(metrics))
        self._end_part()
        if not self._is_in_present_part:
            return control
        part, self._part = self._part, None
        try:
            return call()
        finally:
            self._part = part

    def _end_step(self) -> None:
        """Tells of the end of a committed step, where callbacks may change what they keep."""
        self._loop.controller.seed(self.state.global_step)
        if self._is_put:  # this process has not heard what comes before it
            self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        self.control = self.callback_handler.tell("on_step_end", self.args, self.state, self.control)
        self._progress.is_step_end_due = False

    def _finalize_training(self, *arguments: Any) -> Any:
        while not self._loop.finish():
            self._put()
            while not self._is_over():
                self._run_epoch(epoch=self._progress.epoch, **self._epoch_arguments)
        return super()._finalize_training(*arguments)

    # ---- what they need -------------------------------------------------------------------------------------------

    def _warn_of_callbacks(self) -> None:
        named = list(self.keepstep_options.values())
        modules = [self.model, *(thing for thing in named if isinstance(thing, torch.nn.Module))]
        unnamed = [each for each in self.callback_handler.callbacks if not any(each is thing for thing in named)]
        what_to_do = (
            "give it state_dict() and load_state_dict(), and name it: trainer.keepstep_options['average'] = ..."
        )
        warn_of_tensors(unnamed, modules, what_to_do)

    def _take(self) -> None:
        """Protects what is this rank's own. Call it before a unit's barrier."""
        self._attributes.share(self.session.world_size)
        self._progress.take()

    def _commit(self) -> None:
        self.session.defer(functools.partial(self._attributes.take, self._loop.index + 1))
        self._loop.commit()
        self._is_put = False
        self._begin_lines()

    def _put(self) -> None:
        """Gives the Trainer and its callbacks what a recovery has restored."""
        lines = self._progress.log.lines  # of the unit before; this process may not have told of it
        self._progress.put()
        self._is_put = not self._attributes.put(self._loop.index)
        self._begin_lines()
        if self._is_put:
            for number, logs in enumerate(lines):
                self._say(self._loop.index - 1, number, functools.partial(self._tell, logs))
            self._attributes.take(self._loop.index)

    def _begin_lines(self) -> None:
        """Begins the lines of the current unit."""
        self._progress.log.begin()
        self._num_told = 0
        self._begun_at = self._progress.update_step

    def _log_bytes(self) -> int:
        if self.session.rank == 0:
            return MAX_MAIN_BYTES
        return min(MAX_OTHER_BYTES, MAX_MAIN_BYTES // self.session.world_size)

    def _wants_more(self) -> bool:
        control = self.control
        return bool(control.should_log or control.should_evaluate or control.should_save or self._progress.work.part)

    def _is_over(self) -> bool:
        return self._progress.is_stopped or self._progress.epoch >= self.state.num_train_epochs

    def _say(self, index: int, number: int, call: Callable[[], Any]) -> None:
        """Passes a line of a committed unit to the callbacks; on rank 0, which writes the log, exactly once."""
        if self.session.rank > 0:
            call()
            return
        name = f"transformers: step {self.state.global_step}, unit {index}, line {number}"
        with self.session.once(name) as mine:
            changes = self._attributes.changes_by(call) if mine else b""
            if changes and len(changes) < MAX_AGREED_BYTES // 2:
                self.session.agree(name, changes)
        if not mine:  # another process has; what it has changed in callbacks belongs to this rank
            self._attributes.put_changes(self.session.agree(name, b""))

    def _tell(self, logs: dict[str, Any]) -> None:
        self.callback_handler.tell("on_log", self.args, self.state, self.control, logs=logs)

    def _hear(self, event: str, call: Callable[[], Any], control: TrainerControl, metrics: Any) -> Any:
        """Intercepts a callback event. It defers ``on_log`` until the unit is committed."""
        progress = self._progress
        if event == "on_train_begin" and self.session.is_waiting_spare:  # callbacks ask which process this is
            self._told_later = call
            return control
        if event in ("on_log", "on_evaluate") and self.session.is_late and not progress.was_entered:
            return control  # of eval_on_start, of which the job's first processes have told
        if event == "on_log" and progress.was_entered:
            index, number = self._loop.index, self._num_told
            self._num_told += 1
            self.session.defer(self._say, index, number, call)
            return control
        if event in ("on_evaluate", "on_save") and self._has_parts and self._part is not None:
            return self._tell_of_work(event, call, control, metrics)
        if event == "on_step_end" and self._splits:
            return control  # `_end_step` tells of it
        told = call()
        if event == "on_pre_optimizer_step":
            self._take()
        elif event == "on_epoch_begin":
            self._began_epoch()
        return told

    def _began_epoch(self) -> None:
        """Settles what callbacks have changed where an epoch began."""
        if self._is_in_epoch:  # the Trainer tells a replacement of an epoch in whose middle it joins
            self._attributes.put_back()
        elif not self._begun_at:
            self._attributes.take(self._loop.index)  # a repetition of the unit does not tell of it again
        self._is_in_epoch = False


class KeepstepTrainer(KeepstepMixin, Trainer):
    """``transformers.Trainer`` for jobs that lose ranks. Takes the same arguments."""


def protected(trainer: type[Trainer]) -> type[Any]:
    """Returns a fault-tolerant subclass of a trainer class, such as TRL's ``SFTTrainer``. It takes the same arguments.

    Args:
        trainer: a class derived from ``transformers.Trainer``.
    """
    return type(f"Keepstep{trainer.__name__}", (KeepstepMixin, trainer), {})


class _WhenAsked:
    """The number of the first epoch, computed when ``range()`` reads it."""

    def __init__(self, ask: Callable[[], int]) -> None:
        self._ask = ask

    def __index__(self) -> int:
        return self._ask()


def _listening(handler: CallbackHandler, hear: Callable[..., Any]) -> Any:
    """Makes a handler pass some events to ``hear(event, call, control, metrics)``; ``call`` invokes the callbacks."""
    kind: Any = type(handler)

    class Listening(kind):
        def call_event(self, event: str, args: Any, state: Any, control: Any, **keywords: Any) -> Any:
            if event not in _HEARD:
                return super().call_event(event, args, state, control, **keywords)
            call = functools.partial(self.tell, event, args, state, control, **keywords)
            return hear(event, call, control, keywords.get("metrics"))

        def tell(self, event: str, *values: Any, **keywords: Any) -> Any:
            return super().call_event(event, *values, **keywords)

    handler.__class__ = Listening
    return handler


def _refuse(trainer: Any) -> None:
    """Checks the trainer for settings that keepstep cannot protect.

    Raises:
        ConfigurationError: there is such a setting; the message names it and the reason.
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
