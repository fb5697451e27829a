"""The record of the start-up (`keepstep.protocol.recovery.scripts.startup`), in memory or in a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from keepstep.errors import ConfigurationError
from keepstep.protocol.messages import StoreAnswered, StoreRequested
from keepstep.protocol.recovery import Stage
from keepstep.protocol.recovery.scripts.startup import StartUp
from keepstep.trace.record.growing import GrowingFile
from keepstep.trace.targets import replacing
from keepstep.transports.framing import frame, messages_in, not_ours


class StartUpRecord:
    """A `StartUp`, with a file from which a restarted controller reads it."""

    def __init__(self, path: Path | None = None, *, is_durable: bool = False) -> None:
        """Args:
        path: file for a controller that may be restarted. It is read now, and written with each kept value.
        is_durable: whether the file survives a crash of the machine, as for `keepstep.trace.record.journal.Journal`.

        Raises:
            ConfigurationError: the file is not one that this version writes. It stays as it is.
        """
        self._file: GrowingFile | None = None
        if path is None:
            self._start_up = StartUp()
            return
        self._start_up = StartUp(_written(path))
        if path.exists():
            self._take_over(path)
        self._file = GrowingFile(path, is_durable=is_durable)

    def _take_over(self, path: Path) -> None:
        """Replaces the file of a former controller by a copy.

        The former controller may be stopped, not dead. If it continues, it writes to its open file, which no controller
        reads any more.
        """
        with replacing(path, is_private=True) as file:
            file.writelines(frame(_of(name, value)) for name, value in self._start_up.values.items())
            file.flush()
            os.fsync(file.fileno())

    def starts_over(self, stage: Stage, generation: int) -> bool:
        """Does the same as `StartUp.starts_over`, and also empties the file."""
        begins = self._start_up.starts_over(stage, generation)
        if begins and self._file is not None:
            self._file.empty()
        return begins

    def settle(self, *, is_complete: bool) -> list[StoreAnswered]:
        """Does the same as `StartUp.settle`."""
        return self._start_up.settle(is_complete=is_complete)

    def request(self, request: StoreRequested, generation: int) -> list[StoreAnswered]:
        """Does the same as `StartUp.request`. When it returns, kept values are in the file, or that is given up.

        Raises:
            RemoteProtocolError: the request names no key, or several.
        """
        answers = self._start_up.request(request, generation)
        for kept in self._start_up.take_unwritten():
            if self._file is not None:
                self._file.append(frame(kept))
        return answers

    @property
    def error(self) -> OSError | None:
        """Why the file was given up; None if there is none, or it was not."""
        return None if self._file is None else self._file.error

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def _written(path: Path) -> Iterator[StoreRequested]:
    """Yields the requests in the file. Ignores an incomplete last frame: its rank got no answer, and asks again."""
    for request in messages_in(path):
        if not isinstance(request, StoreRequested) or request.operation != "keep" or len(request.keys) != 1:
            raise ConfigurationError(not_ours(path, f"it holds {type(request).__name__}, which keeps no value"))
        yield request


def _of(name: str, value: bytes) -> StoreRequested:
    return StoreRequested(0, 0, 0, "keep", (name,), value)
