"""The memory for snapshots: whenever its writer dies, what can be read in it is whole."""

import os
from collections.abc import Iterator

import pytest
import xxhash

from keepstep.errors import RemoteProtocolError
from keepstep.shared import snapshotfile
from keepstep.shared.snapshotfile import SnapshotFile, WholeSnapshot, steps_by_rank, whole_snapshots


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = snapshotfile.create("test")
    yield made
    os.close(made)


@pytest.fixture
def file(descriptor: int) -> SnapshotFile:
    return SnapshotFile(os.dup(descriptor))


def write(file: SnapshotFile, step: int, content: bytes, rank: int = 0) -> int:
    slot = file.choose(rank, None)
    file.open_for_writing(slot, len(content))[: len(content)] = content
    file.seal(WholeSnapshot(slot, rank, step, len(content), xxhash.xxh3_128_digest(content)))
    file.leave(slot)
    return slot


def read(file: SnapshotFile, step: int, rank: int = 0) -> bytes:
    with file.read(rank, step) as view:
        return bytes(view)


def held(descriptor: int) -> object:
    return steps_by_rank(whole_snapshots(descriptor))


def test_a_new_one_holds_nothing_and_takes_no_memory(descriptor: int, file: SnapshotFile) -> None:
    assert held(descriptor) == ()
    assert file.whole == []
    assert os.fstat(descriptor).st_blocks == 0


def test_all_slots_are_read_by_each_process_that_has_the_file_open(descriptor: int, file: SnapshotFile) -> None:
    write(file, 7, b"seven" * 3000)
    write(file, 8, b"eight" * 1000)
    write(file, 5, b"five", rank=3)
    other = SnapshotFile(os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDONLY))
    assert held(descriptor) == ((0, (7, 8)), (3, (5,)))
    assert other.steps(0) == [7, 8]
    assert read(other, 7) == b"seven" * 3000
    assert read(other, 8) == b"eight" * 1000
    assert read(other, 5, rank=3) == b"five"


def test_a_slot_grows_and_shrinks(file: SnapshotFile) -> None:
    for step, size in enumerate((10, 100_000, 5, 1_000_000, 7)):
        write(file, step, bytes([step + 1]) * size)
        assert read(file, step) == bytes([step + 1]) * size
    assert file.steps(0) == [4, 3], "two slots are enough for one rank"


def test_it_counts_no_more_from_when_its_slot_is_chosen(descriptor: int, file: SnapshotFile) -> None:
    write(file, 3, b"three")
    slot = write(file, 4, b"four")
    file.choose(0, None)
    assert held(descriptor) == ((0, (4,)),)
    file.discard(slot)
    assert held(descriptor) == ()


def test_a_slot_that_is_being_written_is_given_to_no_other_rank(file: SnapshotFile) -> None:
    chosen = [file.choose(rank, None) for rank in range(3)]
    assert sorted(chosen) == [0, 1, 2]
    file.leave(chosen[1])
    assert file.choose(7, None) == chosen[1]


def test_the_step_that_must_stay_stays(file: SnapshotFile) -> None:
    for step in (3, 4):
        write(file, step, b"content")
    file.leave(file.choose(0, 3))
    assert file.steps(0) == [3]


def test_there_is_none_of_that_step_or_rank(file: SnapshotFile) -> None:
    write(file, 3, b"three")
    for rank, step in ((0, 4), (1, 3)):
        with pytest.raises(RemoteProtocolError, match=f"no snapshot of rank {rank} at step {step} in memory"):
            file.read(rank, step)


def test_damage_is_found_once(descriptor: int, file: SnapshotFile) -> None:
    """Whichever process finds it, no later recovery counts on that snapshot."""
    write(file, 2, b"intact")
    view = file._maps[write(file, 3, os.urandom(10_000))]
    view[5_000] ^= 1
    other = SnapshotFile(os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR))
    with pytest.raises(RemoteProtocolError, match="the snapshot of rank 0 at step 3 in memory has a wrong checksum"):
        other.read(0, 3)
    assert file.steps(0) == other.steps(0) == [2]
    assert read(file, 2) == b"intact"


@pytest.mark.parametrize("byte", range(snapshotfile._SEALED_BYTES))
def test_a_damaged_header_means_no_snapshot(descriptor: int, file: SnapshotFile, byte: int) -> None:
    write(file, 3, b"three")
    header = os.pread(descriptor, 1, byte)[0]
    os.pwrite(descriptor, bytes([header ^ 0x40]), byte)
    assert held(descriptor) == ()
