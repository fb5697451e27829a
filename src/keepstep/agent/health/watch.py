"""The thread that reads the devices, and the processing of its results on the agent's event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable

from keepstep.agent.health.machine import DeviceReading, HealthFinding, HealthMachine
from keepstep.agent.health.nvml import DeviceReader
from keepstep.errors import ConfigurationError

WAIT_S = 1.0
"""Timeout of one wait for an Xid, after which the thread checks whether it must end."""
LOOK_EVERY_S = 5.0
"""Interval between readings. A reading takes a few milliseconds per device. Xids do not wait for it."""
OPEN_DEADLINE_S = 60.0
"""The first use of the driver takes seconds on a machine with many GPUs."""


class HealthWatch:
    """Reads the devices in a thread, and passes the findings on, on the event loop.

    Only the thread calls NVML; only the event loop calls the `HealthMachine`. If an NVML call never returns, the thread
    hangs; the agent waits neither for the call nor for the thread.
    """

    def __init__(self, open_reader: Callable[[], DeviceReader], on_finding: Callable[[HealthFinding], None]) -> None:
        """Args:
        open_reader: returns the source of readings; called in the thread.
        on_finding: called on the event loop with each new finding.
        """
        self._open_reader = open_reader
        self._on_finding = on_finding
        self._machine: HealthMachine | None = None
        self._is_over = threading.Event()
        self._ticks: asyncio.Task[None] | None = None

    async def start(self) -> list[HealthFinding]:
        """Starts the thread. Returns the findings of the first reading of all devices.

        Raises:
            ConfigurationError: the devices cannot be read.
        """
        loop = asyncio.get_running_loop()
        first: asyncio.Future[tuple[tuple[str, ...], list[DeviceReading]]] = loop.create_future()
        threading.Thread(target=self._run, args=(loop, first), name="keepstep-health", daemon=True).start()
        try:
            async with asyncio.timeout(OPEN_DEADLINE_S):
                labels, readings = await first
        except TimeoutError:
            self._is_over.set()
            raise ConfigurationError(f"NVML has not answered within {OPEN_DEADLINE_S:g} s") from None
        now_s = time.monotonic()
        self._machine = HealthMachine(labels, now_s)
        self._ticks = asyncio.create_task(self._tick())
        self._ticks.add_done_callback(_tell_failure)
        return [
            finding for device, reading in enumerate(readings) for finding in self._machine.read(device, reading, now_s)
        ]

    def stop(self) -> None:
        """Stops reporting. The thread ends within a second, or when its NVML call returns."""
        self._is_over.set()
        if self._ticks is not None:
            self._ticks.cancel()
            self._ticks = None

    # ---- on the event loop ------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            assert self._machine is not None
            self._found(self._machine.tick(time.monotonic()))

    def _has_read(self, device: int, reading: DeviceReading) -> None:
        if self._machine is not None:
            self._found(self._machine.read(device, reading, time.monotonic()))

    def _has_seen(self, device: int, xid: int) -> None:
        if self._machine is not None:
            self._found(self._machine.xid(device, xid, time.monotonic()))

    def _found(self, findings: list[HealthFinding]) -> None:
        for finding in findings:
            if not self._is_over.is_set():
                self._on_finding(finding)

    # ---- in the thread ----------------------------------------------------------------------------------------------

    def _run(
        self, loop: asyncio.AbstractEventLoop, first: asyncio.Future[tuple[tuple[str, ...], list[DeviceReading]]]
    ) -> None:
        try:
            self._read(loop, first)
        except RuntimeError:  # the loop is closed: the job has ended
            if not loop.is_closed():
                raise

    def _read(
        self, loop: asyncio.AbstractEventLoop, first: asyncio.Future[tuple[tuple[str, ...], list[DeviceReading]]]
    ) -> None:
        try:
            reader = self._open_reader()
        except ConfigurationError as error:
            loop.call_soon_threadsafe(_fail, first, error)
            return
        try:
            devices = range(len(reader.labels))
            readings = [reader.read(device) for device in devices]
            loop.call_soon_threadsafe(_succeed, first, (tuple(reader.labels), readings))
            due_s = time.monotonic() + LOOK_EVERY_S
            while not self._is_over.is_set():
                began_s = time.monotonic()
                seen = reader.wait(WAIT_S)
                if seen is not None:
                    loop.call_soon_threadsafe(self._has_seen, *seen)
                else:  # the thread must not spin if no device supports Xids, or if an error persists
                    self._is_over.wait(max(0.0, began_s + WAIT_S - time.monotonic()))
                if time.monotonic() >= due_s:
                    due_s = time.monotonic() + LOOK_EVERY_S
                    for device in devices:
                        loop.call_soon_threadsafe(self._has_read, device, reader.read(device))
        finally:
            reader.close()


def _tell_failure(ticks: asyncio.Task[None]) -> None:
    if not ticks.cancelled() and (error := ticks.exception()) is not None:
        print(f"keepstep: the devices are no longer watched: {error!r}", file=sys.stderr, flush=True)


def _fail(first: asyncio.Future[tuple[tuple[str, ...], list[DeviceReading]]], error: ConfigurationError) -> None:
    if not first.done():
        first.set_exception(error)


def _succeed(
    first: asyncio.Future[tuple[tuple[str, ...], list[DeviceReading]]],
    found: tuple[tuple[str, ...], list[DeviceReading]],
) -> None:
    if not first.done():
        first.set_result(found)
