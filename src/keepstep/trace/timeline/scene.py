"""The data for drawing one recovery: lost ranks, when each rank stopped and was reset, transfers of state."""

from __future__ import annotations

import dataclasses
import enum

from keepstep.protocol import messages as msg
from keepstep.protocol.controller import AnswersReceived, JournalEntry, ReportsReceived
from keepstep.protocol.recovery import RecoveryMachine
from keepstep.protocol.recovery.records import Failure, RecoveryRecord
from keepstep.protocol.resume import Action


class SpanKind(enum.StrEnum):
    """What a rank does in the parts of a recovery, in this order."""

    STOP = "stop"
    """The rank goes to a safe point, aborts its communicators and discards the interrupted step."""
    DECIDE = "decide"
    """The rank waits for the decision, or for a replacement of another rank."""
    RESET = "reset"
    """The rank reconnects its process groups."""
    RESTORE = "restore"
    """The rank receives the state of its shard, and goes back to the resume step."""
    SEND = "send"
    """The rank sends its state to others."""
    ADVANCE = "advance"
    """The rank runs the update for which its gradients are synchronised."""
    REWIND = "rewind"
    """The rank loads a snapshot or checkpoint."""
    ROLLBACK = "rollback"
    """The rank keeps its state and undoes the interrupted step."""
    WAIT = "wait"
    """The rank is at the resume step and waits for the others."""


LABELS = {
    SpanKind.STOP: "Stop + Clean",
    SpanKind.DECIDE: "Decide",
    SpanKind.RESET: "Reset",
    SpanKind.RESTORE: "Restoration + Rollback",
    SpanKind.SEND: "Send state",
    SpanKind.ADVANCE: "Advance",
    SpanKind.REWIND: "Rewind",
    SpanKind.ROLLBACK: "Rollback",
    SpanKind.WAIT: "Wait",
}
"""Labels for display."""

_BY_ACTION = {
    Action.STAY: SpanKind.ROLLBACK,
    Action.ADVANCE: SpanKind.ADVANCE,
    Action.REWIND: SpanKind.REWIND,
    Action.RESTORE: SpanKind.RESTORE,
}


@dataclasses.dataclass(frozen=True, slots=True)
class SceneSpan:
    """A part of a recovery on one rank. Times are seconds on the job's clock; ``end_s`` is None while it lasts."""

    rank: int
    kind: SpanKind
    begin_s: float
    end_s: float | None


@dataclasses.dataclass(slots=True)
class Scene:
    """One recovery."""

    number: int
    """Counted from 1."""
    record: RecoveryRecord
    survivors: dict[int, int]
    """rank -> worker, for the ranks that lived when the recovery began."""
    places: dict[int, tuple[int, str]]
    """rank -> worker and node when the recovery began, including lost ranks."""
    transfers: tuple[msg.Transfer, ...] = ()
    replacements: dict[int, tuple[int, str]] = dataclasses.field(default_factory=dict)
    """rank -> worker and node of its replacement."""
    safe_s: dict[int, float] = dataclasses.field(default_factory=dict)
    """rank -> when the controller received its report of the safe point."""
    reset_s: dict[int, float] = dataclasses.field(default_factory=dict)
    """rank -> the same for its reconnected process groups."""
    restored_s: dict[int, float] = dataclasses.field(default_factory=dict)
    """rank -> the same for its recovered state."""
    told_s: list[float] = dataclasses.field(default_factory=list)
    """When the controller learned of each failure of the record."""
    has_resumed: bool = False
    """Whether every rank has completed its first step, so that the recovery is over and its numbers are final."""
    overtaken_s: float | None = None
    """When another recovery superseded this one; None if none did."""

    @property
    def since_s(self) -> float:
        """Time of the first failure, as far as it is known."""
        return min([self.record.begun_s, *(at_s for _, at_s in self.failures())])

    def failures(self) -> list[tuple[Failure, float]]:
        """Returns the failures with their times. A time is never later than when the controller learned of it."""
        pairs = zip(self.record.failures, self.told_s, strict=False)  # the record may already have newer failures
        return [(failure, min(failure.since_s, told_s)) for failure, told_s in pairs]

    @property
    def end_s(self) -> float | None:
        """When training resumed or the next recovery began; None before."""
        return self.record.resumed_s if self.has_resumed else self.overtaken_s

    def spans(self) -> list[SceneSpan]:
        """Returns the spans of all ranks, sorted by rank and time."""
        ranks = sorted({*self.survivors, *self.replacements, *self.reset_s})
        return [span for rank in ranks for span in self._spans_of(rank)]

    def _spans_of(self, rank: int) -> list[SceneSpan]:
        record = self.record
        marks: list[tuple[SpanKind, float | None]] = []
        begin_s: float | None = record.decided_s
        if rank in self.survivors and rank not in self.replacements:
            begin_s = record.begun_s
            marks = [(SpanKind.STOP, self.safe_s.get(rank)), (SpanKind.DECIDE, record.decided_s)]
        marks += [
            (SpanKind.RESET, self.reset_s.get(rank)),
            (self._activity_of(rank), self.restored_s.get(rank)),
            (SpanKind.WAIT, record.restored_s),
        ]
        spans = []
        for kind, end_s in marks:
            if begin_s is None:
                break
            if end_s is None:
                spans.append(SceneSpan(rank, kind, begin_s, self._cut_s(rank, kind, begin_s)))
            else:
                spans.append(SceneSpan(rank, kind, begin_s, end_s := max(begin_s, end_s)))
            begin_s = end_s
        return spans

    def _cut_s(self, rank: int, kind: SpanKind, begin_s: float) -> float | None:
        """Returns when an incomplete span was cut off by the rank's own failure or by the end of the recovery.

        A rank that fails on its way to a safe point fails after the recovery has begun, even if its node's clock shows
        an earlier time. For later spans, earlier failures do not count: a replacement may hold the rank.
        """
        cuts = [self.end_s] if self.end_s is not None else []
        for failure, at_s in self.failures():
            if failure.rank == rank and (kind is SpanKind.STOP or at_s > begin_s):
                cuts.append(at_s)
        return max(begin_s, min(cuts)) if cuts else None

    def _activity_of(self, rank: int) -> SpanKind:
        action = Action(self.record.actions.get(rank, Action.STAY))
        if action is Action.STAY and any(rank in transfer.sources for transfer in self.transfers):
            return SpanKind.SEND
        return _BY_ACTION[action]


