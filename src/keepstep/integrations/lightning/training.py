"""``Trainer.fit`` as a sequence of repeatable units (`keepstep.worker.loop.foreign`).

Lightning's loops keep state in local variables and iterators, and keepstep cannot restore those after an interrupted
step. So this module calls the parts of the loops itself, in their order. There are three kinds of units:

* a *step*: the batches up to an ``optimizer.step()``, with their hooks and the schedulers' steps;
* the work after a step that must not be cut off: validation, a row of a log, a checkpoint, the user's hooks;
* the end of an epoch.

If a failure interrupts a unit, an exception leaves it. keepstep restores the protected state of its beginning, and all
ranks, including a replacement, continue from there.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.optimization.manual import ManualResult
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim.optimizer import register_optimizer_step_pre_hook

from keepstep.integrations.lightning.attributes import bare_callbacks, own_attributes
from keepstep.integrations.lightning.batches import TrainingBatches
from keepstep.integrations.lightning.files import Logs, WrittenCheckpoints
from keepstep.integrations.lightning.metrics import copied, local_values, metrics_of, put_local_values
from keepstep.integrations.lightning.progress import LightningProgress
from keepstep.worker.loop.foreign import ForeignLoop, numbered, warn_of_tensors
from keepstep.worker.session import Session
from keepstep.worker.values.attributes import from_bytes, to_bytes

_MAX_OUTPUT_ELEMENTS = 1024
"""A tensor that ``training_step`` returns is sent to a replacement only up to this size."""


class KeepstepFitLoop(_FitLoop):
    """Lightning's fit loop. A `LightningTraining` runs its epochs."""

    def run(self) -> None:
        """Runs all epochs."""
        self.setup_data()
        if self.skip:
            return
        self.reset()
        self.on_run_start()
        self.trainer.strategy.training.run()
        self._restarting = False
        self.on_run_end()


