"""The controller's events, and its decisions with their reasons, for display and for the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from keepstep.protocol import messages as msg
from keepstep.protocol.controller import Departed, DrainAsked, JournalEntry, LeaseExpired, ReportsReceived, Restarted
from keepstep.protocol.recovery import RecoveryMachine
from keepstep.protocol.recovery.placement.quarantine import Place
from keepstep.protocol.recovery.records import RecoveryRecord
from keepstep.trace.timeline.describe import loaded_text
from keepstep.trace.timeline.scene import is_over


class ControlEvent(NamedTuple):
    """One event. ``at_s`` is on the job's clock. Rank, step and node are None if the event does not have them."""

    at_s: float
    kind: str
    level: str
    """``info``, ``warning`` or ``error``."""
    text: str
    generation: int
    rank: int | None = None
    step: int | None = None
    node: str | None = None


_ORDERS: dict[type[msg.AgentOrder], tuple[str, str]] = {
    msg.StartWorker: ("worker started", "info"),
    msg.FenceWorker: ("worker fenced", "info"),
    msg.Assign: ("rank assigned", "info"),
    msg.Stop: ("recovery begun", "warning"),
    msg.DoubtLifted: ("doubt lifted", "warning"),
    msg.Recover: ("recovery decided", "info"),
    msg.Resume: ("training resumed", "info"),
    msg.Complete: ("training completed", "info"),
    msg.Abandon: ("abandoned", "error"),
    msg.Rescue: ("rescue", "error"),
    msg.Drain: ("drain decided", "info"),
    msg.Terminate: ("scripts told to end", "info"),
    msg.EndJob: ("job ended", "info"),
}


