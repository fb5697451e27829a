"""Which device a parked spare takes with its rank."""

import pytest

from keepstep.protocol import messages as msg
from keepstep.protocol.deadlines import Deadlines
from keepstep.protocol.messages import Cause, Tag
from keepstep.protocol.node.agent import AgentMachine
from keepstep.protocol.node.effects import HandOver, Spawn
from keepstep.protocol.node.parked import device_for
from keepstep.protocol.phases import Phase
from keepstep.protocol.reliable_channel import ReliableChannel

NODE, NUM_GPUS = "node-a", 2
TAG = Tag(1, 3, Phase.UPDATED)


@pytest.mark.parametrize(
    ("own", "taken", "closed", "expected"),
    [
        (1, {0}, (), 1),
        (2, {0}, (), 1),
        (2, {1}, (), 0),
        (3, set(), (), 0),
        (3, {0, 1}, (), 3),
        (2, {0}, (1,), 2),
        (0, {1}, (0,), 0),
    ],
)
def test_its_own_or_the_first_that_is_free(own: int, taken: set[int], closed: tuple[int, ...], expected: int) -> None:
    assert device_for(own, taken, closed, NUM_GPUS) == expected


class Node:
    """Two ranks on two GPUs, and spares beyond them."""

    def __init__(self, devices_of_parked: int, num_spares: int = 2) -> None:
        joined = msg.NodeJoined(NODE, NUM_GPUS + num_spares, NODE, 0, 0, (), 0)
        self.agent = AgentMachine(joined, 1, Deadlines(), devices_of_parked)
        self.controller = ReliableChannel(NODE, 1)
        for number in range(NUM_GPUS + num_spares):
            rank = number if number < NUM_GPUS else None
            self.order(msg.StartWorker(number, rank, number, rank, NUM_GPUS, "the job starts"))
            self.agent.spawned(number, 4000 + number)

    def order(self, order: msg.AgentOrder) -> list[object]:
        self.controller.say([order])
        for packet in self.controller.packets(1.0):
            self.agent.receive(packet, 1.0)
        return list(self.agent.take())

    def lose(self, worker: int) -> None:
        self.agent.exited(worker, Cause.EXIT, "killed", TAG, 1.0)
        self.agent.take()

    def assign(self, worker: int, rank: int) -> int | None:
        [effect] = [each for each in self.order(msg.Assign(worker, 2, rank, rank, NUM_GPUS, None, ())) if each]
        assert isinstance(effect, HandOver)
        assert isinstance(effect.order, msg.Assign)
        return effect.order.device


def test_each_takes_the_gpu_of_the_rank_that_was_lost_last() -> None:
    node = Node(NUM_GPUS)
    node.lose(1)
    assert node.assign(2, 1) == 1
    node.lose(0)
    assert node.assign(3, 0) == 0
    node.lose(2)
    node.agent.devices_failed((0,), "fell off the bus", {3: TAG}, 1.0)
    node.order(msg.StartWorker(4, None, 2, None, NUM_GPUS, "a spare"))
    assert node.assign(4, 1) == 1, "the sick one is left alone"


def test_a_spare_with_a_device_of_its_own_keeps_it() -> None:
    node = Node(0)
    node.lose(1)
    assert node.assign(2, 1) is None


def test_a_rank_that_is_started_beyond_the_devices_takes_one_that_is_free() -> None:
    """All ranks restart, and a sick device has left the controller with numbers that were for parked spares."""
    node = Node(NUM_GPUS)
    for worker in range(4):
        node.lose(worker)
    node.agent.devices_failed((0,), "fell off the bus", {}, 1.0)
    [spawn] = [each for each in node.order(msg.StartWorker(4, 0, 2, 0, 1, "anew")) if isinstance(each, Spawn)]
    assert spawn.device == 1
    [spawn] = [each for each in node.order(msg.StartWorker(5, 1, 3, 1, 1, "anew")) if isinstance(each, Spawn)]
    assert spawn.device == 3, "none is left, and the worker says so"
