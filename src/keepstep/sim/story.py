"""The trace of a run as text: time, process, action and reason."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from keepstep.protocol import messages as msg
from keepstep.protocol.controller import (
    AnswersReceived,
    CalledOff,
    DeadlineCame,
    Departed,
    DrainAsked,
    JournalEntry,
    LeaseExpired,
    NodeSilent,
    ReportsReceived,
    Restarted,
)
from keepstep.sim.cluster.schedule import Event

if TYPE_CHECKING:
    from keepstep.sim.world import World

_TOLD = (
    msg.WorkerLost,
    msg.WorkerSuspected,
    msg.SuspicionLifted,
    msg.WorkerFenced,
    msg.WorkerDone,
    msg.JobStalled,
)
_UNTOLD = (msg.NodeJoined, msg.WorkerStarted, msg.StepObserved)


class Story:
    """The trace of a run: one line for each event that interests a reader."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, now_s: float, who: str, what: str) -> None:
        """Adds a line.

        Args:
            now_s: the time.
            who: the process.
            what: its action.
        """
        self.lines.append(f"{now_s:9.3f}  {who:<18}  {what}")

    def tell(self, world: World, event: Event) -> None:
        """Adds a line for an event, if it interests a reader."""
        now_s = world.schedule.now_s
        if event.part.startswith("worker ") and event.what == "order":
            worker = world.workers[int(event.part.split()[1])]
            order = event.arguments[0]
            if worker.is_alive and not isinstance(order, msg.Assign):
                self.add(now_s, str(worker), f"is told: {_brief(order)}")
        elif event.what == "worker_said":
            number, report = event.arguments[1], event.arguments[2]
            worker = world.part(event.part).workers.get(number)
            if not isinstance(report, _UNTOLD):
                self.add(now_s, str(worker or f"worker {number}"), f"says: {_brief(report)}")

    def decide(self, world: World, entry: JournalEntry) -> None:
        """Adds lines for a decision of the controller: its event and the orders with their reasons."""
        match entry.event:
            case LeaseExpired():
                self.add(entry.at_s, "controller", f"gives {entry.event.node} up: {entry.event.why}")
            case NodeSilent():
                self.add(entry.at_s, "controller", f"stops the ranks: {entry.event.node} is silent: {entry.event.why}")
            case Departed():
                self.add(entry.at_s, "controller", f"lets {entry.event.node} go: {entry.event.why}")
            case Restarted():
                self.add(entry.at_s, "controller", "is back, and has replayed its journal")
            case CalledOff():
                self.add(entry.at_s, "controller", f"is ordered to end the job: {entry.event.order.reason}")
            case DrainAsked():
                self.add(entry.at_s, "controller", f"ends the job: {entry.event.reason}")
            case DeadlineCame():
                self.add(entry.at_s, "controller", "does not wait any longer")
            case AnswersReceived():
                pass  # the trace already has these answers, from when the ranks sent them
            case ReportsReceived():
                for report in entry.event.reports:
                    if isinstance(report, _TOLD):
                        self.add(entry.at_s, entry.event.node, f"says: {_brief(report)}")
        for node, order, reason in entry.orders:
            if not isinstance(order, msg.StartWorker) or "job starts" not in reason:
                self.add(entry.at_s, "controller", f"to {node or 'all'}: {_brief(order)} because {reason}")


def _brief(message: msg.AnyMessage) -> str:
    """Returns a message in a few words."""
    match message:
        case msg.SafePointReached():
            reach = " or ".join(map(str, message.reach)) or "nowhere"
            return f"stopped in {message.phase} of step {message.step}, can be at {reach}"
        case msg.GroupsReset():
            return f"connected in generation {message.generation}"
        case msg.StateRecovered():
            return "at the resume step" + (", state received" if message.received_bytes else "")
        case msg.StepsFinished():
            return f"last step complete, {message.step} in all"
        case msg.WorkerLost():
            tag = message.tag
            where = f", {tag.phase} of step {tag.step}" if tag else ""
            gone = "gone" if message.gone else "not gone yet"
            return f"worker {message.worker} lost ({message.detail}{where}), {gone}"
        case msg.WorkerSuspected():
            return f"worker {message.worker} suspected ({message.detail})"
        case msg.SuspicionLifted():
            return f"worker {message.worker} goes on"
        case msg.WorkerReady():
            return f"ready, can be at {' or '.join(map(str, message.reach)) or 'nowhere'}"
        case msg.Stop():
            return f"stop, generation {message.generation} begins"
        case msg.DoubtLifted():
            return f"what workers {list(message.workers)} hold counts"
        case msg.Recover():
            moves = "; ".join(f"{list(t.sources)} send to {list(t.receivers)}" for t in message.transfers)
            return f"generation {message.generation} resumes at step {message.resume_step}" + (moves and f", {moves}")
        case msg.Resume():
            return f"continue in generation {message.generation}"
        case msg.Assign():
            return f"worker {message.worker} is rank {message.rank} in generation {message.generation}"
        case msg.FenceWorker():
            return f"kill worker {message.worker}"
        case msg.StartWorker():
            role = "a spare" if message.rank is None else f"rank {message.rank}"
            return f"start worker {message.worker} as {role}"
        case msg.CollectiveFailed():
            return f"{message.error} ({message.group}, generation {message.generation})"
        case msg.StateRefused():
            return f"{message.error} (generation {message.generation})"
        case msg.Drain():
            return f"the job ends at step {message.step}"
        case msg.Terminate():
            return "SIGTERM for every worker"
        case msg.EndJob():
            return f"the job ends with exit code {message.exit_code}"
        case _:
            return " ".join(_words(type(message).__name__))


def _words(name: str) -> list[str]:
    """Returns the words of a class name in lower case: ``WorkerFenced`` -> worker, fenced."""
    starts = [at for at, letter in enumerate(name) if letter.isupper()] + [len(name)]
    return [name[begin:end].lower() for begin, end in itertools.pairwise(starts)]
