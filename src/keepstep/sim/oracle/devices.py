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
    """Of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sick: set[tuple[str, int]] = set()
        """(node, device): those that a fault has hit."""
        self._known: dict[str, frozenset[int]] = {}
        """node -> the devices of which the controller has heard, in what it has written down."""
        self._began: list[tuple[float, bool, bool]] = []
        """When each device became sick, whether it has failed, and whether nothing else was going on then."""
        self._held: dict[tuple[str, int], dict[int, int]] = {}
        """Of each life of a node, where spares are parked: the devices of its ranks, by worker."""

    def sickens(self, node: str, device: int, *, has_failed: bool, is_calm: bool) -> None:
        """A device becomes sick."""
        self._sick.add((node, device))
        self._began.append((self._world.schedule.now_s, has_failed, is_calm))

    def is_sick(self, worker: SimulatedProcess) -> bool:
        """Whether a process is on such a device: it may be killed."""
        return (worker.node.name, worker.device) in self._sick

    def given(self, node: SimulatedNode, worker: int, device: int) -> None:
        """An agent gives a device to a process that has, or gets, a rank.

        Raises:
            ViolationError: it is sick, another rank's, or none at all, and one that is free and well is left over.
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
        """An agent knows that a process has ended."""
        self._held.get((node.name, node.incarnation), {}).pop(worker, None)

    def decided(self, entry: JournalEntry) -> None:
        """The controller has decided something, and written it down.

        Raises:
            ViolationError: it starts something on a device that it knew to be closed.
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
        """A device has been sick for long.

        Raises:
            ViolationError: a rank is still there, and nothing stood in its way: the device has failed, or a spare could
                have taken the rank.
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
