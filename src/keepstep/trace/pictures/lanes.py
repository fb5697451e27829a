"""The lanes of one recovery: the activities of each rank over time, and those common to all ranks.

Phases come from the ranks' tag pages, and spans of the recovery from the controller's journal. If both cover the same
time, a running update has precedence over a span, and a span over any other phase.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from keepstep.protocol.messages import Cause
from keepstep.protocol.phases import Phase
from keepstep.protocol.resume import Action
from keepstep.shared.tagpage import PHASES
from keepstep.trace.pictures.shards import DrawnSnapshot, ShardBand, States, gone_of, moments_before, snapshots_of
from keepstep.trace.record.phaselog import PHASE_DTYPE, PhaseArray
from keepstep.trace.timeline.run import Run
from keepstep.trace.timeline.scene import LABELS, Scene, SceneSpan, SpanKind

COMPUTING = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.OPTIMIZER: "optimizer"}
MAX_LANES = 16
NUM_HEALTHY = 3
"""Number of drawn ranks without a failure if the world is too large to draw all."""
LOOK_BACK_S = 60.0
"""How far before a failure the picture looks for the start of the previous step."""
WAITS_RATIO = 3.0
"""An interrupted phase is drawn as a wait from its last collective on, if that part is this many times as long as the
part before."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """An activity of a rank. If it still lasts, ``end_s`` may be after the last known time."""

    kind: str
    begin_s: float
    end_s: float
    hint: str = ""
    step: int | None = None
    generation: int | None = None


@dataclasses.dataclass(slots=True)
class Lane:
    """The lane of one rank."""

    rank: int
    stretches: list[Stretch] = dataclasses.field(default_factory=list)
    failed_s: list[float] = dataclasses.field(default_factory=list)
    gone: tuple[float, float] | None = None
    """From the rank's failure until a replacement held it."""
    snapshots: list[DrawnSnapshot] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Takeover:
    """A spare takes a rank."""

    worker: int
    rank: int
    at_s: float


@dataclasses.dataclass(slots=True)
class Board:
    """The data of one recovery for drawing. Times are seconds on the job's clock."""

    begin_s: float
    zero_s: float
    """Time of the failure."""
    end_s: float
    lanes: list[Lane]
    num_hidden: int
    takeovers: list[Takeover]
    has_ended: bool
    """Whether the job has ended."""
    steps: list[tuple[float, float, int, bool]] = dataclasses.field(default_factory=list)
    """(begin, end, step, whether it is recomputed)."""
    recovery: tuple[float, float] = (0.0, 0.0)
    barriers: list[float] = dataclasses.field(default_factory=list)
    states: States = dataclasses.field(default_factory=list)
    """(begin, end, step of the parameters on all survivors; None while they are being updated)."""
    shards: list[ShardBand] = dataclasses.field(default_factory=list)
    """The shards in the order of the lanes, each with its own states. Empty if all ranks hold the same shard."""


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


def merged(phases: Sequence[Stretch], spans: Sequence[Stretch]) -> list[Stretch]:
    """Merges both into one sequence without overlaps, sorted by time."""
    updates = sorted((s.begin_s, s.end_s) for s in phases if s.kind == "optimizer")
    spans = list(without(sorted(spans, key=lambda s: s.begin_s), updates))
    taken = [(s.begin_s, s.end_s) for s in spans]
    found = sorted([*without(phases, taken), *spans], key=lambda s: s.begin_s)
    return [s for s in found if s.end_s > s.begin_s]


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
        kind, hint = COMPUTING[phase], f"{phase} of step {step}"
        entered_s = float(follower["entered_ns"]) / 1e9 if follower is not None else 0.0
        if _only_waited(change, follower) and begin_s < entered_s < end_s:
            yield Stretch(kind, begin_s, entered_s, hint, step, generation)
            yield Stretch("wait", entered_s, end_s, f"waits in the {phase} of step {step}", step, generation)
        else:
            yield Stretch(kind, begin_s, end_s, hint, step, generation)


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
        yield Stretch(str(kind), span.begin_s, end_s, LABELS[kind], None, scene.record.generation)


def lost_stretches(scene: Scene, rank: int) -> Iterator[Stretch]:
    """Yields the time from a rank's failure until the controller learned of it."""
    for failure, at_s in scene.failures():
        if failure.rank == rank and at_s < scene.record.begun_s:
            hangs = failure.cause in (Cause.HANG, Cause.STOPPED)
            hint = "hangs" if hangs else "lost, not detected yet"
            yield Stretch("silent", at_s, scene.record.begun_s, hint, None, scene.record.generation)


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
    hint = f"no worker holds rank {rank}: {lost[0][0].detail}"
    return Stretch("gone", begin_s, max(begin_s, end_s), hint, None, scene.record.generation)


