"""The log of phase changes in a run's folder: segments of bounded size, which can be read while they grow.

A segment is a sequence of frames. A frame is a `PhasesObserved` as the agent has sent it. Its records have the layout
of `PHASE_DTYPE`. No decision depends on the log: if the disk is full, logging stops and the job continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator
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
        ("entered_ns", "<i8"),  # when it last began a collective; for a moment, its snapshot's bytes
        ("step", "<i8"),
        ("generation", "<i4"),
        ("worker", "<i4"),
        ("rank", "<i4"),  # the worker's rank when the agent read it; NO_RANK for a spare
        ("phase", "<i4"),  # index into PHASES; from len(PHASES) on a moment, as in MOMENT_INDEX
    ]
)
NO_RANK = -1
PhaseArray = NDArray[np.void]
"""One-dimensional, of `PHASE_DTYPE`."""

SEGMENT_BYTES = 8 << 20
NUM_RECENT = 4
"""Number of newest segments that are kept even without a mark."""
MAX_SEGMENTS = 32
"""256 MiB: a day of 8 ranks at one step per second, or ten minutes of 1,024 ranks at two; marked segments included."""


def from_ring(ring: bytes, worker: int, rank: int | None, offset_ns: int) -> PhaseArray:
    """Converts entries of a tag page's ring buffer to records of the log.

    Args:
        ring: the entries, as `keepstep.shared.tagpage.TagReader.copy_since` returns them.
        worker: number of the page's worker.
        rank: the worker's rank; None for a spare.
        offset_ns: added to times of the node's clock to get the controller's.
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
    """Returns the records of a message as a read-only view of its memory.

    Raises:
        RemoteProtocolError: the message does not contain valid records.
    """
    if len(observed.phases) % PHASE_DTYPE.itemsize:
        raise RemoteProtocolError(f"node {observed.node}: {len(observed.phases)} bytes are no whole records of phases")
    records = np.frombuffer(observed.phases, PHASE_DTYPE)
    if len(records) and not 0 <= records["phase"].min() <= records["phase"].max() < NUM_KINDS:
        raise RemoteProtocolError(f"node {observed.node}: a record names a phase that does not exist")
    return records


def phases_in(records: PhaseArray) -> PhaseArray:
    """Returns the phase changes among records."""
    return records[records["phase"] < len(PHASES)]


def moments_in(records: PhaseArray) -> PhaseArray:
    """Returns the moments among records."""
    return records[records["phase"] >= len(PHASES)]


def segments(folder: Path) -> list[Path]:
    """Returns the paths of all segments, oldest first."""
    return sorted(folder.glob("*.frames"))


class PhaseLog:
    """Writes the log. When it is too large, it removes old segments, those without a mark first."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(0o700, exist_ok=True)
        self._folder = folder
        last = segments(folder)
        self._number = int(last[-1].stem) if last else 0
        self._marked: set[int] = set()
        self._file = -1
        self._size = 0
        self._begin_segment()

    def write(self, observed: PhasesObserved) -> None:
        """Appends the message of a node. When it returns, the operating system has the data."""
        if self._size >= SEGMENT_BYTES:
            self._begin_segment()
        data = frame(observed)
        self._size += len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]

    def mark(self) -> None:
        """Marks the current segment and its neighbours, so that they are kept longest. Call it at a recovery."""
        self._marked |= {self._number - 1, self._number, self._number + 1}

    def close(self) -> None:
        """Closes the current segment."""
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
    """Reads the log while it grows: each call reads up to the present end."""

    folder: Path
    _path: Path | None = None
    _file: int = -1
    _decoder: FrameDecoder = dataclasses.field(default_factory=FrameDecoder)

    def read(self) -> Iterator[tuple[Path, PhasesObserved]]:
        """Yields the messages since the last call, each with the path of its segment.

        Raises:
            RemoteProtocolError: a segment contains another message, or none of this version.
        """
        while True:
            if self._file >= 0:
                yield from self._rest()
            following = next((path for path in segments(self.folder) if self._path is None or path > self._path), None)
            if following is None:
                return
            if self._file >= 0:
                yield from self._rest()  # the last messages before the writer began the new segment
            self._open(following)

    def _rest(self) -> Iterator[tuple[Path, PhasesObserved]]:
        assert self._path is not None
        while data := os.read(self._file, 1 << 20):
            try:
                messages = self._decoder.feed(data)
            except RemoteProtocolError as error:
                raise RemoteProtocolError(f"{self._path}: {error}") from error
            for message in messages:
                if not isinstance(message, PhasesObserved):
                    raise RemoteProtocolError(f"{self._path}: holds {type(message).__name__}, which is no phases")
                yield self._path, message

    def _open(self, path: Path) -> None:
        self.close()
        self._path, self._decoder = path, FrameDecoder()
        with contextlib.suppress(FileNotFoundError):  # the writer has just removed it; continue with the next
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Closes the current segment."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def last_phases(folder: Path, workers: Iterable[int]) -> dict[int, tuple[str, int]]:
    """Returns worker -> its last phase and step, of those that the newest `NUM_RECENT` segments have.

    Raises:
        RemoteProtocolError: a segment contains invalid data.
    """
    left, found = set(workers), dict[int, tuple[str, int]]()
    for path in segments(folder)[: -NUM_RECENT - 1 : -1]:
        if not left:
            break
        records = phases_in(read_segment(path))
        records = records[np.isin(records["worker"], list(left))]
        newest = records[np.argsort(records["at_ns"], kind="stable")][::-1]
        _, first = np.unique(newest["worker"], return_index=True)
        for record in newest[first]:
            found[int(record["worker"])] = str(PHASES[record["phase"]]), int(record["step"])
        left -= found.keys()
    return found


def read_segment(path: Path) -> PhaseArray:
    """Returns all records of one segment; none if it has been removed.

    Raises:
        RemoteProtocolError: the segment contains invalid data.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return np.empty(0, PHASE_DTYPE)
    found = [records_of(message) for message in FrameDecoder().feed(data) if isinstance(message, PhasesObserved)]
    return np.concatenate(found) if found else np.empty(0, PHASE_DTYPE)
