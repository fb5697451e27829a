"""Reading NVML, with a fake in the place of the library; and that fake beside the real binding."""

import importlib
import re
import sys
from pathlib import Path

import pytest
from tests.support.fake_nvml import CALLS, CONSTANTS, FakeDevice, FakeNvml

from keepstep.agent.health.conditions import DeviceCondition
from keepstep.agent.health.machine import DeviceReading
from keepstep.agent.health.nvml import NvmlReader
from keepstep.errors import ConfigurationError

WELL = DeviceReading(num_uncorrectable=0, remap_pending=False, remap_failed=False, retirement_pending=False)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(4)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def reader(*names: str, by_bus: bool = False) -> NvmlReader:
    return NvmlReader(names or ("0", "1"), by_bus=by_bus)


# ---- which devices --------------------------------------------------------------------------------------------------


def test_devices_are_known_by_number_and_by_the_beginning_of_their_uuid(nvml: FakeNvml) -> None:
    nvml.devices[2].uncorrectable = 5
    read = reader("3", "GPU-00000002", "0")
    assert list(read.labels) == [
        f"GPU 3 ({nvml.devices[3].uuid})",
        "GPU GPU-00000002",
        f"GPU 0 ({nvml.devices[0].uuid})",
    ]
    assert [read.read(device).num_uncorrectable for device in range(3)] == [0, 5, 0]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("4",), "NVML knows no device 4: it has 4"),
        (("GPU-ffff",), "NVML knows no device GPU-ffff"),
        (("GPU-0000000",), "NVML knows no device GPU-0000000"),  # it is not one alone
        (("MIG-GPU-00000000/1/0",), "is a MIG instance"),
        (("0:1",), "is a MIG instance"),
    ],
)
@pytest.mark.usefixtures("nvml")
def test_a_device_that_cannot_be_found_is_refused_by_name(names: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        reader(*names)


def test_a_gpu_that_is_divided_is_refused(nvml: FakeNvml) -> None:
    nvml.devices[1].mig = (1, 1)
    with pytest.raises(ConfigurationError, match="GPU 1 is divided by MIG"):
        reader()
    nvml.devices[1].mig = (0, 1)  # from the next reset on
    reader()


def test_numbers_are_refused_where_cuda_may_count_otherwise(nvml: FakeNvml) -> None:
    nvml.devices[3].name = "NVIDIA T400"
    with pytest.raises(ConfigurationError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        reader("0")
    reader("0", by_bus=True)
    reader("GPU-00000000")


def test_without_the_binding_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'keepstep\[gpu\]'"):
        reader()


def test_without_a_driver_the_message_is_that_of_nvml(nvml: FakeNvml) -> None:
    nvml.init_error = CONSTANTS["NVML_ERROR_DRIVER_NOT_LOADED"]
    with pytest.raises(ConfigurationError, match="NVML cannot be used: NVML error 9"):
        reader()


# ---- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nvml")
def test_a_device_that_is_well() -> None:
    assert reader().read(0) == WELL


def test_all_that_a_device_shows_is_read(nvml: FakeNvml) -> None:
    sick = nvml.devices[1]
    sick.uncorrectable, sick.rows, sick.pages_pending, sick.reasons = 3, (0, 1, 1, 1), 1, 0x80 | 0x20
    slowdowns = frozenset({DeviceCondition.THERMAL, DeviceCondition.POWER_BRAKE})
    assert reader().read(1) == DeviceReading(False, False, None, 3, True, True, True, slowdowns)


@pytest.mark.parametrize(
    ("reasons", "found"), [(0x40, {DeviceCondition.THERMAL}), (0x4, set()), (0x1, set()), (0x8, set())]
)
def test_only_heat_and_the_power_brake_are_slowdowns(nvml: FakeNvml, reasons: int, found: set[DeviceCondition]) -> None:
    nvml.devices[0].reasons = reasons
    assert reader().read(0).slowdowns == found


def test_what_a_device_does_not_support_is_not_known(nvml: FakeNvml) -> None:
    nvml.devices[0].unsupported = {call for call in CALLS if call.startswith("nvmlDeviceGet")} - {"nvmlDeviceGetUUID"}
    nvml.devices[0].unsupported -= {"nvmlDeviceGetName"}
    assert reader().read(0) == DeviceReading()


@pytest.mark.parametrize(
    ("error", "reading"),
    [
        ("NVML_ERROR_GPU_IS_LOST", DeviceReading(is_lost=True)),
        ("NVML_ERROR_RESET_REQUIRED", DeviceReading(needs_reset=True)),
        ("NVML_ERROR_UNKNOWN", DeviceReading(error="NVML error 999")),
    ],
)
def test_errors_are_readings_too(nvml: FakeNvml, error: str, reading: DeviceReading) -> None:
    read = reader()
    nvml.devices[0].error = CONSTANTS[error]
    assert read.read(0) == reading


# ---- Xids -----------------------------------------------------------------------------------------------------------


def test_xids_are_reported_with_their_device(nvml: FakeNvml) -> None:
    read = reader("2", "1")
    nvml.raise_xid(1, 79)
    nvml.raise_xid(2, 31)
    nvml.raise_xid(3, 48)  # a device that is not this node's part of the job
    assert [read.wait(0.01), read.wait(0.01), read.wait(0.01)] == [(1, 79), (0, 31), None]


def test_other_events_are_none(nvml: FakeNvml) -> None:
    read = reader()
    nvml.raise_xid(0, 1, kind=0x10)
    assert read.wait(0.01) is None


def test_an_xid_of_a_lost_device_is_left_to_the_next_look(nvml: FakeNvml) -> None:
    read = reader()
    nvml.raise_xid(0, 79)
    nvml.devices[0].error = CONSTANTS["NVML_ERROR_GPU_IS_LOST"]
    assert read.wait(0.01) is None
    assert read.read(0).is_lost


def test_a_device_without_events_is_only_looked_at(nvml: FakeNvml) -> None:
    nvml.devices[0].events = 0
    read = reader("0")
    nvml.raise_xid(0, 79)
    assert read.wait(0.01) is None


def test_closed_it_leaves_nothing_behind(nvml: FakeNvml) -> None:
    read = reader()
    assert (nvml.num_open, len(nvml.sets)) == (1, 1)
    read.close()
    assert (nvml.num_open, nvml.sets) == (0, [])


def test_the_end_of_one_reader_leaves_another_one_its_events(nvml: FakeNvml) -> None:
    """Two jobs of one process: the thread of the first may end when the second has begun."""
    first, second = reader(), reader()
    first.close()
    nvml.raise_xid(1, 79)
    assert second.wait(0.01) == (1, 79)


# ---- the fake -------------------------------------------------------------------------------------------------------


def test_the_fake_has_the_names_and_numbers_of_the_real_binding() -> None:
    real = importlib.import_module("pynvml")
    assert {name: getattr(real, name) for name in CONSTANTS} == CONSTANTS
    assert [call for call in CALLS if not callable(getattr(real, call, None))] == []
    assert [call for call in CALLS if not callable(getattr(FakeNvml(), call, None))] == []
    assert issubclass(real.NVMLError, Exception)
    fields = {name for name, _ in real.c_nvmlEventData_t._fields_}
    assert {"device", "eventType", "eventData"} <= fields
    assert FakeDevice(0).uuid.startswith("GPU-")


def test_each_call_of_the_reader_is_one_that_the_fake_knows() -> None:
    source = importlib.import_module("keepstep.agent.health.nvml").__file__
    assert source is not None
    text = Path(source).read_text("utf-8")
    used = set(re.findall(r"nvml\.(nvml[A-Z]\w+)", text))
    assert used == {*CALLS, *(name for name in CONSTANTS if name.startswith("nvml"))}
