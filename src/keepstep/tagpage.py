"""The tag page: a small shared-memory page in which a worker says where it is.

One process writes it (the worker), one reads it (its agent). Writing costs about a microsecond, needs no thread and
no message, and the page is still there after the worker was killed: its agent reads from it exactly where the worker
died. The memory is an anonymous file that both sides hold open, so nothing is left behind whatever dies.

Layout, little endian, 8-byte words::

    0   sequence    odd while the tag is being written (a sequence lock)
    1   generation
    2   step        signed
    3   phase       index into PHASES
    4   since       monotonic time in nanoseconds of the last change
    5   progress    +1 at every sign of life of the training thread
    6   waiting     1 while the training thread waits for an order of the controller
    7   entered     collectives begun since the groups were last connected
    8   left        collectives ended since then
    9   written     phase events written in all
    10  entered at  monotonic time in nanoseconds at which the last collective was begun
    16  ring        RING_EVENTS x (time ns, generation, step, phase, entered at)
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import time

from keepstep.protocol.messages import Tag
from keepstep.protocol.phases import Phase

RING_EVENTS = 4096
"""At five phase changes a step the last 800 steps: enough for any recovery, in 160 KiB."""

PHASES = tuple(Phase)
PHASE_INDEX = {phase: index for index, phase in enumerate(PHASES)}
_SEQUENCE, _GENERATION, _STEP, _PHASE, _SINCE, _PROGRESS, _WAITING, _ENTERED, _LEFT, _WRITTEN = range(10)
_ENTERED_AT = 10
_RING = 16
_WORDS_PER_EVENT = 5
EVENT_BYTES = 8 * _WORDS_PER_EVENT
PAGE_BYTES = 8 * (_RING + RING_EVENTS * _WORDS_PER_EVENT)


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseEvent:
    """One phase change. Times are on the node's monotonic clock."""

    at_ns: int
    generation: int
    step: int
    phase: Phase
    entered_ns: int = 0
    """When the worker had last begun a collective. In a backward that has ended, the time up to there was its own, and
    what followed was mostly waiting for peers. 0: it never has."""


@dataclasses.dataclass(frozen=True, slots=True)
class TagView:
    """The page at one moment."""

    tag: Tag
    since_ns: int
    progress: int
    waiting: bool
    entered: int
    left: int
    events_written: int


def create(name: str) -> int:
    """Makes an empty page and returns its file descriptor, which the caller owns.

    Args:
        name: shows in ``/proc/PID/fd`` only; it is no path and nothing can open it by it.
    """
    descriptor = os.memfd_create(f"keepstep-{name}", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, PAGE_BYTES)
    return descriptor


def step_durations(events: list[PhaseEvent]) -> list[float]:
    """How long each completed step took, in seconds, from entering its forward to its end."""
    durations = []
    begun: PhaseEvent | None = None
    for event in events:
        if event.phase is Phase.FORWARD and (
            begun is None or (begun.step, begun.generation) != (event.step, event.generation)
        ):
            begun = event
        elif event.phase is Phase.UPDATED and begun is not None and begun.step == event.step:
            durations.append((event.at_ns - begun.at_ns) / 1e9)
            begun = None
    return durations


class TagWriter:
    """The worker's side. Only the training thread calls `write`; the counters may be moved from any thread."""

    def __init__(self, descriptor: int) -> None:
        """Maps the page; ``descriptor`` may be closed afterwards."""
        self._map = mmap.mmap(descriptor, PAGE_BYTES)
        self._words = memoryview(self._map).cast("q")

    def write(self, generation: int, step: int, phase: Phase) -> None:
        """Sets the tag and appends the change to the ring."""
        words = self._words
        now_ns = time.monotonic_ns()
        index = PHASE_INDEX[phase]
        written = words[_WRITTEN]
        at = _RING + (written % RING_EVENTS) * _WORDS_PER_EVENT
        words[_SEQUENCE] += 1
        words[at], words[at + 1], words[at + 2], words[at + 3] = now_ns, generation, step, index
        words[at + 4] = words[_ENTERED_AT]
        words[_GENERATION], words[_STEP], words[_PHASE], words[_SINCE] = generation, step, index, now_ns
        words[_PROGRESS] += 1
        words[_WRITTEN] = written + 1
        words[_SEQUENCE] += 1

    def progress(self) -> None:
        """The training thread is alive and moved on within its phase."""
        self._words[_PROGRESS] += 1

    def set_waiting(self, waiting: bool) -> None:
        """Whether the training thread waits for the controller, so that standing still is no fault of its own."""
        self._words[_WAITING] = int(waiting)
        self._words[_PROGRESS] += 1

    def collective_entered(self) -> None:
        """A collective was begun."""
        self._words[_ENTERED_AT] = time.monotonic_ns()
        self._words[_ENTERED] += 1
        self._words[_PROGRESS] += 1

    def collective_left(self) -> None:
        """A collective ended, well or not."""
        self._words[_LEFT] += 1
        self._words[_PROGRESS] += 1

    def reset_collectives(self) -> None:
        """The groups are connected anew: the count begins again on every rank."""
        self._words[_ENTERED] = self._words[_LEFT] = 0


class TagReader:
    """The agent's side; still works when the writer is dead."""

    def __init__(self, descriptor: int) -> None:
        """Maps the page; ``descriptor`` may be closed afterwards."""
        self._map = mmap.mmap(descriptor, PAGE_BYTES, prot=mmap.PROT_READ)
        self._words = memoryview(self._map).cast("q")

    def read(self) -> TagView:
        """The page as it stands. A page torn by its writer's death is read as it is after a few tries."""
        view = self._read()
        for _ in range(64):
            before = self._words[_SEQUENCE]
            view = self._read()
            if before % 2 == 0 and before == self._words[_SEQUENCE]:
                return view
        # Its writer died in the middle of a write: the ring still holds the last whole change.
        last = self.events_since(view.events_written - 1)
        if not last:
            return view
        tag = Tag(last[-1].generation, last[-1].step, last[-1].phase)
        return dataclasses.replace(view, tag=tag, since_ns=last[-1].at_ns)

    def _read(self) -> TagView:
        words = self._words
        tag = Tag(words[_GENERATION], words[_STEP], PHASES[words[_PHASE]])
        waiting = bool(words[_WAITING])
        return TagView(tag, words[_SINCE], words[_PROGRESS], waiting, words[_ENTERED], words[_LEFT], words[_WRITTEN])

    def events_since(self, written: int) -> list[PhaseEvent]:
        """The phase changes from number ``written`` on, oldest first; those the ring has overwritten are missing."""
        words = memoryview(self.copy_since(written)[0]).cast("q")
        return [
            PhaseEvent(words[at], words[at + 1], words[at + 2], PHASES[words[at + 3]], words[at + 4])
            for at in range(0, len(words), _WORDS_PER_EVENT)
        ]

    def copy_since(self, written: int) -> tuple[bytes, int]:
        """The same as they lie in the ring, and the number of the next one."""
        end = self._words[_WRITTEN]
        first = max(written, end - RING_EVENTS + 1, 0)
        slots = [number % RING_EVENTS for number in (first, end)]
        if first >= end:
            return b"", end
        if slots[0] < slots[1]:
            return self._slots(slots[0], slots[1]), end
        return self._slots(slots[0], RING_EVENTS) + self._slots(0, slots[1]), end

    def _slots(self, first: int, end: int) -> bytes:
        return self._words[_RING + first * _WORDS_PER_EVENT : _RING + end * _WORDS_PER_EVENT].tobytes()

    def close(self) -> None:
        """Unmaps the page."""
        self._words.release()
        self._map.close()
