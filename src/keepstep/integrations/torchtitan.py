"""torchtitan: a ``Trainer`` that continues training after a rank is lost.

::

    from keepstep.integrations.torchtitan import TitanTrainer as Trainer

    trainer = Trainer.Config(...).build()       # or TitanTrainer(config), with any Trainer.Config
    trainer.train()

For a class derived from ``Trainer``: ``protected(FluxTrainer)(config)``. Without a script:
``keepstep run -m keepstep.integrations.torchtitan --module llama3 --config llama3_8b`` in place of
``torchrun -m torchtitan.train``.

The trainer's own ``train_step()``, logging, validation and checkpoints run unchanged. keepstep replaces the loop around
them by a sequence of repeatable units (`keepstep.worker.loop.foreign`): a step, and the validation and checkpoint after
a step.

* keepstep keeps the batches of the current step, so a repeated step gets the same ones. A replacement continues at the
  loader's position.
* The optimizer update runs after ``train_step()``. torchtitan calls collectives for its log after
  ``optimizers.step()``, and no collective is allowed between the update and the end of a step.
* The trainer writes a line of the log after the step is committed.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torchtitan
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.metrics import BaseLogger
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import token_dispatcher
from torchtitan.observability import structured_logger
from torchtitan.tools.logging import init_logger, logger
from torchtitan.trainer import Trainer

from keepstep.data.reader import random_numbers_of
from keepstep.errors import ConfigurationError, UsageError
from keepstep.worker.loop.foreign import ForeignLoop, numbered, warn_of_release
from keepstep.worker.session import current_session, init
from keepstep.worker.values.attributes import from_bytes, to_bytes

TESTED = ((0, 3), (0, 4))
"""Releases of torchtitan for which the tests have passed, from and below."""
NEWEST = -1
"""``checkpoint.load_step`` for the newest checkpoint."""
MAX_POSITION_BYTES = 48 << 10
"""Limit for a loader's compressed position; rank-local values may take 64 KiB (`keepstep.worker.values.declared`)."""
_POSITION = "the state of the dataloader"
_Base: Any = Trainer if TYPE_CHECKING else object


