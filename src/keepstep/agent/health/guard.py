"""The agent's reaction to the health of its node's devices, as set by ``--health``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from keepstep.agent.health.conditions import HealthAction
from keepstep.agent.health.machine import HealthFinding
from keepstep.agent.health.nvml import DeviceReader, NvmlReader
from keepstep.agent.health.watch import HealthWatch
from keepstep.agent.settings import AgentSettings, HealthMode
from keepstep.errors import ConfigurationError

_LOG = logging.getLogger("keepstep.health")

OnSick = Callable[[tuple[int, ...], str, bool], None]
"""Called with device numbers of the controller, the reason, and whether their ranks are lost at once."""

_WOULD = {
    HealthAction.REPLACE: " (with --health act its rank would be replaced at once)",
    HealthAction.DRAIN: " (with --health act its rank would move to a spare)",
    HealthAction.WARN: "",
}
_DOES = {
    HealthAction.REPLACE: "; its rank is replaced at once, and nothing more is started there",
    HealthAction.DRAIN: "; its rank moves when a spare is warm, and nothing more is started there",
    HealthAction.WARN: "",
}


class DeviceGuard:
    """Watches the devices that the node's ranks and spares use, and prints their conditions."""

    def __init__(self, settings: AgentSettings, on_sick: OnSick) -> None:
        """Args:
        settings: settings of the node's agent.
        on_sick: called on the event loop, and only with ``--health act``.
        """
        self._mode = settings.health.mode
        self._by_bus = settings.health.by_bus
        self._names = settings.devices[: settings.place.slots]
        self._numbers = range(max(settings.place.slots, settings.place.world_size))
        self._num_devices = len(settings.devices)
        self._on_sick = on_sick
        self._watch: HealthWatch | None = None

    async def start(self) -> dict[int, str]:
        """Checks all devices once, and starts to watch them.

        Returns:
            device number of the controller -> the reason why no worker may be started on it.

        Raises:
            ConfigurationError: with ``--health act``, the devices cannot be watched, or all have failed.
        """
        if self._mode is HealthMode.OFF:
            return {}
        try:
            if not self._names:
                raise ConfigurationError("torch sees no CUDA device on this node")
            watch = HealthWatch(self._open, self._found)
            findings = await watch.start()
        except ConfigurationError as error:
            if self._mode is HealthMode.ACT:
                raise ConfigurationError(f"--health act: {error}; or leave --health out") from error
            _LOG.debug("the devices of this node are not watched: %s", error)
            return {}
        self._watch = watch
        closed: dict[int, str] = {}
        for finding in findings:
            self._tell(finding)
            if self._mode is HealthMode.ACT and finding.action is HealthAction.REPLACE:
                closed |= dict.fromkeys(self._numbers_of(finding.device), finding.reason)
        if closed.keys() >= set(self._numbers):
            self.stop()
            raise ConfigurationError(f"--health act: no device of this node is fit to be used: {closed[0]}")
        return closed

    def stop(self) -> None:
        """Stops watching."""
        if self._watch is not None:
            self._watch.stop()

    def _open(self) -> DeviceReader:
        return NvmlReader(self._names, by_bus=self._by_bus)

    def _found(self, finding: HealthFinding) -> None:
        self._tell(finding)
        if self._mode is HealthMode.ACT and finding.action is not HealthAction.WARN:
            self._on_sick(self._numbers_of(finding.device), finding.reason, finding.action is HealthAction.REPLACE)

    def _numbers_of(self, device: int) -> tuple[int, ...]:
        """Returns the controller's numbers for a device. There are several if processes share it."""
        return tuple(self._numbers[device :: self._num_devices])

    def _tell(self, finding: HealthFinding) -> None:
        follows = (_DOES if self._mode is HealthMode.ACT else _WOULD)[finding.action]
        print(f"keepstep: {finding.reason}{follows}", file=sys.stderr, flush=True)
