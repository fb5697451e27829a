"""The share of the time in which a cluster trains, simulated failure by failure instead of computed."""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
import statistics
from collections import defaultdict

from benchmarks.studies.downtime import Parameters

WARM_UP = 0.2
"""Length of the part of a history that does not count, relative to the rest. At first all spares are available."""


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """The result of simulated histories."""

    ratio: float
    standard_error: float
    num_failures: int
    num_fallbacks: int
    num_shard_losses: int


class _History:
    """One cluster over time, failure by failure."""

    def __init__(self, parameters: Parameters, num_steps: int, rng: random.Random) -> None:
        self._parameters = parameters
        self._num_steps = num_steps  # from one checkpoint to the next
        self._rng = rng
        self._spares = [0.0] * parameters.num_spares  # a heap: when each can take a rank
        self._now_s = self._resumes_s = 0.0
        self._falling_back = False
        self._struck: defaultdict[int, set[int]] = defaultdict(set)  # shard → devices, during one recovery
        self._committed_s = 0.0  # work that is in a checkpoint
        self._steps_done = 0  # since the last checkpoint
        self.num_failures = self.num_fallbacks = self.num_shard_losses = 0

    def live(self, until_s: float) -> float:
        """Simulates up to a later time. Returns how much work since the last call was kept."""
        before_s = self._kept()
        failure_s = self._now_s + self._rng.expovariate(self._parameters.failures_per_s)
        while failure_s < until_s:
            self._fail(failure_s)
            failure_s += self._rng.expovariate(self._parameters.failures_per_s)
        if self._resumes_s < until_s:
            self._train(until_s - self._resumes_s)
            self._resumes_s = until_s
        self._now_s = until_s
        return self._kept() - before_s

    def _kept(self) -> float:
        return self._committed_s + self._steps_done * self._parameters.step_s

    def _train(self, span_s: float) -> None:
        step_s = self._parameters.step_s
        cycle_s = self._num_steps * step_s + self._parameters.checkpoint_s
        cycles, rest_s = divmod(self._steps_done * step_s + span_s, cycle_s)
        self._committed_s += cycles * self._num_steps * step_s
        self._steps_done = min(int(rest_s / step_s), self._num_steps)

    def _fail(self, now_s: float) -> None:
        self.num_failures += 1
        if now_s >= self._resumes_s:
            self._train(now_s - self._resumes_s)
            self._struck.clear()
            self._falling_back = False
        shard_lost = self._strike(self._rng.randrange(self._parameters.num_devices))
        if self._rng.random() < self._parameters.fallback_share or shard_lost:
            self.num_fallbacks += 1
            self._falling_back = True
            self._steps_done = 0
        spare_s = max(now_s, self._spares[0])
        heapq.heapreplace(self._spares, spare_s + self._rng.expovariate(1 / self._parameters.spare_return_s))
        self._resumes_s = spare_s + (self._parameters.restart_s if self._falling_back else self._parameters.recovery_s)

    def _strike(self, device: int) -> bool:
        """Records the loss of a device. Returns whether it was the last replica of some part of the state."""
        num_shards = self._parameters.num_devices // self._parameters.num_replicas
        struck = self._struck[device % num_shards]
        struck.add(device)
        lost = len(struck) >= self._parameters.num_replicas and not self._falling_back
        self.num_shard_losses += lost
        return lost


def simulate(
    parameters: Parameters, interval_s: float, seed: int, num_histories: int = 32, num_failures: int = 1000
) -> Estimate:
    """Simulates histories failure by failure. Each lasts as long as `num_failures` take on average.

    A failure during a recovery, a restart or a wait for a spare restarts the recovery or restart.

    Args:
        parameters: the job.
        interval_s: work between two checkpoints, rounded to whole steps.
        seed: the seed of all random numbers.
        num_histories: number of independent histories, at least 2. The standard error is that of their mean.
        num_failures: expected number of failures in each.
    """
    rng = random.Random(seed)
    until_s = num_failures / parameters.failures_per_s
    begin_s = WARM_UP * until_s
    num_steps = max(1, round(interval_s / parameters.step_s))
    histories = [_History(parameters, num_steps, rng) for _ in range(num_histories)]
    for history in histories:
        history.live(begin_s)
    ratios = [history.live(begin_s + until_s) / until_s for history in histories]
    return Estimate(
        statistics.fmean(ratios),
        statistics.stdev(ratios) / math.sqrt(num_histories),
        sum(history.num_failures for history in histories),
        sum(history.num_fallbacks for history in histories),
        sum(history.num_shard_losses for history in histories),
    )
