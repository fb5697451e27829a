"""The Trainer's batches by number, so that it can skip the first batches of an epoch without reading them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from keepstep.worker.loop.reading import Reading


class StepData(Dataset[Any]):
    """The batches of the current epoch, by number."""

    def __init__(self, dataset: Any, reading: Reading) -> None:
        self._dataset, self.reading = dataset, reading
        self.epoch = 0

    def __len__(self) -> int:
        """Number of samples in the user's dataset, as the Trainer expects; not the number of batches."""
        return len(self._dataset)

    def __getitem__(self, number: int) -> Any:
        return self.reading.read(self.epoch, number)


class _Numbers(Sampler[list[int]]):
    """The numbers of an epoch's batches."""

    def __init__(self, data: StepData) -> None:
        self._data = data

    def __len__(self) -> int:
        return self._data.reading.steps_per_epoch

    def __iter__(self) -> Any:
        return iter([[number] for number in range(len(self))])

    def set_epoch(self, epoch: int) -> None:
        """Selects the epoch whose batches are read from now on."""
        self._data.epoch = epoch


class EpochLoader(DataLoader[Any]):
    """A loader of the Trainer's batches. The Trainer can skip the first ones without reading them."""

    def __init__(self, data: StepData) -> None:
        super().__init__(data, batch_sampler=_Numbers(data), collate_fn=_only)

    def set_epoch(self, epoch: int) -> None:
        """As `_Numbers.set_epoch`."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]  # it was given one


def _only(batches: list[Any]) -> Any:
    (batch,) = batches
    return batch
