"""Which share of the time a cluster trains, by formula: with keepstep, and with checkpoint-restart.

Failures come at random, at a rate λ that grows with the number of devices. One of two things follows:

* A *recovery* of R seconds. Finished steps stay; the step that was struck is computed again.
* A *fallback*: everything restarts within s0 seconds, from a checkpoint that was written every t seconds of work at a
  cost of k0 seconds. What was trained since is computed again.

Checkpoint-restart is the case in which every failure is a fallback. Under keepstep few are: what no replica survives.
So one formula (`effective_ratio`) serves both, and so does one simulated history (`history.simulate`); a test compares
formula and history.

What the model leaves out: failures that strike several devices at one moment (a rack, a power line), time that passes
before a failure is noticed (it belongs into R and s0), and the cost of holding spares. All failures are independent.

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


# ---- What is put in -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class PublishedRate:
    """How often training is interrupted, as somebody counted it."""

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
"""One failure in 18 minutes on about 100,000 GPUs: second hand and round. It fits FT-HSDP, where a stall of 10 minutes
a failure leaves 44 % of the time: (18 - 10)/18."""

PUBLISHED = (LLAMA_3, META_RSC_1, META_RSC_2, META_100K)

MEASURED_RECOVERY_S = 0.107
"""Median of 20 recoveries with a warm spare, the step that is computed again not counted
(benchmarks/results/2026-11-20-recovery.md). Measured with 3 ranks on the CPU of one machine and 10 M parameters, so it
is a lower bound: 58 ms of it move 120 MB of state, and a large model has hundreds of times that on each device."""

LONG_RESTART_S, SHORT_RESTART_S = 600.0, 180.0
"""Stall per failure near 100,000 GPUs: 10 minutes when all restart, 3 minutes with FT-HSDP, which drops a replica
instead. So 3 minutes is kind to a plain restart of a large job; at a few dozen GPUs and a small model a restart takes
less than either (5 s in the benchmark above), and there the best interval decides, not s0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Parameters:
    """One job on one cluster. Each default says whether somebody published it, we measured it, or it is assumed.

    Raises:
        ConfigurationError: a value has no meaning.
    """

    num_devices: int = 16_384
    """As Llama 3 had."""
    failures_per_device_s: float = LLAMA_3.failures_per_device_s
    """Published. The second lowest of `PUBLISHED`."""
    step_s: float = 6.0
    """Derived: Llama 3 405B at 16 M tokens a step, 400 TFLOP/s a GPU, 6 FLOP a parameter and token.
    That it is the same at every size, the model growing with the cluster, is assumed."""
    checkpoint_s: float = 30.0
    """k0. Assumed: training stands still for half a minute. ByteCheckpoint speaks of stalls of minutes for plain
    saving; saving in the background blocks for less, at some cost to the steps."""
    restart_s: float = SHORT_RESTART_S
    """s0. Published, see `SHORT_RESTART_S`."""
    recovery_s: float = 10.0
    """R. Assumed, a hundred times `MEASURED_RECOVERY_S`. Moving the state is a part that can be estimated: 405 B
    parameters at 16 bytes on 128 devices are 50 GB each, 1 s at 400 Gbit/s."""
    fallback_share: float = 6 / 419
    """Failures that no replica helps against. Published: 6 of the 419 of Llama 3 were silent data corruption, which the
    sum of gradients carries to every replica. Assumed: no other failure needs a checkpoint; the last one is clean."""
    num_replicas: int = 2
    """Devices that hold the same part of the state. Assumed, the fewest that can work. keepstep trains with DDP today,
    where every rank holds all of it."""
    num_spares: int = 22
    """What `spares_needed` gives for the other defaults."""
    spare_return_s: float = DAY_S
    """Until a lost device is replaced by another spare, on average. Assumed: one day of repair."""

    def __post_init__(self) -> None:
        """Checks what could not be computed with."""
        for name in ("num_devices", "failures_per_device_s", "step_s", "num_spares", "spare_return_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("checkpoint_s", "restart_s", "recovery_s"):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(f"{name} must not be negative, not {getattr(self, name)}")
        if not 1e-12 <= self.fallback_share <= 1:  # with none there would be no best interval
            raise ConfigurationError(f"fallback_share must lie in 1e-12 ... 1, not {self.fallback_share}")
        if not 1 <= self.num_replicas <= self.num_devices:
            raise ConfigurationError(f"num_replicas must lie in 1 ... {self.num_devices}, not {self.num_replicas}")

    @property
    def failures_per_s(self) -> float:
        """λ: failures of the whole cluster."""
        return self.failures_per_device_s * self.num_devices


def checkpoint_restart(parameters: Parameters) -> Parameters:
    """The same job without keepstep: every failure falls back to the checkpoint."""
    return dataclasses.replace(parameters, fallback_share=1.0)


def of_size(parameters: Parameters, num_devices: int) -> Parameters:
    """The same job on a cluster of another size, with as many spares as it needs."""
    sized = dataclasses.replace(parameters, num_devices=num_devices)
    return dataclasses.replace(sized, num_spares=spares_needed(sized))


# ---- The formulas ---------------------------------------------------------------------------------------------------


def first_order_loss_s(parameters: Parameters, interval_s: float, window_s: float = DAY_S) -> float:
    """F(t) = m·(s0 + t/2) + (d/t)·k0: what checkpoint-restart loses of a window d, with m failures in it.

    Good while failures are rare (Young 1974): a failure costs the restart and on average half an interval. It may come
    out longer than the window, because it knows no failures during a restart.
    """
    num_failures = parameters.failures_per_s * window_s
    return num_failures * (parameters.restart_s + interval_s / 2) + window_s / interval_s * parameters.checkpoint_s


def young_interval_s(parameters: Parameters) -> float:
    """t* = √(2·d·k0/m), where F(t) is smallest (Young 1974)."""
    return math.sqrt(2 * parameters.checkpoint_s / parameters.failures_per_s)


def daly_interval_s(parameters: Parameters) -> float:
    """Daly's series for the best interval (Daly 2006).

    With M = 1/λ, Young's √(2·k0·M) is its first term. Daly also lets failures strike a checkpoint or a restart, which
    asks for checkpoints a little more often: the two differ by about 2/3 of k0. For k0 ≥ 2·M the series ends, and
    checkpoints lie M apart.
    """
    apart_s, ratio = 1 / parameters.failures_per_s, parameters.checkpoint_s * parameters.failures_per_s / 2
    if ratio >= 1:
        return apart_s
    return young_interval_s(parameters) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - parameters.checkpoint_s


def shard_loss_share(parameters: Parameters) -> float:
    """An upper bound for the share of failures with which some part of the state loses its last replica.

    The other r - 1 replicas must have been struck during the same recovery. It goes on with one more failure with
    probability p = 1 - exp(-λR), so j failures came before this one with probability (1 - p)·pʲ, and r - 1 of them can
    be matched to the replicas in j!/(j - r + 1)! ways, each with probability 1/Nʳ⁻¹. The sum over j is
    (r - 1)!·((exp(λR) - 1)/N)ʳ⁻¹; it is a bound because ways are added that may come true together. It assumes that
    devices fail independently, which devices on one node or one power line do not, and that a spare was there.
    """
    per_device = math.expm1(min(parameters.failures_per_s * parameters.recovery_s, 500)) / parameters.num_devices
    bound = 1.0
    for order in range(1, parameters.num_replicas):
        bound *= order * per_device
        if order * per_device >= 1:  # the factors grow from here on
            return 1.0
    return min(1.0, bound)


def spare_wait_share(parameters: Parameters) -> float:
    """The share of time in which a lost rank waits for a spare: the queue M/M/c is not empty (Erlang's C formula).

    Failures are the customers, spares the servers, and a spare is busy from the moment it steps in until its own
    replacement is there (exponential with mean `spare_return_s`). 1 when spares are used up faster than they come.
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
    """The fewest spares with which waiting for one takes no more than this share of time (one part in 100,000)."""
    num_spares = math.floor(parameters.failures_per_s * parameters.spare_return_s) + 1
    while spare_wait_share(dataclasses.replace(parameters, num_spares=num_spares)) > wait_share:
        num_spares += 1
    return num_spares


def _fallback_share(parameters: Parameters) -> float:
    """The share of failures with which no replica helps, or none is left."""
    return parameters.fallback_share + (1 - parameters.fallback_share) * shard_loss_share(parameters)


def _risk(parameters: Parameters, span_s: float) -> float:
    """-ln of the probability that `span_s` of work, started over after every recovery, ends before a fallback comes.

    Let a share f of the failures, which come at rate λ, fall back. An attempt succeeds with probability
    A = exp(-λ·span). One that fails falls back with probability f; otherwise its recovery, which further failures begin
    anew, ends before a fallback with probability ψ = D/(D + f·(1 - D)), D = exp(-λR), and the next attempt begins. So
    φ = A + (1 - A)·(1 - f)·ψ·φ, which comes to 1 - φ = (1 - A)·f/(f + (1 - f)·D·A). In this form nothing cancels.
    """
    failures, share = parameters.failures_per_s, _fallback_share(parameters)
    succeeds = math.exp(-failures * span_s)
    recovers = math.exp(-failures * parameters.recovery_s)
    fails = -math.expm1(-failures * span_s) * share / (share + (1 - share) * recovers * succeeds)
    return -math.log1p(-fails) if fails < 1 else math.inf


def effective_ratio(parameters: Parameters, interval_s: float) -> float:
    """The share of time that ends up in the model, with a checkpoint after every `interval_s` of work.

    A cycle of t seconds of work and a checkpoint ends before a fallback with probability G = exp(-κt)·g, where κ is
    the risk per second of work and g comes from the checkpoint (see `_risk`). A fallback costs S = (exp(λ·s0) - 1)/λ,
    since a failure during the restart starts it over. A cycle takes (1/G - 1)·(1/s + S) on average, s the rate of
    fallbacks, and waiting for spares takes its share of everything (`spare_wait_share`).

    * Every failure a fallback: λt·exp(-λ·s0)/(exp(λ(t + k0)) - 1), the complete model of Daly 2006.
    * Hardly any, and no checkpoints: exp(-λR)·λτ/(exp(λτ) - 1), about 1 - λ(R + τ/2), with τ the length of a step.

    Exact for independent failures in both of these cases; in between, the share of waiting is taken to be independent.
    """
    fails, step_s = parameters.failures_per_s, parameters.step_s
    fallbacks = fails * _fallback_share(parameters)
    ready = 1 - spare_wait_share(parameters)
    exponent = interval_s * _risk(parameters, step_s) / step_s + _risk(parameters, parameters.checkpoint_s)
    if exponent > 500 or fails * parameters.restart_s > 500:  # beyond what a float holds, and nothing is trained
        return 0.0
    cycle_s = math.expm1(exponent) * (1 / fallbacks + math.expm1(fails * parameters.restart_s) / fails)
    return min(1.0, ready * interval_s / cycle_s)


def best_interval_s(parameters: Parameters) -> float:
    """The interval with which `effective_ratio` is largest, one step at least.

    The ratio is t/(exp(κt)/g - 1) but for a factor, so the best x = κt solves 1 - x = g·exp(-x) with 0 < x < 1. For
    checkpoint-restart this is Daly's optimum, of which `daly_interval_s` is the series.
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
    """`effective_ratio` at the best interval."""
    return effective_ratio(parameters, best_interval_s(parameters))
