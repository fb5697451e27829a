"""The memory for snapshots: whenever its writer dies, what can be read in it is whole."""

import os
from collections.abc import Iterator

import pytest
import xxhash

from keepstep.errors import RemoteProtocolError
from keepstep.shared import snapshotfile
from keepstep.shared.snapshotfile import SnapshotFile, held_steps


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = snapshotfile.create("test")
    yield made
    os.close(made)


@pytest.fixture
def file(descriptor: int) -> SnapshotFile:
    return SnapshotFile(os.dup(descriptor))


def write(file: SnapshotFile, slot: int, step: int, content: bytes) -> None:
    file.open_for_writing(slot, len(content))[: len(content)] = content
    file.seal(slot, step, len(content), xxhash.xxh3_128_digest(content))


def read(file: SnapshotFile, step: int) -> bytes:
    with file.read(step) as view:
        return bytes(view)


def test_a_new_one_holds_nothing_and_takes_no_memory(descriptor: int, file: SnapshotFile) -> None:
    assert held_steps(descriptor) == ()
    assert file.steps == {}
    assert os.fstat(descriptor).st_blocks == 0


def test_both_slots_are_read_by_whoever_has_the_file_open(descriptor: int, file: SnapshotFile) -> None:
    write(file, 0, 8, b"eight" * 1000)
    write(file, 1, 7, b"seven" * 3000)
    other = SnapshotFile(os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDONLY))
    assert held_steps(descriptor) == (7, 8)
    assert other.steps == {0: 8, 1: 7}
    assert read(other, 7) == b"seven" * 3000
    assert read(other, 8) == b"eight" * 1000


def test_a_slot_grows_and_shrinks(file: SnapshotFile) -> None:
    for step, size in enumerate((10, 100_000, 5, 1_000_000)):
        write(file, 0, step, bytes([step + 1]) * size)
        assert read(file, step) == bytes([step + 1]) * size


def test_it_counts_no_more_from_when_it_is_opened_for_writing(descriptor: int, file: SnapshotFile) -> None:
    write(file, 0, 3, b"three")
    write(file, 1, 4, b"four")
    file.open_for_writing(0, 4)
    assert held_steps(descriptor) == (4,)
    file.discard(1)
    assert held_steps(descriptor) == ()


def test_there_is_none_of_that_step(file: SnapshotFile) -> None:
    write(file, 0, 3, b"three")
    with pytest.raises(RemoteProtocolError, match="there is no snapshot of step 4 in memory"):
        file.read(4)


def test_damage_is_found(descriptor: int, file: SnapshotFile) -> None:
    content = os.urandom(10_000)
    write(file, 1, 3, content)
    file.open_for_writing(0, 1)
    view = file._maps[1]
    view[5_000] ^= 1
    with pytest.raises(RemoteProtocolError, match="the snapshot of step 3 in memory has a wrong checksum"):
        file.read(3)
    view[5_000] ^= 1
    assert read(file, 3) == content


@pytest.mark.parametrize("byte", range(snapshotfile._SEALED_BYTES))
def test_a_damaged_header_stands_in_front_of_nothing(descriptor: int, file: SnapshotFile, byte: int) -> None:
    write(file, 0, 3, b"three")
    header = os.pread(descriptor, 1, byte)[0]
    os.pwrite(descriptor, bytes([header ^ 0x40]), byte)
    assert held_steps(descriptor) == ()
