"""Second copies of snapshots, in the memory of another node: this rank's with its buddy, and those that it keeps.

They move over the world's process group, as the gradients and restored state do: no further port is opened, and what
ends that group ends them. Threads of their own send and receive, and the group's counters know nothing of it.

A copy is a header from the sender, an answer whether it is wanted, the snapshot's bytes in chunks straight from memory
to memory, and an answer that they are whole.
"""

from __future__ import annotations

import enum
import mmap
import struct
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import xxhash
from torch import distributed as dist

from keepstep.errors import ConfigurationError
from keepstep.freememory import free_bytes
from keepstep.protocol.messages import Membership, SnapshotsByRank
from keepstep.protocol.snapshots import buddies
from keepstep.shared.snapshotfile import SnapshotFile, WholeSnapshot, steps_by_rank
from keepstep.weights.channels.group import Carrier

CHUNK_BYTES = 4 << 20
"""As the buckets of a restore: what the training thread sends to the same rank waits for no more than this."""
NUM_UNDER_WAY = 2
"""Chunks that are sent before the first has arrived."""
_HEADER = struct.Struct("<qQq16s")
"""Step, bytes, the step that must stay (-1: none), and the digest."""
_HEADER_TAG, _ANSWER_TAG, _CHUNK_TAG = 0x4B540, 0x4B541, 0x4B542


class Answer(enum.IntEnum):
    """What a buddy says."""

    SEND = 0
    """It waits for the bytes."""
    WHOLE = 1
    """It has the snapshot, checked."""
    NO_MEMORY = 2
    """There is none for it on that node."""
    DAMAGED = 3
    """The bytes have another checksum than the header says."""