# ---- the board ------------------------------------------------------------------------------------------------------


def board(run: Run, scene: Scene) -> Board:
    """Builds the data for drawing one recovery.

    Args:
        run: the run, after its `Run.poll`.
        scene: the recovery.
    """
    at = scene.number - 1
    earlier = run.scenes[at - 1] if at else None
    if earlier is not None and earlier.overtaken_s is None:
        earlier = None
    ranks, num_hidden = _ranks_of(run, scene)
    end_s = _end_s(run, scene)
    begin_s, changes = _window(run, scene, earlier, ranks, end_s)
    end_s = _trimmed(scene, changes, end_s)
    found = Board(begin_s, scene.since_s, end_s, [], num_hidden, _takeovers(scene, ranks), not run.is_alive)
    by_rank, before_by_rank = spans_by_rank(scene), spans_by_rank(earlier) if earlier is not None else {}
    computed: dict[int, list[Stretch]] = {}
    moments = moments_before(run, begin_s, end_s)
    for rank in ranks:
        phases = computed[rank] = _phases_of(scene, rank, changes, end_s)
        updates = [(s.begin_s, s.end_s) for s in phases if s.kind == "optimizer"]
        own = by_rank.get(rank, [])
        spans = [*lost_stretches(scene, rank), *span_stretches(scene, own, end_s, updates)]
        if earlier is not None:
            before = span_stretches(earlier, before_by_rank.get(rank, []), scene.record.begun_s, updates)
            unnoticed = sorted((s.begin_s, s.end_s) for s in spans if s.kind == "silent")
            spans += without((s for s in before if s.end_s <= scene.record.begun_s), unnoticed)
        lane = Lane(rank, [s for s in merged(phases, spans) if s.end_s > begin_s and s.begin_s < end_s])
        lane.failed_s = [at_s for failure, at_s in scene.failures() if failure.rank == rank]
        gone = vacancy(scene, rank, own, end_s)
        lane.gone = (gone.begin_s, gone.end_s) if gone is not None else None
        lane.snapshots = snapshots_of(moments, rank, begin_s)
        found.lanes.append(lane)
    found.recovery = (scene.since_s, scene.record.restored_s or end_s)
    _tell_steps(found, scene, [stretch for own in computed.values() for stretch in own])
    found.shards = _shards(run, found, scene, computed)
    if not found.shards:
        found.states = _states(found, scene, computed)
    return found


def _shards(run: Run, found: Board, scene: Scene, computed: Mapping[int, Sequence[Stretch]]) -> list[ShardBand]:
    bands: list[ShardBand] = []
    origins = scene.record.origins()
    groups: dict[int, list[int]] = {}
    for lane in found.lanes if run.shards else ():
        groups.setdefault(run.shards[lane.rank], []).append(lane.rank)
    for number, ranks in groups.items():
        gone = gone_of(scene, [rank for rank, shard in enumerate(run.shards) if shard == number], found.end_s)
        states = _states(found, scene, {rank: computed[rank] for rank in ranks})
        if gone is not None:
            stretches = [Stretch("", begin_s, end_s, step=step) for begin_s, end_s, step in states]
            states = [(each.begin_s, each.end_s, each.step) for each in without(stretches, [gone])]
        origin = " and ".join(dict.fromkeys(str(origins[rank]) for rank in ranks if rank in origins))
        bands.append(ShardBand(number, len(ranks), states, gone, origin))
    return bands


def _ranks_of(run: Run, scene: Scene) -> tuple[list[int], int]:
    """Returns the ranks to draw, and the number of other ranks."""
    world_size = run.info.settings.world_size
    shards = run.shards or [0] * world_size
    if world_size + len(scene.replacements) <= MAX_LANES:
        return sorted(range(world_size), key=lambda rank: (shards[rank], rank)), 0
    struck = sorted({*(failure.rank for failure in scene.record.failures), *scene.replacements})
    struck = struck[: MAX_LANES - NUM_HEALTHY]
    sources = [rank for transfer in scene.transfers for rank in transfer.sources]
    others = [rank for rank in [*sources, *range(world_size)] if rank not in struck]
    drawn = [*struck, *list(dict.fromkeys(others))[:NUM_HEALTHY]]
    ranks = sorted(drawn, key=lambda rank: (shards[rank], rank))
    return ranks, world_size - len(ranks)


