"""Durations of phases, speed, completed steps and snapshots, updated with each record."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from keepstep.protocol.phases import Phase
from keepstep.shared.tagpage import MOMENT_INDEX, PHASE_INDEX, SnapshotMoment
from keepstep.trace.record.phaselog import NO_RANK, PHASE_DTYPE, PhaseArray

_FORWARD, _BACKWARD, _SYNCED = PHASE_INDEX[Phase.FORWARD], PHASE_INDEX[Phase.BACKWARD], PHASE_INDEX[Phase.SYNCED]
_OPTIMIZER, _UPDATED = PHASE_INDEX[Phase.OPTIMIZER], PHASE_INDEX[Phase.UPDATED]
RATE_NS = 10_000_000_000
"""Time window of `Pace.steps_per_s`."""
MAX_BUCKETS = 4096
"""Maximum number of buckets in the overview. When it is reached, each bucket becomes twice as long."""

DURATION_DTYPE = np.dtype(
    [
        ("end_ns", "<i8"),
        ("whole_ns", "<i8"),
        ("own_ns", "<i8"),  # without the wait for peers at the end of a backward
        ("step", "<i8"),
        ("rank", "<i4"),
        ("worker", "<i4"),
        ("phase", "<i4"),
    ]
)
DurationArray = NDArray[np.void]


class SnapshotPace:
    """The newest valid snapshot of each rank, and the interval between snapshots."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        """rank -> step of its newest complete snapshot."""
        self.num_bytes: dict[int, int] = {}
        """rank -> size of that snapshot."""
        self.every: int | None = None
        """Steps between the newest two snapshots of a rank; None while no rank has taken two."""
        self.num_taken = 0
        """Number of snapshots of all ranks."""
        self.num_refused = 0
        """Number of second copies for which a buddy's node had no memory."""
        self.undoubled: set[int] = set()
        """Ranks whose newest second copy was refused."""

    def take(self, moments: PhaseArray) -> None:
        """Processes new moments."""
        self._take_second_copies(moments[moments["rank"] != NO_RANK])
        complete, loaded = MOMENT_INDEX[SnapshotMoment.COMPLETE], MOMENT_INDEX[SnapshotMoment.LOADED]
        ranked = moments[(moments["rank"] != NO_RANK) & np.isin(moments["phase"], (complete, loaded))]
        ranked = ranked[np.argsort(ranked["at_ns"], kind="stable")]
        columns = (ranked[name].tolist() for name in ("rank", "step", "entered_ns", "phase"))
        for rank, step, num_bytes, kind in zip(*columns, strict=True):
            if kind == complete:
                self.num_taken += 1
                if step > self.steps.get(rank, step):
                    self.every = step - self.steps[rank]
            self.steps[rank], self.num_bytes[rank] = step, num_bytes  # after a load, newer ones are void

    def _take_second_copies(self, moments: PhaseArray) -> None:
        refused, doubled = MOMENT_INDEX[SnapshotMoment.REFUSED], MOMENT_INDEX[SnapshotMoment.DOUBLED]
        told = moments[np.isin(moments["phase"], (refused, doubled))]
        told = told[np.argsort(told["at_ns"], kind="stable")]
        for rank, kind in zip(told["rank"].tolist(), told["phase"].tolist(), strict=True):
            if kind == refused:
                self.num_refused += 1
                self.undoubled.add(rank)
            else:
                self.undoubled.discard(rank)

    def newest(self, world_size: int) -> int | None:
        """Returns the newest step for which every rank has a snapshot; None if there is none."""
        return min(self.steps.values()) if len(self.steps) == world_size else None


class Durations:
    """Computes durations from phase changes. A phase lasts until its worker's next change in the same generation."""

    def __init__(self) -> None:
        self._last = np.empty(0, PHASE_DTYPE)
        """The last change of each worker."""

    def take(self, changes: PhaseArray) -> DurationArray:
        """Processes new changes. Returns the durations of the phases that they end, except interrupted ones."""
        together = np.concatenate([self._last, changes])
        together = together[np.lexsort((together["at_ns"], together["worker"]))]
        begun, ended = together[:-1], together[1:]
        same = (begun["worker"] == ended["worker"]) & (begun["generation"] == ended["generation"])
        undone = (ended["phase"] == _UPDATED) & (begun["phase"] != _OPTIMIZER)
        whole = same & ~undone & (begun["rank"] != NO_RANK) & (begun["step"] >= 0)
        ends = np.ones(len(together), bool)
        ends[:-1] = begun["worker"] != ended["worker"]
        self._last = together[ends]
        return _durations(begun[whole], ended[whole])


