"""The share of the time in which a cluster trains, by formula: with keepstep, and with checkpoint-restart.

Failures happen at random, at a rate λ that grows with the number of devices. Each has one of two consequences:

* A *recovery* of R seconds. Completed steps remain; the interrupted step is recomputed.
* A *fallback*: everything restarts within s0 seconds, from a checkpoint that is written every t seconds of work at a
  cost of k0 seconds. All work since that checkpoint is recomputed.

With checkpoint-restart every failure is a fallback. With keepstep only a failure that no replica survives is one.
So one formula (`effective_ratio`) serves both, and so does one simulated history (`history.simulate`). A test compares
formula and history.

The model leaves out failures of several devices at once (a rack, a power line), the time until a failure is detected
(it belongs to R and s0), and the cost of spares. All failures are independent.

Sources, by the names used below:

* Young 1974, "A first order approximation to the optimum checkpoint interval".
* Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps".
* Llama 3: "The Llama 3 Herd of Models", 2024.
* Meta RSC: "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025.
* FT-HSDP: "Training LLMs with Fault Tolerant HSDP on 100,000 GPUs", 2026.
* ByteCheckpoint: "ByteCheckpoint: A Unified Checkpointing System for Large Foundation Model Development", 2024.
"""

from __future__ import annotations

import dataclasses
import math

from keepstep.errors import ConfigurationError

DAY_S = 86_400.0


# ---- Inputs ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class PublishedRate:
    """A published rate of interruptions."""

    name: str
    num_devices: int
    failures_per_device_s: float


LLAMA_3 = PublishedRate("Llama 3 405B", 16_384, 419 / (54 * DAY_S * 16_384))
"""419 unexpected interruptions in 54 days on 16,384 GPUs (Llama 3): one in 3.1 hours."""

META_RSC_1 = PublishedRate("Meta RSC-1", 16_384, 6.50 / 1000 / DAY_S / 8)
"""6.50 failures per 1,000 node-days, 8 GPUs a node, about 16 k GPUs (Meta RSC)."""

META_RSC_2 = PublishedRate("Meta RSC-2", 8_192, 2.34 / 1000 / DAY_S / 8)
"""2.34 failures per 1,000 node-days, 8 GPUs a node, about 8 k GPUs (Meta RSC)."""

META_100K = PublishedRate("Meta, about 100 k", 100_000, 1 / (18 * 60 * 100_000))
"""One failure in 18 minutes on about 100,000 GPUs: a rounded figure, second hand. It fits FT-HSDP, where a stall of 10
minutes per failure leaves 44 % of the time: (18 - 10)/18."""

PUBLISHED = (LLAMA_3, META_RSC_1, META_RSC_2, META_100K)

MEASURED_RECOVERY_S = 0.107
"""Median of 20 recoveries with a warm spare, without the recomputed step
(benchmarks/results/2026-11-20-recovery.md). Measured with 3 ranks on the CPU of one machine and 10 M parameters, so it
is a lower bound: 58 ms of it move 120 MB of state, and a large model has hundreds of times that on each device."""

