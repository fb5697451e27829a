"""Compares this rank's state with that of its replicas, before the gradient barrier of some steps.

keepstep.protocol.comparison says which steps these are, and what a difference means. The parameters that optimizers
train and the optimizers' tensors do not change before the update, so a thread computes their digests beside forward and
backward. What the script or a forward may change is read at the end of the backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import msgspec
import torch
import xxhash
from torch import distributed as dist

from keepstep.errors import PeerLost, StateMismatch, StepInterrupted
from keepstep.protocol.comparison import Said, Verdict, compares, follows_recovery, judge
from keepstep.weights.memory.blocks import local_of
from keepstep.worker.coordination import Coordination
from keepstep.worker.groups.store import LinkStore
from keepstep.worker.state.layout import RESTORED, Start, check_same_start, content_digest, gathered, later, start_of
from keepstep.worker.state.protected import ProtectedState

_STORE_TIMEOUT = timedelta(seconds=300)
_GROUP_BYTES = _DIGEST_BYTES = 8
_NOTHING = bytes(_DIGEST_BYTES)
"""Stands for a digest of what is not compared in a step."""

_Known = dict[str, tuple[int, int, bytes]]
"""Name of a tensor -> its version, its address, and the digest of its content at that version."""


class Comparison:
    """One rank's part. The training thread calls all methods."""

    def __init__(
        self, coordination: Coordination, state: ProtectedState, replicated: Callable[[], dict[str, bytes]]
    ) -> None:
        """Args:
        coordination: coordination of this rank.
        state: the protected objects.
        replicated: returns the values that are to be equal on all ranks, also on those that hold different shards.
        """
        self._coordination = coordination
        self._machine = coordination.machine
        self._state = state
        self._replicated = replicated
        self._resumed_at = 0
        self._is_restored = False
        """Whether this rank was restored, and not compared since with an update behind it: only then it shows whether
        something is lacking."""
        self._warned_in = 0
        """The last generation in which this rank has warned that ranks have trained apart."""
        self._beside: Future[_Known] | None = None
        """Digests that a thread computes in this step."""
        self._thread: ThreadPoolExecutor | None = None

    def resumed(self, step: int, *, is_restored: bool) -> None:
        """Call it when this rank is at the resume step of a generation.

        Args:
            step: the resume step.
            is_restored: whether this rank has got its state there from elsewhere.
        """
        self._resumed_at = step
        self._is_restored |= is_restored

    def hand_out(self, step: int) -> None:
        """Begins to compute digests if they are compared in this step. Call it when the step is yielded."""
        self._beside = None
        if not self.compares_state(step):
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "keepstep-digests")
        found = [
            (name, local, local._version, local.data_ptr())
            for name, tensor in (*self._state.parameters(), *self._state.optimizer_tensors())
            if name not in self._state.written
            and not (local := local_of(tensor)).is_inference()  # torch counts no versions of these
        ]
        self._beside = self._thread.submit(
            lambda: {name: (version, at, content_digest(local.detach())) for name, local, version, at in found}
        )

    def before_barrier(self, step: int) -> None:
        """Compares this rank with all others, in some steps. Call it when backward has ended, on every rank.

        Raises:
            StateMismatch: this rank's state differs from a replica's, and has since before any failure.
            StepInterrupted: a rank refuses what it has loaded, so that all ranks undo the step.
        """
        compares_state = self.compares_state(step)
        values = self._replicated() if compares_state or step & (step - 1) == 0 else {}
        if not (compares_state or values):
            return
        machine, page, world_size = self._machine, self._coordination.page, dist.get_world_size()
        if machine.rank is None or world_size == 1:
            return
        page.set_waiting(True)  # reading all of the state may take long, and so may others
        try:
            state = start_of(self._state, digest=self._digest_beside()) if compares_state else Start((), (), ())
            everywhere = Start((), tuple(values), tuple(xxhash.xxh3_64_digest(each) for each in values.values()))
            rows = gathered(self._row(state if compares_state else None, everywhere), world_size)
            groups = [(self._state.shard(), state, 0), ("everywhere", everywhere, 1)]
            for name, own, index in groups:
                self._act(step, name, own, [_said(row, index) for row in rows])
            if step > self._resumed_at and not (machine.interrupted or machine.used_echo):
                self._is_restored = False  # an echo would have been this rank's own digest
        except PeerLost:
            machine.echoed()
        finally:
            page.set_waiting(False)

    def compares_state(self, step: int) -> bool:
        """Whether all of the state is compared in a step."""
        membership = self._machine.membership
        return (
            compares(step, self._resumed_at, self._machine.generation)
            and membership is not None
            and len(membership.shards) < membership.world_size
        )

    def may_be_refused(self, step: int) -> bool:
        """Whether a rank may find in a step that its state is not what it has loaded."""
        return self.compares_state(step) and follows_recovery(step, self._resumed_at, self._machine.generation)

    def _digest_beside(self) -> Callable[[str, torch.Tensor], bytes]:
        """A `content_digest` that takes what was computed beside the step, of tensors that have not changed since."""
        beside, self._beside = self._beside, None
        digests = beside.result() if beside is not None else {}

        def digest(name: str, tensor: torch.Tensor) -> bytes:
            if name in digests and name not in self._state.written:
                version, at, known = digests[name]
                if (tensor._version, tensor.data_ptr()) == (version, at):
                    return known
            return content_digest(tensor)

        return digest

    def _row(self, state: Start | None, everywhere: Start) -> bytes:
        own = _NOTHING if state is None else xxhash.xxh3_64_digest(msgspec.msgpack.encode(state))
        values = xxhash.xxh3_64_digest(msgspec.msgpack.encode(everywhere))
        return xxhash.xxh3_64_digest(self._state.shard().encode()) + own + values + bytes([self._is_restored])

    def _act(self, step: int, name: str, own: Start, said: list[Said]) -> None:
        verdict, rank = judge(said), self._machine.rank
        if not verdict:
            return
        assert rank is not None
        error = self._difference(step, name, own, verdict)
        if not follows_recovery(step, self._resumed_at, self._machine.generation):
            if error is not None:
                raise error
            return
        if error is not None and rank in verdict.apart:
            self._machine.stands_apart(f"step {step}: {error}")
            if rank == verdict.apart[0]:
                self._warn(step, error, verdict.apart)
        if verdict.refused:
            if rank in verdict.refused:
                reason = error or StateMismatch(f"no replica of rank {rank} was left to compare it with")
                self._machine.refused(str(reason))
            else:
                self._machine.breaks_off()
            raise StepInterrupted

    def _warn(self, step: int, error: StateMismatch, apart: tuple[int, ...]) -> None:
        if self._machine.generation == self._warned_in:
            return
        self._warned_in = self._machine.generation
        print(
            f"keepstep: WARNING: step {step}: ranks {list(apart)} had trained apart from their replicas before the "
            f"failure, and go on (--compare strict would end the job): {error}",
            file=sys.stderr,
            flush=True,
        )

    def _difference(self, step: int, name: str, own: Start, verdict: Verdict) -> StateMismatch | None:
        """Returns what differs between this rank and the rank that it is compared with; None if nothing does."""
        rank = self._machine.rank
        assert rank is not None
        store = LinkStore(self._coordination.link, self._machine.generation, f"compared/{step}/{name}", _STORE_TIMEOUT)
        if rank in verdict.first.values():
            store.set(str(rank), msgspec.msgpack.encode(own))
        if (first := verdict.first.get(rank)) is None:
            return None
        theirs = msgspec.msgpack.decode(store.get(str(first)), type=Start)
        try:
            check_same_start(own, theirs, rank, first, RESTORED if rank in verdict.refused else later(step))
        except StateMismatch as error:
            return error
        return None


def _said(row: bytes, index: int) -> Said:
    """What a rank says of its state (0), or of the values that are equal on all ranks (1)."""
    begin = _GROUP_BYTES + index * _DIGEST_BYTES
    return Said(row[:_GROUP_BYTES] if index == 0 else b"", row[begin : begin + _DIGEST_BYTES], bool(row[-1]))
