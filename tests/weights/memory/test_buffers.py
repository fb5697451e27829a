"""Slots in shared memory: written by one, read by others, and no other process touches them."""

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.weights.channels.descriptors import given_back
from tests.worker.ranks import run_ranks

from keepstep.errors import BufferUnavailable, RemoteProtocolError
from keepstep.weights.memory.buffers import MAX_SLOTS, SlotBuffer, SlotPart

NUM_SLOTS, SLOT_BYTES = 3, 5000
SIZE = NUM_SLOTS * SLOT_BYTES


@pytest.fixture
def buffer() -> Iterator[SlotBuffer]:
    with given_back():
        made = SlotBuffer.create(NUM_SLOTS, SLOT_BYTES)
        yield made
        made.close()


@pytest.fixture
def reader(buffer: SlotBuffer) -> Iterator[SlotBuffer]:
    """The same, as another process has it."""
    made = SlotBuffer.attach(os.dup(buffer.descriptor), NUM_SLOTS, SLOT_BYTES)
    yield made
    made.close()


def test_a_slot_is_a_run_of_bytes_of_its_own(buffer: SlotBuffer) -> None:
    assert buffer.num_bytes == SIZE
    for slot in range(NUM_SLOTS):
        view = buffer.view(slot)
        assert (view.dtype, view.shape, view.data_ptr()) == (torch.uint8, (SLOT_BYTES,), buffer.address(slot))
        assert buffer.address(slot) == buffer.address(0) + slot * SLOT_BYTES
        view.fill_(slot + 1)
    content = os.pread(buffer.descriptor, SIZE + 1, 0)
    assert content == b"".join(bytes([slot + 1]) * SLOT_BYTES for slot in range(NUM_SLOTS))


def test_a_new_buffer_has_all_its_memory(buffer: SlotBuffer) -> None:
    """A machine that has not enough says so now, and not when a slot is written."""
    found = os.fstat(buffer.descriptor)
    assert found.st_size == SIZE
    assert found.st_blocks * 512 >= SIZE
    assert os.pread(buffer.descriptor, SIZE, 0) == bytes(SIZE)


def test_a_reader_sees_what_is_written(buffer: SlotBuffer, reader: SlotBuffer) -> None:
    buffer.view(1).copy_(torch.arange(SLOT_BYTES) % 251)
    assert torch.equal(reader.view(1), buffer.view(1))
    assert not reader.view(0).any()
    assert reader.address(1) != buffer.address(1)
    buffer.view(1)[7] = 255
    assert reader.view(1)[7] == 255


def test_a_reader_goes_on_reading_when_its_writer_is_gone(buffer: SlotBuffer, reader: SlotBuffer) -> None:
    buffer.view(2).fill_(9)
    buffer.close()
    assert (reader.view(2) == 9).all()


# ---- Readers only read ----------------------------------------------------------------------------------------------


def test_it_cannot_be_mapped_for_writing(buffer: SlotBuffer) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(buffer.descriptor, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    again = os.open(f"/proc/self/fd/{buffer.descriptor}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(again)
    with mmap.mmap(buffer.descriptor, SIZE, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        assert len(mapped) == SIZE


def test_a_readers_mapping_cannot_be_made_writable(reader: SlotBuffer) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    assert reader.address(0) % page == 0
    protect = libc.mprotect(ctypes.c_void_p(reader.address(0)), page, mmap.PROT_READ | mmap.PROT_WRITE)
    assert (protect, ctypes.get_errno()) == (-1, errno.EACCES)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda descriptor: os.pwrite(descriptor, b"x", 0),
        lambda descriptor: os.ftruncate(descriptor, 0),
        lambda descriptor: os.ftruncate(descriptor, 2 * SIZE),
        lambda descriptor: fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ],
    ids=["write", "shrink", "grow", "seal"],
)
def test_it_cannot_be_spoilt_through_its_descriptor(buffer: SlotBuffer, spoil: Callable[[int], object]) -> None:
    with pytest.raises(PermissionError):
        spoil(buffer.descriptor)
    buffer.view(0).fill_(1)
    assert os.fstat(buffer.descriptor).st_size == SIZE


def write_as_reader(rank: int, size: int, path: Path) -> None:
    """Attaches to a file that it opens by name, and writes."""
    buffer = SlotBuffer.attach(os.open(path, os.O_RDWR), 1, mmap.PAGESIZE)
    buffer.view(0)[0] = 1


def test_a_reader_that_writes_ends_its_own_process(tmp_path: Path) -> None:
    """Even where the kernel would allow a writable mapping, a reader does not ask for one."""
    path = tmp_path / "file"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with pytest.raises(AssertionError, match="died without an answer"):
        run_ranks(1, write_as_reader, path)
    assert path.read_bytes() == bytes(mmap.PAGESIZE)


# ---- Lies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_slots", "slot_bytes"),
    [
        (NUM_SLOTS + 1, SLOT_BYTES),
        (NUM_SLOTS, SLOT_BYTES + 1),
        (NUM_SLOTS, SLOT_BYTES - 1),
        (1, SLOT_BYTES),
        (0, SLOT_BYTES),
        (NUM_SLOTS, 0),
        (-NUM_SLOTS, -SLOT_BYTES),
        (SIZE, 1),
        (2**63, 2**63),
    ],
)
def test_a_buffer_of_another_size_than_was_said_is_refused(buffer: SlotBuffer, num_slots: int, slot_bytes: int) -> None:
    with given_back(), pytest.raises(RemoteProtocolError, match=f"a buffer of {SIZE} bytes for {num_slots} slots"):
        SlotBuffer.attach(os.dup(buffer.descriptor), num_slots, slot_bytes)


