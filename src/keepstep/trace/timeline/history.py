"""All recorded phase changes and snapshot events of a run; older ones are read on demand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from keepstep.protocol.messages import PhasesObserved
from keepstep.trace.record.phaselog import (
    PHASE_DTYPE,
    PhaseArray,
    PhaseTail,
    moments_in,
    phases_in,
    read_segment,
    records_of,
)

IN_MEMORY = 2_000_000
"""Maximum number of records in memory, 80 MB."""
LEAD_NS = 60_000_000_000
"""How far before a window `PhaseHistory.window` looks for the last change of each worker."""


@dataclasses.dataclass(slots=True)
class _Chunk:
    """One segment of the log and the time that it spans. ``parts`` is None if its records are not in memory."""

    path: Path
    parts: list[PhaseArray] | None
    num: int = 0
    begin_ns: int = 0
    end_ns: int = 0

    def add(self, records: PhaseArray) -> None:
        assert self.parts is not None
        first, last = int(records["at_ns"].min()), int(records["at_ns"].max())
        self.begin_ns = min(self.begin_ns, first) if self.num else first
        self.end_ns = max(self.end_ns, last)
        self.num += len(records)
        self.parts.append(records)

    def records(self) -> PhaseArray:
        if self.parts is None:
            return read_segment(self.path)
        if len(self.parts) > 1:
            self.parts = [np.concatenate(self.parts)]
        return self.parts[0] if self.parts else np.empty(0, PHASE_DTYPE)


class PhaseHistory:
    """All records of a phase log, which may still grow."""

    def __init__(self, folder: Path) -> None:
        self._tail = PhaseTail(folder)
        self._chunks: list[_Chunk] = []
        self.error_ns: dict[str, int] = {}
        """node -> maximum error of its times relative to the controller's clock, either way."""

    def poll(self) -> PhaseArray:
        """Reads the new records. Returns them, phase changes and moments, in order of arrival.

        Raises:
            RemoteProtocolError: the log contains invalid data.
        """
        found: list[PhaseArray] = []
        for path, message in self._tail.read():
            found.append(self._take(path, message))
        self._forget()
        return np.concatenate(found) if found else np.empty(0, PHASE_DTYPE)

    def _take(self, path: Path, message: PhasesObserved) -> PhaseArray:
        records = records_of(message)
        self.error_ns[message.node] = message.error_ns
        if not self._chunks or self._chunks[-1].path != path:
            self._chunks.append(_Chunk(path, []))
        if len(records):
            self._chunks[-1].add(records)
        return records

    def _forget(self) -> None:
        in_memory = 0
        for chunk in reversed(self._chunks):
            if chunk.parts is not None:
                in_memory += chunk.num
                if in_memory > IN_MEMORY and chunk is not self._chunks[-1]:
                    chunk.parts = None

    @property
    def end_ns(self) -> int:
        """Time of the newest record; 0 if there is none."""
        return max((chunk.end_ns for chunk in self._chunks), default=0)

    @property
    def num(self) -> int:
        """Number of records read so far."""
        return sum(chunk.num for chunk in self._chunks)

    def window(self, begin_ns: int, end_ns: int, lead: bool = True) -> PhaseArray:
        """Returns the phase changes in a time window, sorted by time.

        Args:
            begin_ns: its start.
            end_ns: its end (exclusive).
            lead: whether to include each worker's last change before the window, which is its phase at the start.
        """
        found = phases_in(self._between(begin_ns - LEAD_NS if lead else begin_ns, end_ns))
        if not lead or not len(found):
            return found
        first = int(np.searchsorted(found["at_ns"], begin_ns))
        _, from_the_end = np.unique(found["worker"][:first][::-1], return_index=True)
        return np.concatenate([found[np.sort(first - 1 - from_the_end)], found[first:]])

    def records(self, begin_ns: int, end_ns: int) -> PhaseArray:
        """Returns the records of `window` and `moments`, sorted by time."""
        found = np.concatenate([self.window(begin_ns, end_ns), self.moments(begin_ns, end_ns)])
        return found[np.argsort(found["at_ns"], kind="stable")]

    def moments(self, begin_ns: int, end_ns: int) -> PhaseArray:
        """Returns the moments in a time window, sorted by time. The end is exclusive."""
        return moments_in(self._between(begin_ns, end_ns))

    def _between(self, begin_ns: int, end_ns: int) -> PhaseArray:
        parts = []
        for chunk in self._chunks:
            if chunk.num and chunk.begin_ns < end_ns and chunk.end_ns >= begin_ns:
                records = chunk.records()
                parts.append(records[(records["at_ns"] >= begin_ns) & (records["at_ns"] < end_ns)])
        if not parts:
            return np.empty(0, PHASE_DTYPE)
        found = np.concatenate(parts)
        return found[np.argsort(found["at_ns"], kind="stable")]

    def in_turn(self, num: int = 500_000) -> Iterator[PhaseArray]:
        """Yields all phase changes in consecutive time windows of about ``num`` changes, each sorted by time."""
        chunks = [chunk for chunk in self._chunks if chunk.num]
        if not chunks:
            return
        begin_ns, end_ns = min(chunk.begin_ns for chunk in chunks), self.end_ns + 1
        step_ns = -(-(end_ns - begin_ns) * num // max(num, self.num))
        for at_ns in range(begin_ns, end_ns, step_ns):
            yield self.window(at_ns, min(at_ns + step_ns, end_ns), lead=False)

    def newest(self, num: int) -> PhaseArray:
        """Returns up to ``num`` of the newest phase changes, sorted by time."""
        parts: list[PhaseArray] = []
        for chunk in reversed(self._chunks):
            parts.insert(0, phases_in(chunk.records()))
            if sum(len(part) for part in parts) >= num:
                break
        if not parts:
            return np.empty(0, PHASE_DTYPE)
        found = np.concatenate(parts)
        return found[np.argsort(found["at_ns"], kind="stable")][-num:]

    def close(self) -> None:
        """Closes the log."""
        self._tail.close()
