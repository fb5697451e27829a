"""Conditions of a device and their actions: the only place that decides them.

This module does not use NVML. Meanings and recommendations of Xids are those of NVIDIA's Xid catalog for Ampere and
newer GPUs (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, as of October 2025). Where it
recommends to reset the GPU or to restart the machine, the action is `HealthAction.REPLACE`. Where it recommends to
restart the application or to ignore the Xid, the action is `HealthAction.WARN`. A comment explains each difference from
that.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping


class HealthAction(enum.StrEnum):
    """What a condition of a device means for the rank on it."""

    REPLACE = "replace"
    """The device has failed, even if the process on it has not crashed yet: the rank is lost."""
    DRAIN = "drain"
    """The rank continues until a warm spare can take it."""
    WARN = "warn"
    """The agent prints a warning and does nothing else."""


class DeviceCondition(enum.StrEnum):
    """A condition that the periodic check of a device may find."""

    LOST = "GPU is lost"
    NEEDS_RESET = "GPU requires a reset"
    UNCORRECTABLE = "uncorrectable ECC errors"
    REMAP_FAILED = "row remapping failed"
    REMAP_PENDING = "row remapping pending"
    RETIREMENT_PENDING = "page retirement pending"
    THERMAL = "thermal slowdown"
    POWER_BRAKE = "power brake"
    UNREADABLE = "NVML gives no answer"


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """The meaning of a condition, and its action."""

    action: HealthAction
    meaning: str


RULES: Mapping[DeviceCondition, Rule] = {
    DeviceCondition.LOST: Rule(
        HealthAction.REPLACE, "it has fallen off the bus, or is not accessible for another reason"
    ),
    DeviceCondition.NEEDS_RESET: Rule(HealthAction.REPLACE, "no process can use it before it was reset"),
    # The lost value may have been part of the rank's state, or of a gradient that all ranks are about to receive.
    DeviceCondition.UNCORRECTABLE: Rule(HealthAction.REPLACE, "their number has grown since the agent was started"),
    DeviceCondition.REMAP_FAILED: Rule(HealthAction.REPLACE, "a bad row of its memory has no replacement"),
    # The driver does not use the bad memory. A later reset repairs it.
    DeviceCondition.REMAP_PENDING: Rule(HealthAction.DRAIN, "a bad row of its memory is replaced at the next reset"),
    DeviceCondition.RETIREMENT_PENDING: Rule(
        HealthAction.DRAIN, "a bad page of its memory is left out from the next reset on"
    ),
    DeviceCondition.THERMAL: Rule(HealthAction.WARN, "it is too hot, and its clocks are lowered"),
    DeviceCondition.POWER_BRAKE: Rule(HealthAction.WARN, "the machine's power supply has its clocks lowered"),
    DeviceCondition.UNREADABLE: Rule(HealthAction.WARN, "its health is unknown"),
}

XIDS: Mapping[int, Rule] = {
    # In most cases the application causes the first six. NVIDIA's device plugin for Kubernetes keeps the device healthy
    # after them (`ignoredXids` in internal/rm/health.go of NVIDIA/k8s-device-plugin). For 109 the catalog recommends a
    # reset, but the plugin ignores it as well.
    13: Rule(HealthAction.WARN, "Graphics Engine Exception"),
    31: Rule(HealthAction.WARN, "GPU memory page fault"),
    43: Rule(HealthAction.WARN, "GPU stopped processing: the application's channel was reset"),
    45: Rule(HealthAction.WARN, "Preemptive cleanup, due to previous errors"),
    68: Rule(HealthAction.WARN, "NVDEC0 Exception"),
    109: Rule(HealthAction.WARN, "Context Switch Timeout Error"),
    46: Rule(HealthAction.REPLACE, "GPU stopped processing"),
    # A workflow in the catalog, which ends with a restart of the application or a reset: in both cases the process on
    # the device is lost. The same holds for 94: the driver ends the process that used the memory.
    48: Rule(HealthAction.REPLACE, "Double Bit ECC Error"),
    94: Rule(HealthAction.REPLACE, "Contained memory error"),
    62: Rule(HealthAction.REPLACE, "Internal micro-controller halt"),
    63: Rule(HealthAction.WARN, "GPU memory remapping event"),
    64: Rule(HealthAction.REPLACE, "GPU memory remapping failure"),
    # A workflow in the catalog. The link may have recovered; if it has not, a collective fails and the rank is lost.
    74: Rule(HealthAction.DRAIN, "NVLINK Error"),
    79: Rule(HealthAction.REPLACE, "GPU has fallen off the bus"),
    92: Rule(HealthAction.WARN, "High single-bit ECC error rate"),
    95: Rule(HealthAction.REPLACE, "Uncontained memory error"),
    110: Rule(HealthAction.REPLACE, "Security Fault Error"),
    119: Rule(HealthAction.REPLACE, "GSP RPC Timeout"),
    120: Rule(HealthAction.REPLACE, "GSP Error"),
    121: Rule(HealthAction.WARN, "C2C Error"),
    136: Rule(HealthAction.REPLACE, "Link Training Failed"),
    140: Rule(HealthAction.REPLACE, "ECC Unrecovered Error"),
    143: Rule(HealthAction.REPLACE, "GPU Initialization Error"),
    # Workflows, as for 74.
    **{
        xid: Rule(HealthAction.DRAIN, f"NVLINK: {unit} Error")
        for xid, unit in enumerate(("SAW", "RLW", "TLW", "TREX", "NVLPW_CTRL", "NETIR", "MSE"), start=144)
    },
    154: Rule(HealthAction.WARN, "GPU Recovery Action Changed: it tells more of another Xid"),
    155: Rule(HealthAction.REPLACE, "NVLINK: SW Defined Error"),
    # The catalog recommends a reset. It may wait: the driver has retired the bad resource, as with a pending row remap.
    156: Rule(HealthAction.DRAIN, "Resource Retirement Event"),
    157: Rule(HealthAction.WARN, "Resource Retirement Failure"),
    158: Rule(HealthAction.REPLACE, "GPU Fatal Timeout"),
}
UNKNOWN_XID = Rule(HealthAction.WARN, "see NVIDIA's Xid catalog")


def rule_of_xid(xid: int) -> Rule:
    """Returns the rule of an Xid; for an unknown one, a warning."""
    return XIDS.get(xid, UNKNOWN_XID)
