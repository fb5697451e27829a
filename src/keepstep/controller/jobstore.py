"""The store of the job: torch's default store, whose keys and values all ranks share for as long as the job lives.

It belongs to the job and not to a generation, so a recovery does not change it. The controller empties it only when all
ranks restart. Its size is bounded. A controller that may restart keeps it in a file, and writes each change before it
answers the request.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from keepstep.errors import ConfigurationError, RemoteProtocolError
from keepstep.protocol.messages import (
    AT_ONCE,
    MAX_STORE_VALUE_BYTES,
    STORE_OPERATIONS_THAT_WAIT,
    AnyMessage,
    StoreAnswered,
    StoreRequested,
)
from keepstep.protocol.recovery.transitions import Stage
from keepstep.trace.record.growing import GrowingFile
from keepstep.transports.framing import frame, messages_in, not_ours

PREFIX = "job_"
"""Prefix of the `StoreRequested` operations of this store. Their ``generation`` is 0, except for a rank that waits
between two steps: then it is the current generation."""
CHANGING = frozenset({"job_set", "job_add", "job_append", "job_compare_set", "job_delete"})
MAX_STORE_BYTES = 256 << 20
"""Limit of all keys and values in the controller's memory, the same as in
`keepstep.protocol.recovery.scripts.startup`."""
MAX_KEY_BYTES = 1 << 16
KEY_OVERHEAD_BYTES = 200
"""Memory of an entry besides its key and value (measured: 190 bytes for a short key, CPython 3.11)."""
MAX_ANSWERS = 1024
"""Number of answers kept for each worker, for repeated requests: more than the threads of a worker that may wait."""
COMPACT_BYTES = 1 << 20
"""The file is rewritten when it is larger than twice the content of the store plus this."""
_NUMBER = re.compile(rb"[ \t-\r]*([+-]?[0-9]{1,40})(?![0-9])")
"""The numbers that C++'s ``stoll`` reads, with which torch's stores add. It refuses numbers beyond 64 bits."""
_pair = msgspec.msgpack.Decoder(tuple[bytes, bytes])


class JobStore:
    """The keys and values of one job, and the requests that wait for a key."""

    def __init__(self, path: Path | None = None, *, is_durable: bool = False) -> None:
        """Args:
        path: file for a controller that may be restarted. It is read now, and `flush` writes the changes.
        is_durable: whether the file survives a crash of the machine, as for `keepstep.trace.record.journal.Journal`.

        Raises:
            ConfigurationError: the file is not one that this version writes. It stays as it is.
        """
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._waiting: dict[tuple[int, int], StoreRequested] = {}
        """(worker, request number) -> the waiting request."""
        self._waiting_for: dict[str, set[tuple[int, int]]] = {}
        """First missing key -> the requests that wait for it."""
        self._answered: dict[int, OrderedDict[int, StoreAnswered]] = {}
        """Worker -> request number -> the answer, for requests that have changed the store."""
        self._path = path
        self._is_durable = is_durable
        self._file: GrowingFile | None = None
        self._unwritten: list[bytes] = []
        self._file_bytes = 0
        if path is not None:
            self._load(path)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def request(self, request: StoreRequested) -> list[StoreAnswered]:
        """Executes a request. Returns its answer, if there is one yet, and those of waiting requests that it completes.

        The caller must send them after `flush`.

        Raises:
            RemoteProtocolError: the operation is unknown, or has a wrong number of keys, or invalid values.
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
        """Sets a key. Returns an error's text, or "" on success."""
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

    # ---- waiting requests -------------------------------------------------------------------------------------------

    def _wait(self, request: StoreRequested) -> list[StoreAnswered]:
        missing = next((key for key in request.keys if key not in self._values), None)
        if missing is None:
            values = (self._values[request.keys[0]],) if request.operation == "job_get" else ()
            return [_answer(request, *values)]
        if request.value == AT_ONCE:
            return [_answer(request, error=f"no rank has set key {missing[:200]!r} of the store")]
        asked = (request.worker, request.request)
        self._waiting[asked] = request
        self._waiting_for.setdefault(missing, set()).add(asked)
        return []

    def _served(self, key: str) -> list[StoreAnswered]:
        """Returns the answers to the requests that have waited for a key, if the key exists now."""
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
        """Returns answers to waits that can never end, by the job's current stage.

        While survivors stop, a rank that waits between two steps (its request names the generation) continues to wait,
        because another rank between steps may set the key. When all ranks without a safe point wait like that, no rank
        will set a key, and the waits end with an error.

        Args:
            stage: the job's stage.
            generation: the current generation.
            awaited: the workers for which the stage waits.
            is_lost: returns whether a worker is lost, so that its requests do not count.
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
                "What a rank sets between two steps is not set again by its replacement: exchange it with a collective",
            )
            for worker in sorted(awaited)
        ]

    def restart(self) -> None:
        """Empties the store, because all ranks start again."""
        self._values, self._num_bytes = {}, 0
        self._waiting, self._waiting_for, self._answered = {}, {}, {}
        if self._file is not None:  # the open file: if another controller has taken over, it reads another one
            self._unwritten.clear()
            self._file.empty()
            self._file_bytes = 0

    # ---- the file ---------------------------------------------------------------------------------------------------

    @property
    def error(self) -> OSError | None:
        """Why the file was given up; None if there is none, or it was not."""
        return None if self._file is None else self._file.error

    def flush(self) -> None:
        """Writes the changes to the file, unless it is given up. Call it before sending any answer.

        Raises:
            OSError: another controller has taken the file over.
        """
        if not self._unwritten or self._path is None:
            return
        assert self._file is not None
        data = b"".join(self._unwritten)
        self._unwritten.clear()
        self._file.append(data)
        self._file_bytes += len(data)
        if self._file_bytes > COMPACT_BYTES + 2 * self._num_bytes and self._file.error is None:
            if not self._file.is_at(self._path):  # not noticed if this controller is stopped again right after this
                raise OSError(f"{self._path} is not written any more: another controller has taken it over")
            try:
                self._rewrite(self._path)
            except OSError as error:
                self._file.give_up(error)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _load(self, path: Path) -> None:
        for message in messages_in(path):  # a worker whose frame is incomplete got no answer, and asks again
            if isinstance(message, StoreRequested) and message.operation in CHANGING and len(message.keys) == 1:
                self._change(message)
            elif isinstance(message, StoreAnswered):
                self._answered.setdefault(message.worker, OrderedDict())[message.request] = message
            else:
                raise ConfigurationError(not_ours(path, f"it holds {type(message).__name__}, which changes no key"))
        self._rewrite(path)

    def _rewrite(self, path: Path) -> None:
        """Replaces the file by one with the current content. A former controller still writes to the unlinked one."""
        messages: list[AnyMessage] = [
            StoreRequested(-1, 0, number, "job_set", (key,), value)
            for number, (key, value) in enumerate(self._values.items())
        ]
        messages += [answer for worker, kept in self._answered.items() if worker >= 0 for answer in kept.values()]
        fresh = path.with_name(path.name + ".new")
        data = b"".join(frame(message) for message in messages)
        file = GrowingFile(fresh, is_durable=self._is_durable, is_empty=True)
        file.append(data)
        if file.error is not None:
            file.close()
            raise file.error
        fresh.replace(path)
        self.close()
        self._unwritten.clear()
        self._file, self._file_bytes = file, len(data)
        self._answered.pop(-1, None)


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value) + KEY_OVERHEAD_BYTES


def _wrapped(number: int) -> int:
    """Wraps a number to a signed 64-bit integer, as torch's stores do."""
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
