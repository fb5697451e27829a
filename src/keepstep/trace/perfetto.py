"""Exports a run as a trace for Perfetto and chrome://tracing.

It has a process for each node, with a track for each rank and spare, and a process for each device that publishes
weights, with a track for each stage.

The format is Google's "Trace Event Format", as JSON. The events are written one by one, each on a line, so that a trace
may be larger than memory.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from keepstep.protocol.messages import Cause
from keepstep.protocol.phases import Phase
from keepstep.shared.tagpage import MOMENTS, PHASES
from keepstep.trace.record.phaselog import NO_RANK, PhaseArray
from keepstep.trace.timeline.run import Run
from keepstep.trace.timeline.scene import LABELS, Scene, SceneSpan, SpanKind

CONTROLLER = 0
"""Number of the trace process with the events of the whole job. Those of the nodes follow."""
SPARE_TRACKS = 1_000_000
"""Number of the first track of workers without a rank, after those of all ranks."""
COMPUTING = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.OPTIMIZER: "optimizer"}
WAITS_RATIO = 3.0
"""An interrupted phase is a wait from its last collective on, if that part is this many times as long as the part
before."""
STAGES = {"h2d": "H2D", "broadcast": "Broadcast", "reload": "Reload"}
"""The stages of an update of published weights, and the names of their tracks."""


class Track(NamedTuple):
    """The process and thread numbers that identify a track."""

    pid: int
    tid: int


class ChromeTrace:
    """Writes a trace. Times are nanoseconds on any clock; ``zero_ns`` becomes time 0 of the trace."""

    def __init__(self, file: BinaryIO, zero_ns: int, other: dict[str, Any]) -> None:
        """Args:
        file: the file to write.
        zero_ns: time 0 of the trace.
        other: metadata of the trace, which the viewers show with the file's details.
        """
        self._file = file
        self._zero_ns = zero_ns
        self._num = 0
        head = json.dumps({"displayTimeUnit": "ms", "otherData": other})[:-1]
        file.write(f'{head}, "traceEvents": [\n'.encode())

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write((",\n" if self._num else "").encode() + json.dumps(event).encode())
        self._num += 1

    def _ts(self, at_ns: int) -> float:
        return (at_ns - self._zero_ns) / 1000

    def process(self, pid: int, name: str) -> None:
        """Names a process. The viewers show processes in the order of their numbers."""
        self._write({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
        self._write({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})

    def track(self, track: Track, name: str) -> None:
        """Names a track. The viewers show tracks in the order of their numbers."""
        at = {"pid": track.pid, "tid": track.tid}
        self._write({"name": "thread_name", "ph": "M", **at, "args": {"name": name}})
        self._write({"name": "thread_sort_index", "ph": "M", **at, "args": {"sort_index": track.tid}})

    def complete(self, track: Track, name: str, kind: str, span_ns: tuple[int, int], args: dict[str, Any]) -> None:
        """Writes an event with a start and an end."""
        begin_ns, end_ns = span_ns
        at = {"pid": track.pid, "tid": track.tid, "ts": self._ts(begin_ns), "dur": (end_ns - begin_ns) / 1000}
        self._write({"name": name, "cat": kind, "ph": "X", **at, "args": args})

    def instant(self, track: Track, name: str, kind: str, at_ns: int, args: dict[str, Any]) -> None:
        """Writes an event at one time."""
        at = {"pid": track.pid, "tid": track.tid, "ts": self._ts(at_ns)}
        self._write({"name": name, "cat": kind, "ph": "i", "s": "t", **at, "args": args})

    def counter(self, pid: int, name: str, at_ns: int, value: float) -> None:
        """Writes the new value of a counter."""
        self._write({"name": name, "ph": "C", "pid": pid, "ts": self._ts(at_ns), "args": {name: value}})

    def flow(self, name: str, begin: tuple[Track, int], end: tuple[Track, int]) -> None:
        """Writes an arrow between two events. Each is identified by its track and a time within the event."""
        number = self._num
        for phase, (track, at_ns), more in (("s", begin, {}), ("f", end, {"bp": "e"})):
            at = {"pid": track.pid, "tid": track.tid, "ts": self._ts(at_ns)}
            self._write({"name": name, "cat": "flow", "ph": phase, "id": number, **at, **more})

    def end(self) -> None:
        """Writes the end of the file."""
        self._file.write(b"\n]}\n")


# ---- an update of published weights ---------------------------------------------------------------------------------


class Work(NamedTuple):
    """The time that one stage of a device works on one bucket."""

    device: int
    stage: str
    bucket: int
    begun_ns: int
    ended_ns: int


def write_update(trace: ChromeTrace, pids: dict[int, int], works: Iterable[Work], args: dict[str, Any]) -> None:
    """Writes the stages of an update.

    Args:
        trace: the trace.
        pids: device -> its process in the trace.
        works: the works of all devices.
        args: what the viewers show with each of them, besides its bucket and the device that the bucket comes from.
    """
    works = sorted(works, key=lambda work: work.begun_ns)
    sources = {work.bucket: work.device for work in works if work.stage == "h2d"}
    for pid in pids.values():
        for number, name in enumerate(STAGES.values()):
            trace.track(Track(pid, number), name)
    for work in works:
        if work.ended_ns > work.begun_ns:
            track = Track(pids[work.device], [*STAGES].index(work.stage))
            told = {"bucket": work.bucket, "source": sources.get(work.bucket)}
            name = f"{STAGES[work.stage]} b{work.bucket}"
            trace.complete(track, name, work.stage, (work.begun_ns, work.ended_ns), told | args)


# ---- what a rank does ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """An activity of a rank. If it still lasts, ``end_s`` may be after the last known time."""

    kind: str
    begin_s: float
    end_s: float
    name: str
    """Its name in the trace."""
    step: int | None = None
    generation: int | None = None


def without(stretches: Iterable[Stretch], taken: Sequence[tuple[float, float]]) -> Iterator[Stretch]:
    """Yields the parts of stretches outside of the intervals ``taken``, which must be sorted."""
    for stretch in stretches:
        begin_s = stretch.begin_s
        for taken_s, free_s in taken:
            if free_s <= begin_s:
                continue
            if taken_s >= stretch.end_s:
                break
            if taken_s > begin_s:
                yield dataclasses.replace(stretch, begin_s=begin_s, end_s=taken_s)
            begin_s = free_s
        if begin_s < stretch.end_s:
            yield dataclasses.replace(stretch, begin_s=begin_s)


def phase_stretches(changes: PhaseArray, until_s: float) -> Iterator[Stretch]:
    """Yields the computing phases of one worker as stretches.

    Args:
        changes: its phase changes, sorted by time.
        until_s: end of the last phase.
    """
    times = (changes["at_ns"] / 1e9).tolist()
    for number, (change, begin_s) in enumerate(zip(changes, times, strict=True), 1):
        phase = PHASES[change["phase"]]
        step, generation = int(change["step"]), int(change["generation"])
        is_last = number == len(times)
        follower = None if is_last else changes[number]
        end_s = until_s if is_last else min(times[number], until_s)
        if phase not in COMPUTING or end_s <= begin_s:
            continue
        kind = COMPUTING[phase]
        entered_s = float(follower["entered_ns"]) / 1e9 if follower is not None else 0.0
        if _only_waited(change, follower) and begin_s < entered_s < end_s:
            yield Stretch(kind, begin_s, entered_s, kind, step, generation)
            yield Stretch("wait", entered_s, end_s, "wait", step, generation)
        else:
            yield Stretch(kind, begin_s, end_s, kind, step, generation)


def _only_waited(change: np.void, follower: np.void | None) -> bool:
    """Whether a worker spent most of an interrupted phase in its last collective."""
    if follower is None or PHASES[follower["phase"]] is not Phase.UPDATED or PHASES[change["phase"]] is Phase.OPTIMIZER:
        return False
    own_ns = int(follower["entered_ns"]) - int(change["at_ns"])
    return own_ns > 0 and int(follower["at_ns"]) - int(follower["entered_ns"]) > WAITS_RATIO * own_ns


def spans_by_rank(scene: Scene) -> dict[int, list[SceneSpan]]:
    """Returns rank -> its spans, sorted by time."""
    found: dict[int, list[SceneSpan]] = {}
    for span in scene.spans():
        found.setdefault(span.rank, []).append(span)
    return found


def span_stretches(
    scene: Scene, spans: Iterable[SceneSpan], until_s: float, updates: Sequence[tuple[float, float]]
) -> Iterator[Stretch]:
    """Yields the spans of one rank in a recovery as stretches.

    A rank whose gradients were synchronised has usually run its update before its groups are reconnected. Then the
    activity after that is to send its state.

    Args:
        scene: the recovery.
        spans: the spans of the rank.
        until_s: end of a span that still lasts.
        updates: times of the rank's updates.
    """
    for span in spans:
        kind, end_s = span.kind, until_s if span.end_s is None else span.end_s
        if kind is SpanKind.ADVANCE and any(span.rank in transfer.sources for transfer in scene.transfers):
            has_run = any(scene.record.begun_s <= ended_s <= span.begin_s for _, ended_s in updates)
            kind = SpanKind.SEND if has_run else kind
        yield Stretch(str(kind), span.begin_s, end_s, LABELS[kind])


def lost_stretches(scene: Scene, rank: int) -> Iterator[Stretch]:
    """Yields the time from a rank's failure until the controller learned of it."""
    for failure, at_s in scene.failures():
        if failure.rank == rank and at_s < scene.record.begun_s:
            hangs = failure.cause in (Cause.HANG, Cause.STOPPED)
            name = "hangs" if hangs else "lost, not detected yet"
            yield Stretch("silent", at_s, scene.record.begun_s, name)


