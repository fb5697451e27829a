"""The record of the start-up (`keepstep.protocol.recovery.scripts.startup`), in memory or in a file."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path

from keepstep.protocol.messages import StoreAnswered, StoreRequested
from keepstep.protocol.recovery import Stage
from keepstep.protocol.recovery.scripts.startup import StartUp
from keepstep.trace.targets import replacing
from keepstep.transports.framing import FrameDecoder, frame


class StartUpRecord:
    """A `StartUp`, and the file that a controller which is started again reads it from."""

    def __init__(self, path: Path | None = None, *, is_durable: bool = False) -> None:
        """Args:
        path: a file, for a controller that may be started again; read now, and written as results come.
        is_durable: what was written survives the machine too, as for `keepstep.trace.record.journal.Journal`.
        """
        self._is_durable = is_durable
        self._file: int | None = None
        """Its descriptor; closed with this object."""
        if path is None:
            self._start_up = StartUp()
            return
        self._start_up = StartUp(_written(path))
        if path.exists():
            self._take_over(path)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        weakref.finalize(self, os.close, self._file)

    def _take_over(self, path: Path) -> None:
        """Puts a copy in the place of a former controller's file.

        The former controller may only have stood still. It then writes into the file that it has open, which no
        controller reads any more.
        """
        with replacing(path) as file:
            file.writelines(frame(_of(name, value)) for name, value in self._start_up.values.items())
            file.flush()
            os.fsync(file.fileno())

    def starts_over(self, stage: Stage, generation: int) -> bool:
        """As `StartUp.starts_over`; what is dropped goes from the file, too."""
        begins = self._start_up.starts_over(stage, generation)
        if begins and self._file is not None:
            os.truncate(self._file, 0)
        return begins

    def settle(self, *, is_complete: bool) -> list[StoreAnswered]:
        """As `StartUp.settle`."""
        return self._start_up.settle(is_complete=is_complete)

    def request(self, request: StoreRequested, generation: int) -> list[StoreAnswered]:
        """As `StartUp.request`; what is kept is in the file when this returns.

        Raises:
            RemoteProtocolError: it names no key, or several.
        """
        answers = self._start_up.request(request, generation)
        for kept in self._start_up.take_unwritten():
            if self._file is not None:
                self._append(self._file, frame(kept))
        return answers

    def _append(self, file: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
        if self._is_durable:
            os.fdatasync(file)


def _written(path: Path) -> Iterator[StoreRequested]:
    """What a former controller has kept; a torn frame at the end is of a rank that was not answered, and asks again."""
    data = path.read_bytes() if path.exists() else b""
    return (request for request in FrameDecoder().feed(data) if isinstance(request, StoreRequested))


def _of(name: str, value: bytes) -> StoreRequested:
    return StoreRequested(0, 0, 0, "keep", (name,), value)
