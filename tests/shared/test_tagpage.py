"""The tag page: one process writes, another reads, whatever happens to the writer."""

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import astuple

from keepstep.protocol.messages import Tag
from keepstep.protocol.phases import Phase
from keepstep.protocol.waiting.operations import ALL_MEMBERS, ANY_MEMBER, Operation, OperationCount
from keepstep.shared import tagpage
from keepstep.shared.tagpage import (
    NAME_BYTES,
    NUM_COUNTS,
    PAGE_BYTES,
    PHASES,
    RING_EVENTS,
    PhaseEvent,
    SnapshotMoment,
    TagReader,
    TagView,
    TagWriter,
)

NUM_WRITES = 6_000
DEADLINE_S = 60.0


@contextmanager
def page() -> Iterator[int]:
    descriptor = tagpage.create("test")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.fixture
def both() -> Iterator[tuple[TagWriter, TagReader]]:
    with page() as descriptor:
        writer, reader = TagWriter(descriptor), TagReader(descriptor)
    yield writer, reader
    reader.close()


# ---- one process ----------------------------------------------------------------------------------------------------


def test_an_empty_page_says_starting(both: tuple[TagWriter, TagReader]) -> None:
    view = both[1].read()
    assert view == TagView(Tag(0, 0, Phase.STARTING), 0, 0, False, 0, 0, 0, 0)
    assert both[1].events_since(0) == []


def test_what_is_written_is_read(both: tuple[TagWriter, TagReader]) -> None:
    writer, reader = both
    for generation, step, phase in ((0, -1, Phase.UPDATED), (1, 0, Phase.FORWARD), (1 << 40, 1 << 50, Phase.SYNCED)):
        writer.write(generation, step, phase)
        assert reader.read().tag == Tag(generation, step, phase)
    events = reader.events_since(0)
    assert [(event.generation, event.step, event.phase) for event in events] == [
        (0, -1, Phase.UPDATED),
        (1, 0, Phase.FORWARD),
        (1 << 40, 1 << 50, Phase.SYNCED),
    ]
    assert reader.read().since_ns == events[-1].at_ns
    assert [event.at_ns for event in events] == sorted(event.at_ns for event in events)
    assert reader.events_since(2) == events[2:]
    assert reader.events_since(3) == []


def test_every_phase_has_a_number_of_its_own(both: tuple[TagWriter, TagReader]) -> None:
    writer, reader = both
    assert len(PHASES) == len(set(Phase)) == 6
    for phase in Phase:
        writer.write(1, 1, phase)
        assert reader.read().tag.phase is phase


def test_signs_of_life_and_collectives_are_counted(both: tuple[TagWriter, TagReader]) -> None:
    writer, reader = both

    def counts() -> tuple[int, bool, int, int, int, int]:
        view = reader.read()
        return view.progress, view.waiting, view.entered, view.left, view.awaited, view.events_written

    writer.write(1, 1, Phase.FORWARD)
    assert counts() == (1, False, 0, 0, 0, 1)
    writer.progress()
    writer.operation_entered("world", Operation.ALL_REDUCE)
    writer.operation_entered("world", Operation.ALL_REDUCE)
    writer.operation_awaited()
    assert counts() == (4, False, 2, 0, 1, 1)
    writer.operation_left("world", Operation.ALL_REDUCE, was_awaited=True)
    assert counts() == (5, False, 2, 1, 0, 1)
    writer.set_waiting(True)
    assert counts() == (6, True, 2, 1, 0, 1)
    writer.set_waiting(False)
    writer.reset_operations()
    assert counts() == (7, False, 0, 0, 0, 1)


