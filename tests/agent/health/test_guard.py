"""What an agent does about sick devices with each ``--health``."""

import asyncio
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.fake_nvml import CONSTANTS, FakeNvml

from keepstep.agent.health import watch
from keepstep.agent.health.guard import DeviceGuard
from keepstep.agent.settings import AgentSettings, HealthMode, HealthSettings, NodePlace
from keepstep.errors import ConfigurationError

DEADLINE_S = 10.0
Sick = tuple[tuple[int, ...], str, bool]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.setattr(watch, "WAIT_S", 0.01)
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.02)
    fake = FakeNvml(4)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


class Scene:
    """A guard of a node, and what it has found."""

    def __init__(self, mode: HealthMode, devices: int = 4, slots: int = 4, world_size: int = 3) -> None:
        self.sick: list[Sick] = []
        settings = AgentSettings(
            ("true",),
            False,
            True,
            False,
            NodePlace("node-a", world_size, world_size, slots),
            Path("."),
            devices=tuple(map(str, range(devices))),
            health=HealthSettings(mode),
        )
        self.guard = DeviceGuard(settings, lambda *sick: self.sick.append(sick))
        self.closed: dict[int, str] = {}

    def play(self, then: Callable[[], None] = lambda: None, until: Callable[[], bool] = lambda: True) -> None:
        """Starts, does something to the devices, and waits until something holds."""

        async def whole() -> None:
            self.closed = await self.guard.start()
            then()
            async with asyncio.timeout(DEADLINE_S):
                while not until():  # noqa: ASYNC110  # what is waited for comes from another thread
                    await asyncio.sleep(0.005)
            self.guard.stop()

        asyncio.run(whole())


def test_off_does_not_even_look(nvml: FakeNvml, capsys: pytest.CaptureFixture[str]) -> None:
    nvml.devices[0].rows = (0, 1, 0, 1)
    scene = Scene(HealthMode.OFF)
    scene.play()
    assert (scene.closed, nvml.num_open, capsys.readouterr().err) == ({}, 0, "")


def test_warn_tells_what_act_would_do_and_does_nothing(nvml: FakeNvml, capsys: pytest.CaptureFixture[str]) -> None:
    scene, lines = Scene(HealthMode.WARN), list[str]()

    def told() -> bool:
        lines.extend(capsys.readouterr().err.splitlines())
        return len(lines) == 3

    def make_sick() -> None:
        nvml.raise_xid(1, 79)
        nvml.raise_xid(2, 74)
        nvml.raise_xid(3, 31)

    scene.play(make_sick, told)
    assert (scene.closed, scene.sick) == ({}, [])
    uuids = [device.uuid for device in nvml.devices]
    assert lines == [
        f"keepstep: GPU 1 ({uuids[1]}): Xid 79: GPU has fallen off the bus "
        "(with --health act its rank would be replaced at once)",
        f"keepstep: GPU 2 ({uuids[2]}): Xid 74: NVLINK Error (with --health act its rank would move to a spare)",
        f"keepstep: GPU 3 ({uuids[3]}): Xid 31: GPU memory page fault",
    ]


def test_act_says_which_devices_and_whether_it_may_wait(nvml: FakeNvml, capsys: pytest.CaptureFixture[str]) -> None:
    scene = Scene(HealthMode.ACT)

    def make_sick() -> None:
        nvml.raise_xid(3, 31)
        nvml.raise_xid(2, 74)
        nvml.devices[1].uncorrectable = 1

    scene.play(make_sick, lambda: len(scene.sick) == 2)
    first, second = sorted(scene.sick)
    assert first[::2] == ((1,), True)
    assert "uncorrectable ECC errors" in first[1]
    assert second[::2] == ((2,), False)
    err = capsys.readouterr().err
    assert "its rank is replaced at once, and nothing more is started there" in err
    assert "its rank moves when a spare is warm, and nothing more is started there" in err


def test_a_device_that_has_failed_before_the_start_is_closed(nvml: FakeNvml) -> None:
    nvml.devices[1].rows = (0, 1, 0, 1)
    nvml.devices[2].rows = (0, 1, 1, 0)  # a reset may wait: told, and used
    scene = Scene(HealthMode.ACT)
    scene.play()
    assert list(scene.closed) == [1]
    assert "row remapping failed" in scene.closed[1]
    assert scene.sick == []


def test_processes_that_share_a_device_are_closed_with_it(nvml: FakeNvml) -> None:
    """Two devices for three ranks and a spare."""
    scene = Scene(HealthMode.ACT, devices=2)
    scene.play(lambda: nvml.raise_xid(1, 79), lambda: bool(scene.sick))
    assert scene.sick[0][0] == (1, 3)


def test_devices_that_the_job_does_not_use_are_not_looked_at(nvml: FakeNvml) -> None:
    nvml.devices[3].rows = (0, 1, 0, 1)
    scene, watched = Scene(HealthMode.ACT, slots=3), list[int]()
    scene.play(lambda: watched.extend(device.index for each in nvml.sets for device in each.devices))
    assert scene.closed == {}
    assert watched == [0, 1, 2]


def test_act_refuses_a_node_without_any_device_that_is_fit(nvml: FakeNvml) -> None:
    for device in nvml.devices:
        device.rows = (0, 1, 0, 1)
    with pytest.raises(ConfigurationError, match=r"--health act: no device of this node is fit to be used: GPU 0 \("):
        Scene(HealthMode.ACT).play()


@pytest.mark.parametrize("num_devices", [0, 4])
def test_what_cannot_be_watched_is_an_error_with_act_and_silence_with_warn(
    nvml: FakeNvml,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    num_devices: int,
) -> None:
    nvml.init_error = CONSTANTS["NVML_ERROR_DRIVER_NOT_LOADED"]
    why = "NVML cannot be used: NVML error 9" if num_devices else "torch sees no CUDA device on this node"
    with pytest.raises(ConfigurationError, match=f"--health act: {why}; or leave --health out"):
        Scene(HealthMode.ACT, num_devices).play()
    with caplog.at_level(logging.DEBUG, "keepstep.health"):
        Scene(HealthMode.WARN, num_devices).play()
    assert capsys.readouterr().err == ""
    assert caplog.messages == [f"the devices of this node are not watched: {why}"]
