"""What happens once per job in simulated scripts: each tries to open the job's log and to fetch the data, and proposes
a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.protocol import messages as msg
from keepstep.sim.cluster.process import SimulatedProcess
from keepstep.sim.cluster.schedule import Event

if TYPE_CHECKING:
    from keepstep.sim.world import World

CLAIM, HOLD, AGREE = 0, 1, 2
FETCH_S = 0.3


class OnceScript:
    """Sends these requests for all processes of a run, and performs what is granted. Training does not wait for it."""

    def __init__(self, world: World) -> None:
        self._world = world

    def ask(self, worker: SimulatedProcess) -> None:
        """Sends the requests of a process that begins its start-up."""
        if self._world.layout.asks_once:
            worker.repeat_report(msg.OnceRequested(worker.number, CLAIM, "claim", "log", b""))
            worker.repeat_report(msg.OnceRequested(worker.number, HOLD, "hold", "data", b""))
            own = str(worker.process).encode()
            worker.repeat_report(msg.OnceRequested(worker.number, AGREE, "agree", "folder", own))

    def answered(self, worker: SimulatedProcess, answer: msg.OnceAnswered) -> None:
        """Handles the controller's answer to a process."""
        if not worker.is_alive:
            return
        if answer.request == AGREE:
            self._world.oracle.agrees(worker, answer.value)
        elif not answer.is_mine:
            return
        elif answer.request == CLAIM:
            self._world.oracle.opens_log(worker)
        else:
            self._world.oracle.fetches(worker)
            self._world.schedule.after(FETCH_S, Event("once", "fetched", (worker.process,)))

    def fetched(self, process: int) -> None:
        """Reports that the holder has fetched the data, if it is still alive."""
        worker = self._world.workers[process]
        if worker.is_alive:
            self._world.oracle.has_fetched(worker)
            worker.repeat_report(msg.OnceRequested(worker.number, HOLD, "done", "data", b""))
