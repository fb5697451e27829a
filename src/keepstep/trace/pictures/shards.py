"""Shards and snapshots in the picture of a recovery."""

from __future__ import annotations

import dataclasses

from keepstep.shared.tagpage import MOMENT_INDEX, SnapshotMoment
from keepstep.trace.record.phaselog import PhaseArray
from keepstep.trace.timeline.run import Run
from keepstep.trace.timeline.scene import Scene

_BEGUN, _COMPLETE = MOMENT_INDEX[SnapshotMoment.BEGUN], MOMENT_INDEX[SnapshotMoment.COMPLETE]
_LOADED = MOMENT_INDEX[SnapshotMoment.LOADED]

LOOK_BACK_S = 600.0
"""How long ago a snapshot may have been taken that is drawn as the one that was loaded."""

States = list[tuple[float, float, int | None]]
"""(begin, end, the step at which the parameters of all that live are; None while they are being updated)."""


@dataclasses.dataclass(slots=True)
class ShardBand:
    """A shard, whose ranks' lanes follow each other."""

    number: int
    num_ranks: int
    """Of those that are drawn."""
    states: States
    gone: tuple[float, float] | None
    """From the loss of the last rank that held it until the state was there again."""
    origin: str
    """Where the state came from."""


@dataclasses.dataclass(frozen=True, slots=True)
class DrawnSnapshot:
    """One snapshot of a rank. Seconds on the controller's clock; ``end_s`` is None where it was not completed."""

    step: int
    begin_s: float
    end_s: float | None
    loaded_s: float | None
    """When the recovery loaded it."""


def moments_before(run: Run, begin_s: float, end_s: float) -> PhaseArray:
    """What became of snapshots in a stretch of time, and in `LOOK_BACK_S` before it."""
    return run.history.moments(round((begin_s - LOOK_BACK_S) * 1e9), round(end_s * 1e9))


def snapshots_of(moments: PhaseArray, rank: int, begin_s: float) -> list[DrawnSnapshot]:
    """The snapshots of a rank from some time on, and the one that was loaded then, whenever it was taken."""
    own = moments[moments["rank"] == rank]
    found = []
    loads = own[(own["phase"] == _LOADED) & (own["at_ns"] >= begin_s * 1e9)]
    for at, each in enumerate(own):
        if each["phase"] != _BEGUN:
            continue
        after = own[at + 1 :]
        complete = _first(after[: _num_until_next(after)], _COMPLETE, int(each["step"]))
        loaded = _first(loads[loads["at_ns"] > each["at_ns"]], _LOADED, int(each["step"])) if complete else None
        is_seen = (complete or float(each["at_ns"]) / 1e9) >= begin_s
        if is_seen or loaded is not None:
            found.append(DrawnSnapshot(int(each["step"]), float(each["at_ns"]) / 1e9, complete, loaded))
    newest = max((each.begin_s for each in found if each.loaded_s is not None), default=None)
    return [each if each.begin_s == newest else dataclasses.replace(each, loaded_s=None) for each in found]


def _num_until_next(after: PhaseArray) -> int:
    """How many moments lie before the next snapshot begins."""
    return next((at for at, each in enumerate(after) if each["phase"] == _BEGUN), len(after))


def _first(moments: PhaseArray, kind: int, step: int) -> float | None:
    found = moments[(moments["phase"] == kind) & (moments["step"] == step)]
    return float(found["at_ns"][0]) / 1e9 if len(found) else None


def gone_of(scene: Scene, ranks: list[int], end_s: float) -> tuple[float, float] | None:
    """The time in which no live rank held what these ranks hold; None if there was none."""
    lost_s = {failure.rank: at_s for failure, at_s in scene.failures() if failure.rank in ranks}
    if len(lost_s) < len(ranks):
        return None
    back_s = [at_s for rank, at_s in scene.restored_s.items() if rank in ranks]
    return max(lost_s.values()), min([*back_s, scene.record.restored_s or end_s, end_s])
