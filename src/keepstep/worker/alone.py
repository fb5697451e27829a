"""A script under plain python: one rank without agent and controller. The code above this layer is the same."""

from __future__ import annotations

from collections.abc import Callable

from keepstep.errors import NothingToRecoverFrom
from keepstep.protocol.messages import (
    Assign,
    CollectiveFailed,
    Complete,
    Member,
    Membership,
    Recover,
    Resume,
    StateRefused,
    StepsFinished,
    WeightsObserved,
    WorkerJoined,
    WorkerOrder,
    WorkerReady,
    WorkerReport,
)
from keepstep.worker.link import Link


class LinkAlone(Link):
    """Answers every report itself, as a controller with a single rank would."""

    def __init__(self) -> None:
        self.worker = 0
        self._on_order: Callable[[WorkerOrder], None] | None = None
        self._keys: dict[str, bytes] = {}
        self._once: set[str] = set()
        self._agreed: dict[str, bytes] = {}

    def listen(self, on_order: Callable[[WorkerOrder], None]) -> None:
        """Sets the function that receives the orders."""
        self._on_order = on_order

    def send(self, report: WorkerReport | WeightsObserved) -> None:
        """Answers a report at once, in the calling thread.

        Raises:
            NothingToRecoverFrom: the one rank cannot load its checkpoint, and no other rank holds the state.
        """
        match report:
            case CollectiveFailed() | StateRefused(is_apart=False):
                raise NothingToRecoverFrom(report.error)
            case WorkerJoined():
                self._give(Assign(0, 1, 0, 0, 1, None, ()))
            case WorkerReady():
                self._membership = Membership.of([Member(self.worker, "", report.shard)])
                self._give(Recover(1, max((*report.reach, *report.snapshots)), (), self._membership, (), None))
                self._give(Resume(1))
            case StepsFinished():
                self._give(Complete(1))
            case _:
                pass

    def request(
        self, generation: int, operation: str, keys: tuple[str, ...], value: bytes, timeout_s: float
    ) -> tuple[bytes, ...]:
        """Sets or reads keys of the rendezvous store of a single rank."""
        if operation == "set":
            self._keys[keys[0]] = value
            return ()
        return tuple(self._keys[key] for key in keys)

    def post(self, generation: int, operation: str, keys: tuple[str, ...], value: bytes) -> None:
        """Same as `request`, without a result."""
        self.request(generation, operation, keys, value, 0.0)

    def ask_once(self, operation: str, name: str, timeout_s: float, value: bytes = b"") -> tuple[bool, bytes]:
        """Grants the first claim or hold of a name, and another one after the process has given the name up. Returns
        the first value that was proposed under a name."""
        if operation == "agree":
            is_mine = name not in self._agreed
            return is_mine, self._agreed.setdefault(name, value)
        is_mine = operation in ("claim", "hold") and name not in self._once
        if is_mine:
            self._once.add(name)
        elif operation == "give_up":
            self._once.discard(name)
        return is_mine, b""

    def fail_requests(self) -> None:
        """Does nothing: no request waits."""

    def _give(self, order: WorkerOrder) -> None:
        assert self._on_order is not None
        self._on_order(order)
