"""Second copies of snapshots, in the memory of another node. A rank sends its own to a buddy, and keeps those of wards.

The copies travel over the world's process group, like gradients and restored state. So they need no further port, and
they end with that group. Separate threads send and receive them, and the group's counters ignore them.

A copy consists of a header from the sender, an answer whether it is needed, the snapshot's bytes in chunks directly
from memory to memory, and an acknowledgement.
"""

from __future__ import annotations

import dataclasses
import enum
import mmap
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import xxhash
from torch import distributed as dist

from keepstep.freememory import free_bytes
from keepstep.protocol.messages import Membership, SnapshotsByRank
from keepstep.protocol.snapshots import buddy_and_wards
from keepstep.shared.snapshotfile import SnapshotFile, WholeSnapshot, steps_by_rank
from keepstep.shared.tagpage import SnapshotMoment
from keepstep.weights.channels.group import Carrier

CHUNK_BYTES = 4 << 20
"""Size of a chunk, as of a restore's buckets. The training thread's sends to the same rank wait for one at most."""
NUM_UNDER_WAY = 2
"""Maximum number of chunks in flight."""
_HEADER = struct.Struct("<qQq16s")
"""Step, size in bytes, step of the snapshot that must stay (-1: none), and digest."""
_HEADER_TAG, _ANSWER_TAG, _CHUNK_TAG = 0x4B540, 0x4B541, 0x4B542

OnMoment = Callable[[SnapshotMoment, int, int, int], None]
"""(moment, step, size in bytes, time in monotonic nanoseconds): called at each moment of a snapshot.

The snapshot thread reports that a snapshot is complete; the training thread reports all other moments."""


def ignore_moment(moment: SnapshotMoment, step: int, num_bytes: int, at_ns: int) -> None:
    """An `OnMoment` that does nothing."""


class Answer(enum.IntEnum):
    """Answer of a buddy."""

    SEND = 0
    """The buddy waits for the bytes."""
    WHOLE = 1
    """The buddy has the snapshot, and has checked it."""
    NO_MEMORY = 2
    """The buddy's node has no memory for it."""
    DAMAGED = 3
    """The checksum of the bytes differs from that in the header."""


@dataclasses.dataclass(frozen=True, slots=True)
class SecondCopySent:
    """The result of sending a second copy."""

    snapshot: WholeSnapshot
    sending_s: float
    answer: Answer | None
    """The buddy's last answer; None: the generation has ended before."""


