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
"""How long before the start of the picture a loaded snapshot may have been taken to be drawn."""

States = list[tuple[float, float, int | None]]
"""(begin, end, step of the parameters on all live ranks; None while they are being updated)."""


@dataclasses.dataclass(slots=True)
class ShardBand:
    """A shard in the picture. The lanes of its ranks are consecutive."""

    number: int
    num_ranks: int
    """Number of its ranks in the picture."""
    states: States
    gone: tuple[float, float] | None
    """From the loss of the last rank with this shard until a rank had restored it; None if a rank always held it."""
    origin: str
    """The source of the restored state."""


@dataclasses.dataclass(frozen=True, slots=True)
class DrawnSnapshot:
    """One snapshot of a rank. Times are seconds on the job's clock. ``end_s`` is None if it was not completed."""

    step: int
    begin_s: float
    end_s: float | None
    loaded_s: float | None
    """When the recovery loaded it; None if it did not."""


def moments_before(run: Run, begin_s: float, end_s: float) -> PhaseArray:
    """Returns the moments of snapshots in a time window and in `LOOK_BACK_S` before it."""
    return run.history.moments(round((begin_s - LOOK_BACK_S) * 1e9), round(end_s * 1e9))


def snapshots_of(moments: PhaseArray, rank: int, begin_s: float) -> list[DrawnSnapshot]:
    """Returns the snapshots of a rank from ``begin_s`` on, and the one that was loaded, even if it is older."""
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
    """Returns the number of moments before the next snapshot begins."""
    return next((at for at, each in enumerate(after) if each["phase"] == _BEGUN), len(after))


def _first(moments: PhaseArray, kind: int, step: int) -> float | None:
    found = moments[(moments["phase"] == kind) & (moments["step"] == step)]
    return float(found["at_ns"][0]) / 1e9 if len(found) else None


def gone_of(scene: Scene, ranks: list[int], end_s: float) -> tuple[float, float] | None:
    """Returns the time in which none of these ranks of a shard had its state; None if a rank always did."""
    lost_s = {failure.rank: at_s for failure, at_s in scene.failures() if failure.rank in ranks}
    if len(lost_s) < len(ranks):
        return None
    back_s = [at_s for rank, at_s in scene.restored_s.items() if rank in ranks]
    return max(lost_s.values()), min([*back_s, scene.record.restored_s or end_s, end_s])