def test_a_buffer_of_more_slots_than_any_device_uses_is_refused() -> None:
    buffer = SlotBuffer.create(MAX_SLOTS + 1, 16)
    with pytest.raises(RemoteProtocolError):
        SlotBuffer.attach(os.dup(buffer.descriptor), MAX_SLOTS + 1, 16)
    buffer.close()


def test_an_empty_file_is_refused() -> None:
    descriptor = os.memfd_create("keepstep-test", os.MFD_CLOEXEC)
    with pytest.raises(RemoteProtocolError):
        SlotBuffer.attach(descriptor, 0, 0)


@pytest.mark.parametrize("what", ["a folder", "only to be written"])
def test_what_cannot_be_mapped_is_refused(tmp_path: Path, what: str) -> None:
    """It has the size that was said, and comes from another process, so it is that one's fault."""
    (tmp_path / "file").write_bytes(bytes(100))
    path, mode = (tmp_path, os.O_RDONLY) if what == "a folder" else (tmp_path / "file", os.O_WRONLY)
    with given_back():
        descriptor = os.open(path, mode)
        with pytest.raises(RemoteProtocolError):
            SlotBuffer.attach(descriptor, 1, os.fstat(descriptor).st_size)


# ---- No memory ------------------------------------------------------------------------------------------------------


def over_the_limit(rank: int, size: int) -> tuple[str, bool, bool]:
    """Wants more than this process may have in a file; what it is told, and whether all is as before."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # as in a program that embeds Python
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    with given_back():
        try:
            SlotBuffer.create(2, 1 << 20)
            told = "it was made"
        except BufferUnavailable as error:
            told = str(error)
    SlotBuffer.create(2, 1 << 19).close()
    pending = signal.sigpending()
    return told, blocked == signal.pthread_sigmask(signal.SIG_BLOCK, set()), not pending


def test_a_limit_of_the_process_is_reported_and_does_not_end_it() -> None:
    ((told, is_mask_as_before, is_nothing_pending),) = run_ranks(1, over_the_limit)
    assert told.startswith("2.0 MiB of shared memory for 2 buckets is not available (EFBIG: File too large)")
    assert told.endswith("use a smaller bucket_bytes")
    assert is_mask_as_before
    assert is_nothing_pending


def blocked_before(rank: int, size: int) -> bool:
    """The same in a process that has blocked the signal itself: it stays so, and comes when it is let through."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXFSZ})
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    with pytest.raises(BufferUnavailable):
        SlotBuffer.create(2, 1 << 20)
    return signal.SIGXFSZ in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_a_signal_that_was_blocked_stays_so() -> None:
    assert run_ranks(1, blocked_before) == [True]


def no_address_space(rank: int, size: int) -> str:
    """The file can be had, and its mapping not."""
    resource.setrlimit(resource.RLIMIT_AS, (0, resource.RLIM_INFINITY))
    with given_back():
        try:
            SlotBuffer.create(2, 1 << 20)
            return "it was made"
        except BufferUnavailable as error:
            return str(error)


def test_memory_that_cannot_be_mapped_is_reported() -> None:
    (told,) = run_ranks(1, no_address_space)
    assert "is not available (ENOMEM" in told


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 16), (2, 0), (-1, 16)])
def test_sizes_that_cannot_be_are_reported(num_slots: int, slot_bytes: int) -> None:
    with given_back(), pytest.raises(BufferUnavailable):
        SlotBuffer.create(num_slots, slot_bytes)


# ---- Giving back ----------------------------------------------------------------------------------------------------


def num_mappings() -> int:
    """How many of this process's mappings are of such buffers."""
    return Path("/proc/self/maps").read_text().count("keepstep-slots")


def test_closing_gives_descriptors_and_memory_back() -> None:
    before = num_mappings()
    with given_back():
        buffer = SlotBuffer.create(NUM_SLOTS, SLOT_BYTES)
        reader = SlotBuffer.attach(os.dup(buffer.descriptor), NUM_SLOTS, SLOT_BYTES)
        buffer.view(0).fill_(1)
        assert reader.view(0).any()
        assert num_mappings() == before + 2
        for each in (buffer, reader):
            each.close()
            each.close()
    assert num_mappings() == before


def test_memory_that_is_in_use_outlives_its_buffer() -> None:
    """A link sends a part, or a thread copies from a view, while another thread closes the buffer."""
    before = num_mappings()
    with given_back():
        buffer = SlotBuffer.create(NUM_SLOTS, SLOT_BYTES)
        buffer.view(1).fill_(7)
        part, view = SlotPart(buffer, 1, 4), buffer.view(1)[:2]
        content = part.content
        buffer.close()
        assert (bytes(content), view.tolist()) == (b"\7" * 4, [7, 7])
        ctypes.memset(part.address, 8, 4)
        assert bytes(part.content) == b"\10" * 4
        for use in (lambda: buffer.view(1), lambda: buffer.fill(1, torch.zeros(1), 1), lambda: SlotPart(buffer, 1, 4)):
            with pytest.raises(ValueError, match="closed"):
                use()
        del part, content
        assert num_mappings() == before + 1
        del view
    assert num_mappings() == before
