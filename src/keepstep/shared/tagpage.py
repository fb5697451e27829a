"""The tag page: a small shared-memory page with a worker's current step and phase.

One process writes it (the worker), one reads it (its agent). Writing costs about a microsecond, needs no thread and no
message, and the page survives the worker: its agent reads there exactly where the worker died. The memory is an
anonymous file that both sides hold open, so it disappears with them.

Layout, little endian, 8-byte words::

    0   sequence    odd while the tag is being written (a sequence lock)
    1   generation
    2   step        signed
    3   phase       index into PHASES
    4   since       monotonic time in nanoseconds of the last change
    5   progress    +1 at every sign of progress of the training thread
    6   waiting     1 while the training thread waits for an order of the controller
    7   entered     operations of process groups begun since the groups were last connected
    8   left        operations ended since then
    9   written     phase events written in all
    10  entered at  monotonic time in nanoseconds at which the last operation was begun
    11  awaited     operations that something in the process has begun to wait for
    12  came        such operations that have ended
    16  counts      NUM_COUNTS x (sequence, group: 6 words of text, peer, left, operation, entered, entered at)
    784 ring        RING_EVENTS x (time ns, generation, step, phase, entered at)
                    or, for a moment, x (time ns, generation, step, len(PHASES) + index into MOMENTS, bytes)

Each count has a sequence lock of its own. The page holds the most recently used counts: if a script has more groups and
peers than fit, a new count replaces the least recently used one (of those without operations in flight, if possible).
The worker keeps all of them, so a count that returns to the page is correct.
"""

from __future__ import annotations

import dataclasses
import enum
import mmap
import os
import struct
import threading
import time
import zlib

from keepstep.protocol.messages import Tag
from keepstep.protocol.phases import Phase
from keepstep.protocol.waiting.operations import ALL_MEMBERS, Operation, OperationCount

RING_EVENTS = 4096
"""At five phase changes a step the last 800 steps: enough for any recovery, in 160 KiB."""

PHASES = tuple(Phase)
PHASE_INDEX = {phase: index for index, phase in enumerate(PHASES)}


class SnapshotMoment(enum.StrEnum):
    """What a ring holds beside phase changes: something happened, and the rank stays in its phase."""

    BEGUN = "snapshot begun"
    COMPLETE = "snapshot complete"
    LOADED = "snapshot loaded"
    REFUSED = "second copy refused"
    """The buddy's node has no memory for it."""
    DOUBLED = "second copy complete"
    """Told of the first one after one that was refused."""