class TitanMixin(_Base):
    """Adds fault tolerance to a class derived from ``Trainer``. It must precede that class among the bases.

    Attributes:
        session: the session of this process.
        keepstep_options: further arguments for `Session.protect`, such as ``snapshot_every``. Set them before
            ``train()``.
    """

    device: torch.device
    """Set by ``Trainer``, as are the next two."""
    step: int
    ntokens_seen: int

    def __init__(self, config: Any) -> None:
        """Calls `keepstep.init` if the script has not done so. A spare waits here for a rank.

        Args:
            config: any ``Trainer.Config``.

        Raises:
            ConfigurationError: the config selects a feature that keepstep cannot protect.
        """
        warn_of_release("torchtitan", torchtitan.__version__, TESTED)
        _refuse(type(self), config)
        self.session = current_session() or init(seed=config.debug.seed or 0)
        _ = self.session.rank  # torchtitan looks it up in the environment, where a spare has none before
        self.keepstep_options: dict[str, Any] = {}
        self._progress = _Progress(self)
        self._loop = ForeignLoop(self.session.begin, lambda: self.step, "torchtitan's step")
        self._was_entered = False
        self._update: list[Callable[[], object]] = []
        """Calls that `train_step` has deferred: the optimizer update and the learning rate scheduler's step."""
        super().__init__(config)
        _postpone(self.optimizers, self._update)
        _postpone(self.lr_schedulers, self._update)
        _listen(self.metrics_processor, self._hear)

    # ---- the trainer's methods --------------------------------------------------------------------------------------

    def init_distributed(self) -> ParallelDims:
        """Creates no process group: keepstep has created it."""
        torch.autograd.set_multithreading_enabled(False)  # as torchtitan: recomputation looks up its mesh by thread
        if self.device.type == "cuda":  # the node says which one, and not the number of the rank
            self.device = self.session.device
            torch.cuda.set_device(self.device)
        return ParallelDims.from_config(self.config.parallelism, self.session.world_size)

    def train(self) -> None:
        """Trains to the last step, or to the end of the data.

        Raises:
            UsageError: `train` was called before in this process.
        """
        if self._was_entered:
            raise UsageError("train() is called a second time in this process: keepstep protects one training")
        self._was_entered = True
        config = self.config
        structured_logger.log_trace_instant("training_start")
        if config.checkpoint.enable and config.checkpoint.load_step == NEWEST:
            self.session.resume(self._load)
        elif not self.session.is_late:
            self._load()
        self._protect()
        self._enter()
        self._first_step = self.step
        logger.info(f"Training starts at step {self.step + 1}")
        with config.profiler.build(global_step=self.step, base_folder=config.dump_folder) as profiler:
            self._loop.run(lambda: self._run(profiler), self._put)
        logger.info("Training completed")

    # ---- what they need ---------------------------------------------------------------------------------------------

    def _load(self) -> None:
        self.checkpointer.load(step=self.config.checkpoint.load_step)

    def _protect(self) -> None:
        _settle(self.loss_fn)
        self._batches = _Batches(self)
        self._own: Any = self.session.state("torchtitan", per_rank=True, tokens=self.ntokens_seen, lines=[])
        schedule = {"schedule": self.pp_schedule} if self.parallel_dims.pp_enabled else {}
        self.session.protect(
            **numbered("model", self.model_parts),
            **numbered("optimizer", list(self.optimizers)),
            scheduler=self.lr_schedulers,
            trainer=self._progress,
            **schedule,
            **self.keepstep_options,
        )

    def _enter(self) -> None:
        self._loop.enter()
        self._put()
        for number, line in enumerate(self._own.lines):  # of a unit after which the former rank may have died
            self._say(self._loop.index - 1, number, line)

    def _run(self, profiler: Any) -> None:
        while not self._is_over():
            if self._progress.is_pending:
                self._follow()
            else:
                self._step()
                profiler.step()

    def _is_over(self) -> bool:
        progress = self._progress
        return progress.is_stopped or not (progress.is_pending or self.should_continue_training())

    def _step(self) -> None:
        """Runs a training step as a unit."""
        progress = self._progress
        self.step += 1
        structured_logger.set_step(self.step, relative_step=self.step - self._first_step)
        with structured_logger.log_trace_span("step"):
            self.gc_handler.run(self.step)
            self._batches.go_to(self.step)
            self._loop.begin(draws_as=self.step)
            try:
                self.train_step(self._batches)
            except DataloaderExhaustedError:
                logger.warning("Ran out of data; last step was canceled.")
                progress.is_stopped = True
                self._update.clear()
            else:
                progress.is_pending = self._wants_more()
                self._own.tokens = self.ntokens_seen
                self._batches.share()
            self._share_lines()
            for part in self._update:
                part()
        self._loop.commit()
        self._handed_out()

    def _wants_more(self) -> bool:
        """Whether the trainer validates or saves a checkpoint after this step."""
        checkpointer, config = self.checkpointer, self.config
        saves = checkpointer.enable and checkpointer._should_save(self.step, self._is_last)
        return bool(saves or (config.validator.enable and self.validator.should_validate(self.step)))

    @property
    def _is_last(self) -> bool:
        return bool(self.step == self.config.training.steps)

    def _follow(self) -> None:
        """Runs the checkpoint and the validation after a step as a unit."""
        self._loop.controller.seed(self.step)
        self._batches.stand_before(self.step + 1)  # the checkpoint has the loader's position in it
        self.checkpointer.save(self.step, last_step=self._is_last)
        if self.config.validator.enable and self.validator.should_validate(self.step):
            self.validator.validate(self.model_parts, self.step)
        self._progress.is_pending = False
        self._share_lines()
        self._loop.commit()
        self._handed_out()

    def _handed_out(self) -> None:
        self._update.clear()
        self._lines: list[list[Any]] = []

    def _put(self) -> None:
        """Sets the trainer's attributes from the protected state."""
        self.ntokens_seen = self._own.tokens
        self._handed_out()

    # ---- its log ----------------------------------------------------------------------------------------------------

    def _hear(self, line: list[Any]) -> None:
        """Defers a line of the log until its unit is committed."""
        self._lines.append(line)
        self.session.defer(self._say, self._loop.index, len(self._lines) - 1, line)

    def _share_lines(self) -> None:
        """Makes the lines of the log rank-local values, which this rank sends at the gradient barrier."""
        if self._lines or self._own.lines:
            self._own.lines = self._lines

    def _say(self, index: int, number: int, line: list[Any]) -> None:
        """Writes a line of a committed unit; on a rank that has loggers, exactly once in the job."""
        metrics = self.metrics_processor
        if not metrics.data_loading_times:
            metrics.data_loading_times.append(0.0)  # their mean is logged, and a replacement has loaded nothing yet
        if type(metrics.logger) is BaseLogger:
            metrics.tell(line)
            return
        name = f"torchtitan: rank {self.session.rank}, step {self.step}, unit {index}, line {number}"
        with self.session.once(name) as mine:
            if mine:
                metrics.tell(line)