class SecondCopies:
    """One rank's part. Methods are called by the training thread, but for `send`."""

    def __init__(
        self, file: SnapshotFile, group: Callable[[], Carrier | None], failed: Callable[[Exception], None]
    ) -> None:
        """Args:
        file: this worker's memory.
        group: gives what carries the copies in the present generation; None where there is no other rank.
        failed: told of an error that the end of the generation does not explain, from any thread.
        """
        self._file = file
        self._group_of_generation = group
        self._failed = failed
        self._rank = -1
        self._buddy: int | None = None
        self._wards: tuple[int, ...] = ()
        """The ranks whose buddy this one is."""
        self._group: Carrier | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._sending: Future[float] | None = None
        self.kept_step: int | None = None
        """The snapshot that must stay until all ranks have theirs of the step at which they resumed."""

    @property
    def has_buddy(self) -> bool:
        """Whether another rank keeps this one's snapshots."""
        return self._buddy is not None

    def held(self) -> SnapshotsByRank:
        """What this worker keeps of other ranks."""
        return tuple((rank, steps) for rank, steps in steps_by_rank(self._file.whole) if rank != self._rank)

    # ---- from generation to generation ------------------------------------------------------------------------------

    def resumed(self, rank: int, membership: Membership | None, kept_step: int | None) -> None:
        """All ranks of a generation stand at one step. What was under way has ended with the last one's group."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        found = buddies(membership) if membership is not None else {}
        self._rank, self._buddy, self.kept_step = rank, found.get(rank), kept_step
        self._wards = tuple(sorted(ward for ward, buddy in found.items() if buddy == rank))
        self._sending = None
        if self._buddy is not None or self._wards:
            self._group = self._group_of_generation()
            self._threads = ThreadPoolExecutor(1 + len(self._wards), "keepstep-second-copy")

    def passed_barrier(self) -> None:
        """All ranks have both copies of the snapshot at which they resumed: those of ranks that were its wards go."""
        if self.kept_step is not None:
            self.kept_step = None
            for each in self._file.whole:
                if each.rank != self._rank and each.rank not in self._wards:
                    self._file.discard(each.slot)

    # ---- from snapshot to snapshot ----------------------------------------------------------------------------------

    def hand_out(self) -> None:
        """All ranks take a snapshot of the step that is handed out: those of the wards are on their way."""
        for ward in self._wards:
            if self._threads is not None and self._group is not None:
                self._threads.submit(self._run, self._receive, self._group, ward)

    def send(self, snapshot: WholeSnapshot) -> None:
        """This rank's snapshot is whole, and stays until `wait` has returned. From any thread."""
        if self._buddy is not None and self._threads is not None and self._group is not None:
            self._sending = self._threads.submit(self._run, self._send, self._group, snapshot)

    def wait(self) -> float | None:
        """Waits until the buddy has the last snapshot, or the generation is over.

        Returns:
            how long it took to send, in seconds; None where none was sent.

        Raises:
            ConfigurationError: the buddy's node has no memory for it.
        """
        sending, self._sending = self._sending, None
        return None if sending is None else sending.result()

    @property
    def is_sending(self) -> bool:
        """Whether `wait` would have to wait."""
        return self._sending is not None and not self._sending.done()

    def _run(self, move: Callable[..., None], group: Carrier, what: object) -> float:
        begun_s = time.monotonic()
        try:
            move(group, what)
        except RuntimeError as error:  # of the group: it was aborted, or a peer is gone
            self._failed(error)
        return time.monotonic() - begun_s

    # ---- the two sides ----------------------------------------------------------------------------------------------

    def _send(self, group: Carrier, snapshot: WholeSnapshot) -> None:
        assert self._buddy is not None
        kept = -1 if self.kept_step is None else self.kept_step
        header = _HEADER.pack(snapshot.step, snapshot.num_bytes, kept, snapshot.digest)
        group.send([torch.frombuffer(bytearray(header), dtype=torch.uint8)], self._buddy, _HEADER_TAG).wait()
        if (answer := _receive_answer(group, self._buddy)) is Answer.SEND:
            view = self._file.open_for_writing(snapshot.slot, snapshot.num_bytes)
            under_way: list[dist.Work] = []
            for chunk in _chunks(view, snapshot.num_bytes):
                if len(under_way) == NUM_UNDER_WAY:
                    under_way.pop(0).wait()
                under_way.append(group.send([chunk], self._buddy, _CHUNK_TAG))
            for work in under_way:
                work.wait()
            answer = _receive_answer(group, self._buddy)
        if answer is Answer.NO_MEMORY:
            raise ConfigurationError(
                f"the node of rank {self._buddy} has no memory for second copies of rank {self._rank}'s snapshots "
                f'(2 x {snapshot.num_bytes / 1e6:.0f} MB): give the job more, or protect(snapshot_every="off")'
            )
        if answer is Answer.DAMAGED:
            raise RuntimeError(f"the snapshot of step {snapshot.step} arrived damaged at rank {self._buddy}")

    def _receive(self, group: Carrier, ward: int) -> None:
        head = torch.empty(_HEADER.size, dtype=torch.uint8)
        group.recv([head], ward, _HEADER_TAG).wait()
        step, num_bytes, kept, digest = _HEADER.unpack(head.numpy().tobytes())
        held = self._file.find(ward, step)
        if held is not None and held.digest == digest:
            _send_answer(group, ward, Answer.WHOLE)
            return
        slot = self._file.choose(ward, None if kept < 0 else kept)
        try:
            view = self._memory(slot, num_bytes)
            if view is None:
                _send_answer(group, ward, Answer.NO_MEMORY)
                return
            _send_answer(group, ward, Answer.SEND)
            if _fill(group, ward, view, num_bytes) != digest:
                _send_answer(group, ward, Answer.DAMAGED)
                return
            self._file.seal(WholeSnapshot(slot, ward, step, num_bytes, digest))
            _send_answer(group, ward, Answer.WHOLE)
        finally:
            self._file.leave(slot)

    def _memory(self, slot: int, num_bytes: int) -> mmap.mmap | None:
        if num_bytes - self._file.capacity(slot) > free_bytes():
            return None
        try:
            return self._file.open_for_writing(slot, num_bytes)
        except OSError:
            return None


def _fill(group: Carrier, ward: int, view: mmap.mmap, num_bytes: int) -> bytes:
    """Receives all chunks, one ahead of the one that is hashed. Returns the digest."""
    checksum = xxhash.xxh3_128()
    coming: list[tuple[torch.Tensor, dist.Work]] = []
    for chunk in [*_chunks(view, num_bytes), None]:
        if chunk is not None:
            coming.append((chunk, group.recv([chunk], ward, _CHUNK_TAG)))
        while coming and (chunk is None or len(coming) == NUM_UNDER_WAY):
            there, work = coming.pop(0)
            work.wait()
            checksum.update(there.numpy().data)
    return checksum.digest()


def _chunks(view: mmap.mmap, num_bytes: int) -> list[torch.Tensor]:
    memory = torch.frombuffer(view, dtype=torch.uint8)
    return [memory[begin : min(num_bytes, begin + CHUNK_BYTES)] for begin in range(0, num_bytes, CHUNK_BYTES)]


def _send_answer(group: Carrier, ward: int, answer: Answer) -> None:
    group.send([torch.tensor([answer], dtype=torch.uint8)], ward, _ANSWER_TAG).wait()


def _receive_answer(group: Carrier, buddy: int) -> Answer:
    answer = torch.empty(1, dtype=torch.uint8)
    group.recv([answer], buddy, _ANSWER_TAG).wait()
    return Answer(int(answer))