def test_the_ring_wraps_and_keeps_the_newest(both: tuple[TagWriter, TagReader]) -> None:
    writer, reader = both
    num = 2 * RING_EVENTS + 123
    for step in range(num):
        writer.write(1, step, PHASES[step % 6])
    events = reader.events_since(0)
    assert [event.step for event in events] == list(range(num - RING_EVENTS + 1, num))
    assert all(event.phase is PHASES[event.step % 6] for event in events)
    assert [event.step for event in reader.events_since(num - 2)] == [num - 2, num - 1]
    assert reader.read().events_written == num


def test_moments_lie_among_the_phases_and_leave_the_tag_alone(both: tuple[TagWriter, TagReader]) -> None:
    writer, reader = both
    writer.write(1, 3, Phase.UPDATED)
    writer.moment(SnapshotMoment.BEGUN, 1, 4, 1 << 40, 77)
    before = reader.read()
    writer.moment(SnapshotMoment.COMPLETE, 1, 4, 1 << 40, 99)
    assert reader.read() == dataclasses.replace(before, events_written=3)
    assert before.tag == Tag(1, 3, Phase.UPDATED)
    assert [event.step for event in reader.events_since(0)] == [3]
    assert reader.events_since(1) == []
    words = memoryview(reader.copy_since(1)[0]).cast("q").tolist()
    assert words[:5] == [77, 1, 4, tagpage.MOMENT_INDEX[SnapshotMoment.BEGUN], 1 << 40]
    assert words[5:] == [99, 1, 4, tagpage.MOMENT_INDEX[SnapshotMoment.COMPLETE], 1 << 40]


class Guarded:
    """The words of a page, of which those that both threads append are written under the lock alone."""

    def __init__(self, writer: TagWriter) -> None:
        self._words, self._lock = writer._words, writer._appending
        self.num_guarded = 0

    def __getitem__(self, index: int) -> int:
        return int(self._words[index])

    def __setitem__(self, index: int, word: int) -> None:
        if index == tagpage._WRITTEN or index >= tagpage._RING:
            assert self._lock.locked()
            self.num_guarded += 1
        self._words[index] = word


