"""The thread that reads devices, and what reaches the event loop."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable

import pytest

from keepstep.agent.health import machine, watch
from keepstep.agent.health.conditions import HealthAction
from keepstep.agent.health.machine import DeviceReading, HealthFinding
from keepstep.agent.health.watch import HealthWatch
from keepstep.errors import ConfigurationError

DEADLINE_S = 10.0


class FakeReader:
    """Devices whose readings a test changes, and Xids that it sends."""

    def __init__(self, num_devices: int = 2) -> None:
        self.labels = tuple(f"GPU {number}" for number in range(num_devices))
        self.readings = [DeviceReading() for _ in self.labels]
        self.xids: queue.Queue[tuple[int, int]] = queue.Queue()
        self.threads: set[str] = set()
        self.is_closed = threading.Event()

    def read(self, device: int) -> DeviceReading:
        self.threads.add(threading.current_thread().name)
        return self.readings[device]

    def wait(self, timeout_s: float) -> tuple[int, int] | None:
        try:
            return self.xids.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        self.is_closed.set()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "WAIT_S", 0.01)
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.02)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110  # what is waited for comes from another thread
            await asyncio.sleep(0.005)


def test_readings_and_xids_become_findings_on_the_loop() -> None:
    async def main() -> None:
        reader, found = FakeReader(), list[HealthFinding]()
        watching = HealthWatch(lambda: reader, found.append)
        assert await watching.start() == []
        reader.xids.put((1, 31))
        await until(lambda: len(found) == 1)
        reader.readings[0] = DeviceReading(is_lost=True)
        await until(lambda: len(found) == 2)
        watching.stop()
        assert [(each.device, each.action) for each in found] == [(1, HealthAction.WARN), (0, HealthAction.REPLACE)]
        assert reader.threads == {"keepstep-health"}
        assert await asyncio.to_thread(reader.is_closed.wait, DEADLINE_S)

    asyncio.run(main())


def test_the_first_look_is_what_start_returns() -> None:
    async def main() -> list[HealthFinding]:
        reader = FakeReader()
        reader.readings[1] = DeviceReading(remap_failed=True)
        watching = HealthWatch(lambda: reader, lambda finding: None)
        findings = await watching.start()
        watching.stop()
        return findings

    (finding,) = asyncio.run(main())
    assert (finding.device, finding.action) == (1, HealthAction.REPLACE)


def test_what_cannot_be_opened_is_said_by_start() -> None:
    def refuse() -> FakeReader:
        raise ConfigurationError("NVML cannot be used: Driver Not Loaded")

    async def main() -> None:
        with pytest.raises(ConfigurationError, match="Driver Not Loaded"):
            await HealthWatch(refuse, lambda finding: None).start()

    asyncio.run(main())


def test_a_driver_that_does_not_answer_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "OPEN_DEADLINE_S", 0.05)
    may_go_on = threading.Event()

    def hang() -> FakeReader:
        may_go_on.wait(DEADLINE_S)
        return FakeReader()

    async def main() -> None:
        with pytest.raises(ConfigurationError, match=r"NVML has not answered within 0\.05 s"):
            await HealthWatch(hang, lambda finding: None).start()

    began_s = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began_s < DEADLINE_S
    may_go_on.set()  # the loop is closed by now, and the thread ends by itself
    for thread in threading.enumerate():
        if thread.name == "keepstep-health":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def test_after_the_stop_nothing_is_found() -> None:
    async def main() -> None:
        reader, found = FakeReader(), list[HealthFinding]()
        watching = HealthWatch(lambda: reader, found.append)
        await watching.start()
        watching.stop()
        watching.stop()
        reader.readings[0] = DeviceReading(is_lost=True)
        assert await asyncio.to_thread(reader.is_closed.wait, DEADLINE_S)
        await asyncio.sleep(0.05)
        assert found == []

    asyncio.run(main())


def test_a_reader_that_falls_silent_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SILENT_S", 0.1)
    may_go_on = threading.Event()

    async def main() -> None:
        reader, found = FakeReader(1), list[HealthFinding]()
        watching = HealthWatch(lambda: reader, found.append)
        await watching.start()
        monkeypatch.setattr(reader, "wait", lambda timeout_s: may_go_on.wait(DEADLINE_S) and None)
        await until(lambda: len(found) == 1)
        assert found[0].action is HealthAction.WARN
        assert "NVML gives no answer" in found[0].reason
        may_go_on.set()
        watching.stop()

    asyncio.run(main())
