"""A fake of `pynvml`, with the functions that keepstep uses, for devices that a test makes sick.

``monkeypatch.setitem(sys.modules, "pynvml", fake)`` installs it in place of the module.
The constants are those of nvml.h; `tests/agent/health/test_nvml.py` compares them with the real binding.
"""

import queue
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CALLS = frozenset(
    {
        *("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"),
        *("nvmlDeviceGetName", "nvmlDeviceGetMigMode", "nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"),
        *("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetRetiredPagesPendingStatus"),
        *("nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlEventSetCreate", "nvmlEventSetWait_v2", "nvmlEventSetFree"),
    }
)
CONSTANTS = {
    "NVML_ERROR_NOT_SUPPORTED": 3,
    "NVML_ERROR_NO_PERMISSION": 4,
    "NVML_ERROR_DRIVER_NOT_LOADED": 9,
    "NVML_ERROR_TIMEOUT": 10,
    "NVML_ERROR_FUNCTION_NOT_FOUND": 13,
    "NVML_ERROR_GPU_IS_LOST": 15,
    "NVML_ERROR_RESET_REQUIRED": 16,
    "NVML_ERROR_UNKNOWN": 999,
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
    "NVML_VOLATILE_ECC": 0,
    "nvmlEventTypeXidCriticalError": 0x8,
    "nvmlClocksThrottleReasonHwThermalSlowdown": 0x40,
    "nvmlClocksThrottleReasonSwThermalSlowdown": 0x20,
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": 0x80,
}


class NVMLError(Exception):
    """The exception that pynvml raises."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class FakeDevice:
    """One device, and the values that NVML reports for it."""

    index: int
    name: str = "NVIDIA H100 80GB HBM3"
    uncorrectable: int = 0
    rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    pages_pending: int = 0
    reasons: int = 0
    mig: tuple[int, int] = (0, 0)
    events: int = 0x8
    error: int | None = None
    """If set, all functions on this device raise an `NVMLError` with this code."""
    unsupported: set[str] = field(default_factory=set)
    """Functions that this device does not support."""

    @property
    def uuid(self) -> str:
        """A different one for each device."""
        return f"GPU-{self.index:08x}-0000-4000-8000-000000000000"


@dataclass
class FakeEvent:
    """An event, as ``c_nvmlEventData_t``."""

    device: FakeDevice
    eventType: int  # noqa: N815  # as in nvml.h
    eventData: int  # noqa: N815  # as in nvml.h


class FakeEventSet:
    """The devices that are registered for Xid events, and the events so far. Each reader has a separate set."""

    def __init__(self) -> None:
        self.devices: list[FakeDevice] = []
        self.events: queue.Queue[FakeEvent] = queue.Queue()


class FakeNvml(types.ModuleType):
    """The fake module, with the machine's devices in ``devices``."""

    def __init__(self, num_devices: int = 1) -> None:
        super().__init__("pynvml")
        self.devices = [FakeDevice(index) for index in range(num_devices)]
        self.init_error: int | None = None
        self.num_open = 0
        """Number of ``nvmlInit`` calls without an ``nvmlShutdown``, counted as by the real library."""
        self.NVMLError = NVMLError
        self.sets: list[FakeEventSet] = []
        for name, value in CONSTANTS.items():
            setattr(self, name, value)

    def raise_xid(self, device: int, xid: int, kind: int = 0x8) -> None:
        """Adds an Xid event to each set in which the device is registered."""
        for each in self.sets:
            if self.devices[device] in each.devices:
                each.events.put(FakeEvent(self.devices[device], kind, xid))

    def _of(self, device: FakeDevice, call: str, value: Any) -> Any:
        if device.error is not None:
            raise NVMLError(device.error)
        if call in device.unsupported:
            raise NVMLError(CONSTANTS["NVML_ERROR_NOT_SUPPORTED"])
        return value

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Returns a function that reads one value of a device."""
        values: dict[str, Callable[[FakeDevice], Any]] = {
            "nvmlDeviceGetName": lambda device: device.name,
            "nvmlDeviceGetMigMode": lambda device: list(device.mig),
            "nvmlDeviceGetSupportedEventTypes": lambda device: device.events,
            "nvmlDeviceGetRemappedRows": lambda device: device.rows,
            "nvmlDeviceGetRetiredPagesPendingStatus": lambda device: device.pages_pending,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda device: device.reasons,
        }
        if name not in values:
            raise AttributeError(name)
        return lambda device: self._of(device, name, values[name](device))

    def nvmlInit(self) -> None:  # noqa: N802  # as in pynvml
        """Opens the library, or raises ``init_error`` if it is set."""
        if self.init_error is not None:
            raise NVMLError(self.init_error)
        self.num_open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802  # as in pynvml
        """Closes the library."""
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802  # as in pynvml
        """Returns the number of devices."""
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeDevice:  # noqa: N802  # as in pynvml
        """Returns a device, which is its own handle."""
        return self.devices[index]

    def nvmlDeviceGetUUID(self, device: FakeDevice) -> str:  # noqa: N802  # as in pynvml
        """Returns the UUID. Raises for a lost device."""
        return str(self._of(device, "nvmlDeviceGetUUID", device.uuid))

    def nvmlDeviceGetTotalEccErrors(self, device: FakeDevice, kind: int, counter: int) -> int:  # noqa: N802  # as in pynvml
        """Returns the count of uncorrected errors. Supports only the arguments that keepstep passes."""
        assert (kind, counter) == (CONSTANTS["NVML_MEMORY_ERROR_TYPE_UNCORRECTED"], CONSTANTS["NVML_VOLATILE_ECC"])
        return int(self._of(device, "nvmlDeviceGetTotalEccErrors", device.uncorrectable))

    def nvmlEventSetCreate(self) -> FakeEventSet:  # noqa: N802  # as in pynvml
        """Returns a new set without devices."""
        self.sets.append(FakeEventSet())
        return self.sets[-1]

    def nvmlDeviceRegisterEvents(  # noqa: N802  # as in pynvml
        self, device: FakeDevice, kinds: int, events: FakeEventSet
    ) -> None:
        """Registers a device for Xid events."""
        assert kinds == CONSTANTS["nvmlEventTypeXidCriticalError"]
        events.devices.append(device)

    def nvmlEventSetWait_v2(self, events: FakeEventSet, timeout_ms: int) -> FakeEvent:  # noqa: N802  # as in pynvml
        """Returns the next event, or waits and raises a timeout."""
        try:
            return events.events.get(timeout=timeout_ms / 1000)
        except queue.Empty:
            raise NVMLError(CONSTANTS["NVML_ERROR_TIMEOUT"]) from None

    def nvmlEventSetFree(self, events: FakeEventSet) -> None:  # noqa: N802  # as in pynvml
        """Releases a set: it gets no more events."""
        self.sets.remove(events)
