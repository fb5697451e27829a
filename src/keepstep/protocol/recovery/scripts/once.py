"""What happens once per job: the claims of workers, and values on which they agree.

A *claim* is granted once, independent of the worker's fate: at most once. A *hold* is granted to one worker at a time;
if the holder's process is gone before it reports that it is done, it passes to the next waiting worker. To *agree*,
each worker proposes a value, and the first one is the answer to all.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from keepstep.protocol.messages import OnceAnswered, OnceRequested
from keepstep.protocol.recovery.orders import Orders
from keepstep.protocol.recovery.placement.roster import Roster


@dataclasses.dataclass(slots=True)
class _Claim:
    holder: int | None
    """The worker that has the claim or hold; None: no worker has it."""
    is_done: bool = False
    waiting: deque[tuple[int, int]] = dataclasses.field(default_factory=deque)
    """(worker, request number) of waiting requests, in the order of their arrival."""


class Claims:
    """All claims, holds and agreed values. They follow from the events in the journal, so a restart keeps them."""

    def __init__(self, roster: Roster, orders: Orders) -> None:
        self._roster = roster
        self._orders = orders
        self._claims: dict[str, _Claim] = {}
        self._agreed: dict[str, bytes] = {}
        self._open: set[str] = set()
        """Names of holds that a worker has, and has not reported as done."""

    def requested(self, request: OnceRequested) -> None:
        """Processes a live worker's claim, hold or proposal, or its report on a hold."""
        claim = self._claims.get(request.name)
        match request.operation:
            case "claim":
                self._claims.setdefault(request.name, _Claim(request.worker, is_done=True))
                self._answer(request.worker, request.request, request.name, is_mine=claim is None)
            case "agree":
                is_first = request.name not in self._agreed
                value = self._agreed.setdefault(request.name, request.value)
                reason = f"agree {request.name!r}: {'its value' if is_first else 'an earlier value'} is that of all"
                self._send(OnceAnswered(request.worker, request.request, is_first, value), reason)
            case "hold" if claim is not None and claim.is_done:
                self._answer(request.worker, request.request, request.name, is_mine=False)
            case "hold":
                claim = self._claims.setdefault(request.name, _Claim(None))
                claim.waiting.append((request.worker, request.request))
                self._give_on(request.name)
            case "done" if claim is not None and claim.holder == request.worker:
                self._done(request.name, claim)
            case "give_up" if claim is not None and claim.holder == request.worker:
                claim.holder = None
                self._give_on(request.name)
            case _:
                pass  # from a former holder that was reported lost

    def follow(self) -> None:
        """Passes the holds of workers whose process is gone to the next waiting worker. Call it after every event."""
        for name in list(self._open):
            holder = self._claims[name].holder
            if holder is None or self._roster.workers[holder].gone:
                self._claims[name].holder = None
                self._give_on(name)

    def _done(self, name: str, claim: _Claim) -> None:
        claim.is_done = True
        self._open.discard(name)
        for worker, request in claim.waiting:
            self._answer(worker, request, name, is_mine=False)
        claim.waiting.clear()

    def _give_on(self, name: str) -> None:
        claim = self._claims[name]
        while claim.holder is None and claim.waiting:
            worker, request = claim.waiting.popleft()
            if not self._roster.workers[worker].lost:
                claim.holder = worker
                self._open.add(name)
                self._answer(worker, request, name, is_mine=True)
        if claim.holder is None:
            self._open.discard(name)

    def _answer(self, worker: int, request: int, name: str, *, is_mine: bool) -> None:
        reason = f"once {name!r}: {'it is the first' if is_mine else 'another one has it, or had'}"
        self._send(OnceAnswered(worker, request, is_mine, b""), reason)

    def _send(self, answer: OnceAnswered, reason: str) -> None:
        asked = self._roster.workers[answer.worker]
        if not asked.lost:
            self._orders.send(asked.node, answer, reason)
