"""The loop around the controller's machine: what comes from the nodes in, journal, packets out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from keepstep.controller.rendezvous import Rendezvous
from keepstep.errors import RemoteProtocolError
from keepstep.protocol.controller import ControllerMachine
from keepstep.protocol.messages import (
    ClockAsked,
    ClockTold,
    EndJob,
    Packet,
    PhasesObserved,
    StoreAnswered,
    StoreRequested,
)
from keepstep.protocol.recovery import RecoveryMachine, Stage
from keepstep.trace.record.recorder import Recorder
from keepstep.transports.lines import Arrival, Connected, NodeLines

FAREWELL_S = 10.0
"""How long a job that has ended waits until every agent has heard so."""


class Controller:
    """Runs a `ControllerMachine` over the lines to the agents until the job has ended."""

    def __init__(
        self, machine: ControllerMachine, lines: NodeLines, recorder: Recorder, *, is_restarted: bool = False
    ) -> None:
        """Args:
        machine: decides; fresh, or as its journal left it.
        lines: to the agents.
        recorder: what is decided is written there before it is transmitted.
        is_restarted: a former controller of the job has died, and the rendezvous with it.
        """
        self.machine = machine
        self._lines = lines
        self._recorder = recorder
        # In other stages either a new generation has just begun, or nobody has met in this one yet.
        has_forgotten = is_restarted and machine.job.stage in (Stage.TRAINING, Stage.FINISHED)
        self._rendezvous = Rendezvous(forgotten=machine.job.generation if has_forgotten else 0)

    @property
    def job(self) -> RecoveryMachine:
        """What is decided, and was: stage, generation, records, and the job's end."""
        return self.machine.job

    async def run(self) -> EndJob:
        """Runs until the job has ended and every agent knows, and returns how."""
        self._settle()
        while self.job.ended is None:
            await self._turn()
        return await self._see_off(self.job.ended)

    async def end(self, order: EndJob) -> EndJob:
        """Ends the job from outside, after `run` was cancelled; returns when every agent knows."""
        self.machine.call_off(order, time.monotonic())
        self._settle()
        assert self.job.ended is not None
        return await self._see_off(self.job.ended)

    async def _see_off(self, ended: EndJob) -> EndJob:
        try:
            async with asyncio.timeout(FAREWELL_S):
                while not self.machine.is_heard:
                    await self._turn()
        except TimeoutError:
            pass  # whom it cannot reach ends by its own deadline
        return ended

    async def _turn(self) -> None:
        """Lives through whatever comes next: a message, or a deadline."""
        arrival = await self._next()
        if arrival is None:
            self.machine.tick(time.monotonic())
        else:
            try:
                self._arrived(arrival.node, arrival.message)
            except RemoteProtocolError as error:
                self._lines.refuse(arrival.node, str(error))
        self._settle()

    async def _next(self) -> Arrival | None:
        """What comes next from a node, or None when a deadline has come first."""
        due = self.machine.next_deadline()
        timeout = None if due is None else max(0.0, due - time.monotonic())
        try:
            # Not wait_for: up to Python 3.11 it can lose a cancellation that meets a message, and then never ends.
            async with asyncio.timeout(timeout):
                return await self._lines.receive()
        except TimeoutError:
            return None

    def _arrived(self, node: str, message: object) -> None:
        speaks_for = getattr(message, "node", node)
        if speaks_for != node:
            raise RemoteProtocolError(f"node {node} spoke for node {speaks_for}")
        match message:
            case Packet():
                self.machine.receive(message, time.monotonic())
            case Connected():
                self.machine.reconnected(node)
            case StoreRequested():
                self._requested(node, message)
            case PhasesObserved():
                self._recorder.observed(message)
            case ClockAsked():
                self._lines.send(node, ClockTold(message.asked_ns, time.monotonic_ns()))
            case _:
                raise RemoteProtocolError(f"an agent sent {type(message).__name__} outside of any packet")

    def _settle(self) -> None:
        """After every event: writes the journal, and only then transmits."""
        self._recorder.decided(self.machine.take_entries())
        # Whoever waits in the rendezvous of a generation that is over is told so before the order that ended it.
        self._answer(self._rendezvous.begin(self.job.generation))
        for packet in self.machine.packets(time.monotonic()):
            self._lines.send(packet.node, packet)

    # ---- the rendezvous of the ranks --------------------------------------------------------------------------------

    def _requested(self, node: str, request: StoreRequested) -> None:
        worker = self.job.roster.workers.get(request.worker)
        if worker is None or worker.node != node:
            raise RemoteProtocolError(f"node {node} asked the store for worker {request.worker}, which is not there")
        self._answer(self._rendezvous.request(request))

    def _answer(self, answers: Iterable[StoreAnswered]) -> None:
        for answer in answers:
            self._lines.send(self.job.roster.workers[answer.worker].node, answer)