class LightningTraining:
    """One rank's part of a training.

    Attributes:
        output: the latest result of ``training_step``.
        has_stepped: whether the current unit has called an optimizer.
    """

    def __init__(self, trainer: Trainer, session: Session, logs: Logs, options: dict[str, Any]) -> None:
        """Args:
        trainer: the trainer whose loops this object runs.
        session: the session of this process.
        logs: the trainer's loggers.
        options: arguments for `Session.protect`.
        """
        self._trainer, self._session, self._options = trainer, session, options
        self._fit_loop, self._epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._module = trainer.lightning_module
        self._forward = self._module.forward
        self._logs, self._written = logs, WrittenCheckpoints()
        self._metrics = metrics_of(self._module)
        """The module's metrics at the beginning of the epoch, or when this process joined it."""
        self._loop = ForeignLoop(session.begin, lambda: trainer.global_step, "Lightning's global_step")
        self._progress = LightningProgress(trainer)
        self._own: Any = None
        """The rank-local values that this rank sent last (`Session.state`)."""
        self._kept: tuple[int, Any] = (-1, None)
        """The number of a unit, and the rank-local values at its beginning."""
        self._is_shared = False
        """Whether this rank has sent its rank-local values in this unit."""
        self._batch: Any = None
        self.output: Any = None
        self.has_stepped = False

    def run(self) -> None:
        """Runs all remaining epochs."""
        self._begin()
        batches = TrainingBatches(self._fit_loop._combined_loader)
        self._read = batches.read
        try:
            self._loop.run(self._run_epochs, self._put)
        finally:
            batches.close()

    def _run_epochs(self) -> None:
        while not self._is_over():
            self._run_epoch()

    def about_to_write(self, path: str) -> None:
        """Records a checkpoint that this rank is about to write."""
        self._written.about_to_write(self._progress.unit, path)

    # ---- units ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        trainer, strategy = self._trainer, self._trainer.strategy
        register_optimizer_step_pre_hook(self._before_update)  # in front of keepstep's own, which passes the barrier
        self._attributes = own_attributes(trainer)
        if self._session.is_main:
            warn_of_tensors(bare_callbacks(trainer), [self._module], "give it state_dict() and load_state_dict()")
        self._own = self._session.state("trainer", per_rank=True, values=_packed(self._local_values()))
        optimizers = [each for each in strategy.optimizers if not isinstance(each, _MockOptimizer)]
        schedulers = [each.scheduler for each in strategy.lr_scheduler_configs]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._session.protect(
            model=strategy.model,
            trainer=self._progress,
            **numbered("optimizer", optimizers),
            **numbered("scheduler", schedulers),
            **({} if scaler is None else {"scaler": scaler}),
            **self._options,
        )
        self._logs.begin()
        self._loop.enter()
        self._put()

    def _is_over(self) -> bool:
        return not self._progress.is_in_epoch and self._fit_loop.done

    def _run_epoch(self) -> None:
        """Runs the rest of the current epoch."""
        fit_loop, epoch_loop = self._fit_loop, self._epoch_loop
        self._metrics = metrics_of(self._module)
        if not self._progress.is_in_epoch:
            self._seed()
            fit_loop.on_advance_start()
            epoch_loop.reset()
            self._progress.is_in_epoch = True
        while self._progress.is_pending or not epoch_loop.done:
            try:
                has_trained = self._progress.is_pending or self._train()
                self._follow(has_trained)
            except StopIteration:  # on_train_batch_start() has returned -1
                break
            finally:
                epoch_loop.on_iteration_done()
            self._commit()
        fit_loop.on_advance_end()
        fit_loop.on_iteration_done()
        self._progress.is_in_epoch = False
        self._commit()

    def _commit(self) -> None:
        """Commits the unit, unless it has only accumulated gradients so far."""
        if self._loop.is_inside and not self.has_stepped:
            return
        self._share()
        self._progress.unit += 1
        self._loop.commit()
        self._handed_out()

    def _handed_out(self) -> None:
        self._is_shared = self.has_stepped = False
        self._kept = self._progress.unit, self._local_values()
        self._attributes.take()
        self._seed()

    def _put(self) -> None:
        """Sets Lightning's state from the protected state."""
        trainer = self._trainer
        trainer.training = True
        self._module._current_fx_name = None
        self._module.forward = self._forward  # training_step() stands in for it while it is called
        self._epoch_loop.val_loop._results.reset()
        self._batch = self.output = None
        unit, kept = self._kept
        is_own = unit == self._progress.unit
        values = kept if is_own else _unpacked(self._own.values)
        put_local_values(trainer, values["trainer"])
        self._logs.rewind(values["logs"])
        self.output = values["output"]
        if is_own:
            self._attributes.put_back()
        else:
            self._attributes.put_changed(values["attributes"])
        if not is_own and self._progress.is_in_epoch and not self._progress.is_pending:
            self._note_metrics()
        if trainer.is_global_zero:
            for path in self._written.undone(self._progress.unit):
                trainer.strategy.checkpoint_io.remove_checkpoint(path)
        self._handed_out()

    def _note_metrics(self) -> None:
        """Fills the logger connector's dicts as ``update_train_step_metrics`` does.

        Lightning calls that method only after the rank has sent its rank-local values, so those do not contain them.
        """
        connector = self._trainer._logger_connector
        if connector._first_loop_iter is not None:
            metrics = connector.metrics
            connector._progress_bar_metrics.update(metrics["pbar"])
            connector._callback_metrics.update(metrics["callback"])
            connector._logged_metrics.update(metrics["log"])

    def _local_values(self) -> dict[str, Any]:
        return {
            "trainer": local_values(self._trainer, self._metrics),
            "logs": self._logs.positions(),
            "output": _carried(self.output),
            "attributes": self._attributes.changed(),
        }

    def _before_update(self, _optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        if self._loop.is_inside:
            self._share()

    def _share(self) -> None:
        """Sets the rank-local values that this rank sends at the gradient barrier, once per unit."""
        if not self._is_shared:
            self._is_shared = True
            self._own.values = _packed(self._local_values())

    def _seed(self) -> None:
        self._loop.controller.seed(self._num_batches())

    def _num_batches(self) -> int:
        return int(self._epoch_loop.total_batch_idx + 1)

    # ---- a step -----------------------------------------------------------------------------------------------------

    def _train(self) -> bool:
        """Trains on one batch, as ``_TrainingEpochLoop.advance``. False if the loaded checkpoint includes the batch."""
        trainer, loop = self._trainer, self._epoch_loop
        if loop.restarting and loop._should_check_val_fx(self._fit_loop._data_fetcher):
            if loop.val_loop.restarted_mid_evaluation:
                return False
            if loop.restarted_on_last:
                loop._skip_next_val = True
                return False
            loop.val_loop.increment_progress_to_evaluation_end()
        loop.val_loop.restarting = False
        number = loop.batch_idx + 1
        batch = self._read(self._fit_loop.epoch_progress.current.processed, number)
        if self._loop.is_inside:
            self._seed()
        else:
            self._loop.begin(draws_as=self._num_batches())
        loop.batch_progress.is_last_batch = number + 1 >= trainer.num_training_batches
        batch = self._batch = self._placed(batch)
        loop.batch_progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        call._call_callback_hooks(trainer, "on_train_batch_start", batch, number)
        response = call._call_lightning_module_hook(trainer, "on_train_batch_start", batch, number)
        call._call_strategy_hook(trainer, "on_train_batch_start", batch, number)
        if response == -1:
            loop.batch_progress.increment_by(0, is_last_batch=True)
        else:
            loop.batch_progress.increment_started()
            self._optimize(batch, number)
        loop.batch_progress.increment_processed()
        loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if response == -1:
            raise StopIteration
        return True

    def _placed(self, batch: Any) -> Any:
        trainer = self._trainer
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)

    def _optimize(self, batch: Any, number: int) -> None:
        trainer, loop = self._trainer, self._epoch_loop
        arguments = loop._build_kwargs(OrderedDict(), batch, number)
        with trainer.profiler.profile("run_training_batch"):
            if trainer.lightning_module.automatic_optimization:
                loop.automatic_optimization.run(trainer.optimizers[0], number, arguments)
            else:
                loop.manual_optimization.run(arguments)

    # ---- what follows it --------------------------------------------------------------------------------------------

    def _follow(self, has_trained: bool) -> None:
        """Does the work after a batch, as ``_TrainingEpochLoop``: in the step's unit, or in a unit of its own."""
        trainer, loop, progress = self._trainer, self._epoch_loop, self._progress
        if has_trained and not progress.is_pending and self.has_stepped and self._needs_unit():
            progress.is_pending = True
            self._commit()
        if has_trained:
            if self._batch is None:
                self._read_again()
            batch, number, output = self._batch, loop.batch_idx, self._output()
            call._call_callback_hooks(trainer, "on_train_batch_end", output, batch, number)
            call._call_lightning_module_hook(trainer, "on_train_batch_end", output, batch, number)
            trainer._logger_connector.on_batch_end()
            loop.batch_progress.increment_completed()
            trainer._logger_connector.update_train_step_metrics()
        loop.on_advance_end(self._fit_loop._data_fetcher)
        self._batch = self.output = None
        progress.is_pending = False

    def _read_again(self) -> None:
        """Reads the batch of a committed step again, when the work after the step is repeated."""
        number = self._epoch_loop.batch_idx
        self._loop.controller.seed(self._num_batches() - 1)
        self._batch = self._placed(self._read(self._fit_loop.epoch_progress.current.processed, number))
        self._epoch_loop._results.batch = self._batch
        self._seed()

    def _output(self) -> Any:
        """The output of ``training_step`` in the form that Lightning passes to hooks."""
        trainer = self._trainer
        if not trainer.lightning_module.automatic_optimization:
            return ManualResult.from_training_step_output(self.output).asdict()
        result = ClosureResult.from_training_step_output(self.output, trainer.accumulate_grad_batches)
        return {} if result.loss is None else result.asdict()

    def _needs_unit(self) -> bool:
        """Whether the work after the step needs its own unit: it writes, communicates or calls the user's code."""
        trainer, loop = self._trainer, self._epoch_loop
        logs = bool(trainer.loggers) and (trainer._logger_connector.should_update_logs or bool(trainer.fast_dev_run))
        return (
            logs
            or trainer.should_stop
            or loop._should_check_val_fx(self._fit_loop._data_fetcher)
            or is_overridden("on_train_batch_end", trainer.lightning_module)
            or any(self._acts(callback) for callback in trainer.callbacks)
            or any(config.reduce_on_plateau and config.interval == "step" for config in trainer.lr_scheduler_configs)
        )

    def _acts(self, callback: Callback) -> bool:
        """Whether a callback does more after this step than display progress."""
        if type(callback).on_train_batch_end is ModelCheckpoint.on_train_batch_end:
            every = callback._every_n_train_steps
            return callback._train_time_interval is not None or (every > 0 and self._trainer.global_step % every == 0)
        is_shown_only = isinstance(callback, ProgressBar)
        return not is_shown_only and is_overridden("on_train_batch_end", callback, parent=Callback)


def _carried(output: Any) -> Any:
    """The part of the result of ``training_step`` that keepstep can send to a replacement."""
    if isinstance(output, torch.Tensor):
        return copied(output) if output.numel() <= _MAX_OUTPUT_ELEMENTS else None
    if isinstance(output, dict):
        kept = {name: _carried(value) for name, value in output.items() if isinstance(name, str)}
        return {name: value for name, value in kept.items() if value is not None}
    return output if isinstance(output, bool | int | float | str) else None


def _packed(values: dict[str, Any]) -> bytes:
    """Compresses rank-local values, because every rank sends them at every step and their size is limited.

    Most of the bytes are repeated names: 100 logged keys take 65 kB, and 7 kB compressed (November 2026).
    """
    return zlib.compress(to_bytes(values, "what self.log() and callbacks keep"), level=1)


def _unpacked(content: bytes) -> dict[str, Any]:
    values: dict[str, Any] = from_bytes(zlib.decompress(content), "what self.log() and callbacks keep")
    return values