MOMENTS = tuple(SnapshotMoment)
MOMENT_INDEX = {moment: index for index, moment in enumerate(MOMENTS, len(PHASES))}
"""They follow the phases."""
NUM_KINDS = len(PHASES) + len(MOMENTS)
MOST_MOMENTS = 4
"""Between two phase changes at most; a snapshot that is loaded, and one that begins and is complete."""
_SEQUENCE, _GENERATION, _STEP, _PHASE, _SINCE, _PROGRESS, _WAITING, _ENTERED, _LEFT, _WRITTEN = range(10)
_ENTERED_AT, _AWAITED, _CAME = range(10, 13)
_COUNTS = 16
_COUNT = struct.Struct("<q48s5q")
_LEFT_IN, _OPERATION_IN = 8, 9
_WORDS_PER_COUNT = _COUNT.size // 8
NUM_COUNTS = 64
"""A job with data, tensor and pipeline parallelism has about ten groups and as many peers; 6 KiB."""
NAME_BYTES = 48
OPERATIONS = tuple(Operation)
_RECV = Operation.RECV
OPERATION_INDEX = {operation: index for index, operation in enumerate(OPERATIONS)}
_RING = _COUNTS + NUM_COUNTS * _WORDS_PER_COUNT
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
    awaited: int
    """Operations in flight that something in the process waits for, or has asked after."""
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
    """The worker's side. Only the training thread calls `write`; operations are counted from any thread."""

    def __init__(self, descriptor: int) -> None:
        """Maps the page; ``descriptor`` may be closed afterwards."""
        self._map = mmap.mmap(descriptor, PAGE_BYTES)
        self._words = memoryview(self._map).cast("q")
        self._appending = threading.Lock()
        """The thread of the snapshots tells when one is complete."""
        self._counting = threading.Lock()
        """Gloo's threads end operations while the training thread begins others."""
        self._counts: dict[tuple[str, int, bool], _Count] = {}
        """By group, peer, and whether it is a recv."""
        self._placed: list[_Count] = []
        """The counts that have a place on the page, in the order of the places."""

    def write(self, generation: int, step: int, phase: Phase) -> None:
        """Sets the tag and appends the change to the ring."""
        words = self._words
        now_ns = time.monotonic_ns()
        index = PHASE_INDEX[phase]
        with self._appending:
            written = words[_WRITTEN]
            at = _RING + (written % RING_EVENTS) * _WORDS_PER_EVENT
            words[_SEQUENCE] += 1
            words[at], words[at + 1], words[at + 2], words[at + 3] = now_ns, generation, step, index
            words[at + 4] = words[_ENTERED_AT]
            words[_GENERATION], words[_STEP], words[_PHASE], words[_SINCE] = generation, step, index, now_ns
            words[_PROGRESS] += 1
            words[_WRITTEN] = written + 1
            words[_SEQUENCE] += 1

    def moment(self, moment: SnapshotMoment, generation: int, step: int, num_bytes: int, at_ns: int) -> None:
        """Appends a moment to the ring, from any thread; the tag stays.

        Args:
            moment: what happened.
            generation: in which it did.
            step: of the snapshot.
            num_bytes: of the snapshot.
            at_ns: when, in monotonic nanoseconds.
        """
        words = self._words
        with self._appending:
            written = words[_WRITTEN]
            at = _RING + (written % RING_EVENTS) * _WORDS_PER_EVENT
            words[at], words[at + 1], words[at + 2], words[at + 3] = at_ns, generation, step, MOMENT_INDEX[moment]
            words[at + 4] = num_bytes
            words[_WRITTEN] = written + 1

    def progress(self) -> None:
        """The training thread is alive and moved on within its phase."""
        self._words[_PROGRESS] += 1

    def set_waiting(self, waiting: bool) -> None:
        """Whether the training thread waits for the controller, so that standing still is no fault of its own."""
        self._words[_WAITING] = int(waiting)
        self._words[_PROGRESS] += 1

    def operation_entered(self, group: str, operation: Operation, peer: int = ALL_MEMBERS) -> None:
        """An operation of a group was begun. ``peer``: as in `OperationCount`."""
        words = self._words
        with self._counting:
            count = self._counts.get((group, peer, operation is _RECV))
            if count is None or not count.at:
                count = self._place(group, operation, peer)
            count.operation = OPERATION_INDEX[operation]
            count.entered += 1
            count.entered_ns = words[_ENTERED_AT] = time.monotonic_ns()
            count.write(words)
            words[_ENTERED] += 1
            words[_PROGRESS] += 1

    def operation_awaited(self) -> None:
        """Something in the process waits for an operation in flight, or asks after it: once for each operation."""
        with self._counting:
            self._words[_AWAITED] += 1

    def operation_left(
        self, group: str, operation: Operation, peer: int = ALL_MEMBERS, *, was_awaited: bool = False
    ) -> None:
        """An operation ended, well or not; ``was_awaited``: `operation_awaited` was called for it."""
        words = self._words
        with self._counting:
            count = self._counts.get((group, peer, operation is _RECV))
            if count is None:
                return  # it was begun before the groups were reconnected
            count.left += 1
            if count.at:
                words[count.at + _LEFT_IN] = count.left  # one word is never torn
            words[_LEFT] += 1
            words[_CAME] += was_awaited
            words[_PROGRESS] += 1

    def _place(self, group: str, operation: Operation, peer: int) -> _Count:
        """A count with a place on the page: a free one, or another count's."""
        count = self._counts.setdefault((group, peer, operation is _RECV), _Count())
        if len(self._placed) < NUM_COUNTS:
            index = len(self._placed)
            self._placed.append(count)
        else:
            index = min(range(NUM_COUNTS), key=lambda index: self._placed[index].importance)
            self._placed[index].at = 0
            self._placed[index] = count
        count.at = _COUNTS + index * _WORDS_PER_COUNT
        self._words[count.at] += 1
        _COUNT.pack_into(self._map, 8 * count.at, self._words[count.at], _short(group), peer, count.left, 0, 0, 0)
        self._words[count.at] += 1
        return count

    def reset_operations(self) -> None:
        """The groups are reconnected: every count begins again, on every rank."""
        words = self._words
        with self._counting:
            words[_ENTERED] = words[_LEFT] = words[_AWAITED] = words[_CAME] = 0
            for count in self._placed:
                words[count.at + 1] = 0  # a place without a name is free
            self._counts.clear()
            self._placed.clear()


