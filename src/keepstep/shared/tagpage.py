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
    11  awaited     operations for which a thread of the process has begun to wait
    12  came        such operations that have ended
    16  counts      NUM_COUNTS x (sequence, group: 6 words of text, peer, left, operation, entered, entered at)
    784 ring        RING_EVENTS x (time ns, generation, step, phase, entered at)
                    or, for a moment, x (time ns, generation, step, len(PHASES) + index into MOMENTS, bytes)

Behind the page, in the same file, is a stack of the training thread as text, if the agent has asked for one
(`keepstep.shared.tracebacks`).

Each count has its own sequence lock. The page holds the most recently used counts. If a script has more groups and
peers than fit, a new count replaces the least recently used one, of those without operations in flight if possible. The
worker keeps all counts in its own memory, so a count that returns to the page is correct.
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
from keepstep.systemcalls import memory_file

RING_EVENTS = 4096
"""Size of the ring: the last 800 steps with five phase changes each, in 160 KiB. Enough for any recovery."""

PHASES = tuple(Phase)
PHASE_INDEX = {phase: index for index, phase in enumerate(PHASES)}


class SnapshotMoment(enum.StrEnum):
    """Events in the ring besides phase changes. The rank stays in its phase."""

    BEGUN = "snapshot begun"
    COMPLETE = "snapshot complete"
    LOADED = "snapshot loaded"
    REFUSED = "second copy refused"
    """The buddy's node has no memory for the second copy."""
    DOUBLED = "second copy complete"
    """Written only for the first complete second copy after a refused one."""


MOMENTS = tuple(SnapshotMoment)
MOMENT_INDEX = {moment: index for index, moment in enumerate(MOMENTS, len(PHASES))}
"""Moment -> its index in the ring's phase word. The indices follow those of the phases."""
NUM_KINDS = len(PHASES) + len(MOMENTS)
MOST_MOMENTS = 4
"""Most moments between two phase changes: a snapshot that is loaded, and one that begins and completes."""
_SEQUENCE, _GENERATION, _STEP, _PHASE, _SINCE, _PROGRESS, _WAITING, _ENTERED, _LEFT, _WRITTEN = range(10)
_ENTERED_AT, _AWAITED, _CAME = range(10, 13)
_COUNTS = 16
_COUNT = struct.Struct("<q48s5q")
_LEFT_IN, _OPERATION_IN = 8, 9
_WORDS_PER_COUNT = _COUNT.size // 8
NUM_COUNTS = 64
"""Number of counts on the page, in 6 KiB. A job with data, tensor and pipeline parallelism has about ten groups and as
many peers."""
NAME_BYTES = 48
OPERATIONS = tuple(Operation)
_RECV = Operation.RECV
OPERATION_INDEX = {operation: index for index, operation in enumerate(OPERATIONS)}
_RING = _COUNTS + NUM_COUNTS * _WORDS_PER_COUNT
_WORDS_PER_EVENT = 5
EVENT_BYTES = 8 * _WORDS_PER_EVENT
PAGE_BYTES = 8 * (_RING + RING_EVENTS * _WORDS_PER_EVENT)
MAX_STACK_BYTES = 1 << 14
"""How much of a stack is read. A sentence shows its innermost frames, which come first."""


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseEvent:
    """One phase change. Times are on the node's monotonic clock."""

    at_ns: int
    generation: int
    step: int
    phase: Phase
    entered_ns: int = 0
    """When the worker had last begun an operation of a group; 0 if it never has. In a completed backward, the time up
    to then was the worker's own, and the rest was mostly waiting for peers."""


@dataclasses.dataclass(frozen=True, slots=True)
class TagView:
    """The content of the page at one moment."""

    tag: Tag
    since_ns: int
    progress: int
    waiting: bool
    entered: int
    left: int
    awaited: int
    """Number of operations in flight for which a thread of the process waits, or whose state it has queried."""
    events_written: int


def create(name: str) -> int:
    """Creates an empty page and returns its file descriptor, which the caller owns.

    Args:
        name: a name for people, shown in ``/proc/PID/fd`` only. It is no path.
    """
    return memory_file(name, PAGE_BYTES)