def _takeovers(scene: Scene, ranks: Sequence[int]) -> list[Takeover]:
    at_s = scene.record.decided_s
    if at_s is None:
        return []
    found = [Takeover(worker, rank, at_s) for rank, (worker, _) in sorted(scene.replacements.items()) if rank in ranks]
    return found[: MAX_LANES // 2]


def _end_s(run: Run, scene: Scene) -> float:
    """Returns the end of the picture: shortly after the first step of the new generation."""
    record, at = scene.record, scene.number - 1
    now_s = max(run.now_s, record.begun_s + 1e-6)
    if record.resumed_s is None:
        return scene.overtaken_s if scene.overtaken_s is not None else now_s
    end_s = record.resumed_s + 0.35 * (record.first_step_s or 0.0)
    if at + 1 < len(run.scenes):
        end_s = min(end_s, max(record.resumed_s, run.scenes[at + 1].since_s))
    return min(end_s, now_s) if now_s > record.resumed_s else record.resumed_s


def _window(
    run: Run, scene: Scene, earlier: Scene | None, ranks: Sequence[int], end_s: float
) -> tuple[float, PhaseArray]:
    """Returns the start of the picture, the step before the interrupted one, and the phase changes of its lanes."""
    record = scene.record
    step = next((failure.step for failure in record.failures if failure.step is not None), record.stopped_at_step)
    workers = [scene.places[rank][0] for rank in ranks if rank in scene.places]
    workers += [worker for worker, _ in scene.replacements.values()] + [scene.survivors[r] for r in scene.survivors]
    length_s = end_s - scene.since_s
    back_s, found_s = max(0.5, 2 * length_s), None
    changes = np.empty(0, PHASE_DTYPE)
    while found_s is None:
        changes = run.history.window(round((scene.since_s - back_s) * 1e9), round(end_s * 1e9))
        changes = changes[np.isin(changes["worker"], workers)]
        before = changes[
            (changes["generation"] < record.generation) & (changes["at_ns"] / 1e9 >= scene.since_s - back_s)
        ]
        if step is not None:
            forward = before[(before["step"] == step - 1) & (before["phase"] == PHASES.index(Phase.FORWARD))]
            if len(forward) == 0 and step == 0:
                forward = before[(before["step"] == 0) & (before["phase"] == PHASES.index(Phase.FORWARD))]
            found_s = float(forward["at_ns"].min()) / 1e9 if len(forward) else None
        if back_s >= LOOK_BACK_S or step is None:
            break
        back_s = min(4 * back_s, LOOK_BACK_S)
    if earlier is not None:
        found_s = max(earlier.since_s - 0.1 * length_s, scene.since_s - 3 * length_s)
    if found_s is None:
        found_s = scene.since_s - 0.06 * length_s
    # The clocks of nodes may disagree, so the failure may seem to be before the step that it interrupted.
    found_s = min(found_s, scene.since_s - 0.02 * length_s)
    return found_s - 0.01 * (end_s - found_s), changes


def _trimmed(scene: Scene, changes: PhaseArray, end_s: float) -> float:
    """Returns an earlier end of the picture if the first step ended before the controller learned of it."""
    record = scene.record
    new = changes[(changes["generation"] == record.generation) & (changes["step"] == record.resume_step)]
    forward = new[new["phase"] == PHASES.index(Phase.FORWARD)]["at_ns"]
    updated = new[new["phase"] == PHASES.index(Phase.UPDATED)]["at_ns"]
    if record.resumed_s is None or len(forward) == 0 or len(updated) == 0:
        return end_s
    done_s = float(updated.max()) / 1e9
    return min(end_s, done_s + 0.35 * (done_s - float(forward.min()) / 1e9))


def _phases_of(scene: Scene, rank: int, changes: PhaseArray, end_s: float) -> list[Stretch]:
    """Returns the phases of a rank's workers: of the one before the recovery and of the one after it."""
    record = scene.record
    found: list[Stretch] = []
    before = scene.places.get(rank, (None, ""))[0]
    before = scene.survivors.get(rank, before)
    after = scene.replacements.get(rank, (before, ""))[0]
    lost_s = min((at_s for failure, at_s in scene.failures() if failure.rank == rank), default=end_s)
    for worker in dict.fromkeys(worker for worker in (before, after) if worker is not None):
        own = changes[changes["worker"] == worker]
        until_s = lost_s if worker == before else end_s
        for stretch in phase_stretches(own, until_s):
            is_old = (stretch.generation or 0) < record.generation
            # A phase after the order to stop is discarded, except an update.
            if is_old and stretch.kind != "optimizer" and stretch.end_s > record.begun_s:
                stretch = dataclasses.replace(stretch, end_s=max(stretch.begin_s, record.begun_s))
            if worker == before and stretch.end_s == lost_s < end_s:
                stretch = _broken_off(scene, rank, stretch)
            if stretch.end_s > stretch.begin_s:
                found.append(stretch)
    return found


def _broken_off(scene: Scene, rank: int, stretch: Stretch) -> Stretch:
    """Returns the last phase of a lost rank. An interrupted update has no step, because the step does not count."""
    if any(failure.rank == rank and failure.cause == Cause.NODE for failure in scene.record.failures):
        return dataclasses.replace(stretch, kind="silent", hint=f"not heard of since the {stretch.hint}", step=None)
    return dataclasses.replace(stretch, step=None) if stretch.kind == "optimizer" else stretch


def _tell_steps(found: Board, scene: Scene, computed: Sequence[Stretch]) -> None:
    """Sets the times of the steps, of the recovery and of the gradient barriers."""
    record = scene.record
    begun: dict[tuple[int, int], float] = {}
    barriers: dict[tuple[int, int], float] = {}
    for stretch in computed:
        if stretch.step is None or stretch.generation is None:
            continue
        key = stretch.generation, stretch.step
        if stretch.kind == "forward":
            begun[key] = min(begun.get(key, stretch.begin_s), stretch.begin_s)
        if stretch.kind == "optimizer" and (key[0] >= record.generation or stretch.begin_s < scene.since_s):
            barriers[key] = min(barriers.get(key, stretch.begin_s), stretch.begin_s)
    order = sorted(begun, key=lambda key: begun[key])
    # The other ranks may continue for a while after a failure.
    went_on = any(key[0] < record.generation and found.zero_s < begun[key] < record.begun_s for key in order)
    since_s = record.begun_s if went_on else found.zero_s
    resumed = [begun[key] for key in order if key[0] >= record.generation and begun[key] > record.begun_s]
    found.recovery = (since_s, min([found.recovery[1], *resumed]) if resumed else found.recovery[1])
    for key, end_s in zip(order, [*(begun[following] for following in order[1:]), found.end_s], strict=False):
        if begun[key] < since_s < end_s:
            end_s = since_s
        again = key[0] >= record.generation and key[1] == record.resume_step and bool(record.steps_recomputed)
        if end_s > found.begin_s and begun[key] < found.end_s:
            found.steps.append((max(begun[key], found.begin_s), min(end_s, found.end_s), key[1], again))
    found.barriers = sorted(at_s for at_s in barriers.values() if found.begin_s < at_s < found.end_s)


def _states(found: Board, scene: Scene, computed_by: Mapping[int, Sequence[Stretch]]) -> States:
    """Returns the step of the parameters of some ranks over time, and when they were being updated."""
    record, states = scene.record, States()
    computed = [stretch for own in computed_by.values() for stretch in own]
    updates: dict[tuple[int, int], tuple[float, float]] = {}
    for s in computed:
        if s.kind == "optimizer" and s.step is not None and s.generation is not None and s.end_s > found.begin_s:
            begin_s, end_s = updates.get((s.step, s.generation), (s.begin_s, s.end_s))
            updates[s.step, s.generation] = min(begin_s, s.begin_s), max(end_s, s.end_s)
    changes: list[tuple[float, float, int]] = [(b, e, step + 1) for (step, _), (b, e) in updates.items()]
    rewinds = any(record.actions.get(rank) == Action.REWIND for rank in computed_by)
    if rewinds and record.restored_s is not None and record.resume_step is not None:
        changes.append((record.restored_s, record.restored_s, record.resume_step))
    changes.sort()
    seen = [(s.begin_s, s.step) for s in computed if s.kind == "forward" and s.step is not None]
    step = changes[0][2] - 1 if changes else min(seen)[1] if seen else record.resume_step
    if step is None:
        return states
    at_s = found.begin_s
    for begin_s, end_s, following in changes:
        begin_s, end_s = max(begin_s, at_s), min(end_s, found.end_s)
        if begin_s >= found.end_s or end_s < at_s:
            continue
        if begin_s > at_s:
            states.append((at_s, begin_s, step))
        if end_s > begin_s:
            states.append((begin_s, end_s, None))
        at_s, step = end_s, following
    if at_s < found.end_s:
        states.append((at_s, found.end_s, step))
    return states
