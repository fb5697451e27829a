"""By how much a snapshot makes a step longer, measured in the first steps of a job.

Every second of these steps has a snapshot. The steps between show how long a step takes without one, and what the ranks
leave of the machine's cores. The lengths of the steps with and without are not subtracted: a snapshot costs some
percent of a step, and lengths of single steps differ by more on most machines.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time

import psutil

from keepstep.protocol.snapshots import fewest_steps


@dataclasses.dataclass(slots=True)
class _Taken:
    """What one snapshot took."""

    prepared_s: float
    """How long the training thread prepared it."""
    waited_s: float = 0.0
    """How long the training thread waited for the copy in front of the gradient barrier."""
    processor_s: float = 0.0
    """How much time of a core the copy took."""
    num_bytes: int = 0


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
        """When the present step was handed out. None: it is not known."""
        self._idle_at_begin_s = 0.0
        self._steps_s: list[float] = []
        """Lengths of the steps without a snapshot."""
        self._idle_s = 0.0
        """What all cores together were idle in these."""
        self._current: _Taken | None = None
        """The snapshot of the present step."""
        self._taken: list[_Taken] = []
        self._sending_s = 0.0

    def begin(self, now_s: float, idle_s: float) -> None:
        """A step is handed out, so the one before is over.

        Args:
            now_s: a monotonic time.
            idle_s: how long the machine's cores have been idle until now, all added up.
        """
        if self._begun_s is not None and self._current is None and self._taken:
            self._steps_s.append(now_s - self._begun_s)
            self._idle_s += idle_s - self._idle_at_begin_s
        self._begun_s, self._idle_at_begin_s = now_s, idle_s
        self._current = None

    def interrupted(self) -> None:
        """The present step is broken: how long it takes says nothing."""
        self._begun_s = self._current = None

    def prepared(self, prepared_s: float) -> None:
        """The copy for the present step has begun; the training thread has prepared it for so long."""
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
        cost_s = statistics.median(self._cost_s(taken, idle_s) for taken in self._taken)
        return max(fewest_steps(cost_s, step_s), math.ceil(self._sending_s / step_s))

    def _cost_s(self, taken: _Taken, idle_s: float) -> float:
        """Args:
        taken: one snapshot.
        idle_s: what the cores are idle in a step without one.
        """
        from_ranks_s = max(0.0, self._num_ranks * taken.processor_s - idle_s) / self._num_cores
        return taken.prepared_s + max(taken.waited_s, from_ranks_s)


def now() -> tuple[float, float]:
    """A monotonic time, and how long all cores have been idle, added up; both in seconds."""
    return time.monotonic(), psutil.cpu_times().idle