class Teller:
    """Derives events from the entries of a journal."""

    def __init__(self, job: RecoveryMachine) -> None:
        """Args:
        job: the machine that replays the entries. The caller replays each entry before it calls `tell`.
        """
        self._job = job
        self._num_records = 0
        self._num_failures = 0
        self._has_resumed = True
        self._held: set[Place] = set()
        self._num_standstills = 0
        self._num_notices = 0

    def tell(self, entry: JournalEntry) -> list[ControlEvent]:
        """Returns the events of one entry, causes before effects."""
        told = [self._seen, self._failed, self._kept_apart, self._noticed, self._stood, self._decided, self._recovered]
        return [event for tell in told for event in tell(entry)]

    def _seen(self, entry: JournalEntry) -> Iterator[ControlEvent]:
        match entry.event:
            case LeaseExpired(node, why):
                yield ControlEvent(entry.at_s, "node lost", "error", f"{node}: {why}", entry.generation, node=node)
            case Departed(node, why):
                yield ControlEvent(entry.at_s, "node left", "warning", f"{node}: {why}", entry.generation, node=node)
            case Restarted():
                yield ControlEvent(entry.at_s, "controller restarted", "warning", "from its journal", entry.generation)
            case DrainAsked(reason):
                yield ControlEvent(entry.at_s, "drain begun", "warning", reason, entry.generation)
            case ReportsReceived(node, _, reports):
                for report in reports:
                    if isinstance(report, msg.NodeJoined):
                        text = f"{node}, with room for {report.slots} workers"
                        yield ControlEvent(entry.at_s, "node joined", "info", text, entry.generation, node=node)
                    elif isinstance(report, msg.NodeDraining):
                        text = f"{node}: {report.reason}"
                        yield ControlEvent(entry.at_s, "node draining", "warning", text, entry.generation, node=node)
                    elif isinstance(report, msg.DevicesClosed):
                        text = f"{node}, devices {list(report.devices)}: {report.reason}"
                        yield ControlEvent(entry.at_s, "devices closed", "warning", text, entry.generation, node=node)
                    elif isinstance(report, msg.WorkerFailed):
                        worker = self._job.roster.workers.get(report.worker)
                        rank = worker.rank if worker else None
                        yield ControlEvent(
                            entry.at_s, "script raised", "error", report.error, entry.generation, rank=rank, node=node
                        )
            case _:
                pass

    def _failed(self, entry: JournalEntry) -> Iterator[ControlEvent]:
        """Yields an event for each newly lost rank. Further ranks may be lost during a recovery."""
        records = self._job.records
        if len(records) > self._num_records:
            self._num_records, self._num_failures, self._has_resumed = len(records), 0, False
        if records:
            for failure in records[-1].failures[self._num_failures :]:
                where = self._job.roster.node_of(failure.rank)
                text = f"rank {failure.rank}: {failure.detail}"
                generation = records[-1].generation - 1
                yield ControlEvent(
                    min(failure.since_s, entry.at_s),
                    "rank lost",
                    "error",
                    text,
                    generation,
                    failure.rank,
                    failure.step,
                    where,
                )
            self._num_failures = len(records[-1].failures)

    def _kept_apart(self, entry: JournalEntry) -> Iterator[ControlEvent]:
        """Yields an event for each node or device that is new in quarantine."""
        held = self._job.quarantine.held
        for place in held.keys() - self._held:
            yield ControlEvent(
                entry.at_s, "quarantine", "warning", quarantine_text(place, held[place]), entry.generation,
                node=place.node,
            )  # fmt: skip
        self._held = set(held)

    def _noticed(self, entry: JournalEntry) -> Iterator[ControlEvent]:
        """Yields an event for each new notice."""
        notices = self._job.notices
        for text in notices[self._num_notices :]:
            yield ControlEvent(entry.at_s, "notice", "warning", text, entry.generation)
        self._num_notices = len(notices)

    def _stood(self, entry: JournalEntry) -> Iterator[ControlEvent]:
        """Yields an event if ranks have waited for others for a long time."""
        published = self._job.standstill.published
        for text in published[self._num_standstills :]:
            yield ControlEvent(entry.at_s, "ranks wait", "warning", text, entry.generation)
        self._num_standstills = len(published)

    def _decided(self, entry: JournalEntry) -> Iterator[ControlEvent]:
        """Yields an event for each kind and reason of orders."""
        together: dict[tuple[str, str, str], list[tuple[str | None, msg.AgentOrder]]] = {}
        for node, order, reason in entry.orders:
            if type(order) in _ORDERS:
                kind, level = _ORDERS[type(order)]
                together.setdefault((kind, level, reason), []).append((node, order))
        for (kind, level, reason), given in together.items():
            node, order = given[0]
            text = reason if len(given) == 1 else f"{reason} ({len(given)} of them)"
            rank = getattr(order, "rank", None) if len(given) == 1 else None
            step = getattr(order, "resume_step", None)
            if isinstance(order, msg.EndJob):
                text, level = order.reason, "error" if order.exit_code else "info"
            yield ControlEvent(
                entry.at_s, kind, level, text, entry.generation, rank, step, node if len(given) == 1 else None
            )

    def _recovered(self, entry: JournalEntry) -> Iterator[ControlEvent]:
        if not self._has_resumed and is_over(self._job, record := self._job.records[-1]):
            self._has_resumed = True
            assert record.resumed_s is not None
            yield ControlEvent(
                record.resumed_s, "recovered", "info", recovery_text(record), entry.generation, step=record.resume_step
            )


def quarantine_text(place: Place, why: str) -> str:
    """Describes a quarantined node or device in a sentence."""
    return f"{place} is in quarantine, and used only when no other spare is left: it {why}"


def recovery_text(record: RecoveryRecord) -> str:
    """Describes a recovery in a sentence."""
    gap_ms = record.milliseconds()["gap"]
    if gap_ms is None:
        return f"{record.detail}; another failure interrupted this recovery"
    loaded = f", {text}," if (text := loaded_text(record)) else ""
    return f"{record.detail}; training continues from step {record.resume_step}{loaded} after {gap_ms:.0f} ms"
