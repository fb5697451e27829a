"""The store of the job: torch's default store, whose keys and values all ranks share for as long as the job lives.

It belongs to the job and not to a generation, so a recovery does not change it; only when all ranks restart is it
emptied. It is bounded, and a controller that may restart keeps it in a file: a change is written before its request is
answered.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO

import msgspec

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import (
    MAX_STORE_VALUE_BYTES,
    STORE_OPERATIONS_THAT_WAIT,
    AnyMessage,
    StoreAnswered,
    StoreRequested,
)
from keepstep.protocol.recovery.transitions import Stage
from keepstep.transports.framing import FrameDecoder, frame

PREFIX = "job_"
"""Of the operations of a `StoreRequested` that are answered here. Its ``generation`` is that in which a rank waits
between two steps, and 0 for all else."""
CHANGING = frozenset({"job_set", "job_add", "job_append", "job_compare_set", "job_delete"})
MAX_STORE_BYTES = 256 << 20
"""Of all keys and values, in the controller's memory: as much as `keepstep.protocol.recovery.scripts.startup` keeps."""
MAX_KEY_BYTES = 1 << 16
KEY_OVERHEAD_BYTES = 200
"""What an entry takes besides its characters (measured: 190 bytes for a short key, CPython 3.11)."""
MAX_ANSWERS = 1024
"""Answers kept of each worker, for requests that come twice: more than a worker has threads that could be asking."""
COMPACT_BYTES = 1 << 20
"""A file is rewritten when it is larger than twice what it holds and this."""
_NUMBER = re.compile(rb"[ \t-\r]*([+-]?[0-9]{1,40})(?![0-9])")
"""What C++'s ``stoll`` reads, which torch's stores add with; it refuses what 64 bits do not hold."""
_pair = msgspec.msgpack.Decoder(tuple[bytes, bytes])


