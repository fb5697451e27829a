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
"""Records; 80 MB."""
LEAD_NS = 60_000_000_000
"""How far before a window the last change of each worker is looked for."""


@dataclasses.dataclass(slots=True)
class _Chunk:
    """One segment of the log: its records, unless there are too many in memory, and the time that they span."""

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
    """Follows a log of phases."""

    def __init__(self, folder: Path) -> None:
        self._tail = PhaseTail(folder)
        self._chunks: list[_Chunk] = []
        self.error_ns: dict[str, int] = {}
        """node -> how far its times may be from the controller's, either way."""

    def poll(self) -> PhaseArray:
        """Reads what is new and returns it, phase changes and moments, by time of arrival.

        Raises:
            RemoteProtocolError: the log holds something else.
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
        """The time of the newest change; 0 while there is none."""
        return max((chunk.end_ns for chunk in self._chunks), default=0)

    @property
    def num(self) -> int:
        """How many records the log still has."""
        return sum(chunk.num for chunk in self._chunks)

    def window(self, begin_ns: int, end_ns: int, lead: bool = True) -> PhaseArray:
        """The changes in a stretch of time, by time.

        Args:
            begin_ns: its beginning.
            end_ns: its end, which does not belong to it.
            lead: whether the last change of each worker before it belongs to it as well: what it was in when it began.
        """
        found = phases_in(self._between(begin_ns - LEAD_NS if lead else begin_ns, end_ns))
        if not lead or not len(found):
            return found
        first = int(np.searchsorted(found["at_ns"], begin_ns))
        _, from_the_end = np.unique(found["worker"][:first][::-1], return_index=True)
        return np.concatenate([found[np.sort(first - 1 - from_the_end)], found[first:]])

    def records(self, begin_ns: int, end_ns: int) -> PhaseArray:
        """What `window` and `moments` have, by time."""
        found = np.concatenate([self.window(begin_ns, end_ns), self.moments(begin_ns, end_ns)])
        return found[np.argsort(found["at_ns"], kind="stable")]

    def moments(self, begin_ns: int, end_ns: int) -> PhaseArray:
        """The moments in a stretch of time, by time; its end does not belong to it."""
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
        """All changes, stretch of time by stretch of time, each by time and with about ``num`` of them."""
        chunks = [chunk for chunk in self._chunks if chunk.num]
        if not chunks:
            return
        begin_ns, end_ns = min(chunk.begin_ns for chunk in chunks), self.end_ns + 1
        step_ns = -(-(end_ns - begin_ns) * num // max(num, self.num))
        for at_ns in range(begin_ns, end_ns, step_ns):
            yield self.window(at_ns, min(at_ns + step_ns, end_ns), lead=False)

    def newest(self, num: int) -> PhaseArray:
        """About so many of the newest changes, by time."""
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
