"""The loop around the controller's machine: receive, step the machine, journal, perform."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from keepstep.controller.rendezvous import Rendezvous
from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import AnyMessage, EndJob, Report, StoreRequested
from keepstep.protocol.recovery import Effect, RecoveryMachine, RecoverySettings
from keepstep.transports.memory import MemoryChannel


class JournalEntry(msgspec.Struct, omit_defaults=True):
    """One line of the journal: what came in, or what was ordered and why."""

    at_s: float
    generation: int
    stage: str
    received: AnyMessage | None = None
    ordered: AnyMessage | None = None
    reason: str = ""


class Controller:
    """Runs a `RecoveryMachine` over the channel to an agent until the job has ended."""

    def __init__(self, settings: RecoverySettings, channel: MemoryChannel, journal: Path) -> None:
        self.machine = RecoveryMachine(settings)
        self._channel = channel
        self._rendezvous = Rendezvous()
        self._journal_path = journal
        self._journal: BinaryIO | None = None
        self._encoder = msgspec.json.Encoder()
        self.on_change: Callable[[], None] = lambda: None
        """Called after every event, for whoever draws progress."""

    async def run(self) -> EndJob:
        """Runs until the job has ended and returns how."""
        with self._journal_path.open("ab") as self._journal:
            while self.machine.ended is None:
                message = await self._next()
                now_s = time.monotonic()
                if message is None:
                    self._perform(self.machine.tick(now_s), now_s)
                elif isinstance(message, StoreRequested):
                    self._answer(message)
                else:
                    self._note(JournalEntry(now_s, self.machine.generation, self.machine.stage, received=message))
                    self._perform(self.machine.receive(message, now_s), now_s)
                self.on_change()
        return self.machine.ended

    async def _next(self) -> Report | None:
        """The next report, or None when a deadline has come first."""
        due = self.machine.next_deadline()
        timeout = None if due is None else max(0.0, due - time.monotonic())
        try:
            # Not wait_for: up to Python 3.11 it can lose a cancellation that meets a message, and then never ends.
            async with asyncio.timeout(timeout):
                message = await self._channel.receive()
        except TimeoutError:
            return None
        if not isinstance(message, Report):
            raise RemoteProtocolError(f"an agent sent an order: {type(message).__name__}")
        return message

    def _perform(self, effects: list[Effect], now_s: float) -> None:
        for answer in self._rendezvous.begin(self.machine.generation):
            self._channel.send(answer)
        for effect in effects:
            entry = JournalEntry(
                now_s, self.machine.generation, self.machine.stage, ordered=effect.order, reason=effect.reason
            )
            self._note(entry)
            self._channel.send(effect.order)

    def _answer(self, request: StoreRequested) -> None:
        for answer in self._rendezvous.begin(self.machine.generation):
            self._channel.send(answer)
        for answer in self._rendezvous.request(request):
            self._channel.send(answer)

    def _note(self, entry: JournalEntry) -> None:
        if self._journal is not None:
            self._journal.write(self._encoder.encode(entry) + b"\n")
            self._journal.flush()
