"""The loop around the controller's machine: packets in, journal, packets out."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from keepstep.controller.rendezvous import Rendezvous
from keepstep.errors import RemoteProtocolError
from keepstep.protocol.controller import ControllerMachine
from keepstep.protocol.messages import ClockAsked, ClockTold, EndJob, Packet, PhasesObserved, StoreRequested
from keepstep.protocol.recovery import RecoveryMachine, RecoverySettings
from keepstep.trace.record.recorder import Listener, Recorder
from keepstep.transports.memory import MemoryChannel


class Controller:
    """Runs a `ControllerMachine` over the channel to an agent until the job has ended."""

    def __init__(
        self, settings: RecoverySettings, channel: MemoryChannel, run_dir: Path, listener: Listener | None = None
    ) -> None:
        # No lease: the agent lives in this very process, so it can only seem lost when the process itself has stood
        # still (SIGSTOP, a laptop that slept), and then giving up the only node would end a healthy job.
        self.machine = ControllerMachine(settings, lease_s=None)
        self._channel = channel
        self._rendezvous = Rendezvous()
        self._run_dir = run_dir
        self._listener = listener

    @property
    def job(self) -> RecoveryMachine:
        """What is decided, and was: stage, generation, records, and the job's end."""
        return self.machine.job

    async def run(self) -> EndJob:
        """Runs until the job has ended and returns how."""
        with Recorder(self._run_dir, self._listener) as recorder:
            while self.job.ended is None:
                match message := await self._next():
                    case StoreRequested():
                        self._answer(message)
                    case PhasesObserved():
                        recorder.observed(message)
                    case ClockAsked():
                        self._channel.send(ClockTold(message.asked_ns, time.monotonic_ns()))
                    case _:
                        self._decide(message, recorder)
        return self.job.ended

    def _decide(self, packet: Packet | None, recorder: Recorder) -> None:
        now_s = time.monotonic()
        if packet is None:
            self.machine.tick(now_s)
        else:
            self.machine.receive(packet, now_s)
        recorder.decided(self.machine.take_entries())
        self._transmit(now_s)

    async def _next(self) -> Packet | StoreRequested | PhasesObserved | ClockAsked | None:
        """What comes next from the agent, or None when a deadline has come first."""
        due = self.machine.next_deadline()
        timeout = None if due is None else max(0.0, due - time.monotonic())
        try:
            # Not wait_for: up to Python 3.11 it can lose a cancellation that meets a message, and then never ends.
            async with asyncio.timeout(timeout):
                message = await self._channel.receive()
        except TimeoutError:
            return None
        if not isinstance(message, Packet | StoreRequested | PhasesObserved | ClockAsked):
            raise RemoteProtocolError(f"an agent sent {type(message).__name__} outside of any packet")
        return message

    def _transmit(self, now_s: float) -> None:
        self._begin_generation()
        for packet in self.machine.packets(now_s):
            self._channel.send(packet)

    def _answer(self, request: StoreRequested) -> None:
        self._begin_generation()
        for answer in self._rendezvous.request(request):
            self._channel.send(answer)

    def _begin_generation(self) -> None:
        """Whoever waits in the rendezvous of a generation that is over is told so, before the order that ended it."""
        for answer in self._rendezvous.begin(self.job.generation):
            self._channel.send(answer)