class TitanTrainer(TitanMixin, Trainer):
    """``torchtitan.trainer.Trainer`` for jobs that lose ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """That of ``Trainer``; its ``build()`` makes a `TitanTrainer`."""


def protected(trainer: type[Trainer]) -> type[Any]:
    """Returns a fault-tolerant subclass of a trainer class. It takes the same config.

    Args:
        trainer: a class derived from ``torchtitan.trainer.Trainer``.
    """
    return type(f"Keepstep{trainer.__name__}", (TitanMixin, trainer), {})


def main() -> None:
    """The command line of ``torchtitan.train``, with a fault-tolerant trainer."""
    init_logger()
    config = ConfigManager().parse_args()
    structured_logger.init_structured_logger(
        source="training", output_dir=config.dump_folder, enable=config.debug.enable_structured_logging
    )
    if config.checkpoint.create_seed_checkpoint:
        raise ConfigurationError("create_seed_checkpoint needs one process and no protection: run torchtitan.train")
    trainer = protected(config._owner)(config)
    try:
        trainer.train()
    finally:
        trainer.close()


class _Progress:
    """The progress of a trainer, replicated on all ranks, as a protected object.

    Attributes:
        is_pending: whether the validation and checkpoint after the last step are still to be done.
        is_stopped: whether the data are exhausted.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.is_pending = self.is_stopped = False

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {"step": self._trainer.step, "is_pending": self.is_pending, "is_stopped": self.is_stopped}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Puts it back."""
        self._trainer.step = content["step"]
        self.is_pending, self.is_stopped = content["is_pending"], content["is_stopped"]


class _Batches:
    """The batches of a rank, as the iterator for ``train_step()``.

    The object keeps the batches of the current step. The loader's position before a step is a rank-local value, so a
    replacement gets it. If a position is too large, the rank keeps sending an earlier position and the number of
    batches read since then.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._loader = trainer, trainer.dataloader
        dims = trainer.parallel_dims
        self._rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
        self._seed = trainer.config.debug.seed or 0
        self._per_step = trainer.gradient_accumulation_steps * trainer.num_pipeline_parallel_microbatches
        if getattr(self._loader, "snapshot_every_n_steps", 1) is None:
            self._loader.snapshot_every_n_steps = 1  # torchtitan leaves it out where it writes no checkpoint
        self._own = trainer.session.state("torchtitan's dataloader", per_rank=True, position=self._packed(), ahead=0)
        self._iterator: Iterator[Any] | None = None
        self._step: int | None = None
        """The step whose batches are in ``_kept``."""
        self._kept: list[Any] = []
        self._given = 0

    def go_to(self, step: int) -> None:
        """Positions the iterator at the first batch of a step. The step must be the one of the protected state."""
        if step == self._step:
            self._given = 0
            return
        if self._iterator is None or self._step is None or step != self._step + 1:
            self._load(step)
        self._step, self._kept, self._given = step, [], 0

    def stand_before(self, step: int) -> None:
        """As `go_to`, and also moves the loader itself to that position."""
        if self._kept and step == self._step:
            self._step = None
        self.go_to(step)

    def _load(self, step: int) -> None:
        self._loader.load_state_dict(from_bytes(zlib.decompress(self._own.position), _POSITION))
        self._iterator = self._trainer.batch_generator(self._loader)
        for back in range(self._own.ahead, 0, -1):
            self._read(step, -back)

    def _read(self, step: int, number: int) -> Any:
        """Reads a batch, with random numbers of its own."""
        assert self._iterator is not None
        with random_numbers_of(self._seed, self._rank, step * self._per_step + number):
            return next(self._iterator)

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        if self._given == len(self._kept):
            assert self._step is not None
            self._kept.append(self._read(self._step, len(self._kept)))
        inputs, labels = self._kept[self._given]
        self._given += 1
        return dict(inputs), labels  # train_step() puts other tensors into the dict

    def share(self) -> None:
        """Makes the position after this step a rank-local value, which the rank sends at the gradient barrier."""
        position = self._packed()
        if len(position) <= MAX_POSITION_BYTES:
            self._own.position, self._own.ahead = position, 0
        else:
            self._own.ahead += len(self._kept)

    def _packed(self) -> bytes:
        return zlib.compress(to_bytes(self._loader.state_dict(), _POSITION), level=1)


