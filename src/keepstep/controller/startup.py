"""What the ranks exchanged while they started together, for the start-up of a replacement.

Each rank hands over what its operations gave it before it says that it stands at its first step. So when all ranks
have come there the record is complete, and a replacement that asks earlier waits. When all ranks are started anew they
exchange other things, and the record of their former start is dropped.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import StoreAnswered, StoreRequested
from keepstep.trace.targets import replacing
from keepstep.transports.framing import FrameDecoder, frame

OPERATIONS = ("keep", "kept")
"""The operations of a `StoreRequested` that are answered here: to keep a value, and to ask for what was kept."""
MAX_KEPT_BYTES = 256 << 20
"""From all ranks together: 2.5 KiB from each of 100,000. What comes beyond it is not kept, and its rank says so."""


class StartUpRecord:
    """Values by name, from all ranks of one start-up, and the requests that wait until it is complete."""

    def __init__(self, path: Path | None = None, *, is_durable: bool = False) -> None:
        """Args:
        path: a file, for a controller that may be started again; read now, and written as results come.
        is_durable: what was written survives the machine too, as for `keepstep.trace.record.journal.Journal`.
        """
        self._is_durable = is_durable
        self._kept: dict[str, bytes] = {}
        self._num_bytes = 0
        self._is_complete = False
        self._waiting: dict[tuple[int, int], StoreRequested] = {}
        if path is not None and path.exists():
            self._take_over(path)
        self._file: int | None = None
        """Its descriptor; closed with this object."""
        if path is not None:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            weakref.finalize(self, os.close, self._file)

    def _take_over(self, path: Path) -> None:
        """Reads a former controller's file, and puts a copy in its place.

        The former controller may only have stood still. It then writes into the file that it has open, which no
        controller reads any more.
        """
        # A torn frame at the end stays in the decoder: its rank was not answered, and asks again.
        for request in FrameDecoder().feed(path.read_bytes()):
            if isinstance(request, StoreRequested):
                self._keep(request)
        with replacing(path) as file:
            file.writelines(frame(_of(name, value)) for name, value in self._kept.items())
            file.flush()
            os.fsync(file.fileno())

    def start_anew(self) -> None:
        """All ranks start, and what those of an earlier start exchanged counts no more, be it complete or not."""
        self._kept, self._num_bytes = {}, 0
        if self._file is not None:
            os.truncate(self._file, 0)

    def settle(self, *, is_complete: bool) -> list[StoreAnswered]:
        """Takes note of whether all ranks have come to their first step; returns answers to those who waited for it."""
        self._is_complete = is_complete
        if not is_complete or not self._waiting:
            return []
        answers = [self._answer(request) for request in self._waiting.values()]
        self._waiting.clear()
        return answers

    def request(self, request: StoreRequested, generation: int) -> list[StoreAnswered]:
        """Carries out one request; one that came before is carried out again, to the same end.

        Args:
            request: with one of `OPERATIONS`.
            generation: the present one.

        Raises:
            RemoteProtocolError: it names no key, or several.
        """
        if len(request.keys) != 1:
            raise RemoteProtocolError(f"worker {request.worker}: {request.operation!r} names {len(request.keys)} keys")
        if request.operation == "kept":
            if self._is_complete:
                return [self._answer(request)]
            self._waiting[request.worker, request.request] = request
            return []
        if request.generation != generation or self._is_complete:
            return [StoreAnswered(request.worker, request.request, None, "")]
        is_kept = self._keep(request)
        if is_kept and self._file is not None:
            self._append(self._file, frame(request))
        return [StoreAnswered(request.worker, request.request, (b"1" if is_kept else b"0",), "")]

    def _keep(self, request: StoreRequested) -> bool:
        name = request.keys[0]
        num_bytes = self._num_bytes + len(request.value) - len(self._kept.get(name, b""))
        if num_bytes > MAX_KEPT_BYTES:
            return False
        self._kept[name], self._num_bytes = request.value, num_bytes
        return True

    def _append(self, file: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
        if self._is_durable:
            os.fdatasync(file)

    def _answer(self, request: StoreRequested) -> StoreAnswered:
        """What was kept under the name; nothing where that is nothing."""
        value = self._kept.get(request.keys[0])
        return StoreAnswered(request.worker, request.request, () if value is None else (value,), "")


def _of(name: str, value: bytes) -> StoreRequested:
    return StoreRequested(0, 0, 0, "keep", (name,), value)