def vacancy(scene: Scene, rank: int, spans: Sequence[SceneSpan], until_s: float) -> Stretch | None:
    """Returns the time in which no worker held a rank; None if the rank was not lost.

    Args:
        scene: the recovery.
        rank: the rank.
        spans: the rank's spans in that recovery.
        until_s: the end, if the recovery has none yet.
    """
    lost = [(failure, at_s) for failure, at_s in scene.failures() if failure.rank == rank]
    if not lost:
        return None
    begin_s = max(scene.record.begun_s, lost[0][1])
    taken_s = [span.begin_s for span in spans if span.kind not in (SpanKind.STOP, SpanKind.DECIDE)]
    end_s = min((at_s for at_s in taken_s if at_s >= begin_s), default=scene.end_s or until_s)
    name = f"no worker holds rank {rank}: {lost[0][0].detail}"
    return Stretch("gone", begin_s, max(begin_s, end_s), name)


# ---- a run ----------------------------------------------------------------------------------------------------------


def write_trace(run: Run, file: BinaryIO) -> None:
    """Writes a run as a trace.

    Args:
        run: the run, after its `Run.poll`.
        file: the file to write.
    """
    info = run.info
    other = {"run": info.run, "command": " ".join(info.command), "version": info.version}
    trace = ChromeTrace(file, info.started_ns, other)
    _Export(run, trace).write()
    trace.end()


