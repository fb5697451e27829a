"""The used part of NVML: the devices, their counters, and Xid events.

The binding is `pynvml` of the package nvidia-ml-py. Only this file imports it, and only when a node's health is read.
This file takes no decisions. One thread makes all calls, because any of them may block.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from keepstep.agent.health.conditions import DeviceCondition
from keepstep.agent.health.machine import DeviceReading
from keepstep.errors import ConfigurationError

INSTALL = "install it with: pip install 'keepstep[gpu]'"


class DeviceReader(Protocol):
    """A source of readings."""

    labels: Sequence[str]
    """Names of the devices in reports, in the order of the node's devices."""

    def read(self, device: int) -> DeviceReading:
        """Reads the state of a device."""

    def wait(self, timeout_s: float) -> tuple[int, int] | None:
        """Waits for the next Xid. Returns (device, Xid), or None if there was none, maybe before the timeout."""

    def close(self) -> None:
        """Releases the devices."""


class NvmlReader:
    """Reads the devices of this node through NVML."""

    def __init__(self, names: Sequence[str], *, by_bus: bool) -> None:
        """Finds the devices.

        Args:
            names: the devices in ``CUDA_VISIBLE_DEVICES``: numbers, or prefixes of UUIDs.
            by_bus: whether CUDA numbers the devices as NVML does (``CUDA_DEVICE_ORDER=PCI_BUS_ID``).

        Raises:
            ConfigurationError: NVML is not available or does not know a device, or a device is a MIG instance.
        """
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise ConfigurationError(f"nvidia-ml-py is not installed ({error}); {INSTALL}") from error
        nvml = self._nvml
        self._unsupported = (
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_NO_PERMISSION,
        )
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise ConfigurationError(f"NVML cannot be used: {error}") from error
        try:
            self._handles = self._find(names, by_bus)
            self._uuids = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in self._handles]
            self.labels: Sequence[str] = tuple(
                f"GPU {name}" if name.startswith("GPU-") else f"GPU {name} ({uuid})"
                for name, uuid in zip(names, self._uuids, strict=True)
            )
            self._events = nvml.nvmlEventSetCreate()
            registered = [self._register(handle) for handle in self._handles]
            self._has_events = any(registered)
        except nvml.NVMLError as error:
            raise ConfigurationError(f"NVML cannot read the devices {', '.join(names)}: {error}") from error

    def _find(self, names: Sequence[str], by_bus: bool) -> list[Any]:
        nvml = self._nvml
        parts = [name for name in names if name.startswith("MIG-") or ":" in name]
        if parts:
            raise ConfigurationError(f"{parts[0]} is a MIG instance: health is read of whole GPUs only")
        everyone = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in everyone]
        if not by_bus and any(name.isdecimal() for name in names):
            models = sorted({str(nvml.nvmlDeviceGetName(handle)) for handle in everyone})
            if len(models) > 1:
                raise ConfigurationError(
                    f"this machine has several models of GPUs ({', '.join(models)}), which CUDA numbers in an order of "
                    "its own: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or have CUDA_VISIBLE_DEVICES name the devices by UUIDs"
                )
        found = []
        for name in names:
            if name.isdecimal():
                matching = [int(name)] if int(name) < len(everyone) else []
            else:
                matching = [index for index, uuid in enumerate(uuids) if uuid.startswith(name)]
            if len(matching) != 1:
                raise ConfigurationError(f"NVML knows no device {name}: it has {len(everyone)}")
            found.append(everyone[matching[0]])
            if self._optional(nvml.nvmlDeviceGetMigMode, found[-1]) not in (None, [0, 0], [0, 1]):
                raise ConfigurationError(f"GPU {name} is divided by MIG: health is read of whole GPUs only")
        return found

    def _register(self, handle: Any) -> bool:
        """Subscribes to a device's Xids. Returns False if the device does not support that."""
        nvml = self._nvml
        supported = self._optional(nvml.nvmlDeviceGetSupportedEventTypes, handle) or 0
        if not supported & nvml.nvmlEventTypeXidCriticalError:
            return False
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        return True

    def _optional(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the result of an NVML call; None if the device or the driver does not support the call."""
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in self._unsupported:
                return None
            raise

    def read(self, device: int) -> DeviceReading:
        """Reads the state of a device."""
        nvml, handle = self._nvml, self._handles[device]
        try:
            rows = self._optional(nvml.nvmlDeviceGetRemappedRows, handle)
            pages = self._optional(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
            return DeviceReading(
                num_uncorrectable=self._optional(
                    nvml.nvmlDeviceGetTotalEccErrors,
                    handle,
                    nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                    nvml.NVML_VOLATILE_ECC,
                ),
                remap_pending=None if rows is None else bool(rows[2]),
                remap_failed=None if rows is None else bool(rows[3]),
                retirement_pending=None if pages is None else bool(pages),
                slowdowns=self._slowdowns(handle),
            )
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                return DeviceReading(is_lost=True)
            if error.value == nvml.NVML_ERROR_RESET_REQUIRED:
                return DeviceReading(needs_reset=True)
            return DeviceReading(error=str(error))

    def _slowdowns(self, handle: Any) -> frozenset[DeviceCondition]:
        nvml = self._nvml
        # NVML calls them throttle reasons before driver 535; the numbers are the same.
        reasons = self._optional(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        thermal = nvml.nvmlClocksThrottleReasonHwThermalSlowdown | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        found = {DeviceCondition.THERMAL} if reasons & thermal else set()
        if reasons & nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown:
            found.add(DeviceCondition.POWER_BRAKE)
        return frozenset(found)

    def wait(self, timeout_s: float) -> tuple[int, int] | None:
        """Waits for the next Xid. Returns (device, Xid), or None if there was none. It may return before the timeout.

        It also returns None if NVML cannot name the device because it is lost. The next `read` reports that.
        """
        nvml = self._nvml
        if not self._has_events:
            return None
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, int(timeout_s * 1000))
            uuid = str(nvml.nvmlDeviceGetUUID(event.device))
        except nvml.NVMLError:  # a timeout, or the device is lost
            return None
        if event.eventType != nvml.nvmlEventTypeXidCriticalError or uuid not in self._uuids:
            return None
        return self._uuids.index(uuid), int(event.eventData)

    def close(self) -> None:
        """Releases the devices and shuts NVML down."""
        nvml = self._nvml
        try:
            nvml.nvmlEventSetFree(self._events)
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            pass  # a device is lost, or the driver was unloaded: nothing is left to release