class SecondCopies:
    """Sends and keeps second copies on one rank. The training thread calls the methods, except for `send`."""

    def __init__(
        self,
        file: SnapshotFile,
        group: Callable[[], Carrier | None],
        failed: Callable[[Exception], None],
        on_moment: OnMoment | None = None,
    ) -> None:
        """Args:
        file: this worker's snapshot memory.
        group: returns the carrier of the copies in the current generation; None if the world group is down.
        failed: called with the error of a transfer, from any thread.
        on_moment: called for each copy that the buddy's node had no memory for, and for the first complete one after
            that.
        """
        self._file = file
        self._group_of_generation = group
        self._failed = failed
        self._on_moment = on_moment or ignore_moment
        self._rank = -1
        self._buddy: int | None = None
        self._buddys_node = ""
        self._wards: tuple[int, ...] = ()
        """The ranks whose buddy this rank is."""
        self._group: Carrier | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._sending: Future[SecondCopySent] | None = None
        self._refused_by: str | None = None
        """The node that had no memory for this rank's newest second copy; None if the buddy has the copy."""
        self.kept_step: int | None = None
        """Step of the snapshot that must stay until all ranks have one of the resume step."""

    @property
    def has_buddy(self) -> bool:
        """Whether another rank keeps this rank's snapshots."""
        return self._buddy is not None

    def held(self) -> SnapshotsByRank:
        """The snapshots of other ranks that this worker keeps."""
        return tuple((rank, steps) for rank, steps in steps_by_rank(self._file.whole) if rank != self._rank)

    # ---- from generation to generation ------------------------------------------------------------------------------

    def resumed(self, rank: int, membership: Membership | None, kept_step: int | None) -> None:
        """Plans the copies of a generation, whose ranks stand at the resume step. Earlier transfers have ended.

        Args:
            rank: this rank.
            membership: membership of the generation; None if no snapshots are taken.
            kept_step: see `keepstep.protocol.messages.Recover`.
        """
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        self._rank, self.kept_step, self._sending = rank, kept_step, None
        self._buddy, self._wards = (None, ()) if membership is None else buddy_and_wards(membership, rank)
        if membership is not None and self._buddy is not None:
            self._buddys_node = membership.member(self._buddy).node
        if self.has_buddy or self._wards:
            self._group = self._group_of_generation()
            self._threads = ThreadPoolExecutor(1 + len(self._wards), "keepstep-second-copy")

    def passed_barrier(self) -> None:
        """Discards the snapshots of former wards: all ranks have both copies of their snapshot of the resume step."""
        if self.kept_step is not None:
            self.kept_step = None
            for each in self._file.whole:
                if each.rank != self._rank and each.rank not in self._wards:
                    self._file.discard(each.slot)

    # ---- from snapshot to snapshot ----------------------------------------------------------------------------------

    def hand_out(self) -> None:
        """Begins to receive the wards' copies: all ranks take a snapshot of the yielded step."""
        for ward in self._wards:
            if self._threads is not None and self._group is not None:
                self._threads.submit(self._receive, self._group, ward)

    def send(self, snapshot: WholeSnapshot) -> None:
        """Begins to send this rank's complete snapshot, from any thread. It must stay until `wait` has returned."""
        if self.has_buddy and self._threads is not None and self._group is not None:
            self._sending = self._threads.submit(self._send, self._group, snapshot)

    def wait(self) -> float | None:
        """Waits until the buddy has the last snapshot or has refused it, or the generation is over.

        Returns:
            seconds that the transfer took; None if no copy was sent.
        """
        sending, self._sending = self._sending, None
        if sending is None:
            return None
        sent = sending.result()
        if sent.answer is Answer.NO_MEMORY:
            self._refused(sent.snapshot)
            return None
        if sent.answer is Answer.WHOLE and self._refused_by is not None:
            self._refused_by = None
            self._show(SnapshotMoment.DOUBLED, sent.snapshot)
            self._print(f"have a second copy again: rank {self._buddy} keeps it")
        return sent.sending_s

    def _refused(self, snapshot: WholeSnapshot) -> None:
        self._show(SnapshotMoment.REFUSED, snapshot)
        if self._refused_by == self._buddys_node:
            return  # it was reported
        self._refused_by = self._buddys_node
        self._print(
            f"have one copy only: node {self._buddys_node!r}, where rank {self._buddy} would keep the second one, has "
            f"no memory for it (2 x {snapshot.num_bytes / 1e6:.3g} MB). Training goes on. If this rank's own node is "
            "lost, the job goes back to a checkpoint or, without one, ends with exit code 75. Free memory on "
            f"{self._buddys_node!r} (keepstep asks again with each snapshot), or write checkpoints "
            "(protect(checkpoint_dir=...))"
        )

    def _show(self, moment: SnapshotMoment, snapshot: WholeSnapshot) -> None:
        self._on_moment(moment, snapshot.step, snapshot.num_bytes, time.monotonic_ns())

    def _print(self, what: str) -> None:
        print(f"keepstep: the snapshots of rank {self._rank} {what}", file=sys.stderr, flush=True)

    # ---- the two sides ----------------------------------------------------------------------------------------------

    def _send(self, group: Carrier, snapshot: WholeSnapshot) -> SecondCopySent:
        begun_s, answer = time.monotonic(), None
        try:
            answer = self._give(group, snapshot)
        except RuntimeError as error:  # of the group: it was aborted, or a peer is gone
            self._failed(error)
        return SecondCopySent(snapshot, time.monotonic() - begun_s, answer)

    def _give(self, group: Carrier, snapshot: WholeSnapshot) -> Answer:
        buddy = self._buddy
        assert buddy is not None
        kept = -1 if self.kept_step is None else self.kept_step
        header = _HEADER.pack(snapshot.step, snapshot.num_bytes, kept, snapshot.digest)
        group.send([torch.frombuffer(bytearray(header), dtype=torch.uint8)], buddy, _HEADER_TAG).wait()
        if (answer := _receive_answer(group, buddy)) is Answer.SEND:
            view = self._file.open_for_writing(snapshot.slot, snapshot.num_bytes)
            under_way: list[dist.Work] = []
            for chunk in _chunks(view, snapshot.num_bytes):
                if len(under_way) == NUM_UNDER_WAY:
                    under_way.pop(0).wait()
                under_way.append(group.send([chunk], buddy, _CHUNK_TAG))
            for work in under_way:
                work.wait()
            answer = _receive_answer(group, buddy)
        if answer is Answer.DAMAGED:
            raise RuntimeError(f"the snapshot of step {snapshot.step} arrived damaged at rank {buddy}")
        return answer

    def _receive(self, group: Carrier, ward: int) -> None:
        try:
            self._take(group, ward)
        except RuntimeError as error:  # as above
            self._failed(error)

    def _take(self, group: Carrier, ward: int) -> None:
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
    """Receives all chunks, each while the one before is hashed. Returns the digest."""
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
