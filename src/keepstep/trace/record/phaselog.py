"""The log of phase changes in a run's folder: segments of frames, bounded in size, readable while they grow.

A frame is a `PhasesObserved` as an agent sent it; its records are laid out as `PHASE_DTYPE`. No decision depends on the
log, so a full disk ends the log and not the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import PhasesObserved
from keepstep.shared.tagpage import EVENT_BYTES, NUM_KINDS, PHASES
from keepstep.transports.framing import FrameDecoder, frame

PHASE_DTYPE = np.dtype(
    [
        ("at_ns", "<i8"),  # when the worker entered the phase, on the controller's monotonic clock
        ("entered_ns", "<i8"),  # when it had last begun a collective; of a moment the bytes of its snapshot
        ("step", "<i8"),
        ("generation", "<i4"),
        ("worker", "<i4"),
        ("rank", "<i4"),  # of the worker when this was gathered; NO_RANK for a spare
        ("phase", "<i4"),  # index into PHASES; from len(PHASES) on a moment, as in MOMENT_INDEX
    ]
)
NO_RANK = -1
PhaseArray = NDArray[np.void]
"""One-dimensional, of `PHASE_DTYPE`."""

SEGMENT_BYTES = 8 << 20
NUM_RECENT = 4
"""The newest so many segments are kept, marked or not."""
MAX_SEGMENTS = 32
"""256 MiB: a day of 8 ranks at a step a second, ten minutes of 1,024 ranks at two; and what was marked before."""


def from_ring(ring: bytes, worker: int, rank: int | None, offset_ns: int) -> PhaseArray:
    """What a tag page's ring holds, as records of the log.

    Args:
        ring: as `keepstep.shared.tagpage.TagReader.copy_since` gives it.
        worker: whose page it is.
        rank: that the worker holds; None for a spare.
        offset_ns: from the node's clock to the controller's.
    """
    words = np.frombuffer(ring, "<i8").reshape(-1, EVENT_BYTES // 8)
    records = np.empty(len(words), PHASE_DTYPE)
    at_ns, generation, step, phase, entered_ns = words.T
    is_time = (entered_ns != 0) & (phase < len(PHASES))
    records["at_ns"], records["entered_ns"] = at_ns + offset_ns, entered_ns + offset_ns * is_time
    records["step"], records["generation"], records["phase"] = step, generation, phase
    records["worker"], records["rank"] = worker, NO_RANK if rank is None else rank
    return records


def records_of(observed: PhasesObserved) -> PhaseArray:
    """The records in a message; they share its memory and cannot be written.

    Raises:
        RemoteProtocolError: they are no records.
    """
    if len(observed.phases) % PHASE_DTYPE.itemsize:
        raise RemoteProtocolError(f"node {observed.node}: {len(observed.phases)} bytes are no whole records of phases")
    records = np.frombuffer(observed.phases, PHASE_DTYPE)
    if len(records) and not 0 <= records["phase"].min() <= records["phase"].max() < NUM_KINDS:
        raise RemoteProtocolError(f"node {observed.node}: a record names a phase that does not exist")
    return records


def phases_in(records: PhaseArray) -> PhaseArray:
    """The phase changes among records."""
    return records[records["phase"] < len(PHASES)]


def moments_in(records: PhaseArray) -> PhaseArray:
    """The moments among records."""
    return records[records["phase"] >= len(PHASES)]


def segments(folder: Path) -> list[Path]:
    """The segments that are there, oldest first."""
    return sorted(folder.glob("*.frames"))


class PhaseLog:
    """Writes the log. When it has grown too large, old segments are removed: first those without a mark."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        last = segments(folder)
        self._number = int(last[-1].stem) if last else 0
        self._marked: set[int] = set()
        self._file = -1
        self._size = 0
        self._begin_segment()

    def write(self, observed: PhasesObserved) -> None:
        """Appends what a node has sent; when this returns it is with the operating system."""
        if self._size >= SEGMENT_BYTES:
            self._begin_segment()
        data = frame(observed)
        self._size += len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]

    def mark(self) -> None:
        """Something happens now that will be looked at: what is around it is kept longest."""
        self._marked |= {self._number - 1, self._number, self._number + 1}

    def close(self) -> None:
        """Ends the log."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _begin_segment(self) -> None:
        self.close()
        self._number += 1
        path = self._folder / f"{self._number:08d}.frames"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = 0
        there = segments(self._folder)
        old = [each for each in there[:-NUM_RECENT] if int(each.stem) not in self._marked]
        old += [each for each in there[:-NUM_RECENT] if int(each.stem) in self._marked]
        for each in old[: max(0, len(there) - MAX_SEGMENTS)]:
            each.unlink(missing_ok=True)


@dataclasses.dataclass(slots=True)
class PhaseTail:
    """Reads the log to its present end, and goes on from there when asked again."""

    folder: Path
    _path: Path | None = None
    _file: int = -1
    _decoder: FrameDecoder = dataclasses.field(default_factory=FrameDecoder)

    def read(self) -> Iterator[tuple[Path, PhasesObserved]]:
        """What has been written since the last call, each message with the segment it lies in.

        Raises:
            RemoteProtocolError: a segment holds something else.
        """
        while True:
            if self._file >= 0:
                yield from self._rest()
            following = next((path for path in segments(self.folder) if self._path is None or path > self._path), None)
            if following is None:
                return
            if self._file >= 0:
                yield from self._rest()  # what was written between the last look and the new segment
            self._open(following)

    def _rest(self) -> Iterator[tuple[Path, PhasesObserved]]:
        assert self._path is not None
        while data := os.read(self._file, 1 << 20):
            for message in self._decoder.feed(data):
                if not isinstance(message, PhasesObserved):
                    raise RemoteProtocolError(f"{self._path}: holds {type(message).__name__}, which is no phases")
                yield self._path, message

    def _open(self, path: Path) -> None:
        self.close()
        self._path, self._decoder = path, FrameDecoder()
        with contextlib.suppress(FileNotFoundError):  # it was removed just now: on to the next one
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Closes the segment that is being read."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_segment(path: Path) -> PhaseArray:
    """All records of one segment; none if it has been removed.

    Raises:
        RemoteProtocolError: it holds something else.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return np.empty(0, PHASE_DTYPE)
    found = [records_of(message) for message in FrameDecoder().feed(data) if isinstance(message, PhasesObserved)]
    return np.concatenate(found) if found else np.empty(0, PHASE_DTYPE)
