"""Hugging Face Accelerate: an ``Accelerator`` for training loops that lose ranks.

::

    from keepstep.integrations.accelerate import KeepstepAccelerator as Accelerator

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in accelerator.epochs(loader, 3):
        def train_step(step, batch):
            ...                             # what was the body of the loop over batches
        epoch.run(train_step)
        ...                                 # evaluation, as before

Without ``epochs()``, `Session.protect` and `Session.batches` take what ``prepare()`` gives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from torch.utils.data import DataLoader, IterableDataset

from keepstep.errors import UsageError
from keepstep.worker.loop.epochs import Epoch
from keepstep.worker.loop.foreign import numbered
from keepstep.worker.loop.late_rank import have_accelerate_wait
from keepstep.worker.loop.step import Step
from keepstep.worker.session import current_session, init

have_accelerate_wait(current_session)


class KeepstepAccelerator(Accelerator):
    """An ``accelerate.Accelerator`` with the same arguments. It calls `keepstep.init` if the script has not done so.

    A spare waits for a rank when it first reads the rank.

    Attributes:
        session: the `keepstep.Session` of this process.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.session = init()
        super().__init__(*arguments, **keywords)
        self._has_begun = False
        self._wrapped: list[torch.nn.Module] = []
        """The wrapped models that `prepare` returned."""

    def epochs(
        self, loader: DataLoader[Any], num_epochs: int, *, updates: int = 1, **options: Any
    ) -> Iterator[PreparedEpoch]:
        """Protects all prepared objects and all objects registered for checkpointing, and yields a loader's epochs.

        See `Session.epochs`. A step has ``gradient_accumulation_steps`` batches.

        Args:
            loader: a loader that `prepare` returned.
            num_epochs: number of epochs of the whole training, not of this run.
            updates: steps that get the same batch; see `Session.batches`.
            options: further arguments for `Session.protect`.

        Raises:
            UsageError: this method was called before, or the script called `Session.protect` itself.
        """
        if self._has_begun:
            raise UsageError("accelerator.epochs() is called a second time: one loop has all epochs")
        self._has_begun = True
        self.session.protect(**self._protected(), **options)
        accumulate = self.gradient_accumulation_steps
        for epoch in self.session.epochs(loader, num_epochs, accumulate=accumulate, updates=updates):
            yield PreparedEpoch(self, epoch)

    def prepare(self, *arguments: Any, **keywords: Any) -> Any:
        """As ``Accelerator.prepare``. It also records the models that Accelerate shards with FSDP2, for `epochs`."""
        prepared = super().prepare(*arguments, **keywords)
        for thing in prepared if isinstance(prepared, tuple | list) else (prepared,):
            self._note(thing)
        return prepared

    def prepare_model(self, model: Any, *arguments: Any, **keywords: Any) -> Any:
        """As ``Accelerator.prepare_model``. It also records the model that Accelerate wraps in DDP, for `epochs`."""
        wrapped = super().prepare_model(model, *arguments, **keywords)
        self._note(wrapped)
        return wrapped

    def prepare_data_loader(self, data_loader: Any, *arguments: Any, **keywords: Any) -> Any:
        """As ``Accelerator.prepare_data_loader``. A spare splits the batches by rank only when it iterates the loader.

        In two cases Accelerate needs the rank at once, and a spare waits for it here: with a device mesh, which
        determines the ranks that read the same batches, and with an ``IterableDataset``, which may split by rank.
        """
        is_shared_out_later = self.torch_device_mesh is None and not isinstance(data_loader.dataset, IterableDataset)
        with self.session.pretending() if is_shared_out_later else contextlib.nullcontext():
            return super().prepare_data_loader(data_loader, *arguments, **keywords)

    def _note(self, thing: Any) -> None:
        if isinstance(thing, torch.nn.Module) and not any(thing is known for known in self._wrapped):
            self._wrapped.append(thing)

    def _protected(self) -> dict[str, Any]:
        named = {
            "model": self._wrapped,
            "optimizer": self._optimizers,
            "scheduler": self._schedulers,
            "custom": self._custom_objects,
            "scaler": [] if self.scaler is None else [self.scaler],
        }
        return {key: thing for name, things in named.items() for key, thing in numbered(name, things).items()}


class PreparedEpoch(int):
    """One epoch: an int, its number from 0. `run` executes its remaining steps."""

    _accelerator: KeepstepAccelerator
    _epoch: Epoch

    def __new__(cls, accelerator: KeepstepAccelerator, epoch: Epoch) -> PreparedEpoch:
        prepared = super().__new__(cls, int(epoch))
        prepared._accelerator, prepared._epoch = accelerator, epoch
        return prepared

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # pickled as a plain int

    def run(self, function: Callable[[Step, Any], object]) -> None:
        """Calls a function with each remaining batch. If a step is interrupted, it repeats the calls of that step.

        Args:
            function: the body of a loop over ``enumerate(loader)``. It gets the step, which is an int: the number of
                the batch in the epoch, from 0; and the batch. With gradient accumulation a step consists of several
                calls.
        """
        accumulate = self._accelerator.gradient_accumulation_steps
        with _LoaderState(self._accelerator.gradient_state) as state:
            for step, batches in self._epoch:
                with step:
                    self._accelerator.step = 0  # it counts batches, to know with which one gradients are complete
                    group = batches if accumulate > 1 else [batches]
                    for number, batch in enumerate(group):
                        state.end_of_dataloader = step.is_epoch_end and number == len(group) - 1
                        function(step.numbered(step * accumulate + number), batch)


class _LoaderState:
    """Stands in for the active dataloader in Accelerate's ``GradientState``."""

    def __init__(self, state: GradientState) -> None:
        self._state = state
        self.end_of_dataloader = False
        self.remainder = -1

    def __enter__(self) -> _LoaderState:
        self._state._add_dataloader(self)
        return self

    def __exit__(self, *_error: object) -> None:
        self._state._remove_dataloader(self)
