"""The ranks' start-up exchange, recorded for the start-up of a replacement.

Each rank submits the results of its operations before it reports that it is at its first step. So the record is
complete when all ranks are at their first step. A replacement that asks earlier waits. When all ranks restart, they
exchange other values. Then the controller drops the record of their former start, complete or not.
"""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import StoreAnswered, StoreRequested
from keepstep.protocol.recovery.transitions import Stage

OPERATIONS = ("keep", "kept")
"""The `StoreRequested` operations for this record: keep a value, and ask for a kept value."""
MAX_KEPT_BYTES = 256 << 20
"""Limit for all ranks together: 2.5 KiB from each of 100,000. A value beyond it is not kept, and its rank learns so."""


class StartUp:
    """The kept values of all ranks of one start-up, by name, and the requests that wait until it is complete."""

    def __init__(self, written: Iterable[StoreRequested] = ()) -> None:
        """Args:
        written: the requests to keep a value that a former controller has carried out, in order.
        """
        self.values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._is_complete = False
        self._start: int | None = None
        """The generation in which all ranks last started."""
        self._waiting: dict[tuple[int, int], StoreRequested] = {}
        self._unwritten: list[StoreRequested] = []
        for request in written:
            self._keep(request)

    def starts_over(self, stage: Stage, generation: int) -> bool:
        """Drops the record if all ranks have restarted since the last call. Returns whether they have.

        Call it after every event, before `settle`, because the record may be that of an interrupted start-up.
        """
        if stage is not Stage.STARTING or generation == self._start:
            return False
        self._start = generation
        self.values, self._num_bytes, self._unwritten = {}, 0, []
        return True

    def settle(self, *, is_complete: bool) -> list[StoreAnswered]:
        """Records whether all ranks have reached their first step. If so, returns the answers to waiting requests."""
        self._is_complete = is_complete
        if not is_complete or not self._waiting:
            return []
        answers = [self._answer(request) for request in self._waiting.values()]
        self._waiting.clear()
        return answers

    def request(self, request: StoreRequested, generation: int) -> list[StoreAnswered]:
        """Executes a request, and returns its answer if there is one yet. A repeated request has the same effect.

        Args:
            request: a request with one of `OPERATIONS`.
            generation: the current generation.

        Raises:
            RemoteProtocolError: the request names no key, or several.
        """
        if len(request.keys) != 1:
            raise RemoteProtocolError(f"worker {request.worker}: {request.operation!r} names {len(request.keys)} keys")
        if request.operation == "kept":
            if self._is_complete:
                return [self._answer(request)]
            self._waiting[request.worker, request.request] = request
            return []
        if request.generation != generation or self._is_complete:
            return [StoreAnswered(request.worker, request.request, None, "")]
        is_kept = self._keep(request)
        if is_kept:
            self._unwritten.append(request)
        return [StoreAnswered(request.worker, request.request, (b"1" if is_kept else b"0",), "")]

    def take_unwritten(self) -> list[StoreRequested]:
        """Returns new requests to keep a value, each once. The caller must write them before it sends their answers."""
        unwritten, self._unwritten = self._unwritten, []
        return unwritten

    def _keep(self, request: StoreRequested) -> bool:
        name = request.keys[0]
        num_bytes = self._num_bytes + len(request.value) - len(self.values.get(name, b""))
        if num_bytes > MAX_KEPT_BYTES:
            return False
        self.values[name], self._num_bytes = request.value, num_bytes
        return True

    def _answer(self, request: StoreRequested) -> StoreAnswered:
        """Returns the answer with the kept value of a name, or without a value if there is none."""
        value = self.values.get(request.keys[0])
        return StoreAnswered(request.worker, request.request, () if value is None else (value,), "")
