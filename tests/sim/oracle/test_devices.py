"""What the oracle says of the devices that parked spares take with their rank."""

import dataclasses

import pytest

from keepstep.sim.cluster.layout import SETTINGS, ClusterLayout, NodeLayout
from keepstep.sim.cluster.node import SimulatedNode
from keepstep.sim.oracle.checks import Check, ViolationError
from keepstep.sim.oracle.devices import DeviceWatch
from keepstep.sim.run import case_of
from keepstep.sim.world import World


@pytest.fixture
def node() -> SimulatedNode:
    """Of three devices, with room for two spares beyond them."""
    settings = dataclasses.replace(SETTINGS, world_size=2, num_spares=2, ranks_per_node=2)
    layout = ClusterLayout((NodeLayout("node-0", 5, "rack", num_devices=3),), ("0",) * 2, settings)
    return World(layout, seed=0).nodes["node-0"]


@pytest.fixture
def watch(node: SimulatedNode) -> DeviceWatch:
    """Workers 0 and 1 have the devices of their numbers."""
    watch = DeviceWatch(node.world)
    for worker in range(2):
        watch.given(node, worker, worker)
    return watch


def test_what_is_free_may_be_taken(node: SimulatedNode, watch: DeviceWatch) -> None:
    watch.given(node, 2, 2)
    watch.left(node, 0)
    watch.given(node, 3, 0)


@pytest.mark.parametrize("device", [0, 1, 3])
def test_a_device_is_left_over(node: SimulatedNode, watch: DeviceWatch, device: int) -> None:
    with pytest.raises(ViolationError, match=rf"takes device {device} of node-0, and \[2\] are free") as raised:
        watch.given(node, 3, device)
    assert raised.value.check is Check.DEVICE


def test_a_sick_device_is_not_free(node: SimulatedNode, watch: DeviceWatch) -> None:
    node.closed.add(2)
    watch.given(node, 3, 3)  # where none is left it has to share one
    watch.left(node, 1)
    with pytest.raises(ViolationError, match=r"takes device 2 of node-0, and \[1\] are free"):
        watch.given(node, 4, 2)


def test_an_agent_that_begins_another_life_has_all_devices_again(node: SimulatedNode, watch: DeviceWatch) -> None:
    node.boot()
    watch.given(node, 7, 0)


def test_seeds_have_such_nodes() -> None:
    layouts = [case_of(seed).layout for seed in range(300)]
    assert any(node.num_devices for layout in layouts for node in layout.nodes)
    for layout in layouts:
        parks = layout.parks_spares and layout.needs_rank
        assert all(node.num_devices <= node.slots and (parks or not node.num_devices) for node in layout.nodes)
