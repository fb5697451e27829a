"""The agent's reports on its workers' phases, read from tag pages and converted to the controller's clock."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

import msgspec
import numpy as np

from keepstep.protocol.clocks import ASK_EVERY_S, ClockEstimate
from keepstep.protocol.messages import ClockAsked, ClockTold, PhasesObserved, WeightsObserved
from keepstep.protocol.node.agent import HEARTBEAT_S
from keepstep.shared.tagpage import TagReader
from keepstep.trace.record.phaselog import from_ring
from keepstep.transports.interface import ControllerConnection

NEARLY = 0.9
"""A report that goes with a heartbeat may be up to a tenth of its interval early."""
FIRST_ASKS_S = 0.2
"""Interval at which the agent asks for the controller's time until it gets the first answer."""


class Watched(Protocol):
    """A worker whose tag page is read."""

    worker: int
    rank: int | None
    page: TagReader
    phases_read: int


class PhaseReporter:
    """Sends new entries of the workers' ring buffers to the controller, and estimates the controller's clock."""

    def __init__(self, node: str, connection: ControllerConnection) -> None:
        self._node = node
        self._connection = connection
        self._clock = ClockEstimate()
        self._has_answer = False
        self._ask_s = 0.0
        self._gathered_s = 0.0
        self._every_s = 0.0

    def reconnected(self) -> None:
        """Discards the clock estimate. Call it on a new connection, which may lead to another controller."""
        self._clock, self._has_answer, self._ask_s = ClockEstimate(), False, 0.0

    def told(self, answer: ClockTold) -> float:
        """Processes the controller's time. Returns how many seconds its clock is ahead of this node's."""
        now_ns = time.monotonic_ns()
        self._every_s = answer.gather_s
        self._clock.told(answer.asked_ns, answer.told_ns, now_ns)
        self._has_answer = True
        alignment = self._clock.alignment(now_ns)
        return alignment.offset_ns / 1e9 if alignment is not None else 0.0

    def on_job_clock(self, weights: WeightsObserved) -> WeightsObserved:
        """Returns a worker's report on published weights with its times converted to the controller's clock.

        Before the first estimate the times stay as they are.
        """
        alignment = self._clock.alignment(time.monotonic_ns())
        ahead_s = alignment.offset_ns / 1e9 if alignment is not None else 0.0
        return msgspec.structs.replace(weights, begun_s=weights.begun_s + ahead_s, at_s=weights.at_s + ahead_s)

    def tick(self, workers: Iterable[Watched], now_s: float, *, is_sending: bool) -> None:
        """Asks for the controller's time and calls `gather`, each when it is due. Call it periodically.

        Args:
            workers: the workers whose ring buffers are read.
            now_s: the present time in monotonic seconds.
            is_sending: another message goes to the controller now. Reports that are not more frequent than heartbeats
                wait for one, because two messages together cost the controller as much as one.
        """
        if now_s >= self._ask_s and (is_sending or not self._has_answer):
            self._ask_s = now_s + (ASK_EVERY_S if self._has_answer else FIRST_ASKS_S)
            self._connection.send(ClockAsked(self._node, time.monotonic_ns()))
        rides = self._every_s >= HEARTBEAT_S * NEARLY
        if now_s >= self._gathered_s + self._every_s * (NEARLY if rides else 1.0) and (is_sending or not rides):
            self._gathered_s = now_s
            self.gather(workers)

    def gather(self, workers: Iterable[Watched]) -> None:
        """Sends the new entries of the workers' ring buffers. Does nothing until the controller's clock is known.

        Call it once more before a worker is dropped, dead or alive.
        """
        alignment = self._clock.alignment(time.monotonic_ns())
        if alignment is None:
            return
        found = []
        for worker in workers:
            ring, end = worker.page.copy_since(worker.phases_read)
            worker.phases_read = end
            if ring:
                found.append(from_ring(ring, worker.worker, worker.rank, alignment.offset_ns))
        if found:
            self._connection.send(PhasesObserved(self._node, alignment.error_ns, np.concatenate(found).tobytes()))