def _settle(loss: Any) -> None:
    """Sets the FSDP2 options of the head that the chunked loss otherwise sets at its first call.

    Without this, a replacement would lack the options and would all-gather the head's parameters once less than the
    other ranks.
    """
    head = getattr(loss, "lm_head", None)
    if isinstance(loss, ChunkedLossWrapper) and isinstance(head, FSDPModule):
        head.set_reshard_after_forward(True)
        head.set_reshard_after_backward(True)
        head.set_requires_gradient_sync(True, recurse=False)


def _postpone(thing: Any, calls: list[Callable[[], object]]) -> None:
    """Makes ``thing.step()`` append its call to ``calls`` instead of running it.

    torchtitan's container of optimizers is itself a torch optimizer, so torch wraps its ``step()`` in the global
    optimizer hooks. The deferred call runs without those hooks, because the optimizers in the container run them.
    """
    kind: Any = type(thing)

    class Postponed(kind):
        def step(self, *arguments: Any) -> None:
            calls.append(functools.partial(self.step_now, *arguments))

        step.hooked = True  # type: ignore[attr-defined]  # torch puts its hooks around a step() that has no such mark

        def step_now(self, *arguments: Any) -> None:
            for hook in getattr(self, "_optimizer_step_pre_hooks", {}).values():
                hook(self, arguments, {})
            inspect.unwrap(kind.step)(self, *arguments)
            for hook in getattr(self, "_optimizer_step_post_hooks", {}).values():
                hook(self, arguments, {})

    thing.__class__ = Postponed


def _listen(metrics: Any, hear: Callable[[list[Any]], object]) -> None:
    """Makes ``metrics`` pass each line of the log to ``hear`` instead of writing it; ``metrics.tell()`` writes it."""
    kind: Any = type(metrics)

    class DeferringMetrics(kind):
        def log(self, *arguments: Any, **keywords: Any) -> None:
            hear(["log", list(arguments), keywords])

        def log_validation(self, *arguments: Any, **keywords: Any) -> None:
            hear(["log_validation", list(arguments), keywords])

        def tell(self, line: list[Any]) -> None:
            name, arguments, keywords = line
            getattr(super(), name)(*arguments, **keywords)

    metrics.__class__ = DeferringMetrics


def _refuse(kind: type, config: Any) -> None:
    """Checks the trainer class and config for features that keepstep cannot protect.

    Raises:
        ConfigurationError: there is such a feature; the message names it and the reason.
    """
    checkpoint, captures = config.checkpoint, torch.cuda.is_available() and not config.training.disable_cuda_graphs
    own_buffers = (
        token_dispatcher.DeepEPTokenDispatcher.Config,
        token_dispatcher.HybridEPTokenDispatcher.Config,
        token_dispatcher.MinimalAsyncEPTokenDispatcher.Config,
    )
    refused = {
        "a train() of its own": (
            any("train" in vars(each) for each in kind.__mro__ if each not in (TitanMixin, Trainer)),
            "keepstep has a loop in place of Trainer.train(); override train_step() or what it calls",
        ),
        f"comm.mode={config.comm.mode!r}": (
            config.comm.mode != "default",
            "the process groups have to be keepstep's",
        ),
        "CUDA graphs": (captures, "a captured step cannot be left in its middle; set training.disable_cuda_graphs"),
        f"checkpoint.async_mode={getattr(checkpoint, 'async_mode', None)!r}": (
            checkpoint.enable and getattr(checkpoint, "async_mode", "disabled") != "disabled",
            "it communicates beside the training; set 'disabled'",
        ),
        type(checkpoint).__qualname__: (
            checkpoint.enable and not isinstance(checkpoint, CheckpointManager.Config),
            "it saves beside the training, over a store of its own; use CheckpointManager",
        ),
        "parallelism.enable_fsdp_symm_mem": (
            config.parallelism.enable_fsdp_symm_mem,
            "it communicates past the process groups",
        ),
        "this token dispatcher": (
            config.model_spec is not None and any(map(any, map(config.model_spec.traverse, own_buffers))),
            "it communicates past the process groups; use AllToAllTokenDispatcher",
        ),
    }
    for name, (is_there, why) in refused.items():
        if is_there:
            raise ConfigurationError(f"{kind.__name__}: {name} is not supported: {why}")


if __name__ == "__main__":
    main()
