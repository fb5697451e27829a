"""The loops that a session gives to a script: over steps, batches and epochs; and functions as steps."""

from __future__ import annotations

import abc
import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from keepstep.data.numbers import whole
from keepstep.errors import ConfigurationError, UsageError
from keepstep.worker.loop.batches import Batches
from keepstep.worker.loop.epochs import Epochs
from keepstep.worker.loop.reading import Reading, check_replicas
from keepstep.worker.loop.runner import StepRunner
from keepstep.worker.loop.step import Step
from keepstep.worker.loop.stream import StreamReading, is_stream
from keepstep.worker.step_controller import StepController
from keepstep.worker.values.attributes import State

if TYPE_CHECKING:  # its import takes long
    from torch.utils.data import DataLoader

Result = TypeVar("Result")


class Loops(abc.ABC):
    """The part of `keepstep.Session` that yields steps. Call all methods from the training thread."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._controller: StepController | None = None
        self._runner: StepRunner | None = None
        self._present: Step | None = None
        """The step that the loop yielded last."""
        self._has_batches = False

    def _set_controller(self, controller: StepController) -> None:
        """Registers the controller of this process's steps: from now on there is state to restore."""
        self._controller, self._runner = controller, StepRunner(controller)

    @property
    @abc.abstractmethod
    def data_rank(self) -> int:
        """See `Session.data_rank`."""

    @property
    @abc.abstractmethod
    def data_world_size(self) -> int:
        """See `Session.data_world_size`."""

    @property
    @abc.abstractmethod
    def world_size(self) -> int:
        """See `Session.world_size`."""

    @abc.abstractmethod
    def state(
        self, name: str = "", /, *, per_rank: bool = False, reset: Literal["epoch"] | None = None, **values: Any
    ) -> State:
        """See `Session.state`."""

    @abc.abstractmethod
    def begin(self, start: int = 0) -> StepController:
        """See `Session.begin`."""

    @abc.abstractmethod
    def _has_fewer_steps(self, num_steps: int) -> int | None:
        """The job's number of completed steps, if it is below ``num_steps`` and the job was not terminated; or None."""

    def steps(self, num_steps: int, *, start: int = 0) -> Iterator[Step]:
        """Yields the steps up to ``num_steps``, beginning at the job's current step.

        Use each as ``with step:``. An interrupted step is repeated with the same index.

        Args:
            num_steps: the length of the training, not of this run.
            start: the first step of a script that has loaded its own checkpoint, the same on all ranks. A recovery, or
                a newer checkpoint of keepstep's, takes precedence.

        Raises:
            UsageError: `protect` was not called, a step was not entered, or the job has completed fewer steps already.
            ConfigurationError: ``start`` is below 0 or above ``num_steps``.
        """
        _check_start("steps", start, num_steps)
        self._protected_controller("steps")
        return self._loop(num_steps, start)

    def _protected_controller(self, asked: str) -> StepController:
        if self._controller is None:
            raise UsageError(
                f"{asked}() before protect(): nothing would be restored; call session.protect(model=...) first"
            )
        return self._controller

    def batches(
        self,
        loader: DataLoader[Any],
        *,
        epochs: int = 1,
        accumulate: int = 1,
        updates: int = 1,
        steps: int | None = None,
        start: int = 0,
    ) -> Batches:
        """Yields the steps of the epochs of a loader as pairs ``step, batch``.

        The order is the loader's own, epoch by epoch (it calls ``set_epoch()``). Augmentation is seeded for each batch,
        so a batch that is read again is the same. A replacement or a restarted job reads no batches before its first
        step. `Step.epoch` and `Step.is_epoch_end` give the position.

        Args:
            loader: of a map-style dataset, with any sampler. Its workers, ``collate_fn`` and other settings are used,
                but it is not iterated itself.
            epochs: the length of the training, not of this run.
            accumulate: batches per step. If more than 1, a step has a list of them; the last step of an epoch may have
                fewer.
            updates: how many steps in a row get the same batch, each a copy of it: 2 for a GAN whose discriminator and
                generator are updated with each batch. `Step.update` tells which of them a step is, from 0.
            steps: the length of the training in steps, instead of ``epochs``. A loader with ``state_dict()`` and
                ``load_state_dict()``, or with an iterable dataset that has them, is then iterated itself, restarted at
                its end, and set back to its position after a recovery.
            start: as for `steps`. A loader that is iterated itself continues at the position that it has.

        Raises:
            ConfigurationError: the loader's batches cannot be found by their number, or a number is out of range.
            UsageError: as for `steps` and `data_rank`; or a second loop over batches is begun.
        """
        if steps is not None and is_stream(loader):
            if updates != 1:
                raise ConfigurationError(
                    f"batches(updates={updates}) with a loader that is iterated itself: leave steps out, so that its "
                    "batches are read by number, or keep the batch from one step to the next"
                )
            return self._stream(loader, steps, accumulate, start)
        length = None if steps is None else whole("steps", steps, 1)
        reading = self._reading(loader, epochs if length is None else sys.maxsize, accumulate, updates)
        begin = functools.partial(self._begin_reading, loader, reading.steps_per_epoch)
        found = Batches(reading, lambda num_steps: self._loop(num_steps, start, begin), length)
        _check_start("batches", start, len(found))
        return found

    def _stream(self, loader: Any, num_steps: int, accumulate: int, start: int) -> Batches:
        _check_start("batches", start, num_steps)
        own = self.state("batches", per_rank=True, position={}, generators=[], epoch=None, begins_as_loaded=None)
        reading = StreamReading(loader, num_steps, accumulate, own, self._seed, lambda: self.data_rank)
        return Batches(reading, lambda num_steps: self._loop(num_steps, start, self._begin_stream))

    def _begin_stream(self) -> None:
        self._protected_controller("batches")
        self._refuse_second_loop()

    def epochs(self, loader: DataLoader[Any], num_epochs: int, *, accumulate: int = 1, updates: int = 1) -> Epochs:
        """Yields epochs of a loader, beginning at the job's current step; each yields its steps with their batches.

        ``for epoch in session.epochs(loader, 3)``, and in it ``for step, batch in epoch`` with its ``with step:``, or
        ``epoch.run(function)``. The code after that, at the end of the epoch, is protected too: if a rank is lost in
        it, all ranks repeat it. The batches are those of `batches`.

        Args:
            loader: see `batches`.
            num_epochs: the length of the training, not of this run.
            accumulate: see `batches`.
            updates: see `batches`.

        Raises:
            ConfigurationError: as for `batches`.
            UsageError: as for `batches`; or an epoch is left before its last step.
        """

        def start() -> StepController:
            self._begin_reading(loader, handed.numbers_per_epoch)
            handed.own = self.state("keepstep.epochs", begun=-1)
            controller = self.begin()
            controller.take_ahead(lambda number: not handed.is_step(number))
            return controller

        handed = Epochs(self._reading(loader, num_epochs, accumulate, updates), start, self._hand)
        return handed

    def _reading(self, loader: DataLoader[Any], epochs: int, accumulate: int, updates: int) -> Reading:
        return Reading(loader, epochs, accumulate, self._seed, lambda: self.data_rank, updates=updates)

    def _begin_reading(self, loader: DataLoader[Any], epoch_length: int) -> None:
        self._protected_controller("batches").epoch_length = epoch_length
        self._refuse_second_loop()
        check_replicas(loader, self.data_world_size, self.world_size)

    def _refuse_second_loop(self) -> None:
        if self._has_batches:
            raise UsageError(
                "session.batches() is iterated a second time: one loop has all epochs, session.batches(loader, "
                "epochs=...) or session.epochs(loader, ...). For validation, iterate a DataLoader itself"
            )
        self._has_batches = True

    def run_step(self, function: Callable[..., Result], /, *arguments: Any, **keywords: Any) -> Result:
        """Calls a function as the body of the loop's current step, until the step is committed.

        Use it instead of ``with step:``. keepstep keeps the arguments and passes them again if the step is interrupted:
        copies of lists and dicts, but the same tensors, so the function must not change tensors in place.

        Args:
            function: computes, and calls ``optimizer.step()``.
            arguments: of the function.
            keywords: of the function.

        Returns:
            its result in the committed attempt.

        Raises:
            UsageError: outside of a loop over steps, in a step that was entered already, or the function has changed a
                tensor argument.
            NothingToRecoverFrom: the job has gone back to steps whose arguments are not kept.
        """
        if self._runner is None or self._present is None:
            raise UsageError(
                "run_step() outside of a loop over steps: call it in one of session.steps(), batches() or epochs()"
            )
        return self._runner.run(self._present, function, arguments, keywords)

    def step(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """Decorates a function so that each call of it is a `run_step`."""

        @functools.wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Result:
            return self.run_step(function, *arguments, **keywords)

        return run

    def defer(self, function: Callable[..., object], /, *arguments: Any, **keywords: Any) -> None:
        """Calls a function once the current step is committed, and never for an attempt that is undone.

        For actions that must not happen twice, such as a log line or a counter. Surviving ranks call it at the end of
        the step, or of the epoch if it was deferred there. It must not communicate, nor change protected state.

        Args:
            function: what to call.
            arguments: what to call it with, evaluated now.
            keywords: likewise.
        """
        self._protected_controller("defer").defer(functools.partial(function, *arguments, **keywords))

    def warm_up(self, function: Callable[..., object], /, *arguments: Any, **keywords: Any) -> None:
        """Lets a waiting spare call a function, such as a forward and backward of a compiled model.

        Only spares call it, at the beginning of the loop. The state that it changes is restored when the spare takes a
        rank, and its gradients are dropped. Collectives in it echo, and the spare's rank is 0. Call this after
        `protect`, before the loop.

        Args:
            function: what to call.
            arguments: what to call it with.
            keywords: likewise.

        Raises:
            UsageError: `protect` was not called.
        """
        self._protected_controller("warm_up").warm_up = functools.partial(function, *arguments, **keywords)

    def _loop(self, num_steps: int, start: int, first: Callable[[], None] | None = None) -> Iterator[Step]:
        if first is not None:
            first()
        controller = self.begin(start)
        while (index := controller.next_step(num_steps)) is not None:
            step = Step(controller, index, controller.attempt, controller.resumed)
            self._hand(step)
            yield step
        if (reached := self._has_fewer_steps(num_steps)) is not None:
            raise UsageError(
                f"steps({num_steps}) after all ranks have completed steps({reached}): one loop has all steps"
            )

    def _hand(self, step: Step) -> None:
        self._present = step


def _check_start(asked: str, start: int, num_steps: int) -> None:
    if not 0 <= start <= num_steps:
        raise ConfigurationError(f"{asked}(start={start}): allowed are 0 to {num_steps}, the number of all steps")
