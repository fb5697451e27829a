"""Keeps the files that Lightning writes, CSV logs and checkpoints, consistent when a step is repeated."""

from __future__ import annotations

import csv
import functools
import json
import os
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from torch import distributed as dist

from keepstep.worker.session import Session

_KEY = "keepstep/lightning/checkpoints"


class RewindableWriter(ExperimentWriter):
    """A writer for ``CSVLogger`` that can remove the rows of a step that is repeated."""

    def __init__(self, log_dir: str, *, is_first: bool) -> None:
        """Args:
        log_dir: folder of the logger.
        is_first: whether this is the first process of the job that writes there. A later process keeps the existing
            file, and writes nothing until `rewind` has set the number of valid rows.
        """
        self._is_first = is_first
        self._is_held = not is_first
        self._num_saved = 0
        super().__init__(log_dir=log_dir)

    def _check_log_dir_exists(self) -> None:
        if self._is_first:
            super()._check_log_dir_exists()

    def save(self) -> None:
        """Appends the new rows to the file."""
        if self._is_held:
            self.metrics.clear()
        self._num_saved += len(self.metrics)
        super().save()

    def position(self) -> dict[str, Any]:
        """The number of rows and their keys. Writes buffered rows to the file first: this process may be lost."""
        if self.metrics:
            self.save()
        return {"rows": self._num_saved, "keys": list(self.metrics_keys)}

    def rewind(self, position: dict[str, Any]) -> None:
        """Truncates the log to a `position` that this or another process returned."""
        self._is_held = False
        self.metrics.clear()
        self.metrics_keys = list(position["keys"])
        self._num_saved = position["rows"]
        path = Path(self.metrics_file_path)
        if not path.exists():
            return
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))[: self._num_saved]
        if not rows:
            path.unlink()
            return
        part = path.with_suffix(".part")
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=self.metrics_keys, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        part.replace(path)


class Logs:
    """The loggers of a trainer.

    A repeated step removes its rows from a ``CSVLogger``. Other loggers get a line only after its step is committed.
    """

    def __init__(self, trainer: Trainer, session: Session) -> None:
        """Makes all ranks, and later replacements, write to the same folder."""
        self._session = session
        self._others = [each for each in trainer.loggers if not isinstance(each, CSVLogger)]
        self._csv = [each for each in trainer.loggers if isinstance(each, CSVLogger)]
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger | TensorBoardLogger):
                logger._version = trainer.strategy.broadcast(logger.version)
        if session.rank == 0:
            for logger in self._csv:
                os.makedirs(logger.root_dir, exist_ok=True)
                is_first = bool(session.once(_name_of(logger.log_dir)))
                logger._experiment = RewindableWriter(logger.log_dir, is_first=is_first)

    def begin(self) -> None:
        """Defers the lines of all loggers but ``CSVLogger``: from now on a step may be repeated."""
        for logger in self._others:
            if hasattr(logger, "log_metrics"):
                logger.log_metrics = functools.partial(self._session.defer, logger.log_metrics)

    def positions(self) -> list[dict[str, Any]]:
        """The positions of this rank's CSV logs."""
        return [each._experiment.position() for each in self._csv if isinstance(each._experiment, RewindableWriter)]

    def rewind(self, positions: list[dict[str, Any]]) -> None:
        """Truncates the CSV logs to positions that `positions` returned."""
        for logger, position in zip(self._csv, positions, strict=False):
            logger._experiment.rewind(position)


def _name_of(log_dir: str) -> str:
    """A name of a log for `Session.once`, which allows 200 characters."""
    return f"keepstep/lightning/log {os.path.abspath(log_dir)[-150:]}"


class WrittenCheckpoints:
    """The new checkpoints that the current unit has written.

    The list is in the job's store, so the replacement of a lost rank 0 can read it. A repeated unit deletes these
    checkpoints first; otherwise Lightning would give the new ones other names (``-v1``).
    """

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._unit = -1

    def about_to_write(self, unit: int, path: str) -> None:
        """Records a checkpoint. Call it before the checkpoint is written."""
        if unit != self._unit:
            self._unit, self._paths = unit, []
        if not os.path.exists(path) and path not in self._paths:
            self._paths.append(path)
            _store().set(_KEY, json.dumps({"unit": unit, "paths": self._paths}))

    def undone(self, unit: int) -> list[str]:
        """The checkpoints that an earlier attempt at a unit wrote."""
        store = _store()
        if not store.check([_KEY]):
            return []
        known = json.loads(store.get(_KEY))
        return [path for path in known["paths"] if os.path.exists(path)] if known["unit"] == unit else []


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def on_rank_zero() -> bool:
    """Whether this process writes files."""
    return bool(rank_zero_only.rank == 0)
