"""The events of a running job as lines of JSON, for log collectors."""

from __future__ import annotations

import contextlib
import datetime
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import structlog

from keepstep.errors import ConfigurationError
from keepstep.protocol.controller import JournalEntry, relive
from keepstep.protocol.recovery import RecoveryMachine
from keepstep.trace.record.runfolder import RunInfo
from keepstep.trace.timeline.events import ControlEvent, Teller

STDERR = Path("-")
ENDED = "job ended"
_ORDER = ("timestamp", "level", "event", "message", "job", "generation", "rank", "step", "node")


class EventLog:
    """Appends to a log. It lives through the journal's entries once more, as every view does, and tells what it sees.

    Nothing depends on it: a disk that is full ends the log and not the job.
    """

    def __init__(self, path: Path, info: RunInfo) -> None:
        """Opens the log.

        Args:
            path: of the file, which is appended to; `STDERR` for the standard error.
            info: of the run.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        self._path = path
        self._info = info
        self._job = RecoveryMachine(info.settings)
        self._teller = Teller(self._job)
        self._has_ended = False
        try:
            self._file: TextIO | None = sys.stderr if path == STDERR else path.open("a", buffering=1, encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"--log-json {path}: {error.strerror}") from error
        self._logger: structlog.BoundLogger = structlog.wrap_logger(
            structlog.WriteLogger(self._file),
            processors=[structlog.processors.add_log_level, _in_order, structlog.processors.JSONRenderer()],
            wrapper_class=structlog.BoundLogger,
            job=info.run,
        )

    def caught_up(self, entries: list[JournalEntry]) -> None:
        """Lives through what an earlier process has told of already."""
        for entry in entries:
            relive(self._job, entry.event, entry.at_s)
            for _ in self._teller.tell(entry):
                pass

    def decided(self, entries: list[JournalEntry]) -> None:
        """Tells of entries that have just been written into the journal."""
        for entry in entries:
            if self._file is not None:
                relive(self._job, entry.event, entry.at_s)
                for event in self._teller.tell(entry):
                    self._write(event)

    def ended(self, exit_code: int, reason: str, at_ns: int) -> None:
        """The job has ended; what the controller has not told of that is told now, such as a signal to the launcher."""
        if not self._has_ended:
            level = "error" if exit_code else "info"
            self._write(ControlEvent(at_ns / 1e9, ENDED, level, reason, self._job.generation))

    def _write(self, event: ControlEvent) -> None:
        if self._file is None:
            return
        self._has_ended |= event.kind == ENDED
        try:
            getattr(self._logger, event.level)(event.kind, **self._fields(event))
        except OSError as error:
            self.close()
            text = f"keepstep: --log-json {self._path}: logging has stopped, training continues: {error}"
            with contextlib.suppress(OSError):  # it may have been the standard error that failed
                print(text, file=sys.stderr, flush=True)

    def _fields(self, event: ControlEvent) -> dict[str, Any]:
        at = datetime.datetime.fromtimestamp(self._info.unix_ns(event.at_s) / 1e9, datetime.UTC)
        fields: dict[str, Any] = {
            "timestamp": at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "message": event.text,
            "generation": event.generation,
            "rank": event.rank,
            "step": event.step,
            "node": event.node,
        }
        if event.kind == "recovered":
            record = self._job.records[-1]
            fields |= {
                "cause": str(record.cause),
                "ranks": [failure.rank for failure in record.failures],
                "steps_recomputed": record.steps_recomputed,
                "milliseconds": record.milliseconds(),
            }
        return fields

    def close(self) -> None:
        """Ends the log."""
        file, self._file = self._file, None
        if file is not None and file is not sys.stderr:
            with contextlib.suppress(OSError):  # what it could not write it cannot write now, either
                file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _in_order(_logger: object, _name: str, fields: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """The same fields in the same places on each line, what only some have at the end."""
    return {name: fields[name] for name in _ORDER} | dict(fields)