def _durations(begun: PhaseArray, ended: PhaseArray) -> DurationArray:
    found = np.empty(len(begun), DURATION_DTYPE)
    whole_ns = ended["at_ns"] - begun["at_ns"]
    until_ns = ended["entered_ns"] - begun["at_ns"]
    waits = (begun["phase"] == _BACKWARD) & (until_ns > 0) & (until_ns < whole_ns)
    found["end_ns"], found["whole_ns"] = ended["at_ns"], whole_ns
    found["own_ns"] = np.where(waits, until_ns, whole_ns)
    for name in ("step", "worker", "phase"):
        found[name] = begun[name]
    found["rank"] = ended["rank"]
    return found


@dataclasses.dataclass(slots=True)
class Pace:
    """The steps of the job. A step is completed when the first rank has completed it, because then every rank will."""

    step: int = 0
    """Number of completed steps."""
    begun_ns: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    """(generation, step) -> when the first rank began it, for recent steps."""
    first_forward_ns: int | None = None
    """When training began."""
    bucket_ns: int = 1_000_000_000
    buckets: list[int] = dataclasses.field(default_factory=list)
    """Number of steps completed in each interval of ``bucket_ns`` since the start."""
    _completed: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Recent (time, step) pairs."""

    def take(self, changes: PhaseArray, started_ns: int) -> None:
        """Processes new phase changes.

        Args:
            changes: the changes, of any ranks.
            started_ns: start of the run.
        """
        ranked = changes[changes["rank"] != NO_RANK]
        self._note_begun(ranked[ranked["phase"] == _FORWARD])
        done = ranked[(ranked["phase"] == _UPDATED) & (ranked["step"] >= self.step)]
        # A step that is undone ends in the phase `updated` of the step before it, which was completed already.
        order = np.lexsort((done["at_ns"], done["step"]))
        for step, at_ns in zip(done["step"][order].tolist(), done["at_ns"][order].tolist(), strict=True):
            if step >= self.step:
                self._count(at_ns - started_ns, step + 1 - self.step if self._completed else 1)
                self.step = step + 1
                self._completed.append((at_ns, self.step))

    def _note_begun(self, forward: PhaseArray) -> None:
        order = np.argsort(forward["at_ns"], kind="stable")
        keys = zip(forward["generation"][order].tolist(), forward["step"][order].tolist(), strict=True)
        for key, at_ns in zip(keys, forward["at_ns"][order].tolist(), strict=True):
            if key not in self.begun_ns:
                self.begun_ns[key] = at_ns
                if self.first_forward_ns is None:
                    self.first_forward_ns = at_ns
                if len(self.begun_ns) > 1024:
                    del self.begun_ns[next(iter(self.begun_ns))]

    def _count(self, since_start_ns: int, num_steps: int) -> None:
        bucket = max(0, since_start_ns) // self.bucket_ns
        while bucket >= MAX_BUCKETS:
            self.buckets = [sum(self.buckets[at : at + 2]) for at in range(0, len(self.buckets), 2)]
            self.bucket_ns *= 2
            bucket //= 2
        self.buckets += [0] * (bucket + 1 - len(self.buckets))
        self.buckets[bucket] += num_steps

    def steps_per_s(self, now_ns: int) -> float | None:
        """Returns the recent number of completed steps per second; None if there were too few."""
        while len(self._completed) > 2 and self._completed[0][0] < now_ns - RATE_NS:
            self._completed.pop(0)
        if len(self._completed) < 2:
            return None
        (begin_ns, first), (_, last) = self._completed[0], self._completed[-1]
        end_ns = max(self._completed[-1][0], now_ns - RATE_NS)
        return (last - first) / ((end_ns - begin_ns) / 1e9) if end_ns > begin_ns else None
