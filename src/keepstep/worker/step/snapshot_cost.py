"""Measures the cost of a snapshot per step in the first steps of a job.

Every second of these steps has a snapshot. The steps between show how long a step takes without one, and how much time
of the machine's cores the ranks leave idle.

The copy's processor time and the training thread's waits are measured directly. They are not the whole cost: a copy
also takes caches and memory bandwidth from the computation, and all ranks wait for the slowest one. The difference in
length between steps with and without a snapshot contains all of that, and noise as well. So both are measured, and the
greater one counts. The standard error of the two medians is subtracted from their difference first.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Sequence

from keepstep.procfs import cores_idle_s
from keepstep.protocol.snapshots import NUM_KEPT, fewest_steps

NUM_FIRST_TOUCHES = NUM_KEPT
"""Number of first snapshots of one size that are written to new memory."""


@dataclasses.dataclass(slots=True)
class _Taken:
    """Measurements of one snapshot."""

    prepared_s: float
    """Seconds that the training thread prepared it."""
    waited_s: float = 0.0
    """Seconds that the training thread waited for the copy before the gradient barrier."""
    processor_s: float = 0.0
    """Processor time of the copy, in seconds."""
    num_bytes: int = 0
    step_s: float | None = None
    """Length of its step, in seconds. None: unknown."""


class SnapshotCost:
    """Measures the cost of snapshots on one rank.

    While ranks leave cores idle, a snapshot costs the time in which the training thread prepares it and waits for it.
    Otherwise copies take processor time from all ranks. A rank assumes that the copies of all ranks of its node cost as
    much as its own.
    """

    def __init__(self, num_ranks: int, num_cores: int | None = None) -> None:
        """Args:
        num_ranks: number of ranks on this node.
        num_cores: number of cores that they share. None: all cores of the machine.
        """
        self._num_ranks = num_ranks
        self._num_cores = num_cores or os.cpu_count() or 1
        self._begun_s: float | None = None
        """When the current step was yielded. None: unknown."""
        self._idle_at_begin_s = 0.0
        self._steps_s: list[float] = []
        """Lengths of the steps without a snapshot."""
        self._idle_s = 0.0
        """Idle time of all cores together in these steps."""
        self._current: _Taken | None = None
        """The snapshot of the current step."""
        self._taken: list[_Taken] = []
        self._sending_s = 0.0

    def begin(self, now_s: float, idle_s: float) -> None:
        """Begins to measure a yielded step, and ends the measurement of the step before.

        Args:
            now_s: a monotonic time, in seconds.
            idle_s: how long the machine's cores have been idle until now, all added up, in seconds.
        """
        if self._begun_s is not None and self._current is not None:
            self._current.step_s = now_s - self._begun_s
        elif self._begun_s is not None and self._taken:
            self._steps_s.append(now_s - self._begun_s)
            self._idle_s += idle_s - self._idle_at_begin_s
        self._begun_s, self._idle_at_begin_s = now_s, idle_s
        self._current = None

    def interrupted(self) -> None:
        """Discards the measurement of the current step, which was interrupted."""
        self._begun_s = self._current = None

    def prepared(self, prepared_s: float) -> None:
        """Records that the copy for the current step has begun.

        Args:
            prepared_s: seconds that the training thread prepared it.
        """
        self._current = _Taken(prepared_s)

    def waited(self, waited_s: float, processor_s: float, num_bytes: int) -> None:
        """Records the end of the copy, after the forward and backward of the step.

        Args:
            waited_s: seconds that the training thread waited for the copy.
            processor_s: processor time of the copy, in seconds.
            num_bytes: size of the snapshot. It grows once, when optimizer state appears; earlier measurements are then
                discarded.
        """
        taken = self._current
        if taken is None:
            return
        taken.waited_s, taken.processor_s, taken.num_bytes = waited_s, processor_s, num_bytes
        if self._taken and num_bytes > self._taken[-1].num_bytes:
            self._taken, self._steps_s, self._idle_s = [], [], 0.0
        self._taken.append(taken)

    def sent(self, sending_s: float) -> None:
        """Records that a buddy has the step's copy.

        Args:
            sending_s: seconds that the transfer took. The next one cannot begin earlier.
        """
        self._sending_s = min(self._sending_s or sending_s, sending_s)

    def fewest_steps(self) -> int:
        """Returns the minimum number of steps between two snapshots; 1 if nothing was measured."""
        if not self._taken or not self._steps_s:
            return 1
        step_s = statistics.median(self._steps_s)
        idle_s = self._idle_s / len(self._steps_s)
        taken = self._taken[min(NUM_FIRST_TOUCHES, len(self._taken) - 1) :]
        known_s = statistics.median(self._cost_s(each, idle_s) for each in taken)
        longer_s = _difference([each.step_s for each in taken if each.step_s is not None], self._steps_s)
        return max(fewest_steps(max(known_s, longer_s), step_s), math.ceil(self._sending_s / step_s))

    def _cost_s(self, taken: _Taken, idle_s: float) -> float:
        """Returns the cost of a snapshot, in seconds.

        Args:
            taken: measurements of the snapshot.
            idle_s: idle time of the cores in a step without a snapshot, in seconds.
        """
        from_ranks_s = max(0.0, self._num_ranks * taken.processor_s - idle_s) / self._num_cores
        return taken.prepared_s + max(taken.waited_s, from_ranks_s)


def _difference(these: Sequence[float], others: Sequence[float]) -> float:
    """Returns by how much the median of ``these`` exceeds that of ``others``, less the standard error.

    The standard error of the median of n normal values is about 1.25 s / sqrt(n), and s about 1.48 times their median
    deviation from it (Rousseeuw and Croux, Alternatives to the median absolute deviation, JASA 1993). Returns 0 for
    fewer than three values.
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
    """Returns a monotonic time, and how long all cores have been idle, added up; both in seconds."""
    return time.monotonic(), cores_idle_s()
