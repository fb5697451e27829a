"""The strategy that a ``Trainer`` is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from keepstep.errors import ConfigurationError, UsageError
from keepstep.integrations.lightning.batches import NumberedLoader
from keepstep.integrations.lightning.fabric import KeepstepEnvironment, global_seed, join, refuse_options
from keepstep.integrations.lightning.files import Logs
from keepstep.integrations.lightning.training import KeepstepFitLoop, LightningTraining
from keepstep.worker.session import Session

NEWEST = ("last", "hpc")
"""Values of ``ckpt_path`` for the newest checkpoint."""


class _Resuming(_Launcher):
    """Starts no processes, for ``keepstep run`` has done so, and decides which of them load the checkpoint."""

    is_interactive_compatible = True

    def __init__(self, session: Session) -> None:
        self._session = session

    def launch(self, function: Callable[..., Any], *arguments: Any, trainer: Trainer, **keywords: Any) -> Any:
        """Calls what ``fit()`` and others run, as if there were no launcher; a replacement fits without ``ckpt_path``.

        ``fit(ckpt_path="last")`` has fresh ranks load the newest checkpoint also if all ranks are lost.
        """
        called = inspect.signature(function).bind(*arguments, **keywords)
        if trainer.state.fn == TrainerFn.FITTING and called.arguments.get("ckpt_path") is not None:
            if called.arguments["ckpt_path"] in NEWEST:
                self._session.resume(lambda: None)
            if self._session.is_late:
                called.arguments["ckpt_path"] = None
        return function(*called.args, **called.kwargs)

    def kill(self, signum: Any) -> None:
        """Ends no processes: ``keepstep run`` does."""


class KeepstepStrategy(DDPStrategy):
    """``lightning.pytorch.strategies.DDPStrategy`` for jobs that lose ranks.

    It calls `keepstep.init` if the script has not done so. A spare waits for a rank in ``fit()``. ``keepstep run``
    sets the number of devices and nodes, so the Trainer needs no ``devices`` and ``num_nodes``.
    """

    strategy_name = "keepstep"

    def __init__(self, *, keepstep_options: dict[str, Any] | None = None, **options: Any) -> None:
        """Args:
            keepstep_options: further arguments for `Session.protect`, such as ``snapshot_every``.
            options: those of ``DDPStrategy``, such as ``find_unused_parameters``.

        Raises:
            ConfigurationError: an option that cannot be protected, or a release of Lightning that is harmful.
        """
        refuse_options("KeepstepStrategy", options)
        self._session = join()
        super().__init__(cluster_environment=KeepstepEnvironment(self._session), **options)
        self._keepstep_options = dict(keepstep_options or {})
        self._logs: Logs | None = None
        self._training: LightningTraining | None = None

    @property
    def training(self) -> LightningTraining:
        """The training that ``fit()`` runs."""
        assert self._training is not None, "fit() was not called"
        return self._training

    # ---- which process this is --------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self._session.device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for ``DistributedSampler``: they select the samples that this rank reads."""
        return {"num_replicas": self._session.world_size, "rank": self._session.rank}

    def _configure_launcher(self) -> None:
        self._launcher = _Resuming(self._session)

    # ---- the start of fit() -----------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """The first that ``fit()`` asks for: before loggers open their files."""
        super().setup_environment()
        trainer = self._trainer
        if trainer.state.fn == TrainerFn.FITTING:
            if self._training is not None:
                raise UsageError("fit() is called a second time in this process: keepstep protects one training")
            _refuse(trainer)
            if self._session.is_late:
                _have_configuration_saved_again(trainer)
            self._logs = Logs(trainer, self._session)

    def setup(self, trainer: Trainer) -> None:
        """Wraps the model, creates the optimizers, and replaces the Trainer's loop over epochs."""
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            assert self._logs is not None
            trainer.fit_loop.__class__ = KeepstepFitLoop
            trainer._signal_connector.__class__ = _NoSignals
            self._training = LightningTraining(trainer, self._session, self._logs, self._keepstep_options)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Wraps a training loader so that its batches can be read by number."""
        if not self._trainer.training:
            return dataloader
        return NumberedLoader(dataloader, global_seed(), lambda: self._session.rank)

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # ---- steps ------------------------------------------------------------------------------------------------------

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        """Calls the module's ``training_step()`` and keeps the result: a repeated unit passes it to its hooks."""
        output = super().training_step(*arguments, **keywords)
        self.training.output = output
        return output

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **keywords: Any
    ) -> Any:
        """Computes the gradients, then calls ``optimizer.step()`` without a closure.

        Lightning does both in ``optimizer.step(closure)``, which does not show when the update begins.
        """
        self.training.has_stepped = True
        precision = self.precision_plugin
        if not _computes_inside(precision):
            return super().optimizer_step(optimizer, closure, model, **keywords)
        result = precision._wrap_closure(model or self.lightning_module, optimizer, closure)
        optimizer.step(**keywords)
        return result

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces integers as Lightning does under gloo: it sums them and divides the sum for the mean."""
        if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point() or reduce_op not in ("mean", "avg"):
            return super().reduce(tensor, group, reduce_op)
        total = super().reduce(tensor, group, "sum")
        return total.copy_(total / self.world_size)

    # ---- files ------------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint, on rank 0."""
        if self.is_global_zero and self._training is not None:
            self._training.about_to_write(str(filepath))
        super().save_checkpoint(checkpoint, filepath, storage_options)


class _NoSignals(_SignalConnector):
    """Installs no signal handlers. In keepstep SIGTERM drains the job; Lightning's handler would run a collective."""

    def register_signal_handlers(self) -> None:
        """Does nothing."""


def _have_configuration_saved_again(trainer: Trainer) -> None:
    """Lets the replacement of rank 0 overwrite ``LightningCLI``'s ``config.yaml`` with the same content.

    By default the callback refuses to overwrite the file of the first rank 0. The replacement cannot skip the callback,
    because the ranks exchange values in it.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, SaveConfigCallback):
            save = callback.parser.save
            callback.parser.save = lambda *values, save=save, **options: save(*values, **options | {"overwrite": True})


def _computes_inside(precision: Precision) -> bool:
    """Whether ``optimizer.step(closure)`` computes the gradients under this precision plugin."""
    if isinstance(precision, MixedPrecision):
        return precision.scaler is None
    return type(precision).optimizer_step is Precision.optimizer_step


def _refuse(trainer: Trainer) -> None:
    """Checks the trainer for settings that keepstep cannot protect.

    Raises:
        ConfigurationError: there is such a setting; the message names it and the reason.
    """
    averaging = next(
        (each for each in trainer.callbacks if isinstance(each, StochasticWeightAveraging | WeightAveraging)), None
    )
    module = trainer.lightning_module
    refused = {
        "Trainer(overfit_batches=...)": (trainer.overfit_batches > 0, "it replaces the loader's sampler"),
        "Trainer(reload_dataloaders_every_n_epochs=...)": (
            trainer.reload_dataloaders_every_n_epochs > 0,
            "a replacement would load others",
        ),
        "Trainer(val_check_interval=...) as a time": (
            trainer._val_check_time_interval is not None,
            "steps that come again would validate at other times; give it a number of batches",
        ),
        type(averaging).__name__: (averaging is not None, "it keeps a second model, which is not protected"),
        "training_step(dataloader_iter)": (
            is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True),
            "no batch that it takes could be found again",
        ),
    }
    for name, (is_there, why) in refused.items():
        if is_there:
            raise ConfigurationError(f"KeepstepStrategy: {name} is not supported: {why}")
