"""The memory that an agent holds for its workers' snapshots."""

import os
from collections.abc import Iterator

import pytest
import xxhash

from keepstep.agent.snapshots import SnapshotMemory
from keepstep.shared.snapshotfile import SnapshotFile, WholeSnapshot


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    held = SnapshotMemory()
    yield held
    held.release(None, ())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def write(descriptor: int, step: int, rank: int = 0) -> None:
    file = SnapshotFile(os.dup(descriptor))
    slot = file.choose(rank, None)
    file.open_for_writing(slot, 3)[:3] = b"abc"
    file.seal(WholeSnapshot(slot, rank, step, 3, xxhash.xxh3_128_digest(b"abc")))


def test_it_outlives_the_worker_that_has_written_to_it(memory: SnapshotMemory) -> None:
    descriptor = memory.create(4)
    write(descriptor, 7)
    write(descriptor, 6, rank=3)
    memory.ended(4)
    assert memory.of(4) == ((0, (7,)), (3, (6,)))
    path = memory.path(4)
    assert path is not None
    with SnapshotFile(os.open(path, os.O_RDONLY)).read(0, 7) as view:
        assert bytes(view) == b"abc"


def test_it_goes_with_a_worker_that_has_written_nothing(memory: SnapshotMemory) -> None:
    before = open_files()
    memory.create(4)
    memory.ended(4)
    assert (memory.of(4), memory.path(4)) == ((), None)
    assert open_files() == before


def test_it_is_let_go_when_it_is_needed_no_more(memory: SnapshotMemory) -> None:
    before = open_files()
    for worker in range(3):
        write(memory.create(worker), worker)
    memory.release((0, 1, 99), running=(1,))
    assert [memory.of(worker) for worker in range(3)] == [(), ((0, (1,)),), ((0, (2,)),)], (
        "a running worker keeps its own"
    )
    memory.release(None, running=(1,))
    assert [memory.of(worker) for worker in range(3)] == [(), ((0, (1,)),), ()]
    memory.release(None, running=())
    assert open_files() == before
