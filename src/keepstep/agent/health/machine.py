"""Reports on a node's devices, once for each condition, from NVML's data. Pure: time is an argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from keepstep.agent.health.conditions import RULES, DeviceCondition, HealthAction, Rule, rule_of_xid

SLOW_S = 30.0
"""keepstep reports lowered clocks from this time on: every peak of power or heat lowers them for a moment."""
REPEAT_S = 300.0
"""The same Xid of the same device is told again after this time; a failing kernel may cause it at every step."""
SILENT_S = 60.0
"""Calls of NVML take milliseconds. Where none has come back for so long, none will; a lost GPU may cause that."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceReading:
    """What NVML shows of one device at one look; None for what this device does not support."""

    is_lost: bool = False
    needs_reset: bool = False
    error: str | None = None
    """Why there is nothing to be read, for any other reason."""
    num_uncorrectable: int | None = None
    """ECC errors since the driver was loaded."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retirement_pending: bool | None = None
    slowdowns: frozenset[DeviceCondition] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class HealthFinding:
    """A new condition of a device, to be reported."""

    device: int
    """Its place among the devices of the node."""
    action: HealthAction
    reason: str


class HealthMachine:
    """Knows of each device what was told of it already."""

    def __init__(self, labels: Sequence[str], now_s: float) -> None:
        """Args:
        labels: what the user calls the devices.
        now_s: when the look at them begins.
        """
        self._labels = tuple(labels)
        self._baselines: dict[int, int] = {}
        """device -> its uncorrectable errors at the first look: those of earlier jobs."""
        self._is_read: set[int] = set()
        self._holds: set[tuple[int, DeviceCondition]] = set()
        """What was told and has not gone since."""
        self._slow_since_s: dict[tuple[int, DeviceCondition], float] = {}
        self._told_s: dict[tuple[int, int], float] = {}
        """(device, Xid) -> when it was told last."""
        self._failed: set[int] = set()
        """Devices of which the worst was told: nothing is added to it."""
        self._heard_s = now_s
        self._is_silent = False

    def read(self, device: int, reading: DeviceReading, now_s: float) -> list[HealthFinding]:
        """One look at a device.

        At the first look what may wait is only a warning: the device was given to the job in this state.
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
        """The driver has told of an Xid."""
        self._heard_s, self._is_silent = now_s, False
        told_s = self._told_s.get((device, xid))
        if told_s is not None and now_s < told_s + REPEAT_S:
            return []
        self._told_s[device, xid] = now_s
        return self._tell(device, f"Xid {xid}", rule_of_xid(xid))

    def tick(self, now_s: float) -> list[HealthFinding]:
        """Time goes by: tells once when nothing was heard of any device for long."""
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
