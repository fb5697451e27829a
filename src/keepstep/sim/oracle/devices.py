"""The oracle's checks of devices: nothing starts on unhealthy ones, ranks leave them, and each rank has its own device
if spares are parked without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.protocol.controller import JournalEntry, ReportsReceived
from keepstep.protocol.messages import DevicesClosed, NodeJoined, StartWorker
from keepstep.protocol.worker import WorkerState
from keepstep.sim.oracle.checks import Check, ViolationError
from keepstep.sim.oracle.drain import SPARE_IS_WARM_S

if TYPE_CHECKING:
    from keepstep.sim.cluster.node import SimulatedNode
    from keepstep.sim.cluster.process import SimulatedProcess
    from keepstep.sim.world import World


class DeviceWatch:
    """Watches the devices of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sick: set[tuple[str, int]] = set()
        """(node, device) of each device that a fault has hit."""
        self._known: dict[str, frozenset[int]] = {}
        """node -> the closed devices that the controller knows of, from reports in its journal."""
        self._began: list[tuple[float, bool, bool]] = []
        """For each sick device: when it became sick, whether it has failed, whether all ranks trained then."""
        self._held: dict[tuple[str, int], dict[int, int]] = {}
        """(node, incarnation of its agent) -> worker -> its device, for workers with a rank."""

    def sickens(self, node: str, device: int, *, has_failed: bool, is_calm: bool) -> None:
        """Records that a device has become sick."""
        self._sick.add((node, device))
        self._began.append((self._world.schedule.now_s, has_failed, is_calm))

    def is_sick(self, worker: SimulatedProcess) -> bool:
        """Returns whether a process is on a sick device, so that it may be killed."""
        return (worker.node.name, worker.device) in self._sick

    def given(self, node: SimulatedNode, worker: int, device: int) -> None:
        """Checks the device that an agent gives to a process with a rank.

        Raises:
            ViolationError: the device is sick, another rank's, or none at all, although a healthy one is free.
        """
        held = self._held.setdefault((node.name, node.incarnation), {})
        taken = {each for number, each in held.items() if number != worker} | node.closed
        free = set(range(node.layout.num_devices)) - taken
        if free and device not in free:
            raise ViolationError(
                Check.DEVICE, f"worker {worker} takes device {device} of {node.name}, and {sorted(free)} are free"
            )
        held[worker] = device

    def left(self, node: SimulatedNode, worker: int) -> None:
        """Frees the device of a process, whose end the agent knows."""
        self._held.get((node.name, node.incarnation), {}).pop(worker, None)

    def decided(self, entry: JournalEntry) -> None:
        """Checks the orders in an entry of the controller's journal.

        Raises:
            ViolationError: the controller starts a process on a device that it knew to be closed.
        """
        reports = entry.event.reports if isinstance(entry.event, ReportsReceived) else ()
        for report in reports:
            if isinstance(report, NodeJoined):
                self._known[report.node] = frozenset(report.closed)
        for node, order, _ in entry.orders:
            if isinstance(order, StartWorker) and node is not None and order.device in self._known.get(node, ()):
                raise ViolationError(
                    Check.DEVICE,
                    f"worker {order.worker} is started on device {order.device} of {node}, which is closed",
                )
        for report in reports:
            if isinstance(report, DevicesClosed):
                self._known[report.node] = self._known.get(report.node, frozenset()).union(report.devices)

    def should_be_left(self, node: str, device: int) -> None:
        """Checks that no rank is left on a device that has been sick for long.

        Raises:
            ViolationError: a rank is still there. The device has failed, or a spare could have taken the rank, and no
                other event has prevented it.
        """
        world = self._world
        began_s, has_failed, was_calm = self._began[0]
        is_clear = was_calm and not world.oracle.drain.was_disturbed_since(began_s)
        if not is_clear or len(self._began) > 1 or world.oracle.finished_ranks:
            return
        holders = world.rank_holders()
        there = [worker for worker in holders if (worker.node.name, worker.device) == (node, device)]
        elsewhere = {worker.shard for worker in holders if worker not in there}
        warm = [
            spare
            for spare in world.spares()
            if not self.is_sick(spare)
            and spare.machine.state is WorkerState.READY
            and spare.spawned_s + SPARE_IS_WARM_S < world.schedule.now_s
        ]
        if there and (has_failed or (warm and there[0].shard in elsewhere)):
            why = "which has failed" if has_failed else "and spares are warm"
            raise ViolationError(Check.DEVICE, f"{there[0]} is still on device {device} of {node}, {why}")