class _Export:
    """Writes one run to a trace."""

    def __init__(self, run: Run, trace: ChromeTrace) -> None:
        self._run = run
        self._trace = trace
        self._now_s = max([run.now_s, *(scene.record.begun_s for scene in run.scenes)])
        self._nodes = {run.info.node: 1}
        self._named: set[Track] = set()
        self._lost_s: dict[int, float] = {}
        """worker -> when it was lost."""
        self._taken: dict[int, list[tuple[float, float]]] = {}
        """rank -> its times in recoveries, sorted."""
        self._updates: dict[int, list[tuple[float, float]]] = defaultdict(list)
        """rank -> times of updates that ran during a recovery."""
        self._completed = 0

    def write(self) -> None:
        trace, run = self._trace, self._run
        trace.process(CONTROLLER, "controller")
        trace.track(Track(CONTROLLER, 0), "events")
        for node in sorted({worker.node for worker in run.job.roster.workers.values()} | {run.info.node}):
            self._nodes.setdefault(node, len(self._nodes) + 1)
            trace.process(self._nodes[node], f"node {node}")
        for scene in run.scenes:
            for failure, at_s in scene.failures():
                if failure.rank in scene.places:
                    self._lost_s[scene.places[failure.rank][0]] = at_s
        self._taken = {
            rank: sorted((s.begin_s, s.end_s) for s, _ in found) for rank, found in self._recoveries().items()
        }
        self._phases()
        self._moments()
        self._events()
        self._stragglers()
        self._write_recoveries()
        self._weights()

    # ---- tracks ------------------------------------------------------------------------------------------------------

    def _track(self, rank: int, worker: int | None) -> Track:
        """Returns the track of a rank on its worker's node, or the worker's own track if it has no rank."""
        known = self._run.job.roster.workers.get(worker) if worker is not None else None
        pid = self._nodes[known.node if known is not None else self._run.info.node]
        track, name = Track(pid, rank), f"rank {rank}"
        if rank == NO_RANK:
            track, name = Track(pid, SPARE_TRACKS + (worker or 0)), f"spare, worker {worker}"
        if track not in self._named:
            self._named.add(track)
            self._trace.track(track, name)
        return track

    # ---- recoveries --------------------------------------------------------------------------------------------------

    def _recoveries(self) -> dict[int, list[tuple[Stretch, Scene]]]:
        """Returns rank -> its stretches in all recoveries, without overlaps: of two recoveries the later one counts."""
        found: dict[int, list[tuple[Stretch, Scene]]] = defaultdict(list)
        taken: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for scene in reversed(self._run.scenes):
            by_rank = spans_by_rank(scene)
            for rank in {*by_rank, *(failure.rank for failure, _ in scene.failures())}:
                spans, updates = by_rank.get(rank, []), sorted(self._updates.get(rank, ()))
                gone = vacancy(scene, rank, spans, self._now_s)
                stretches = [*span_stretches(scene, spans, self._now_s, updates), *lost_stretches(scene, rank)]
                for stretch in [*stretches, *([gone] if gone is not None else [])]:
                    free = list(without([stretch], _near(taken[rank], stretch)))
                    found[rank] += [(part, scene) for each in free for part in without([each], updates)]
                    for part in free:
                        bisect.insort(taken[rank], (part.begin_s, part.end_s))
        return found

    def _holder(self, scene: Scene, rank: int, kind: str) -> int | None:
        before = scene.places.get(rank, (None, ""))[0]
        if kind in ("silent", "gone"):
            return before
        if rank in scene.replacements and kind not in (SpanKind.STOP, SpanKind.DECIDE):
            return scene.replacements[rank][0]
        return scene.survivors.get(rank, before)

    def _write_recoveries(self) -> None:
        places: dict[tuple[int, str, int], tuple[Track, int]] = {}
        """(recovery, kind, rank) -> the beginning of the first such event."""
        for rank, found in sorted(self._recoveries().items()):
            for stretch, scene in sorted(found, key=lambda each: each[0].begin_s):
                span_ns = round(stretch.begin_s * 1e9), round(stretch.end_s * 1e9)
                if span_ns[1] > span_ns[0]:
                    track = self._track(rank, self._holder(scene, rank, stretch.kind))
                    record = scene.record
                    args = {"recovery": scene.number, "generation": record.generation, "step": record.resume_step}
                    self._trace.complete(track, stretch.name, "recovery", span_ns, args)
                    places.setdefault((scene.number, stretch.kind, rank), (track, span_ns[0]))
        for scene in self._run.scenes:
            self._write_failures(scene)
            self._write_arrows(scene, places)

    def _write_failures(self, scene: Scene) -> None:
        args: dict[str, Any] = {"recovery": scene.number, "generation": scene.record.generation}
        for failure, at_s in scene.failures():
            told = {"detail": failure.detail, "cause": failure.cause, "step": failure.step, "phase": failure.phase}
            track = self._track(failure.rank, scene.places.get(failure.rank, (None, ""))[0])
            self._trace.instant(track, f"rank {failure.rank} lost", "failure", round(at_s * 1e9), args | told)
        if not scene.record.failures:
            at_ns = round(scene.record.begun_s * 1e9)
            self._trace.instant(Track(CONTROLLER, 0), scene.record.detail, "failure", at_ns, args)

    def _write_arrows(self, scene: Scene, places: dict[tuple[int, str, int], tuple[Track, int]]) -> None:
        """Writes arrows from a failure to the restore of its rank, and from senders to receivers of state.

        The journal may have a rank's part begin and end at one moment, and the wait after it, too. Then the arrow is at
        the reset before it.
        """

        def place(rank: int, *kinds: str) -> tuple[Track, int] | None:
            kinds += ("wait", "reset") if rank in scene.restored_s else ()
            return next((found for kind in kinds if (found := places.get((scene.number, kind, rank)))), None)

        for failure, _ in scene.failures():
            begin, end = places.get((scene.number, "gone", failure.rank)), place(failure.rank, "restore")
            if begin is not None and end is not None:
                self._trace.flow("replaced", begin, end)
        for transfer in scene.transfers:
            for source in transfer.sources:
                begin = place(source, "send", "advance")
                for receiver in transfer.receivers:
                    end = place(receiver, "restore")
                    if begin is not None and end is not None:
                        self._trace.flow("state", begin, end)

    # ---- phases ------------------------------------------------------------------------------------------------------

    def _phases(self) -> None:
        last: dict[int, PhaseArray] = {}
        for changes in self._run.history.in_turn():
            order = np.argsort(changes["worker"], kind="stable")
            changes = changes[order]
            workers, firsts = np.unique(changes["worker"], return_index=True)
            completed: list[tuple[int, int]] = []
            for worker, own in zip(workers.tolist(), np.split(changes, firsts[1:]), strict=True):
                if worker in last:
                    own = np.concatenate([last[worker], own])
                last[worker] = own[-1:]
                completed += self._of_worker(worker, own, float(own["at_ns"][-1]) / 1e9)
            for at_ns, step in sorted(completed):
                if step > self._completed:
                    self._completed = step
                    self._trace.counter(CONTROLLER, "step", at_ns, step)
        for worker, own in last.items():
            self._of_worker(worker, own, self._now_s)

    def _of_worker(self, worker: int, own: PhaseArray, until_s: float) -> list[tuple[int, int]]:
        """Writes the phases of one worker. Returns (time, number of completed steps) for each step it completed."""
        until_s = min(until_s, self._lost_s.get(worker, until_s))
        rank = int(own["rank"][-1])
        track = self._track(rank, worker)
        taken, completed = self._taken.get(rank, []), []
        for stretch in phase_stretches(own, until_s):
            args = {"step": stretch.step, "generation": stretch.generation, "worker": worker}
            near = _near(taken, stretch)
            if stretch.kind == "optimizer":
                completed.append((round(stretch.end_s * 1e9), (stretch.step or 0) + 1))
                self._updates[rank] += [(stretch.begin_s, stretch.end_s)] if near else []
                near = []
            for part in without([stretch], near):
                span_ns = round(part.begin_s * 1e9), round(part.end_s * 1e9)
                if span_ns[1] > span_ns[0]:
                    self._trace.complete(track, stretch.name, "step", span_ns, args)
        return completed

    def _moments(self) -> None:
        """Writes the moments of snapshots."""
        for moment in self._run.history.moments(0, self._run.history.end_ns + 1):
            track = self._track(int(moment["rank"]), int(moment["worker"]))
            args = {"step": int(moment["step"]), "generation": int(moment["generation"])}
            args |= {"worker": int(moment["worker"]), "bytes": int(moment["entered_ns"])}
            name = f"{MOMENTS[moment['phase'] - len(PHASES)]}, step {moment['step']}"
            self._trace.instant(track, name, "snapshot", int(moment["at_ns"]), args)

    def _events(self) -> None:
        track = Track(CONTROLLER, 0)
        for event in self._run.events:
            args = {"text": event.text, "level": event.level, "generation": event.generation}
            args |= {"rank": event.rank, "step": event.step, "node": event.node}
            self._trace.instant(track, event.kind, "control", round(event.at_s * 1e9), args)

    def _stragglers(self) -> None:
        """Writes the stragglers at the end of the run, because the window of steps ends there."""
        holders = {worker.rank: worker.worker for worker in self._run.job.roster.workers.values() if not worker.lost}
        for each in self._run.stragglers.found():
            args = {"own_ms": each.own_ms, "typical_ms": each.typical_ms}
            name = f"slow {each.phase}, {each.ratio:.1f} times the others"
            track = self._track(each.rank, holders.get(each.rank))
            self._trace.instant(track, name, "straggler", round(self._now_s * 1e9), args)

    def _weights(self) -> None:
        """Writes the last update in each folder, as far as its devices have reported it."""
        num_processes = 1 + len(self._nodes)
        for publication in self._run.publications.found.values():
            devices = {rank: each for rank, each in publication.last_devices.items() if each.spans}
            pids = {rank: num_processes + number for number, rank in enumerate(devices)}
            num_processes += len(pids)
            works = []
            for rank, device in devices.items():
                self._trace.process(pids[rank], f"weights in {publication.folder}, device {rank}")
                begun_s = device.committed_span_s[0]
                for span in device.spans:
                    begin_ns, end_ns = (round((begun_s + at_s) * 1e9) for at_s in (span.begin_s, span.end_s))
                    works.append(Work(rank, span.stage, span.bucket, begin_ns, end_ns))
            write_update(self._trace, pids, works, {"version": publication.version})


def _near(taken: list[tuple[float, float]], stretch: Stretch) -> list[tuple[float, float]]:
    """Returns those of the sorted intervals that overlap a stretch."""
    first = max(0, bisect.bisect_right(taken, (stretch.begin_s, float("inf"))) - 1)
    last = bisect.bisect_left(taken, (stretch.end_s, 0.0))
    return [(begin_s, end_s) for begin_s, end_s in taken[first:last] if end_s > stretch.begin_s]