class JobStore:
    """Keys and values of one job, and the requests that wait for a key."""

    def __init__(self, path: Path | None = None, *, is_durable: bool = False) -> None:
        """Args:
        path: a file, for a controller that may be started again; read now, and written as keys change.
        is_durable: what was written survives the machine too, as for `keepstep.trace.record.journal.Journal`.
        """
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._waiting: dict[tuple[int, int], StoreRequested] = {}
        """By worker and number of the request."""
        self._waiting_for: dict[str, set[tuple[int, int]]] = {}
        """By the first key of each that is not there."""
        self._answered: dict[int, OrderedDict[int, StoreAnswered]] = {}
        """Answers to what has changed something, by worker and number."""
        self._path = path
        self._is_durable = is_durable
        self._file: BinaryIO | None = None
        self._unwritten: list[bytes] = []
        self._file_bytes = 0
        if path is not None:
            self._load(path)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def request(self, request: StoreRequested) -> list[StoreAnswered]:
        """Carries out one request; returns the answers it gives rise to, of waiting ones too. Transmit them after
        `flush`.

        Raises:
            RemoteProtocolError: an operation that is unknown, or with too few keys or values that are none.
        """
        before = self._answered.get(request.worker, OrderedDict()).get(request.request)
        if before is not None:
            return [before]
        if len(request.keys) != 1 and request.operation in CHANGING | {"job_get"}:
            raise RemoteProtocolError(f"worker {request.worker}: {request.operation!r} names {len(request.keys)} keys")
        if request.operation in STORE_OPERATIONS_THAT_WAIT:
            return self._wait(request)
        match request.operation:
            case "job_check":
                there = all(key in self._values for key in request.keys)
                return [_answer(request, b"1" if there else b"0")]
            case "job_num_keys":
                return [_answer(request, str(len(self._values)).encode())]
            case "job_cancel":
                return [_answer(request), *self._cancel(request)]
            case _ if request.operation in CHANGING:
                return self._change(request)
            case _:
                raise RemoteProtocolError(
                    f"worker {request.worker}: no store operation is called {request.operation!r}"
                )

    def _change(self, request: StoreRequested) -> list[StoreAnswered]:
        answer = self._changed(request)
        kept = self._answered.setdefault(request.worker, OrderedDict())
        kept[request.request] = answer
        if len(kept) > MAX_ANSWERS:
            kept.popitem(last=False)
        if self._path is not None:
            self._unwritten.append(frame(request))
        return [answer, *self._served(request.keys[0])]

    def _changed(self, request: StoreRequested) -> StoreAnswered:
        key, value = request.keys[0], request.value
        present = self._values.get(key)
        match request.operation:
            case "job_set":
                return _answer(request, error=self._put(key, value))
            case "job_append":
                return _answer(request, error=self._put(key, (present or b"") + value))
            case "job_add":
                found = _NUMBER.match(present or b"0")
                if found is None or _wrapped(int(found[1])) != int(found[1]):
                    return _answer(request)
                total = str(_wrapped(int(found[1]) + _number(request))).encode()
                return _answer(request, total, error=self._put(key, total))
            case "job_compare_set":
                expected, desired = _two(request)
                if (present or b"") != expected:
                    return _answer(request, expected if present is None else present)
                return _answer(request, desired, error=self._put(key, desired))
            case _:  # job_delete
                if present is not None:
                    del self._values[key]
                    self._num_bytes -= _size(key, present)
                return _answer(request, b"0" if present is None else b"1")

    def _put(self, key: str, value: bytes) -> str:
        """Sets a key; or says why not."""
        if len(key) * 4 > MAX_KEY_BYTES and len(key.encode()) > MAX_KEY_BYTES:
            return f"a key of {len(key)} characters: at most {MAX_KEY_BYTES >> 10} KiB are allowed"
        if len(value) > MAX_STORE_VALUE_BYTES:
            max_mib = MAX_STORE_VALUE_BYTES >> 20
            return f"key {key[:200]!r}: a value of {len(value)} bytes, and at most {max_mib} MiB are allowed"
        before = self._values.get(key)
        num_bytes = self._num_bytes + _size(key, value) - (0 if before is None else _size(key, before))
        if num_bytes > MAX_STORE_BYTES and num_bytes > self._num_bytes:
            return (
                f"the store of the job is full: {len(self._values)} keys take {self._num_bytes >> 20} MiB of "
                f"{MAX_STORE_BYTES >> 20} MiB. Delete keys that no rank reads any more (delete_key), and exchange "
                "large values in collectives or files"
            )
        self._values[key], self._num_bytes = value, num_bytes
        return ""

    # ---- who waits --------------------------------------------------------------------------------------------------

    def _wait(self, request: StoreRequested) -> list[StoreAnswered]:
        missing = next((key for key in request.keys if key not in self._values), None)
        if missing is None:
            values = (self._values[request.keys[0]],) if request.operation == "job_get" else ()
            return [_answer(request, *values)]
        asked = (request.worker, request.request)
        self._waiting[asked] = request
        self._waiting_for.setdefault(missing, set()).add(asked)
        return []

    def _served(self, key: str) -> list[StoreAnswered]:
        """The answers to those that have waited for a key, if it is there now."""
        if key not in self._values or key not in self._waiting_for:
            return []
        requests = [self._waiting.pop(asked) for asked in sorted(self._waiting_for.pop(key)) if asked in self._waiting]
        return [answer for request in requests for answer in self._wait(request)]

    def _cancel(self, request: StoreRequested) -> list[StoreAnswered]:
        asked = (request.worker, _number(request))
        return [self._end(asked, "")] if asked in self._waiting else []

    def _end(self, asked: tuple[int, int], error: str) -> StoreAnswered:
        waited = self._waiting.pop(asked)
        for key in waited.keys:
            if asked in (others := self._waiting_for.get(key, set())):
                others.discard(asked)
                if not others:
                    del self._waiting_for[key]
        return _answer(waited, error=error)

    def settle(
        self, stage: Stage, generation: int, awaited: Collection[int], is_lost: Callable[[int], bool]
    ) -> list[StoreAnswered]:
        """Updates the job's stage; returns answers to waits that can never end.

        While survivors are stopped, one that waits between two steps (its request names its generation) goes on
        waiting, for another one that is between steps too may set the key. When all that have not come to a safe point
        wait like that, none will.

        Args:
            stage: of the job.
            generation: the present one.
            awaited: the workers that the stage waits for.
            is_lost: whether a worker's requests count no more.
        """
        if not self._waiting or stage is not Stage.STOPPING:
            return []
        for asked in [asked for asked in self._waiting if is_lost(asked[0])]:
            self._end(asked, "")
        held_up = {worker: (worker, number) for (worker, number), r in self._waiting.items() if r.generation > 0}
        if not awaited or not all(worker in held_up for worker in awaited):
            return []
        return [
            self._end(
                held_up[worker],
                f"generation {generation}: a rank was lost, and every other one stands at a safe point or waits as "
                f"this one does, so none will set {', '.join(map(repr, self._waiting[held_up[worker]].keys))[:200]}. "
                "What a rank sets between two steps is not set again by its replacement: wait for it inside of the "
                "step, before optimizer.step(), or with a collective",
            )
            for worker in sorted(awaited)
        ]

    def restart(self) -> None:
        """All ranks start, and none of an earlier start is left: what those had agreed upon is void."""
        self._values, self._num_bytes = {}, 0
        self._waiting, self._waiting_for, self._answered = {}, {}, {}
        if self._file is not None:  # what is open, and no other controller reads if this one is the former one
            self._unwritten.clear()
            self._file.seek(0)
            self._file.truncate()
            self._file_bytes = 0
            self._sync(self._file)

    # ---- the file ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Writes what has changed. Call it before any answer is transmitted.

        Raises:
            OSError: it cannot be written.
        """
        if not self._unwritten or self._path is None:
            return
        assert self._file is not None
        data = b"".join(self._unwritten)
        self._unwritten.clear()
        self._file.write(data)
        self._file_bytes += len(data)
        if self._file_bytes > COMPACT_BYTES + 2 * self._num_bytes:
            self._check_own(self._file, self._path)
            self._rewrite(self._path)
        else:
            self._sync(self._file)

    def close(self) -> None:
        """Gives up the file."""
        if self._file is not None:
            self._file.close()

    def _load(self, path: Path) -> None:
        if path.exists():
            # A torn frame at the end stays in the decoder: its worker was not answered, and asks again.
            for message in FrameDecoder().feed(path.read_bytes()):
                if isinstance(message, StoreRequested):
                    self._change(message)
                elif isinstance(message, StoreAnswered):
                    self._answered.setdefault(message.worker, OrderedDict())[message.request] = message
        self._rewrite(path)

    @staticmethod
    def _check_own(file: BinaryIO, path: Path) -> None:
        """Makes sure that no successor has put its file there: a former controller may have stood still until now.

        One that stands still again right behind this, until another one has taken over, is not noticed.
        """
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise OSError(f"{path} is not written any more: another controller has taken it over")

    def _rewrite(self, path: Path) -> None:
        """Rewrites the file. A former controller that still writes has the old one open, which is unlinked now."""
        messages: list[AnyMessage] = [
            StoreRequested(-1, 0, number, "job_set", (key,), value)
            for number, (key, value) in enumerate(self._values.items())
        ]
        messages += [answer for worker, kept in self._answered.items() if worker >= 0 for answer in kept.values()]
        fresh = path.with_name(path.name + ".new")
        self._unwritten.clear()
        self.close()
        self._file = fresh.open("wb")
        self._file_bytes = sum(self._file.write(frame(message)) for message in messages)
        self._sync(self._file)
        fresh.replace(path)
        self._answered.pop(-1, None)

    def _sync(self, file: BinaryIO) -> None:
        file.flush()
        if self._is_durable:
            os.fdatasync(file.fileno())


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value) + KEY_OVERHEAD_BYTES


def _wrapped(number: int) -> int:
    """As 64 bits with a sign hold it, as in torch's stores."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _number(request: StoreRequested) -> int:
    try:
        return int(request.value)
    except ValueError:
        raise RemoteProtocolError(
            f"worker {request.worker}: {request.operation!r} needs a number, not {request.value[:40]!r}"
        ) from None


def _two(request: StoreRequested) -> tuple[bytes, bytes]:
    try:
        return _pair.decode(request.value)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"worker {request.worker}: {request.operation!r} needs two values: {error}") from None


def _answer(request: StoreRequested, *values: bytes, error: str = "") -> StoreAnswered:
    return StoreAnswered(request.worker, request.request, () if error else values, error)