def test_the_training_thread_and_that_of_the_snapshots_append_one_after_the_other(
    both: tuple[TagWriter, TagReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = both
    words = Guarded(writer)
    monkeypatch.setattr(writer, "_words", words)
    writer.write(1, 3, Phase.FORWARD)
    writer.moment(SnapshotMoment.COMPLETE, 1, 3, 1, 77)
    assert words.num_guarded == 2 * 6
    assert reader.read().events_written == 2


def test_a_page_that_tore_behind_a_moment_shows_the_last_phase(both: tuple[TagWriter, TagReader]) -> None:
    writer, reader = both
    writer.write(1, 3, Phase.UPDATED)
    writer.moment(SnapshotMoment.BEGUN, 1, 4, 1, 77)
    words = writer._words
    words[0] += 1  # its writer is killed in the middle of the next change
    words[2] = 4
    assert reader.read().tag == Tag(1, 3, Phase.UPDATED)


def test_the_descriptor_may_be_closed_and_nothing_is_left() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with page() as descriptor:
        assert os.fstat(descriptor).st_size == PAGE_BYTES
        reader = TagReader(descriptor)
        reader.close()
        assert not os.get_inheritable(descriptor)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_reader_cannot_write() -> None:
    with page() as descriptor:
        reader = TagReader(descriptor)
    with pytest.raises(TypeError):
        reader._words[0] = 1
    reader.close()


def test_a_page_torn_by_its_writers_death_is_read_as_it_is(both: tuple[TagWriter, TagReader]) -> None:
    writer, reader = both
    writer.write(3, 4, Phase.BACKWARD)
    writer._words[0] += 1  # killed right after it began to write
    assert reader.read().tag == Tag(3, 4, Phase.BACKWARD)


class Moving:
    """A page on which something happens between two of the reader's looks at it."""

    def __init__(self, words: memoryview, happens: Callable[[], None], at: int) -> None:
        self._words, self._happens, self._at = words, happens, at

    def __getitem__(self, index: int) -> int:
        value: int = self._words[index]
        self._at -= 1
        if self._at == 0:
            self._happens()
        return value


@pytest.mark.parametrize("num_writes", [1, 2])
@pytest.mark.parametrize("at", range(1, 12))
def test_a_write_in_the_middle_of_a_read_is_seen_whole_or_not(
    at: int, num_writes: int, both: tuple[TagWriter, TagReader]
) -> None:
    writer, reader = both
    written = [Tag(1, 10, Phase.FORWARD), Tag(2, 20, Phase.BACKWARD), Tag(3, 30, Phase.SYNCED)]

    def write(*tags: Tag) -> None:
        for tag in tags:
            writer.write(tag.generation, tag.step, tag.phase)

    write(written[0])
    words = reader._words
    reader._words = Moving(words, lambda: write(*written[1 : 1 + num_writes]), at)
    view = reader.read()
    reader._words = words
    assert view.tag in written
    assert view.events_written == view.progress == written.index(view.tag) + 1


# ---- operations of groups -------------------------------------------------------------------------------------------

Counted = tuple[str, Operation, int, int, int]


def counted(reader: TagReader) -> list[Counted]:
    return [astuple(count) for count in reader.operation_counts()]


def test_the_collectives_of_each_group_and_the_messages_of_each_peer_are_counted(
    both: tuple[TagWriter, TagReader],
) -> None:
    writer, reader = both
    assert reader.operation_counts() == []
    for _ in range(3):
        writer.operation_entered("world", Operation.ALL_REDUCE)
        writer.operation_left("world", Operation.ALL_REDUCE)
    writer.operation_entered("world", Operation.ALL_GATHER)
    writer.operation_entered("0-1.0", Operation.BARRIER)
    writer.operation_entered("world", Operation.SEND, 2)
    writer.operation_entered("world", Operation.RECV, 2)
    writer.operation_left("world", Operation.SEND, 2)
    writer.operation_entered("world", Operation.RECV, ANY_MEMBER)
    assert counted(reader) == [
        ("world", Operation.RECV, ANY_MEMBER, 1, 0),
        ("world", Operation.RECV, 2, 1, 0),
        ("world", Operation.SEND, 2, 1, 1),
        ("0-1.0", Operation.BARRIER, ALL_MEMBERS, 1, 0),
        ("world", Operation.ALL_GATHER, ALL_MEMBERS, 4, 3),
    ]


def test_several_operations_of_a_group_may_be_in_flight(both: tuple[TagWriter, TagReader]) -> None:
    writer, reader = both
    for _ in range(3):
        writer.operation_entered("world", Operation.ALL_REDUCE)
    writer.operation_left("world", Operation.ALL_REDUCE)
    (count,) = reader.operation_counts()
    assert (count.entered, count.left, count.in_flight) == (3, 1, True)


def test_where_groups_are_reconnected_every_count_begins_again(both: tuple[TagWriter, TagReader]) -> None:
    writer, reader = both
    writer.operation_entered("world", Operation.ALL_REDUCE)
    writer.operation_entered("0-1.0", Operation.BARRIER)
    writer.reset_operations()
    assert reader.operation_counts() == []
    writer.operation_entered("world", Operation.BROADCAST)
    assert counted(reader) == [("world", Operation.BROADCAST, ALL_MEMBERS, 1, 0)]


def test_the_page_shows_the_counts_used_last(both: tuple[TagWriter, TagReader]) -> None:
    writer, reader = both
    num = NUM_COUNTS + 10
    for group in range(num):
        writer.operation_entered(f"group {group}", Operation.ALL_REDUCE)
        writer.operation_left(f"group {group}", Operation.ALL_REDUCE)
    assert {count.group for count in reader.operation_counts()} == {f"group {group}" for group in range(10, num)}
    writer.operation_entered("group 3", Operation.BARRIER)
    assert ("group 3", Operation.BARRIER, ALL_MEMBERS, 2, 1) in counted(reader), "its number goes on"
    assert len(reader.operation_counts()) == NUM_COUNTS


def test_a_long_name_is_cut_and_remains_different_from_another(both: tuple[TagWriter, TagReader]) -> None:
    writer, reader = both
    names = ["-".join(map(str, range(500))) + end for end in (".0", ".1")] + ["é" * 40, "x" * NAME_BYTES]
    for name in names:
        writer.operation_entered(name, Operation.BARRIER)
    shown = [count.group for count in reversed(reader.operation_counts())]
    assert len(set(shown)) == len(names)
    assert all(len(name.encode()) <= NAME_BYTES for name in shown)
    assert shown[3] == names[3]


def test_a_count_that_is_just_being_written_is_left_out(both: tuple[TagWriter, TagReader]) -> None:
    writer, reader = both
    writer.operation_entered("world", Operation.ALL_REDUCE)
    writer.operation_entered("0-1.0", Operation.ALL_REDUCE)
    writer._words[16] += 1  # killed right after it began to write
    assert [count.group for count in reader.operation_counts()] == ["0-1.0"]


def test_operations_that_end_in_other_threads_are_all_counted(both: tuple[TagWriter, TagReader]) -> None:
    writer, reader = both
    num_threads, num_each = 4, 2_000

    def go_through(group: str) -> None:
        for _ in range(num_each):
            writer.operation_entered(group, Operation.ALL_REDUCE)
            writer.operation_left(group, Operation.ALL_REDUCE)

    threads = [threading.Thread(target=go_through, args=(f"{number % 2}",)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    seen: list[OperationCount] = []
    while any(thread.is_alive() for thread in threads):
        seen += reader.operation_counts()
    for thread in threads:
        thread.join()
    view = reader.read()
    assert view.entered == view.left == num_threads * num_each
    assert {count[3:] for count in counted(reader)} == {(num_threads * num_each // 2,) * 2}
    assert all(0 <= count.entered - count.left <= 2 for count in seen)


# ---- durations ------------------------------------------------------------------------------------------------------


def events(*entries: tuple[float, int, Phase], generation: int = 1) -> list[PhaseEvent]:
    return [PhaseEvent(round(at_s * 1e9), generation, step, phase) for at_s, step, phase in entries]


def test_a_step_lasts_from_its_forward_to_its_end() -> None:
    found = tagpage.step_durations(
        events(
            (1.0, 0, Phase.FORWARD),
            (1.5, 0, Phase.BACKWARD),
            (1.75, 0, Phase.SYNCED),
            (2.0, 0, Phase.OPTIMIZER),
            (3.0, 0, Phase.UPDATED),
            (10.0, 1, Phase.FORWARD),
            (10.5, 1, Phase.UPDATED),
        )
    )
    assert found == [2.0, 0.5]


def test_micro_batches_are_one_step() -> None:
    found = tagpage.step_durations(
        events(
            (1.0, 3, Phase.FORWARD),
            (2.0, 3, Phase.BACKWARD),
            (3.0, 3, Phase.FORWARD),
            (4.0, 3, Phase.BACKWARD),
            (6.0, 3, Phase.UPDATED),
        )
    )
    assert found == [5.0]


def test_what_has_no_beginning_or_no_end_is_no_step() -> None:
    assert tagpage.step_durations(events((1.0, 0, Phase.BACKWARD), (2.0, 0, Phase.UPDATED))) == []
    assert tagpage.step_durations(events((1.0, 0, Phase.FORWARD), (2.0, 0, Phase.SYNCED))) == []
    assert tagpage.step_durations(events((1.0, 5, Phase.FORWARD), (2.0, 4, Phase.UPDATED))) == []
    assert tagpage.step_durations([]) == []


def test_a_step_computed_again_counts_from_its_second_forward() -> None:
    first = events((1.0, 7, Phase.FORWARD), (2.0, 6, Phase.UPDATED))
    second = events((5.0, 7, Phase.FORWARD), (6.5, 7, Phase.UPDATED), generation=2)
    assert tagpage.step_durations(first + second) == [1.5]


# ---- two processes --------------------------------------------------------------------------------------------------


def tag_of(number: int) -> Tag:
    """A tag in which every field follows from the generation, so that a torn one gives itself away."""
    return Tag(number, 3 * number + 1, PHASES[number % 6])


def spin(descriptor: int, num_writes: int) -> None:
    writer = TagWriter(descriptor)
    for number in range(1, num_writes + 1):
        tag = tag_of(number)
        writer.write(tag.generation, tag.step, tag.phase)
        for _ in range(2000):  # some ten microseconds: more often than any training, yet whole most of the time
            pass


def test_a_reader_never_sees_a_torn_tag() -> None:
    """The reader reads as fast as it can, until all has been written.

    A writer that the kernel took off its processor in the middle of a write leaves a page that no number of tries
    makes whole: then, and only then, the sequence number is odd around the read.
    """
    with page() as descriptor:
        reader = TagReader(descriptor)
        process = multiprocessing.get_context("fork").Process(target=spin, args=(descriptor, NUM_WRITES), daemon=True)
        process.start()
    seen: set[int] = set()
    torn: list[TagView] = []
    latest = 0
    while process.is_alive() and latest < NUM_WRITES:
        in_mid_write = reader._words[0] % 2 == 1
        view = reader.read()
        in_mid_write |= reader._words[0] % 2 == 1
        if view.tag.generation == 0:
            continue
        if view.tag == tag_of(view.tag.generation):
            seen.add(view.tag.generation)
            assert view.tag.generation >= latest, "time ran backwards"
            latest = view.tag.generation
        elif not in_mid_write:
            torn.append(view)
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    process.close()
    assert torn == []
    assert reader.read().tag == tag_of(NUM_WRITES)
    assert len(seen) > 10, "the reader came too late to see anything"
    reader.close()


def test_a_writer_killed_in_mid_write_leaves_a_tag_that_was(both: tuple[TagWriter, TagReader]) -> None:
    writer, reader = both
    writer.write(1, 6, Phase.OPTIMIZER)
    writer.write(1, 6, Phase.UPDATED)
    writer._words[0] += 1
    writer._words[1], writer._words[2] = 1, 7  # of (1, 7, forward); then it was killed
    assert reader.read().tag in (Tag(1, 6, Phase.UPDATED), Tag(1, 7, Phase.FORWARD))


def test_a_page_is_readable_after_its_writer_was_killed() -> None:
    script = (
        "import os, signal, sys\n"
        "from keepstep.protocol.phases import Phase\n"
        "from keepstep.protocol.waiting.operations import Operation\n"
        "from keepstep.shared.tagpage import TagWriter\n"
        "writer = TagWriter(int(sys.argv[1]))\n"
        "for step in range(5000):\n"
        "    writer.write(2, step, Phase.FORWARD)\n"
        "writer.write(2, 4999, Phase.BACKWARD)\n"
        "writer.operation_entered('0-1.0', Operation.RECV, 1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with page() as descriptor:
        reader = TagReader(descriptor)
        done = subprocess.run(
            [sys.executable, "-c", script, str(descriptor)], pass_fds=[descriptor], timeout=DEADLINE_S, check=False
        )
    assert done.returncode == -signal.SIGKILL
    view = reader.read()
    assert (view.tag, view.entered, view.left) == (Tag(2, 4999, Phase.BACKWARD), 1, 0)
    assert [astuple(count) for count in reader.operation_counts()] == [("0-1.0", Operation.RECV, 1, 1, 0)]
    ring = reader.events_since(0)
    assert (ring[-1].step, ring[-1].phase, len(ring)) == (4999, Phase.BACKWARD, RING_EVENTS - 1)
    reader.close()
