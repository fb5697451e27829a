"""The loop around the controller's machine: receives packets, writes the journal, and sends packets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from keepstep.controller.rendezvous import Rendezvous
from keepstep.controller.stores import ControllerStores
from keepstep.errors import RemoteProtocolError
from keepstep.protocol.controller import ControllerMachine
from keepstep.protocol.messages import (
    AnyMessage,
    ClockAsked,
    ClockTold,
    EndJob,
    NodeLeft,
    Packet,
    PhasesObserved,
    StoreAnswered,
    StoreRequested,
    WeightsObserved,
)
from keepstep.protocol.recovery import RecoveryMachine, Stage
from keepstep.protocol.relay.bundle import PacketBundle
from keepstep.trace.record.jobclock import JobClock
from keepstep.trace.record.recorder import Recorder
from keepstep.transports.interface import Arrival, BundlingConnections, Connected, NodeConnections, RelayLost

GATHER_S = 0.2
"""Least interval at which nodes report phases. Phases are for display only, so five updates a second are enough. The
ring on a tag page holds far more phases than that."""
PHASE_MESSAGES_PER_S = 1024
"""Limit for all nodes together. A message takes the controller up to a third of a millisecond
(benchmarks/controller.py)."""
MAX_TOGETHER = 256
"""Most messages that the loop processes before it writes the journal and sends anything."""
CALM_S = 3.0
"""Time after the start of training at which the activity of a new generation is over."""
FAREWELL_S = 10.0
"""How long the controller of an ended job waits for the acknowledgements of all agents."""


class Controller:
    """Runs a `ControllerMachine` over the connections to the agents until the job has ended."""

    def __init__(
        self,
        machine: ControllerMachine,
        connections: NodeConnections,
        recorder: Recorder,
        *,
        clock: JobClock | None = None,
        confirm: Callable[[], None] = lambda: None,
        when_calm: Callable[[], None] = lambda: None,
        is_restarted: bool = False,
        stores: ControllerStores | None = None,
    ) -> None:
        """Args:
        machine: the machine, new or restored from its journal.
        connections: connections to the agents.
        recorder: writes the journal, before the loop sends anything.
        clock: the job's clock; None: it starts now.
        confirm: called after the loop has written the journal and before it sends anything; raises `LeaseLost` if
            another controller may serve the run.
        when_calm: called when a generation has trained for `CALM_S`, for work that takes a moment.
        is_restarted: a former controller of the job has died, and its rendezvous is lost.
        stores: the stores for ranks; None: new ones in memory.
        """
        self.machine = machine
        self._connections = connections
        self._relays = connections if isinstance(connections, BundlingConnections) else None
        self._recorder = recorder
        self._clock = clock or JobClock()
        self._confirm = confirm
        self._when_calm = when_calm
        self._calm: asyncio.TimerHandle | None = None
        self._showing: asyncio.TimerHandle | None = None
        """Timer that writes the state of published weights, so that many reports are written together."""
        self._waiting: asyncio.Timeout | None = None
        """Timeout of the wait for the next message, which ends at the machine's next deadline."""
        self._unsent: list[tuple[str, AnyMessage]] = []
        # In other stages a new generation has just begun, or no rank has used the rendezvous of this one yet.
        has_forgotten = is_restarted and machine.job.stage in (Stage.TRAINING, Stage.FINISHED)
        self._rendezvous = Rendezvous(forgotten=machine.job.generation if has_forgotten else 0)
        self._stores = stores or ControllerStores()

    @property
    def job(self) -> RecoveryMachine:
        """The job's state: stage, generation, records, and the job's end."""
        return self.machine.job

    async def run(self) -> EndJob:
        """Runs until the job has ended and every agent has acknowledged it. Returns how the job ended."""
        self.machine.begin(self._clock.now_s())
        self._settle()
        while self.job.ended is None:
            await self._turn()
        return await self._see_off(self.job.ended)

    def drain(self, reason: str) -> None:
        """Begins a drain: the job ends at a step that all ranks have completed. `run` continues until then."""
        self.machine.drain(reason, self._clock.now_s())
        self._settle()
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())  # there is a new deadline

    async def end(self, order: EndJob) -> EndJob:
        """Ends the job with an order, after `run` was cancelled. Returns when all agents have acknowledged it."""
        self.machine.call_off(order, self._clock.now_s())
        self._settle()
        assert self.job.ended is not None
        return await self._see_off(self.job.ended)

    async def _see_off(self, ended: EndJob) -> EndJob:
        try:
            async with asyncio.timeout(FAREWELL_S):
                while not self.machine.is_heard:
                    await self._turn()
        except TimeoutError:
            pass  # an unreachable agent ends by its own deadline
        return ended

    async def _turn(self) -> None:
        """Handles the next deadline, or the next messages. Messages that have arrived already are handled together."""
        arrival = await self._next()
        if arrival is None:
            self.machine.tick(self._clock.now_s())
        num = 0
        while arrival is not None:
            try:
                self._arrived(arrival.node, arrival.message)
            except RemoteProtocolError as error:
                self._connections.refuse(arrival.node, str(error))
            num += 1
            arrival = self._connections.more() if num < MAX_TOGETHER else None
        self._settle()

    async def _next(self) -> Arrival | None:
        """Waits for the next message, and returns it; None if a deadline has come first."""
        due = self.machine.next_deadline()
        timeout = None if due is None else max(0.0, due - self._clock.now_s())
        try:
            # Not wait_for: up to Python 3.11 it can lose a cancellation that meets a message, and then never ends.
            async with asyncio.timeout(timeout) as self._waiting:
                return await self._connections.receive()
        except TimeoutError:
            return None

    def _arrived(self, node: str, message: object) -> None:
        speaks_for = getattr(message, "node", node)
        if speaks_for != node:
            raise RemoteProtocolError(f"node {node} spoke for node {speaks_for}")
        match message:
            case PacketBundle():
                for name, why in self.machine.receive_bundle(message, self._clock.now_s()):
                    self._connections.refuse(name, why)
            case RelayLost():
                self.machine.relay_lost(message.nodes, self._clock.now_s())
            case Packet():
                self.machine.receive(message, self._clock.now_s())
            case Connected():
                self.machine.reconnected(node)
            case NodeLeft():
                self.machine.left(message, self._clock.now_s())
            case StoreRequested():
                self._requested(node, message)
            case PhasesObserved():
                self._recorder.observed(message)
            case WeightsObserved():
                self._weights_seen(node, message)
            case ClockAsked():
                self._unsent.append((node, ClockTold(message.asked_ns, self._clock.now_ns(), self._gather_s())))
            case _:
                raise RemoteProtocolError(f"an agent sent {type(message).__name__} outside of any packet")

    def _weights_seen(self, node: str, message: WeightsObserved) -> None:
        worker = self.job.roster.workers.get(message.worker)
        if worker is None:
            return  # the message is late, and for display only
        if worker.node != node:
            raise RemoteProtocolError(f"node {node} told of weights of worker {message.worker}, which is on another")
        self._recorder.published(node, message)
        if self._showing is None:
            self._showing = asyncio.get_running_loop().call_later(GATHER_S, self._show_weights)

    def _show_weights(self) -> None:
        self._showing = None
        self._recorder.show_weights()

    def _gather_s(self) -> float:
        return max(GATHER_S, len(self.machine.connections) / PHASE_MESSAGES_PER_S)

    def _settle(self) -> None:
        """Runs after every event: writes the journal, confirms that no other controller serves the run, and sends."""
        try:
            self._recorder.decided(self.machine.take_entries())
            self._answer(self._stores.settle(self.job))
        except OSError:
            self._confirm()  # raises if another controller serves the run, which would be the cause
            raise
        if self._stores.error is not None:
            self._recorder.give_up(self._stores.error)
        # The answers that end a wait in an old generation's rendezvous are sent before the order that ended it.
        self._answer(self._rendezvous.begin(self.job.generation))
        now_s = self._clock.now_s()
        bundles: list[tuple[int, PacketBundle]] = []
        if self._relays is None:
            alone = self.machine.packets(now_s)
        else:
            alone, bundles = self.machine.bundles(now_s, self._relays.routes)
        self._unsent += ((packet.node, packet) for packet in alone)
        if self._unsent or bundles:
            self._confirm()
            for node, message in self._unsent:
                self._connections.send(node, message)
            self._unsent.clear()
        if bundles and self._relays is not None:
            self._relays.send_bundles(bundles)
        self._look_if_calm()

    def _look_if_calm(self) -> None:
        is_training = self.job.stage is Stage.TRAINING
        if is_training and self._calm is None:
            self._calm = asyncio.get_running_loop().call_later(CALM_S, self._when_calm)
        elif not is_training and self._calm is not None:
            self._calm.cancel()
            self._calm = None

    # ---- stores for the ranks ---------------------------------------------------------------------------------------

    def _requested(self, node: str, request: StoreRequested) -> None:
        worker = self.job.roster.workers.get(request.worker)
        if worker is None or worker.node != node:
            raise RemoteProtocolError(f"node {node} asked the store for worker {request.worker}, which is not there")
        answers = self._stores.request(request, self.job)
        self._answer(self._rendezvous.request(request) if answers is None else answers)

    def _answer(self, answers: Iterable[StoreAnswered]) -> None:
        for answer in answers:
            self._unsent.append((self.job.roster.workers[answer.worker].node, answer))
