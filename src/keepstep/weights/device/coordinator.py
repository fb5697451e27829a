"""Runs the coordinator's state machine for one update, in a thread of rank 0."""

from __future__ import annotations

import time
from collections import deque

from keepstep.cancel import CancelToken
from keepstep.errors import PeerLost, RemoteProtocolError
from keepstep.protocol.transfer.messages import DeviceFailed, DevicePrepared, MovementSeen, StillThere, UpdateOffered
from keepstep.protocol.transfer.update import Agreement, SubscriberStanding, Terms, UpdateMachine, Verdict
from keepstep.weights.channels.connection import Connection, wait
from keepstep.weights.device.callers import Callers


class Coordinator:
    """Collects the offers and reports of all devices, and sends each verdict to the members of the update.

    It also sends signs of life, so that no device takes the coordinator for lost in a long update.
    """

    def __init__(self, terms: Terms, offers: Callers[UpdateOffered], sign_s: float, former: Agreement | None) -> None:
        """Args:
        terms: terms of the update.
        offers: the offers of devices; more may arrive. Offers of later updates stay there.
        sign_s: interval of signs of life, in seconds.
        former: agreement of the previous update.
        """
        self._machine = UpdateMachine(terms, time.monotonic(), former)
        self._offers, self._sign_s = offers, sign_s
        self._connections: dict[int, Connection] = {}
        """Connections to the members of the update, by rank."""
        self._broken_off: tuple[str, str] | None = None

    @property
    def agreement(self) -> Agreement | None:
        """This update's agreement, as the input of the next update."""
        return self._machine.agreement

    def break_off(self, culprit: str, reason: str) -> None:
        """Aborts the update. Any thread."""
        self._broken_off = culprit, reason
        self._offers.changed.set()

    def run(self) -> None:
        """Runs until the update is committed or aborted. The verdict is the last message on each connection."""
        machine = self._machine
        sign_due_s = time.monotonic() + self._sign_s
        while not machine.is_over:
            self._offers.changed.clear()
            if news := self._look_around():
                self._tell(*news)
                continue
            awaited: list[Connection | CancelToken] = [self._offers.changed, *self._connections.values()]
            ready = wait(awaited, min(sign_due_s, machine.deadline_s))
            verdicts: list[Verdict] = []
            for rank, connection in list(self._connections.items()):
                if connection in ready:
                    verdicts += self._hear(rank, connection)
            now_s = time.monotonic()
            verdicts += machine.tick(now_s)
            self._tell(*verdicts)
            if now_s >= sign_due_s:
                self._tell(StillThere())
                sign_due_s = now_s + self._sign_s
        for connection in self._connections.values():
            connection.close()

    def _look_around(self) -> list[Verdict]:
        """Handles new offers."""
        if self._broken_off is not None:
            return self._machine.abort(*self._broken_off)
        verdicts: list[Verdict] = []
        for rank, (offer, connection) in self._offers.present().items():
            standing = self._machine.standing_of(offer)
            if standing is SubscriberStanding.IS_AHEAD and not connection.has_ended:
                verdicts += self._machine.ahead(offer)
            elif self._offers.take(rank, connection):
                verdicts += self._take_in(offer, connection, standing)
        return verdicts

    def _take_in(self, offer: UpdateOffered, connection: Connection, standing: SubscriberStanding) -> list[Verdict]:
        if standing is not SubscriberStanding.JOINS or connection.has_ended:
            self._tell_one(connection, self._machine.past(offer))
            connection.close()
            return []
        if (former := self._connections.pop(offer.rank, None)) is not None:
            former.close()
        self._connections[offer.rank] = connection
        return self._machine.receive(offer.rank, offer, time.monotonic())

    def _hear(self, rank: int, connection: Connection) -> list[Verdict]:
        try:
            message = connection.receive_now()
        except (PeerLost, RemoteProtocolError) as error:
            return self._lose(rank, str(error))
        match message:
            case None:
                return []
            case MovementSeen() | StillThere() | DevicePrepared() | DeviceFailed():
                return self._machine.receive(rank, message, time.monotonic())
            case other:
                return self._lose(rank, f"it sent {other!r:.80}")

    def _lose(self, rank: int, reason: str) -> list[Verdict]:
        self._connections.pop(rank).close()
        return self._machine.lost(rank, reason)

    def _tell(self, *messages: Verdict | StillThere) -> None:
        """Sends messages to all members. A member that cannot be reached is lost, which may cause another verdict."""
        untold = deque(messages)
        while untold:
            message = untold.popleft()
            for rank, connection in list(self._connections.items()):
                if (reason := self._tell_one(connection, message)) is not None:
                    untold += self._lose(rank, reason)

    def _tell_one(self, connection: Connection, message: Verdict | StillThere) -> str | None:
        """Sends a message. Returns None, or the reason of a failure."""
        try:
            connection.send(message, time.monotonic() + self._sign_s)
        except PeerLost as error:
            return str(error)
        return None
