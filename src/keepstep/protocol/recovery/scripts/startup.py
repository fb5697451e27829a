"""The ranks' start-up exchange, recorded for the start-up of a replacement.

Each rank submits the results of its operations before it reports that it is at its first step. So when all ranks are
there, the record is complete; a replacement that asks earlier waits. When all ranks restart, they exchange other
values, and the record of their former start is dropped, complete or not.
"""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import StoreAnswered, StoreRequested
from keepstep.protocol.recovery.transitions import Stage

OPERATIONS = ("keep", "kept")
"""The operations of a `StoreRequested` that are answered here: to keep a value, and to ask for what was kept."""
MAX_KEPT_BYTES = 256 << 20
"""From all ranks together: 2.5 KiB from each of 100,000. What comes beyond it is not kept, and its rank says so."""


class StartUp:
    """Values by name, from all ranks of one start-up, and the requests that wait until it is complete."""

    def __init__(self, written: Iterable[StoreRequested] = ()) -> None:
        """Takes ``written``: the requests to keep a value that a former controller has carried out, in order."""
        self.values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._is_complete = False
        self._start: int | None = None
        """The generation in which all ranks have started last."""
        self._waiting: dict[tuple[int, int], StoreRequested] = {}
        self._unwritten: list[StoreRequested] = []
        for request in written:
            self._keep(request)

    def starts_over(self, stage: Stage, generation: int) -> bool:
        """Whether all ranks have restarted since this was last asked; then what was kept counts no more.

        Ask after every event, before `settle`: what was kept may be of a start-up that was interrupted.
        """
        if stage is not Stage.STARTING or generation == self._start:
            return False
        self._start = generation
        self.values, self._num_bytes, self._unwritten = {}, 0, []
        return True

    def settle(self, *, is_complete: bool) -> list[StoreAnswered]:
        """Takes note of whether all ranks have come to their first step; returns answers to those who waited for it."""
        self._is_complete = is_complete
        if not is_complete or not self._waiting:
            return []
        answers = [self._answer(request) for request in self._waiting.values()]
        self._waiting.clear()
        return answers

    def request(self, request: StoreRequested, generation: int) -> list[StoreAnswered]:
        """Carries out one request; one that came before is carried out again, to the same end.

        Args:
            request: with one of `OPERATIONS`.
            generation: the present one.

        Raises:
            RemoteProtocolError: it names no key, or several.
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
        """Kept results that must be written before their answers are sent, each once."""
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
        """What was kept under the name; nothing where that is nothing."""
        value = self.values.get(request.keys[0])
        return StoreAnswered(request.worker, request.request, () if value is None else (value,), "")
