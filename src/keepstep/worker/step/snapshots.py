"""Snapshots of this rank's state in memory, for shards whose holders may all be lost at once.

Between two updates parameters and optimizer state do not change. So the copy for a step begins when the step is
yielded. It runs in a separate thread (on a GPU: on a separate stream, see `keepstep.worker.step.side_copies`) beside
forward and backward. The rank waits for it before the gradient barrier. The copy goes into memory that the agent holds
as well (`keepstep.shared.snapshotfile`), and from there to a buddy on another node
(`keepstep.worker.step.second_copies`).

A snapshot is the length of a `StateHeader` as msgpack, the header, and the tensors' bytes in its order, each at a
multiple of 64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import torch
import xxhash

from keepstep.errors import ConfigurationError, RemoteProtocolError
from keepstep.freememory import free_bytes
from keepstep.protocol.messages import Membership, SnapshotsByRank
from keepstep.protocol.snapshots import NUM_KEPT, SnapshotSchedule, outdated
from keepstep.shared.snapshotfile import SnapshotFile, WholeSnapshot
from keepstep.shared.tagpage import SnapshotMoment
from keepstep.weights.memory.bytes_of import byte_view, copy_flat
from keepstep.weights.memory.pieces import Held
from keepstep.worker.state.image import StateHeader, describe, finish, targets
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.step import snapshot_cost
from keepstep.worker.step.second_copies import OnMoment, SecondCopies, ignore_moment
from keepstep.worker.step.side_copies import SideCopies, Wait, side_copies
from keepstep.worker.step.snapshot_cost import SnapshotCost

_LENGTH_BYTES = 8
_ALIGNMENT = 64


def parse_every(value: object) -> int | None:
    """Parses ``protect(snapshot_every=...)``. Returns the steps between two snapshots, 0 for "off", None for "auto".

    Raises:
        ConfigurationError: the value is not allowed.
    """
    if value == "auto":
        return None
    if value == "off":
        return 0
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ConfigurationError(f'protect(snapshot_every={value!r}): allowed are 1 and more, "auto" and "off"')


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor that is copied into a slot."""

    tensor: torch.Tensor
    """Its bytes, as a view."""
    offset: int
    is_copied: bool
    """Whether it was copied before the step began, because the step may change it before its update."""


@dataclasses.dataclass(slots=True)
class _Copy:
    """A snapshot that is being taken."""

    step: int
    slot: int
    num_bytes: int
    view: mmap.mmap
    pieces: list[_Piece]
    is_begun: Wait
    """Waits until the device has come to the step, and the copies made before the step are complete."""
    is_confirmed: threading.Event
    """Set once the copied state is known to be what its replicas hold: no process may load it before."""
    is_cancelled: bool = False
    processor_s: float = 0.0
    """Processor time of the copy, in seconds."""

    def run(self, file: SnapshotFile, rank: int, copies: SideCopies, on_moment: OnMoment) -> WholeSnapshot | None:
        """Fills the slot and seals it. Runs in the snapshot thread. Returns None if the copy was cancelled.

        What it waits for is set by `Snapshots.complete`, or by what cancels the copy.
        """
        begun_s = time.thread_time()
        copies.pin(self.slot, self.view)
        self.is_begun()
        digest = self._fill(copies)
        self.processor_s = time.thread_time() - begun_s
        self.is_confirmed.wait()
        if digest is None or self.is_cancelled:
            return None
        whole = WholeSnapshot(self.slot, rank, self.step, self.num_bytes, digest)
        file.seal(whole)
        on_moment(SnapshotMoment.COMPLETE, self.step, self.num_bytes, time.monotonic_ns())
        return whole

    def _fill(self, copies: SideCopies) -> bytes | None:
        """Copies the pieces not yet copied, and hashes all pieces. Returns the digest; None if it was cancelled."""
        memory = torch.frombuffer(self.view, dtype=torch.uint8)
        content, checksum, hashed = memory.numpy().data, xxhash.xxh3_128(), 0
        under_way: deque[tuple[Wait, int]] = deque()
        for piece, begin, end in self._chunks(copies.chunk_bytes):
            if self.is_cancelled:
                break
            target = memory[piece.offset + begin : piece.offset + end]
            is_there = _is_there if piece.is_copied else copies.begin(target, piece.tensor[begin:end])
            under_way.append((is_there, piece.offset + end))
            if len(under_way) == copies.num_ahead:
                wait, until = under_way.popleft()
                wait()
                checksum.update(content[hashed:until])
                hashed = until
        for wait, _until in under_way:  # also after a cancellation: the tensors are about to be overwritten
            wait()
        checksum.update(content[hashed : self.num_bytes])
        return None if self.is_cancelled else checksum.digest()

    def _chunks(self, chunk_bytes: int) -> Iterator[tuple[_Piece, int, int]]:
        for piece in self.pieces:
            size = piece.tensor.numel()
            for begin in range(0, size, chunk_bytes):
                yield piece, begin, min(size, begin + chunk_bytes)


