"""Derives reports on a node's devices from NVML's data, once for each condition. Pure: time is an argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from keepstep.agent.health.conditions import RULES, DeviceCondition, HealthAction, Rule, rule_of_xid

SLOW_S = 30.0
"""keepstep reports lowered clocks only after this time: short peaks of power or heat lower them for a moment."""
REPEAT_S = 300.0
"""keepstep reports the same Xid of the same device again only after this time. A failing kernel may cause it at every
step."""
SILENT_S = 60.0
"""NVML calls take milliseconds. If none has returned for this long, keepstep reports that NVML hangs; a lost GPU may
cause that."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceReading:
    """The state of one device at one time, from NVML. A value is None if the device does not support it."""

    is_lost: bool = False
    needs_reset: bool = False
    error: str | None = None
    """Any other error of NVML."""
    num_uncorrectable: int | None = None
    """Uncorrectable ECC errors since the driver was loaded."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retirement_pending: bool | None = None
    slowdowns: frozenset[DeviceCondition] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class HealthFinding:
    """A new condition of a device, which the agent must report."""

    device: int
    """Index among the node's devices."""
    action: HealthAction
    reason: str


class HealthMachine:
    """Decides which conditions are new. It remembers for each device what it has reported already."""

    def __init__(self, labels: Sequence[str], now_s: float) -> None:
        """Args:
        labels: names of the devices in reports.
        now_s: the present time in monotonic seconds.
        """
        self._labels = tuple(labels)
        self._baselines: dict[int, int] = {}
        """device -> the highest number of uncorrectable errors so far. The first reading has those of earlier jobs."""
        self._is_read: set[int] = set()
        self._holds: set[tuple[int, DeviceCondition]] = set()
        """Reported conditions that still hold."""
        self._slow_since_s: dict[tuple[int, DeviceCondition], float] = {}
        self._told_s: dict[tuple[int, int], float] = {}
        """(device, Xid) -> time of its last report."""
        self._failed: set[int] = set()
        """Devices that were reported as failed. Nothing more is reported about them."""
        self._heard_s = now_s
        self._is_silent = False

    def read(self, device: int, reading: DeviceReading, now_s: float) -> list[HealthFinding]:
        """Processes a reading of a device. Returns the new findings.

        In a device's first reading, a condition that would drain its rank is only a warning, because the job was
        started on the device in this state.
        """
        self._heard_s, self._is_silent = now_s, False
        is_first = device not in self._is_read
        self._is_read.add(device)
        here = set(self._conditions(device, reading, now_s))
        news = [each for each in here if (device, each) not in self._holds]
        self._holds = {held for held in self._holds if held[0] != device} | {(device, each) for each in here}
        if reading.num_uncorrectable is not None:
            self._baselines[device] = max(self._baselines.get(device, 0), reading.num_uncorrectable)
        findings = []
        for condition in sorted(news):
            rule = RULES[condition]
            if is_first and rule.action is HealthAction.DRAIN:
                rule = dataclasses.replace(rule, action=HealthAction.WARN)
            findings += self._tell(device, condition, rule)
        return findings

    def xid(self, device: int, xid: int, now_s: float) -> list[HealthFinding]:
        """Processes an Xid from the driver. Returns the new findings."""
        self._heard_s, self._is_silent = now_s, False
        told_s = self._told_s.get((device, xid))
        if told_s is not None and now_s < told_s + REPEAT_S:
            return []
        self._told_s[device, xid] = now_s
        return self._tell(device, f"Xid {xid}", rule_of_xid(xid))

    def tick(self, now_s: float) -> list[HealthFinding]:
        """Reports once if no device was read for `SILENT_S`. Call it periodically."""
        if self._is_silent or now_s < self._heard_s + SILENT_S:
            return []
        self._is_silent = True
        rule = RULES[DeviceCondition.UNREADABLE]
        return [
            finding
            for device in range(len(self._labels))
            for finding in self._tell(device, f"{DeviceCondition.UNREADABLE} for {SILENT_S:g} s", rule)
        ]

    def _conditions(self, device: int, reading: DeviceReading, now_s: float) -> Iterator[DeviceCondition]:
        baseline = self._baselines.get(device, reading.num_uncorrectable)
        yield from (
            condition
            for condition, holds in (
                (DeviceCondition.LOST, reading.is_lost),
                (DeviceCondition.NEEDS_RESET, reading.needs_reset),
                (DeviceCondition.UNREADABLE, reading.error is not None),
                (DeviceCondition.UNCORRECTABLE, (reading.num_uncorrectable or 0) > (baseline or 0)),
                (DeviceCondition.REMAP_FAILED, reading.remap_failed),
                (DeviceCondition.REMAP_PENDING, reading.remap_pending),
                (DeviceCondition.RETIREMENT_PENDING, reading.retirement_pending),
            )
            if holds
        )
        for condition in (DeviceCondition.THERMAL, DeviceCondition.POWER_BRAKE):
            if condition not in reading.slowdowns:
                self._slow_since_s.pop((device, condition), None)
            elif now_s >= self._slow_since_s.setdefault((device, condition), now_s) + SLOW_S:
                yield condition

    def _tell(self, device: int, what: str, rule: Rule) -> list[HealthFinding]:
        if device in self._failed:
            return []
        if rule.action is HealthAction.REPLACE:
            self._failed.add(device)
        return [HealthFinding(device, rule.action, f"{self._labels[device]}: {what}: {rule.meaning}")]