LONG_RESTART_S, SHORT_RESTART_S = 600.0, 180.0
"""Stall per failure near 100,000 GPUs: 10 minutes if all restart, 3 minutes with FT-HSDP, which drops a replica
instead. So 3 minutes favours a plain restart of a large job. With a few dozen GPUs and a small model a restart takes
less than either (5 s in the benchmark above). There the result depends on the best interval, not on s0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Parameters:
    """One job on one cluster. Each default says whether it is published, measured by this project, or assumed.

    Raises:
        ConfigurationError: a value has no meaning.
    """

    num_devices: int = 16_384
    """As for Llama 3."""
    failures_per_device_s: float = LLAMA_3.failures_per_device_s
    """Published. The second lowest of `PUBLISHED`."""
    step_s: float = 6.0
    """Derived: Llama 3 405B at 16 M tokens per step, 400 TFLOP/s per GPU, 6 FLOP per parameter and token.
    Assumed: it is the same at every size, because the model grows with the cluster."""
    checkpoint_s: float = 30.0
    """k0. Assumed: training stops for half a minute. ByteCheckpoint reports stalls of minutes for plain saving; saving
    in the background blocks for less, at some cost to the steps."""
    restart_s: float = SHORT_RESTART_S
    """s0. Published, see `SHORT_RESTART_S`."""
    recovery_s: float = 10.0
    """R. Assumed, a hundred times `MEASURED_RECOVERY_S`. Moving the state is a part that can be estimated: 405 B
    parameters at 16 bytes on 128 devices are 50 GB each, 1 s at 400 Gbit/s."""
    fallback_share: float = 6 / 419
    """Share of failures that need a checkpoint. Published: 6 of the 419 of Llama 3 were silent data corruption, which
    the sum of gradients carries to every replica. Assumed: no other failure needs one; the last checkpoint is clean."""
    num_replicas: int = 2
    """Number of devices that hold the same part of the state. Assumed: the least number that works. With DDP every rank
    holds the whole state."""
    num_spares: int = 22
    """The result of `spares_needed` for the other defaults."""
    spare_return_s: float = DAY_S
    """Mean time until another spare replaces a lost device. Assumed: one day of repair."""

    def __post_init__(self) -> None:
        """Checks the values."""
        for name in ("num_devices", "failures_per_device_s", "step_s", "num_spares", "spare_return_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("checkpoint_s", "restart_s", "recovery_s"):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(f"{name} must not be negative, not {getattr(self, name)}")
        if not 1e-12 <= self.fallback_share <= 1:  # with 0 there would be no best interval
            raise ConfigurationError(f"fallback_share must lie in 1e-12 ... 1, not {self.fallback_share}")
        if not 1 <= self.num_replicas <= self.num_devices:
            raise ConfigurationError(f"num_replicas must lie in 1 ... {self.num_devices}, not {self.num_replicas}")

    @property
    def failures_per_s(self) -> float:
        """λ: failures of the whole cluster."""
        return self.failures_per_device_s * self.num_devices


def checkpoint_restart(parameters: Parameters) -> Parameters:
    """Returns the same job without keepstep: every failure falls back to the checkpoint."""
    return dataclasses.replace(parameters, fallback_share=1.0)


def of_size(parameters: Parameters, num_devices: int) -> Parameters:
    """Returns the same job on a cluster of another size, with as many spares as it needs."""
    sized = dataclasses.replace(parameters, num_devices=num_devices)
    return dataclasses.replace(sized, num_spares=spares_needed(sized))


# ---- The formulas ---------------------------------------------------------------------------------------------------


def first_order_loss_s(parameters: Parameters, interval_s: float, window_s: float = DAY_S) -> float:
    """Returns F(t) = m·(s0 + t/2) + (d/t)·k0: the time that checkpoint-restart loses in a window d with m failures.

    Accurate while failures are rare (Young 1974): a failure costs the restart and on average half an interval. The
    result may exceed the window, because the formula ignores failures during a restart.
    """
    num_failures = parameters.failures_per_s * window_s
    return num_failures * (parameters.restart_s + interval_s / 2) + window_s / interval_s * parameters.checkpoint_s


def young_interval_s(parameters: Parameters) -> float:
    """Returns t* = √(2·d·k0/m), the minimum of F(t) (Young 1974)."""
    return math.sqrt(2 * parameters.checkpoint_s / parameters.failures_per_s)


def daly_interval_s(parameters: Parameters) -> float:
    """Returns the best interval by Daly's series (Daly 2006).

    With M = 1/λ, Young's √(2·k0·M) is its first term. In Daly's model failures also happen during a checkpoint or a
    restart, so the interval is a little shorter: the two differ by about 2/3 of k0. For k0 ≥ 2·M the series does not
    apply, and the interval is M.
    """
    apart_s, ratio = 1 / parameters.failures_per_s, parameters.checkpoint_s * parameters.failures_per_s / 2
    if ratio >= 1:
        return apart_s
    return young_interval_s(parameters) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - parameters.checkpoint_s


def shard_loss_share(parameters: Parameters) -> float:
    """Returns an upper bound for the share of failures with which some part of the state loses its last replica.

    The other r - 1 replicas must have failed during the same recovery. Another failure extends it with probability
    p = 1 - exp(-λR), so j failures came before this one with probability (1 - p)·pʲ, and r - 1 of them can be matched
    to the replicas in j!/(j - r + 1)! ways, each with probability 1/Nʳ⁻¹. The sum over j is
    (r - 1)!·((exp(λR) - 1)/N)ʳ⁻¹. It is a bound because it adds the probabilities of ways that may happen together. It
    assumes that devices fail independently, which is not true of devices on one node or one power line, and that a
    spare is available.
    """
    per_device = math.expm1(min(parameters.failures_per_s * parameters.recovery_s, 500)) / parameters.num_devices
    bound = 1.0
    for order in range(1, parameters.num_replicas):
        bound *= order * per_device
        if order * per_device >= 1:  # the factors grow from here on
            return 1.0
    return min(1.0, bound)


def spare_wait_share(parameters: Parameters) -> float:
    """Returns the share of time in which a lost rank waits for a spare: the queue M/M/c is not empty (Erlang's C).

    Failures are the customers, spares the servers. A spare is busy from the moment it takes a rank until its own
    replacement is there (exponential with mean `spare_return_s`). 1 if spares are used up faster than they return.
    """
    load = parameters.failures_per_s * parameters.spare_return_s
    if load >= parameters.num_spares:
        return 1.0
    blocked = 1.0
    for spares in range(1, parameters.num_spares + 1):
        blocked = load * blocked / (spares + load * blocked)
    busy = load / parameters.num_spares
    return busy * blocked / (1 - busy * (1 - blocked))


def spares_needed(parameters: Parameters, wait_share: float = 1e-5) -> int:
    """Returns the least number of spares with which the wait for one takes at most this share of time."""
    num_spares = math.floor(parameters.failures_per_s * parameters.spare_return_s) + 1
    while spare_wait_share(dataclasses.replace(parameters, num_spares=num_spares)) > wait_share:
        num_spares += 1
    return num_spares


def _fallback_share(parameters: Parameters) -> float:
    """Returns the share of failures for which no replica helps, or none is left."""
    return parameters.fallback_share + (1 - parameters.fallback_share) * shard_loss_share(parameters)


def _risk(parameters: Parameters, span_s: float) -> float:
    """Returns -ln of the probability that `span_s` of work, restarted after every recovery, ends before a fallback.

    Let a share f of the failures, which happen at rate λ, fall back. An attempt succeeds with probability
    A = exp(-λ·span). A failed attempt falls back with probability f. Otherwise its recovery, which further failures
    restart, ends before a fallback with probability ψ = D/(D + f·(1 - D)), D = exp(-λR), and the next attempt begins.
    So φ = A + (1 - A)·(1 - f)·ψ·φ, and 1 - φ = (1 - A)·f/(f + (1 - f)·D·A). In this form there is no cancellation.
    """
    failures, share = parameters.failures_per_s, _fallback_share(parameters)
    succeeds = math.exp(-failures * span_s)
    recovers = math.exp(-failures * parameters.recovery_s)
    fails = -math.expm1(-failures * span_s) * share / (share + (1 - share) * recovers * succeeds)
    return -math.log1p(-fails) if fails < 1 else math.inf


def effective_ratio(parameters: Parameters, interval_s: float) -> float:
    """Returns the share of time that trains the model, with a checkpoint after every `interval_s` of work.

    A cycle of t seconds of work and a checkpoint ends before a fallback with probability G = exp(-κt)·g, where κ is
    the risk per second of work and g comes from the checkpoint (see `_risk`). A fallback costs S = (exp(λ·s0) - 1)/λ,
    since a failure during the restart starts it over. A cycle takes (1/G - 1)·(1/s + S) on average, s the rate of
    fallbacks, and waiting for spares takes its share of everything (`spare_wait_share`).

    * Every failure a fallback: λt·exp(-λ·s0)/(exp(λ(t + k0)) - 1), the complete model of Daly 2006.
    * Hardly any, and no checkpoints: exp(-λR)·λτ/(exp(λτ) - 1), about 1 - λ(R + τ/2), with τ the length of a step.

    It is exact for independent failures in both of these cases. In between, it assumes that the waits are independent.
    """
    fails, step_s = parameters.failures_per_s, parameters.step_s
    fallbacks = fails * _fallback_share(parameters)
    ready = 1 - spare_wait_share(parameters)
    exponent = interval_s * _risk(parameters, step_s) / step_s + _risk(parameters, parameters.checkpoint_s)
    if exponent > 500 or fails * parameters.restart_s > 500:  # beyond the range of a float: nothing is trained
        return 0.0
    cycle_s = math.expm1(exponent) * (1 / fallbacks + math.expm1(fails * parameters.restart_s) / fails)
    return min(1.0, ready * interval_s / cycle_s)


def best_interval_s(parameters: Parameters) -> float:
    """Returns the interval that maximises `effective_ratio`, at least one step.

    The ratio is proportional to t/(exp(κt)/g - 1), so the best x = κt solves 1 - x = g·exp(-x) with 0 < x < 1. For
    checkpoint-restart this is Daly's optimum, which `daly_interval_s` approximates by a series.
    """
    per_s = _risk(parameters, parameters.step_s) / parameters.step_s
    written = _risk(parameters, parameters.checkpoint_s)
    low, high = 0.0, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        # 1 - g·exp(-x) > x as long as x is too small.
        if -math.expm1(-written - middle) > middle:
            low = middle
        else:
            high = middle
    return max(parameters.step_s, low / per_s)


def best_ratio(parameters: Parameters) -> float:
    """Returns `effective_ratio` at the best interval."""
    return effective_ratio(parameters, best_interval_s(parameters))