class SceneStage:
    """Builds the scenes from the entries of a journal."""

    def __init__(self, job: RecoveryMachine) -> None:
        """Args:
        job: the machine that replays the entries. Call `before` and `after` around the replay of each.
        """
        self._job = job
        self.scenes: list[Scene] = []
        self._places: dict[int, tuple[int, str]] = {}

    def before(self) -> None:
        """Records who holds which rank. Call it before an entry is replayed."""
        if self._job.stage == "training":
            return
        self._places |= {w.rank: (w.worker, w.node) for w in self._job.roster.holders() if w.rank is not None}

    def after(self, entry: JournalEntry) -> bool:
        """Updates the scenes after an entry was replayed. Returns whether a scene has changed."""
        job, num = self._job, len(self.scenes)
        for record in job.records[num:]:
            if self.scenes and self.scenes[-1].end_s is None:
                self.scenes[-1].overtaken_s = record.begun_s
            lost = {failure.rank for failure in record.failures}
            living = {w.rank: w.worker for w in job.roster.holders() if w.rank is not None and w.rank not in lost}
            self.scenes.append(Scene(len(self.scenes) + 1, record, living, dict(self._places)))
        if not self.scenes:
            return False
        scene = self.scenes[-1]
        scene.told_s += [entry.at_s] * (len(scene.record.failures) - len(scene.told_s))
        for _, order, _ in entry.orders:
            if isinstance(order, msg.Recover):
                scene.transfers = order.transfers
        for rank, number in scene.record.replacements.items():
            scene.replacements[rank] = (number, job.roster.workers[number].node)
        has_changed = scene.end_s is None
        if isinstance(entry.event, AnswersReceived):
            for answer in entry.event.spoken():
                self._heard(scene, answer, entry.at_s)
        if isinstance(entry.event, ReportsReceived):
            for report in entry.event.reports:
                self._heard(scene, report, entry.at_s)
                has_changed |= isinstance(report, msg.WorkerEnded)  # the report on how a process ended may come late
        scene.has_resumed = scene.has_resumed or is_over(job, scene.record)
        return has_changed

    def _heard(self, scene: Scene, report: object, at_s: float) -> None:
        match report:
            case msg.SafePointReached():
                times = scene.safe_s
            case msg.GroupsReset():
                times = scene.reset_s
            case msg.StateRecovered():
                times = scene.restored_s
            case _:
                return
        if report.generation == scene.record.generation:
            for number in report.workers:
                worker = self._job.roster.workers.get(number)
                if worker is not None and worker.rank is not None:
                    times[worker.rank] = at_s


def is_over(job: RecoveryMachine, record: RecoveryRecord) -> bool:
    """Whether the newest recovery of a job is over.

    That is when the ranks of all nodes have completed their first step, and the controller knows how the processes of
    the lost ranks have ended.
    """
    is_resumed = bool(record.observed_on) and all(worker.node in record.observed_on for worker in job.roster.holders())
    return is_resumed and not record.unexplained
