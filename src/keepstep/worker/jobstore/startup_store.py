"""Results of the ranks' store operations during their start, for a replacement that starts later and alone.

A replacement runs the same code on a store that has changed since: a counter would count it twice, and a key may be
deleted or changed. So until its first step it gets the results of the rank that it replaces, and changes nothing: for
the n-th operation of a kind on the same keys it gets the n-th result.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import deque
from collections.abc import Callable

import msgspec
from torch import distributed as dist

from keepstep.errors import PeerLost
from keepstep.worker.groups.startup_operations import MAX_RESULT_BYTES, MAX_VALUE_BYTES, Keeper, decode_kept
from keepstep.worker.jobstore.default import Asking

WHAT_TO_DO = "USAGE.md, 'Objects exchanged while the script starts'"
SILENT = frozenset({"job_set", "job_append", "job_wait"})
"""Operations without a result."""


class StoreResult(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The result of one operation of the store."""

    operation: str
    keys: tuple[str, ...]
    digest: bytes
    """Digest of the value passed to the operation."""
    values: tuple[bytes, ...]
    error: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[StoreResult, ...])


def _name(rank: int) -> str:
    return f"store/{rank}"


def _digest(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=8).digest()


class StoreRecorder:
    """Records the results of a rank's operations. Implements `default.Asking`."""

    def __init__(self, rank: int, asking: Asking) -> None:
        self._rank = rank
        self._asking = asking
        self._lock = threading.Lock()
        self._results: list[StoreResult] = []
        self._num_bytes = 0
        self._omitted = 0

    def ask(self, operation: str, keys: tuple[str, ...], value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        """Performs one operation and records its result, from any thread."""
        try:
            values = self._asking.ask(operation, keys, value, timeout_s)
        except dist.DistStoreError as error:
            self._keep(StoreResult(operation, keys, _digest(value), (), str(error)))
            raise
        self._keep(StoreResult(operation, keys, _digest(value), values, ""))
        return values

    def _keep(self, result: StoreResult) -> None:
        num_bytes = len(_encoder.encode(result))
        with self._lock:
            if num_bytes > MAX_RESULT_BYTES or self._num_bytes + num_bytes > MAX_VALUE_BYTES:
                self._omitted += 1
                return
            self._num_bytes += num_bytes
            self._results.append(result)

    def hand_over(self, keeper: Keeper) -> None:
        """Stores all results. Prints a warning if there is no room for them; training continues.

        Raises:
            PeerLost: a rank was lost, so this start-up does not count.
        """
        with self._lock:
            value, is_empty = _encoder.encode(self._results), not self._results
        if (not is_empty and not keeper.keep(_name(self._rank), value)) or self._omitted:
            print(
                f"keepstep: rank {self._rank}: not all that the store gave before the first step could be kept for a "
                f"replacement ({len(value)} bytes, and {self._omitted} results more): it ends with an error where it "
                f"asks for that ({WHAT_TO_DO})",
                file=sys.stderr,
                flush=True,
            )


class StoreReplayer:
    """Answers a replacement's operations with the recorded results. Implements `default.Asking`."""

    def __init__(self, keeper: Keeper, await_rank: Callable[[], int], known_rank: Callable[[], int | None]) -> None:
        """Args:
        keeper: holds the recorded results.
        await_rank: returns this process's rank; waits if the rank is not known yet.
        known_rank: the same, without waiting; None if the rank is not known yet.
        """
        self._keeper = keeper
        self._await_rank = await_rank
        self._known_rank = known_rank
        self._lock = threading.Lock()
        self._results: dict[tuple[str, tuple[str, ...]], deque[StoreResult]] | None = None
        self._skipped: list[tuple[str, tuple[str, ...]]] = []
        """Operations without a result that ran before the rank was known."""

    def ask(self, operation: str, keys: tuple[str, ...], value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        """Returns the result of the same operation of the replaced rank. Waits for the rank if there is a result.

        Raises:
            PeerLost: the result was not recorded.
            DistStoreError: the operation raised it on the replaced rank.
        """
        with self._lock:
            if operation in SILENT and self._known_rank() is None:
                self._skipped.append((operation, keys))
                return ()
            results = self._load().get((operation, keys))
            if not results:
                raise PeerLost(
                    f"rank {self._known_rank()}: {operation.removeprefix('job_')} of {', '.join(keys)[:200]!r} in the "
                    "store: a replacement gets what the store gave its rank before the first step, and this was more "
                    f"than the rank had asked for, or could be kept ({WHAT_TO_DO})"
                )
            result = results.popleft()
        if result.digest != _digest(value):
            self._warn(operation, keys)
        if result.error:
            raise dist.DistStoreError(result.error)
        return result.values

    def _load(self) -> dict[tuple[str, tuple[str, ...]], deque[StoreResult]]:
        if self._results is None:
            self._results = {}
            for each in decode_kept(_decoder, self._keeper, _name(self._await_rank())) or ():
                self._results.setdefault((each.operation, each.keys), deque()).append(each)
            for skipped in self._skipped:
                if of_it := self._results.get(skipped):
                    of_it.popleft()
        return self._results

    def _warn(self, operation: str, keys: tuple[str, ...]) -> None:
        print(
            f"keepstep: rank {self._known_rank()}: a replacement gives the store another value for "
            f"{', '.join(keys)[:200]!r} ({operation.removeprefix('job_')}) than its rank did before the first step. "
            "The store keeps the first, which other ranks may have read: read it back with get()",
            file=sys.stderr,
            flush=True,
        )