def _is_there() -> None:
    """A `Wait` for a piece that was copied before."""


class Snapshots:
    """Takes and loads the snapshots of one rank. The training thread calls all methods."""

    def __init__(
        self,
        state: ProtectedState,
        file: SnapshotFile,
        every: int | None,
        copies: SecondCopies,
        num_ranks: int = 1,
        on_moment: OnMoment | None = None,
        side: SideCopies | None = None,
    ) -> None:
        """Args:
        state: the protected objects.
        file: this worker's snapshot memory.
        every: steps from one snapshot to the next; 0: no snapshots; None: see `SnapshotSchedule`.
        copies: second copies: those of other ranks in the same memory, and this rank's at its buddy.
        num_ranks: number of ranks on this node.
        on_moment: called for each snapshot that begins, is complete, or is loaded.
        side: copies the tensors. None: chosen by their device in the first step, because a script may move them before.
        """
        self._given_side = side
        self._on_moment = on_moment or ignore_moment
        self._state = state
        self._file = file
        self._copies = copies
        self._rank = -1
        self._schedule = SnapshotSchedule(every)
        self._cost = SnapshotCost(num_ranks)
        self._thread = ThreadPoolExecutor(1, "keepstep-snapshot")
        self._copy: _Copy | None = None
        self._running: Future[None] | None = None
        self.num_bytes = 0
        """Size of the last snapshot."""
        self._inherited: dict[tuple[int, int], SnapshotFile] = {}
        """(rank, step) -> other memory of this node that holds the snapshot."""

    def steps(self, rank: int | None) -> tuple[int, ...]:
        """Steps of the snapshots from which this worker can restore a rank, ascending."""
        if rank is None:
            return ()
        inherited = {step for whose, step in self._inherited if whose == rank and self._where(rank, step) is not None}
        return tuple(sorted({*inherited, *self._file.steps(rank)}))

    def second_copies(self) -> SnapshotsByRank:
        """The second copies that this worker keeps for other ranks."""
        return self._copies.held()

    def inherit(self, path: str, rank: int, steps: Iterable[int]) -> None:
        """Adds snapshots in other memory that the agent holds, for a process that takes a rank or sends its state.

        Args:
            path: path of that memory.
            rank: rank of the snapshots.
            steps: steps of the snapshots.
        """
        file = SnapshotFile(os.open(path, os.O_RDWR))  # a damaged snapshot is discarded
        self._inherited |= {(rank, step): file for step in steps}

    @functools.cached_property
    def _side(self) -> SideCopies:
        return self._given_side or side_copies(self._state.device)

    # ---- taking ---------------------------------------------------------------------------------------------------

    def hand_out(self, step: int, *, is_compared: bool = False) -> None:
        """Begins the snapshot of a yielded step, if one is due.

        Args:
            step: the step.
            is_compared: whether the state is compared with its replicas' before `complete` is called. The snapshot can
                be loaded only from then on.

        Raises:
            ConfigurationError: there is no memory for it.
        """
        if self._schedule.every is None:
            self._cost.begin(*snapshot_cost.now())
        if self._copy is not None or not self._schedule.is_due(step):
            return
        if (held := self._file.find(self._rank, step)) is not None:
            self._copies.hand_out()
            self._copies.send(held)
            return
        begun_s = time.monotonic()
        self._begin(step, is_compared=is_compared)
        if self._schedule.every is None:
            self._cost.prepared(time.monotonic() - begun_s)

    def _begin(self, step: int, *, is_compared: bool) -> None:
        self._copies.hand_out()
        begun_ns = time.monotonic_ns()
        header, blocks = describe(self._state, step)
        head = msgspec.msgpack.encode(header)
        first_buffer, first_optimizer = len(header.parameters), len(header.parameters) + len(header.buffers)
        last = first_optimizer + len(header.optimizer)
        end = _LENGTH_BYTES + len(head)
        pieces = []
        for index, (block, entry) in enumerate(zip(blocks, header.all_tensors, strict=True)):
            content = byte_view(block.held.tensor)
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            is_written = index < first_buffer and self._state.may_write(entry.name)
            is_changed = first_buffer <= index < first_optimizer or index >= last
            pieces.append(_Piece(content, offset, is_written or is_changed))
            end = offset + content.numel()
        slot = self._file.choose(self._rank, self._copies.kept_step)
        view = self._open(slot, end)
        view[: _LENGTH_BYTES + len(head)] = len(head).to_bytes(_LENGTH_BYTES, "little") + head
        memory = torch.frombuffer(view, dtype=torch.uint8)
        for piece in pieces:
            if piece.is_copied:
                self._side.copy(memory[piece.offset : piece.offset + piece.tensor.numel()], piece.tensor)
        is_begun = self._side.mark({piece.tensor.device for piece in pieces})
        self._copy = _Copy(step, slot, end, view, pieces, is_begun, threading.Event())
        if not is_compared:
            self._copy.is_confirmed.set()
        self._on_moment(SnapshotMoment.BEGUN, step, end, begun_ns)
        self._running = self._thread.submit(self._run, self._copy)

    def _run(self, copy: _Copy) -> None:
        """Runs in the snapshot thread."""
        try:
            whole = copy.run(self._file, self._rank, self._side, self._on_moment)
        finally:
            self._file.leave(copy.slot)
        if whole is not None:
            self._copies.send(whole)

    def complete(self, step: int, set_waiting: Callable[[bool], None]) -> None:
        """Waits until the copies are complete that are due before this rank counts as synced.

        Args:
            step: the current step.
            set_waiting: called before and after a wait for a copy, so that the agent does not take the rank for hung.
        """
        if self._copy is not None and self._running is not None:
            self._copy.is_confirmed.set()
            begun_s = time.monotonic()
            with _waiting(set_waiting):  # the first copies touch new memory, which may take longer than a backward
                self._running.result()
            if self._schedule.every is None:
                self._cost.waited(time.monotonic() - begun_s, self._copy.processor_s, self._copy.num_bytes)
            self.num_bytes = self._copy.num_bytes
            self._copy = self._running = None
        if self._schedule.is_second_copy_due(step):
            with _waiting(set_waiting):
                sending_s = self._copies.wait()
            if sending_s is not None and self._schedule.every is None:
                self._cost.sent(sending_s)
        if self._schedule.is_next_due(step):
            with _waiting(set_waiting):
                self._take(step + 1)

    def _take(self, step: int) -> None:
        """Takes a snapshot and its second copy, and waits for both. An earlier one of that step is discarded."""
        self._copies.wait()  # for the copy of a snapshot whose slot may be the next
        if (held := self._file.find(self._rank, step)) is not None:
            self._file.discard(held.slot)
        self._begin(step, is_compared=False)
        assert self._running is not None
        self._running.result()
        self._copy = self._running = None
        self._copies.wait()

    def take_ahead(self, ahead: Callable[[int], bool]) -> None:
        """Sets the steps in which the snapshot of the next one is taken; see `SnapshotSchedule.ahead`."""
        self._schedule.ahead = ahead

    def flush(self) -> None:
        """Waits for the copies in progress after the last step, so that no other rank waits for this one."""
        if self._running is not None and self._copy is not None:
            self._copy.is_confirmed.set()
            self._running.result()
        self._copies.wait()

    def proposal(self, step: int) -> int | None:
        """Returns this rank's proposal, in the gradient barrier of ``step``, of the steps between two snapshots.

        None: the ranks do not agree on it in this step. 0: this rank cannot tell.
        """
        if not self._schedule.is_agreed_in(step):
            return None
        return self._schedule.known if self._schedule.is_first(step) else self._cost.fewest_steps()

    def agreed(self, every: int) -> None:
        """Sets the steps between two snapshots to the maximum of all ranks' proposals."""
        self._schedule.agreed(every)

    @property
    def every(self) -> int | None:
        """Steps from one snapshot to the next; 0: no snapshots; None: the ranks are still measuring."""
        return self._schedule.every

    @property
    def has_buddy(self) -> bool:
        """Whether another rank keeps this rank's snapshots, too."""
        return self._copies.has_buddy

    def _open(self, slot: int, num_bytes: int) -> mmap.mmap:
        try:
            more_bytes = num_bytes - self._file.capacity(slot)
            if more_bytes > 0 and more_bytes > (free := free_bytes()):
                raise OSError(errno.ENOMEM, f"{free / 1e6:.0f} MB are left")
            return self._file.open_for_writing(slot, num_bytes)
        except OSError as error:
            self._file.leave(slot)
            raise ConfigurationError(
                f"this rank's snapshots take {NUM_KEPT} x {num_bytes / 1e6:.0f} MB of memory, which is not there: "
                f'{error.strerror}; give the job more, or protect(snapshot_every="off")'
            ) from error

    def _cancel(self) -> None:
        if self._copy is not None and self._running is not None:
            self._copy.is_cancelled = True
            self._copy.is_confirmed.set()
            self._running.result()
            self._copy = self._running = None

    # ---- going back -----------------------------------------------------------------------------------------------

    def release_state(self) -> None:
        """Cancels the copy in progress, because the state is about to be overwritten."""
        self._cancel()

    def load(self, rank: int, step: int) -> bool:
        """Loads a rank's snapshot of a step into the protected objects.

        Returns:
            whether there is such a snapshot; if not, nothing was done.

        Raises:
            RemoteProtocolError: the checksum is wrong, or the snapshot is of another step.
            StateMismatch: the snapshot is of other objects. The protected objects were not touched.
        """
        file = self._where(rank, step)
        if file is None:
            return False
        with contextlib.closing(file.read(rank, step)) as view:
            self._load_from(view, step)
            self._on_moment(SnapshotMoment.LOADED, step, len(view), time.monotonic_ns())
        return True

    def _where(self, rank: int, step: int) -> SnapshotFile | None:
        files = (self._file, self._inherited.get((rank, step)))
        return next((file for file in files if file is not None and file.find(rank, step) is not None), None)

    def image(self, ranks: Collection[int], step: int) -> tuple[StateHeader, list[Held]]:
        """Returns the state at a step of one of ``ranks``, from a snapshot in memory of this node.

        Raises:
            RemoteProtocolError: there is no such snapshot, or its checksum is wrong.
        """
        rank = next((rank for rank in ranks if self._where(rank, step) is not None), min(ranks))
        file = self._where(rank, step) or self._file
        view = file.read(rank, step)  # closed with the last tensor that uses it
        header, offsets = _read_header(view, step)
        memory = torch.frombuffer(view, dtype=torch.uint8)
        return header, [
            Held(entry.tensor_in(memory[offset:]), entry.box)
            for entry, offset in zip(header.all_tensors, offsets, strict=True)
        ]

    def _load_from(self, view: mmap.mmap, step: int) -> None:
        header, offsets = _read_header(view, step)
        tensors, host_tensors = targets(self._state, header, "the snapshot")
        memory = torch.frombuffer(view, dtype=torch.uint8)
        for tensor, offset in zip(map(byte_view, tensors), offsets, strict=True):
            copy_flat(tensor, memory[offset : offset + tensor.numel()])
        self._side.mark({tensor.device for tensor in tensors})()  # waits: the memory is about to be unmapped
        finish(self._state, header, host_tensors)

    def resumed(self, step: int, rank: int, membership: Membership | None, kept_step: int | None) -> None:
        """Begins a generation at the resume step. Discards snapshots of later steps.

        Args:
            step: the resume step.
            rank: the rank of this worker.
            membership: membership of the generation.
            kept_step: see `keepstep.protocol.messages.Recover`.
        """
        self._cancel()
        self._cost.interrupted()
        self._rank = rank
        for slot in outdated(self._file.held, step):
            self._file.discard(slot)
        self._inherited = {key: file for key, file in self._inherited.items() if key[1] <= step}
        self._schedule.resumed(step, membership)
        self._copies.resumed(rank, membership if self._schedule.every != 0 else None, kept_step)

    def passed_barrier(self) -> None:
        """Drops inherited snapshots: with complete gradients, every rank has its snapshot of the resume step."""
        self._inherited.clear()
        self._copies.passed_barrier()


@contextlib.contextmanager
def _waiting(set_waiting: Callable[[bool], None]) -> Iterator[None]:
    set_waiting(True)
    try:
        yield
    finally:
        set_waiting(False)


def _read_header(view: mmap.mmap, step: int) -> tuple[StateHeader, list[int]]:
    """Returns a snapshot's header, and the offset of each of its tensors.

    Raises:
        RemoteProtocolError: the snapshot is of another step.
    """
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    header = msgspec.msgpack.decode(view[_LENGTH_BYTES : _LENGTH_BYTES + length], type=StateHeader)
    if header.step != step:
        raise RemoteProtocolError(f"the snapshot of step {step} in memory says it is of step {header.step}")
    offsets, end = [], _LENGTH_BYTES + length
    for entry in header.all_tensors:
        offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = offsets[-1] + entry.num_bytes
    return header, offsets
