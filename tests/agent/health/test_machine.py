"""What is told of devices, and when: once, and no earlier than it is certain."""

import pytest

from keepstep.agent.health.conditions import DeviceCondition, HealthAction
from keepstep.agent.health.machine import REPEAT_S, SILENT_S, SLOW_S, DeviceReading, HealthMachine

WELL = DeviceReading(num_uncorrectable=0, remap_pending=False, remap_failed=False, retirement_pending=False)


def watched(first: DeviceReading = WELL) -> HealthMachine:
    """A machine that has had its first look at two devices."""
    machine = HealthMachine(("GPU 0 (a)", "GPU 1 (b)"), 0.0)
    for device in range(2):
        machine.read(device, first, 0.0)
    return machine


@pytest.mark.parametrize(
    ("reading", "action", "reason"),
    [
        (DeviceReading(is_lost=True), HealthAction.REPLACE, "GPU 1 (b): GPU is lost: it has fallen off the bus"),
        (DeviceReading(needs_reset=True), HealthAction.REPLACE, "GPU 1 (b): GPU requires a reset: no process"),
        (DeviceReading(num_uncorrectable=1), HealthAction.REPLACE, "GPU 1 (b): uncorrectable ECC errors: their number"),
        (DeviceReading(remap_failed=True), HealthAction.REPLACE, "GPU 1 (b): row remapping failed"),
        (DeviceReading(remap_pending=True), HealthAction.DRAIN, "GPU 1 (b): row remapping pending"),
        (DeviceReading(retirement_pending=True), HealthAction.DRAIN, "GPU 1 (b): page retirement pending"),
        (DeviceReading(error="Unknown Error"), HealthAction.WARN, "GPU 1 (b): NVML gives no answer"),
    ],
)
def test_a_condition_is_reported_once_with_its_action_and_reason(
    reading: DeviceReading, action: HealthAction, reason: str
) -> None:
    machine = watched()
    (finding,) = machine.read(1, reading, 5.0)
    assert (finding.device, finding.action) == (1, action)
    assert finding.reason.startswith(reason)
    assert machine.read(1, reading, 10.0) == []
    assert machine.read(0, WELL, 10.0) == []


def test_errors_of_earlier_jobs_count_for_nothing_and_new_ones_do() -> None:
    machine = HealthMachine(("GPU 0 (a)",), 0.0)
    assert machine.read(0, DeviceReading(num_uncorrectable=7), 0.0) == []
    assert machine.read(0, DeviceReading(num_uncorrectable=7), 5.0) == []
    assert [each.action for each in machine.read(0, DeviceReading(num_uncorrectable=8), 10.0)] == [HealthAction.REPLACE]


def test_what_a_device_has_from_the_start_is_only_told_unless_it_has_failed() -> None:
    machine = HealthMachine(("GPU 0 (a)", "GPU 1 (b)"), 0.0)
    assert [each.action for each in machine.read(0, DeviceReading(remap_pending=True), 0.0)] == [HealthAction.WARN]
    assert machine.read(0, DeviceReading(remap_pending=True), 5.0) == []
    assert [each.action for each in machine.read(1, DeviceReading(remap_failed=True), 0.0)] == [HealthAction.REPLACE]


def test_what_has_gone_and_comes_again_is_reported_again() -> None:
    machine = watched()
    assert len(machine.read(0, DeviceReading(error="busy"), 5.0)) == 1
    assert machine.read(0, WELL, 10.0) == []
    assert len(machine.read(0, DeviceReading(error="busy"), 15.0)) == 1


@pytest.mark.parametrize("condition", [DeviceCondition.THERMAL, DeviceCondition.POWER_BRAKE])
def test_lowered_clocks_are_reported_when_they_last(condition: DeviceCondition) -> None:
    machine, slow = watched(), DeviceReading(slowdowns=frozenset({condition}))
    assert machine.read(0, slow, 10.0) == []
    assert machine.read(0, slow, 10.0 + SLOW_S - 0.1) == []
    assert machine.read(1, slow, 10.0 + SLOW_S) == []  # the other device has only begun
    (finding,) = machine.read(0, slow, 10.0 + SLOW_S)
    assert finding.action is HealthAction.WARN
    assert condition in finding.reason
    assert machine.read(0, slow, 100.0) == []
    assert machine.read(0, WELL, 105.0) == []
    assert machine.read(0, slow, 110.0) == []  # it has to last again


def test_an_xid_is_reported_with_its_meaning() -> None:
    (finding,) = watched().xid(1, 79, 5.0)
    assert (finding.device, finding.action) == (1, HealthAction.REPLACE)
    assert finding.reason == "GPU 1 (b): Xid 79: GPU has fallen off the bus"


def test_the_same_xid_is_reported_again_only_after_a_while() -> None:
    machine = watched()
    assert len(machine.xid(0, 31, 5.0)) == 1
    assert machine.xid(0, 31, 5.0 + REPEAT_S - 0.1) == []
    assert len(machine.xid(1, 31, 6.0)) == 1
    assert len(machine.xid(0, 13, 6.0)) == 1
    assert len(machine.xid(0, 31, 5.0 + REPEAT_S)) == 1


def test_nothing_is_added_to_what_is_told_of_a_device_that_has_failed() -> None:
    machine = watched()
    assert len(machine.xid(0, 95, 5.0)) == 1
    assert machine.xid(0, 79, 5.1) == []
    assert machine.read(0, DeviceReading(is_lost=True), 6.0) == []
    assert len(machine.read(1, DeviceReading(is_lost=True), 6.0)) == 1


def test_a_device_that_is_to_be_drained_may_still_fail() -> None:
    machine = watched()
    assert [each.action for each in machine.xid(0, 74, 5.0)] == [HealthAction.DRAIN]
    assert [each.action for each in machine.xid(0, 79, 6.0)] == [HealthAction.REPLACE]


def test_silence_is_reported_once_and_anything_ends_it() -> None:
    machine = watched()
    assert machine.tick(SILENT_S - 0.1) == []
    assert [(each.device, each.action) for each in machine.tick(SILENT_S)] == [
        (0, HealthAction.WARN),
        (1, HealthAction.WARN),
    ]
    assert machine.tick(SILENT_S + 5.0) == []
    machine.read(0, WELL, SILENT_S + 6.0)
    assert machine.tick(2 * SILENT_S + 5.9) == []
    assert len(machine.tick(2 * SILENT_S + 6.0)) == 2
