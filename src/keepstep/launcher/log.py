"""The events of a running job as lines of JSON, for log collectors."""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from keepstep.errors import ConfigurationError
from keepstep.protocol.controller import JournalEntry, relive
from keepstep.protocol.recovery import RecoveryMachine
from keepstep.trace.record.runfolder import RunInfo
from keepstep.trace.timeline.events import ControlEvent, Teller

STDERR = Path("-")
ENDED = "job ended"


class EventLog:
    """Appends the job's events to a log. Like every view, it replays the journal and derives the events from it.

    The job does not depend on it: if the disk is full, logging stops and the job continues.
    """

    def __init__(self, path: Path, info: RunInfo) -> None:
        """Opens the log.

        Args:
            path: the file to which it appends; `STDERR` is the standard error.
            info: description of the run.

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

    def caught_up(self, entries: list[JournalEntry]) -> None:
        """Replays entries that an earlier process has logged already, without logging them again."""
        for entry in entries:
            relive(self._job, entry.event, entry.at_s)
            for _ in self._teller.tell(entry):
                pass

    def decided(self, entries: list[JournalEntry]) -> None:
        """Logs the events of entries that the controller has just written to the journal."""
        for entry in entries:
            if self._file is not None:
                relive(self._job, entry.event, entry.at_s)
                for event in self._teller.tell(entry):
                    self._write(event)

    def ended(self, exit_code: int, reason: str, at_ns: int) -> None:
        """Logs the end of the job, unless that was logged from the journal.

        The journal does not have it if a signal has ended the launcher.

        Args:
            exit_code: the job's exit code.
            reason: why it has ended.
            at_ns: when, on the job's clock.
        """
        if not self._has_ended:
            level = "error" if exit_code else "info"
            self._write(ControlEvent(at_ns / 1e9, ENDED, level, reason, self._job.generation))

    def _write(self, event: ControlEvent) -> None:
        if self._file is None:
            return
        self._has_ended |= event.kind == ENDED
        try:
            self._file.write(json.dumps(self._fields(event)) + "\n")
            self._file.flush()
        except OSError as error:
            self.close()
            text = f"keepstep: --log-json {self._path}: logging has stopped, training continues: {error}"
            with contextlib.suppress(OSError):  # the log may be the standard error itself
                print(text, file=sys.stderr, flush=True)

    def _fields(self, event: ControlEvent) -> dict[str, Any]:
        at = datetime.datetime.fromtimestamp(self._info.unix_ns(event.at_s) / 1e9, datetime.UTC)
        fields: dict[str, Any] = {
            "timestamp": at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": event.level,
            "event": event.kind,
            "message": event.text,
            "job": self._info.run,
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
        """Stops logging and closes the file."""
        file, self._file = self._file, None
        if file is not None and file is not sys.stderr:
            with contextlib.suppress(OSError):  # an earlier write has failed and was reported
                file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
