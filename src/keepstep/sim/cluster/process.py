"""A simulated process as its node and the kernel see it: it lives, is held, and ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.protocol import messages as msg
from keepstep.protocol.messages import Cause
from keepstep.sim.cluster.schedule import Event

if TYPE_CHECKING:
    from keepstep.sim.cluster.node import SimulatedNode
    from keepstep.sim.world import World


class SimulatedProcess:
    """What a `SimulatedWorker` is as a process, whatever runs in it."""

    def __init__(self, world: World, node: SimulatedNode, process: int, number: int) -> None:
        self.world = world
        self.node = node
        self.process = process
        self.number = number
        self.is_alive = True
        self.is_stopped = False
        """Held by SIGSTOP: nothing in it moves."""
        self.is_stuck = False
        """Its training thread hangs; its listener lives."""
        self.slowness = 1.0
        self.exit: tuple[Cause, str] = (Cause.EXIT, "")
        self._missed: list[tuple[str, tuple[object, ...]]] = []
        """What came while it was stopped."""

    def go_on(self) -> None:
        """A stopped process is continued: what came meanwhile comes now."""
        self.is_stopped = False
        missed, self._missed = self._missed, []
        for what, arguments in missed:
            getattr(self, what)(*arguments)

    def be_fast(self) -> None:
        """It is not slow any more."""
        self.slowness = 1.0

    def say_anew(self, report: msg.WorkerReport) -> None:
        """Something the process says by mistake, or a second time."""
        if self.is_alive and not self.is_stopped:
            self._say(report)

    def is_answered(self, answer: msg.StoreAnswered) -> None:
        """An answer of the controller's record of the start-up comes."""
        if self._can_move("is_answered", answer) and not self.is_stuck:
            self.world.start_up.heard(self.process, answer)

    def _can_move(self, what: str, *arguments: object) -> bool:
        if self.is_stopped:
            self._missed.append((what, arguments))
        return self.is_alive and not self.is_stopped

    def _after(self, delay_s: float, what: str, *arguments: object) -> None:
        self.world.schedule.after(delay_s, Event(f"worker {self.process}", what, arguments))

    def _drawn(self, duration: str) -> float:
        return self.world.draw(getattr(self.world.layout.durations, duration))

    def _say(self, report: msg.WorkerReport) -> None:
        self.node.worker_says(self.number, report)