def step_durations(events: list[PhaseEvent]) -> list[float]:
    """Returns the duration of each completed step in seconds, from the start of its forward to its end."""
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
    """The worker's side. Only the training thread may call `write`. Any thread may count operations."""

    def __init__(self, descriptor: int) -> None:
        """Maps the page. ``descriptor`` stays the caller's; what comes behind the page needs it open."""
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, PAGE_BYTES)
        self._words = memoryview(self._map).cast("q")
        self._appending = threading.Lock()
        """Guards the ring: the snapshot thread appends moments, the training thread phase changes."""
        self._counting = threading.Lock()
        """Guards the counts: Gloo's threads end operations while the training thread begins others."""
        self._counts: dict[tuple[str, int, bool], _Count] = {}
        """(group, peer, whether it is a recv) -> count."""
        self._placed: list[_Count] = []
        """The counts on the page, in the order of their places."""

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
        """Appends a moment to the ring, without changing the tag. Any thread may call it.

        Args:
            moment: the kind of event.
            generation: generation in which it happened.
            step: step of the snapshot.
            num_bytes: size of the snapshot.
            at_ns: time of the event, in monotonic nanoseconds.
        """
        words = self._words
        with self._appending:
            written = words[_WRITTEN]
            at = _RING + (written % RING_EVENTS) * _WORDS_PER_EVENT
            words[at], words[at + 1], words[at + 2], words[at + 3] = at_ns, generation, step, MOMENT_INDEX[moment]
            words[at + 4] = num_bytes
            words[_WRITTEN] = written + 1

    def progress(self) -> None:
        """Records that the training thread has made progress within its phase."""
        self._words[_PROGRESS] += 1

    def set_waiting(self, waiting: bool) -> None:
        """Records whether the training thread waits for the controller: then a lack of progress is no fault."""
        self._words[_WAITING] = int(waiting)
        self._words[_PROGRESS] += 1

    def operation_entered(self, group: str, operation: Operation, peer: int = ALL_MEMBERS) -> None:
        """Counts an operation of a group that was begun. ``peer`` is as in `OperationCount`."""
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
        """Records that a thread waits for an operation in flight, or queries it. Call it once for each operation."""
        with self._counting:
            self._words[_AWAITED] += 1

    def operation_left(
        self, group: str, operation: Operation, peer: int = ALL_MEMBERS, *, was_awaited: bool = False
    ) -> None:
        """Counts an operation that has ended, with or without an error.

        ``was_awaited``: `operation_awaited` was called for it.
        """
        words = self._words
        with self._counting:
            count = self._counts.get((group, peer, operation is _RECV))
            if count is None:
                return  # it was begun before the groups were reconnected
            count.left += 1
            if count.at:
                words[count.at + _LEFT_IN] = count.left  # without the lock: a write of one word is atomic
            words[_LEFT] += 1
            words[_CAME] += was_awaited
            words[_PROGRESS] += 1

    def _place(self, group: str, operation: Operation, peer: int) -> _Count:
        """Gives a count a place on the page, a free one or that of another count, and returns it."""
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
        """Resets all counts when the groups are reconnected, as every other rank does."""
        words = self._words
        with self._counting:
            words[_ENTERED] = words[_LEFT] = words[_AWAITED] = words[_CAME] = 0
            for count in self._placed:
                words[count.at + 1] = 0  # a place without a name is free
            self._counts.clear()
            self._placed.clear()


class _Count:
    """An `OperationCount` in the worker's memory. ``at`` is the first word of its place on the page; 0: it has none."""

    __slots__ = ("at", "entered", "entered_ns", "left", "operation")

    def __init__(self) -> None:
        self.at = self.operation = self.entered = self.left = self.entered_ns = 0

    @property
    def importance(self) -> tuple[bool, int]:
        """Sort key: the least count loses its place first, one without operations in flight and used longest ago."""
        return self.entered > self.left, self.entered_ns

    def write(self, words: memoryview) -> None:
        """Writes the fields to the page that change when an operation begins."""
        at = self.at
        words[at] += 1
        at += _OPERATION_IN
        words[at], words[at + 1], words[at + 2] = self.operation, self.entered, self.entered_ns
        words[self.at] += 1


def _short(name: str) -> bytes:
    """Encodes a group's name for the page. A long name is cut and ends in its checksum, to stay distinct."""
    encoded = name.encode()
    if len(encoded) <= NAME_BYTES:
        return encoded
    return encoded[: NAME_BYTES - 9].decode(errors="ignore").encode() + b"~%08x" % zlib.crc32(encoded)


class TagReader:
    """The agent's side. It also works when the writer is dead."""

    def __init__(self, descriptor: int) -> None:
        """Maps the page. The caller may close ``descriptor`` afterwards."""
        self._descriptor = os.dup(descriptor)
        self._map = mmap.mmap(descriptor, PAGE_BYTES, prot=mmap.PROT_READ)
        self._words = memoryview(self._map).cast("q")

    def read(self) -> TagView:
        """Returns the content of the page. If the writer died in the middle of a write, the tag is that of the ring."""
        view = self._read()
        for _ in range(64):
            before = self._words[_SEQUENCE]
            view = self._read()
            if before % 2 == 0 and before == self._words[_SEQUENCE]:
                return view
        # The writer died in the middle of a write. The ring still holds the last complete change.
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
        """Returns the counts on the page, most recently used first, without one that the dying writer has torn."""
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
        """Returns the phase changes from number ``written`` on, oldest first, without moments.

        Those that the ring has overwritten are missing.
        """
        words = memoryview(self.copy_since(written)[0]).cast("q")
        return [
            PhaseEvent(words[at], words[at + 1], words[at + 2], PHASES[words[at + 3]], words[at + 4])
            for at in range(0, len(words), _WORDS_PER_EVENT)
            if words[at + 3] < len(PHASES)
        ]

    def copy_since(self, written: int) -> tuple[bytes, int]:
        """Returns the raw records from number ``written`` on, with moments, and the number of the next record."""
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

    def clear_stack(self) -> None:
        """Removes the stack behind the page. A signal's handler writes the next one from there on: both processes
        share the position in the file."""
        os.ftruncate(self._descriptor, PAGE_BYTES)
        os.lseek(self._descriptor, PAGE_BYTES, os.SEEK_SET)

    def stack(self) -> str:
        """Returns the stack behind the page, which is the worker's text; empty if there is none."""
        return os.pread(self._descriptor, MAX_STACK_BYTES, PAGE_BYTES).decode(errors="replace")

    def close(self) -> None:
        """Unmaps the page."""
        self._words.release()
        self._map.close()
        os.close(self._descriptor)