class _Count:
    """An `OperationCount` as its worker keeps it. ``at``: the first word of its place on the page; 0: it has none."""

    __slots__ = ("at", "entered", "entered_ns", "left", "operation")

    def __init__(self) -> None:
        self.at = self.operation = self.entered = self.left = self.entered_ns = 0

    @property
    def importance(self) -> tuple[bool, int]:
        """Which count gives its place away first: one with nothing in flight, used longest ago."""
        return self.entered > self.left, self.entered_ns

    def write(self, words: memoryview) -> None:
        """Shows what has changed with the operation that was begun."""
        at = self.at
        words[at] += 1
        at += _OPERATION_IN
        words[at], words[at + 1], words[at + 2] = self.operation, self.entered, self.entered_ns
        words[self.at] += 1


def _short(name: str) -> bytes:
    """The name of a group as it fits on the page: a long one ends in its checksum, so that two remain apart."""
    encoded = name.encode()
    if len(encoded) <= NAME_BYTES:
        return encoded
    return encoded[: NAME_BYTES - 9].decode(errors="ignore").encode() + b"~%08x" % zlib.crc32(encoded)


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
        last = self.events_since(view.events_written - 1 - MOST_MOMENTS)
        if not last:
            return view
        tag = Tag(last[-1].generation, last[-1].step, last[-1].phase)
        return dataclasses.replace(view, tag=tag, since_ns=last[-1].at_ns)

    def _read(self) -> TagView:
        words = self._words
        tag = Tag(words[_GENERATION], words[_STEP], PHASES[words[_PHASE]])
        waiting = bool(words[_WAITING])
        counts = words[_ENTERED], words[_LEFT], words[_AWAITED] - words[_CAME]
        return TagView(tag, words[_SINCE], words[_PROGRESS], waiting, *counts, words[_WRITTEN])

    def operation_counts(self) -> list[OperationCount]:
        """The counts on the page, the one used last in front. One that its writer was killed in is left out."""
        found = []
        for place in range(NUM_COUNTS):
            at = _COUNTS + place * _WORDS_PER_COUNT
            for _ in range(64):
                sequence = self._words[at]
                _, name, peer, left, operation, entered, entered_ns = _COUNT.unpack_from(self._map, 8 * at)
                if sequence % 2 == 0 and sequence == self._words[at]:
                    if name[0]:
                        group = name.rstrip(b"\0").decode(errors="replace")
                        found.append((entered_ns, OperationCount(group, OPERATIONS[operation], peer, entered, left)))
                    break
        return [count for _, count in sorted(found, key=lambda each: each[0], reverse=True)]

    def events_since(self, written: int) -> list[PhaseEvent]:
        """The phase changes from number ``written`` on, oldest first, without moments.

        Those that the ring has overwritten are missing.
        """
        words = memoryview(self.copy_since(written)[0]).cast("q")
        return [
            PhaseEvent(words[at], words[at + 1], words[at + 2], PHASES[words[at + 3]], words[at + 4])
            for at in range(0, len(words), _WORDS_PER_EVENT)
            if words[at + 3] < len(PHASES)
        ]

    def copy_since(self, written: int) -> tuple[bytes, int]:
        """Phase changes and moments as they lie in the ring, and the number of the next one."""
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
