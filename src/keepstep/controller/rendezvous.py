"""The rendezvous store of a generation's process groups.

Every key belongs to one generation. A request of a generation that is over gets an empty answer at once. A request that
arrives twice, because the connection to its node broke, is executed once.
"""

from __future__ import annotations

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import StoreAnswered, StoreRequested

MAX_KEYS = 1 << 20
"""Limit of keys, so that a faulty script cannot fill the controller's memory. Gloo uses a handful for each rank and
group."""


class Rendezvous:
    """The keys and values of the current generation, and the requests that wait for a key."""

    def __init__(self, forgotten: int = 0) -> None:
        """Args:
        forgotten: the generation in which the controller restarted; 0 if it did not. The keys of this generation are
            lost, so it counts as over: each request gets an empty answer, and a recovery begins another generation.
        """
        self._generation = forgotten
        self._forgotten = forgotten
        self._values: dict[str, bytes] = {}
        self._waiting: dict[tuple[int, int], StoreRequested] = {}
        """(worker, request number) -> the waiting request."""
        self._answered: dict[tuple[int, int], StoreAnswered] = {}

    def begin(self, generation: int) -> list[StoreAnswered]:
        """Begins a generation: drops all keys of older ones. Returns the answers that end waiting requests."""
        if generation == self._generation:
            return []
        self._generation = generation
        ended = [StoreAnswered(request.worker, request.request, None, "") for request in self._waiting.values()]
        self._values, self._waiting, self._answered = {}, {}, {}
        return ended

    def request(self, request: StoreRequested) -> list[StoreAnswered]:
        """Executes a request. Returns its answer, if there is one yet, and those of waiting requests that it completes.

        Raises:
            RemoteProtocolError: the operation is unknown, lacks a key or a number, or the store is full.
        """
        if request.generation != self._generation or request.generation == self._forgotten:
            return [StoreAnswered(request.worker, request.request, None, "")]
        key = (request.worker, request.request)
        if (before := self._answered.get(key)) is not None:
            return [before]
        answers = self._carry_out(request)
        self._answered |= {(answer.worker, answer.request): answer for answer in answers}
        return answers

    def _carry_out(self, request: StoreRequested) -> list[StoreAnswered]:
        if not request.keys and request.operation not in ("get", "check"):
            raise RemoteProtocolError(f"worker {request.worker}: store operation {request.operation!r} names no key")
        match request.operation:
            case "get":
                self._waiting[request.worker, request.request] = request
                return self._served()
            case "set":
                self._set(request.keys[0], request.value)
                return [_answer(request), *self._served()]
            case "add":
                total = self._number(request.keys[0], self._values.get(request.keys[0], b"0"))
                total += self._number(request.keys[0], request.value)
                self._set(request.keys[0], str(total).encode())
                return [_answer(request, str(total).encode()), *self._served()]
            case "check":
                there = all(key in self._values for key in request.keys)
                return [_answer(request, b"1" if there else b"0")]
            case "delete":
                there = self._values.pop(request.keys[0], None) is not None
                return [_answer(request, b"1" if there else b"0")]
            case _:
                raise RemoteProtocolError(
                    f"worker {request.worker}: no store operation is called {request.operation!r}"
                )

    @staticmethod
    def _number(key: str, value: bytes) -> int:
        try:
            return int(value)
        except ValueError:
            raise RemoteProtocolError(f"store key {key!r}: {value[:40]!r} is not a number to add") from None

    def _set(self, key: str, value: bytes) -> None:
        if len(self._values) >= MAX_KEYS and key not in self._values:
            raise RemoteProtocolError(f"the rendezvous store is full: {MAX_KEYS} keys")
        self._values[key] = value

    def _served(self) -> list[StoreAnswered]:
        served = [r for r in self._waiting.values() if all(key in self._values for key in r.keys)]
        for request in served:
            del self._waiting[request.worker, request.request]
        return [_answer(request, *(self._values[key] for key in request.keys)) for request in served]


def _answer(request: StoreRequested, *values: bytes) -> StoreAnswered:
    return StoreAnswered(request.worker, request.request, values, "")
