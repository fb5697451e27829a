"""Measures the cost of a snapshot per step in the first steps of a job.

Every second of these steps has a snapshot. The steps between show how long a step takes without one, and what the ranks
leave of the machine's cores.

What a copy takes of cores and of the training thread is known well, and is not all that it costs: it takes caches and
the memory's bandwidth from what computes, and all ranks wait for the slowest one. The lengths of steps with and without
a snapshot have all of that in them, and whatever else makes steps differ. So both are measured, and the greater one
counts: of the lengths' difference what is left when the standard error of the two medians is taken off.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence

import psutil

from keepstep.protocol.snapshots import NUM_KEPT, fewest_steps

NUM_FIRST_TOUCHES = NUM_KEPT
"""So many snapshots of one size are written to memory that is new."""


@dataclasses.dataclass(slots=True)
class _Taken:
    """What one snapshot took."""

    prepared_s: float
    """How long the training thread prepared it."""
    waited_s: float = 0.0
    """How long the training thread waited for the copy before the gradient barrier."""
    processor_s: float = 0.0
    """How much time of a core the copy took."""
    num_bytes: int = 0
    step_s: float | None = None
    """How long its step took. None: it is not known."""


class SnapshotCost:
    """What one rank measures.

    While ranks leave cores idle a snapshot costs the time in which the training thread prepares it and waits for it.
    Where they do not, copies take time of cores from all ranks. A rank assumes that the copies of all ranks of its node
    cost as much as its own.
    """

    def __init__(self, num_ranks: int, num_cores: int | None = None) -> None:
        """Args:
        num_ranks: of this node.
        num_cores: of this node, which they share. None: all that the machine has.
        """
        self._num_ranks = num_ranks
        self._num_cores = num_cores or psutil.cpu_count() or 1
        self._begun_s: float | None = None
        """When the current step was handed out. None: it is not known."""
        self._idle_at_begin_s = 0.0
        self._steps_s: list[float] = []
        """Lengths of the steps without a snapshot."""
        self._idle_s = 0.0
        """What all cores together were idle in these."""
        self._current: _Taken | None = None
        """The snapshot of the current step."""
        self._taken: list[_Taken] = []
        self._sending_s = 0.0

    def begin(self, now_s: float, idle_s: float) -> None:
        """A step is handed out, so the one before is over.

        Args:
            now_s: a monotonic time.
            idle_s: how long the machine's cores have been idle until now, all added up.
        """
        if self._begun_s is not None and self._current is not None:
            self._current.step_s = now_s - self._begun_s
        elif self._begun_s is not None and self._taken:
            self._steps_s.append(now_s - self._begun_s)
            self._idle_s += idle_s - self._idle_at_begin_s
        self._begun_s, self._idle_at_begin_s = now_s, idle_s
        self._current = None

    def interrupted(self) -> None:
        """The present step is broken: how long it takes says nothing."""
        self._begun_s = self._current = None

    def prepared(self, prepared_s: float) -> None:
        """The copy for the current step has begun; the training thread has prepared it for so long."""
        self._current = _Taken(prepared_s)

    def waited(self, waited_s: float, processor_s: float, num_bytes: int) -> None:
        """The forward and backward of the step are through, and its copy is.

        Args:
            waited_s: how long they had to wait for the copy.
            processor_s: what the copy took of a core.
            num_bytes: its size. It grows once, when there is optimizer state; what was measured before tells nothing.
        """
        taken = self._current
        if taken is None:
            return
        taken.waited_s, taken.processor_s, taken.num_bytes = waited_s, processor_s, num_bytes
        if self._taken and num_bytes > self._taken[-1].num_bytes:
            self._taken, self._steps_s, self._idle_s = [], [], 0.0
        self._taken.append(taken)

    def sent(self, sending_s: float) -> None:
        """A buddy has the step's copy.

        Args:
            sending_s: how long that took. The next one cannot be on its way before.
        """
        self._sending_s = min(self._sending_s or sending_s, sending_s)

    def fewest_steps(self) -> int:
        """How many steps must lie between two snapshots; 1 where nothing was measured."""
        if not self._taken or not self._steps_s:
            return 1
        step_s = statistics.median(self._steps_s)
        idle_s = self._idle_s / len(self._steps_s)
        taken = self._taken[min(NUM_FIRST_TOUCHES, len(self._taken) - 1) :]
        known_s = statistics.median(self._cost_s(each, idle_s) for each in taken)
        longer_s = _difference([each.step_s for each in taken if each.step_s is not None], self._steps_s)
        return max(fewest_steps(max(known_s, longer_s), step_s), math.ceil(self._sending_s / step_s))

    def _cost_s(self, taken: _Taken, idle_s: float) -> float:
        """Args:
        taken: one snapshot.
        idle_s: what the cores are idle in a step without one.
        """
        from_ranks_s = max(0.0, self._num_ranks * taken.processor_s - idle_s) / self._num_cores
        return taken.prepared_s + max(taken.waited_s, from_ranks_s)


def _difference(these: Sequence[float], others: Sequence[float]) -> float:
    """By how much the median of some lengths is surely above that of others: less its standard error.

    That of a median of n normal values is about 1.25 s / sqrt(n), and s about 1.48 times their median deviation from
    it (Rousseeuw and Croux, Alternatives to the median absolute deviation, JASA 1993). 0 for less than three.
    """
    if min(len(these), len(others)) < 3:
        return 0.0
    medians = [statistics.median(each) for each in (these, others)]
    variance = 0.0
    for lengths, median in zip((these, others), medians, strict=True):
        deviation = 1.4826 * statistics.median(abs(each - median) for each in lengths)
        variance += math.pi / 2 * deviation**2 / len(lengths)
    return max(0.0, medians[0] - medians[1] - math.sqrt(variance))


def now() -> tuple[float, float]:
    """A monotonic time, and how long all cores have been idle, added up; both in seconds."""
    return time.monotonic(), psutil.cpu_times().idle
