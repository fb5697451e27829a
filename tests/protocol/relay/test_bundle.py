"""Packets in bundles mean what they mean alone: to the controller, to its journal, and to the agents."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.toy_cluster import RelayedCluster, ToyCluster

from keepstep.protocol import messages as msg
from keepstep.protocol.controller import AnswersReceived, ControllerMachine
from keepstep.protocol.deadlines import LEASE_S
from keepstep.protocol.recovery import RecoverySettings
from keepstep.protocol.relay.bundle import Item, NodeConnected, NodeSaid, PacketBundle, bundled

ANSWERS = st.sampled_from([msg.GroupsReset, msg.StateRecovered, msg.WorkerFenced])
NODES = ("node-0", "node-1", "node-2")


def answer(kind: type, worker: int) -> msg.Report:
    if kind is msg.GroupsReset:
        return msg.GroupsReset((worker, worker + 10), 2)
    return (
        msg.StateRecovered((worker, worker + 10), 2, 0, False)
        if kind is msg.StateRecovered
        else msg.WorkerFenced(worker)
    )


@st.composite
def gathered(draw: st.DrawFn) -> list[NodeConnected | NodeSaid]:
    items: list[NodeConnected | NodeSaid] = []
    numbers: dict[str, int] = defaultdict(int)
    for node in draw(st.lists(st.sampled_from(NODES), max_size=12)):
        if draw(st.integers(0, 5)) == 0:
            items.append(NodeConnected(node))
            continue
        messages = tuple(answer(kind, NODES.index(node)) for kind in draw(st.lists(ANSWERS, max_size=2)))
        packet = msg.Packet(node, 1, numbers[node], draw(st.integers(0, 3)), messages, misses=draw(st.booleans()))
        numbers[node] += len(messages)
        items.append(NodeSaid(node, packet))
    return items


def by_node(items: list[Item]) -> dict[str, list[object]]:
    found: dict[str, list[object]] = defaultdict(list)
    for item in items:
        if isinstance(item, PacketBundle):
            assert len(set(item.nodes)) == len(item.nodes)
            for packet in item.packets():
                found[packet.node].append(NodeSaid(packet.node, packet))
        else:
            found[item.node].append(item)
    return found


@given(gathered())
def test_a_bundle_holds_what_each_node_said_in_its_order(items: list[NodeConnected | NodeSaid]) -> None:
    assert by_node(bundled(items)) == by_node(list(items))


def test_what_all_answer_alike_is_one_bundle() -> None:
    packets = [msg.Packet(node, 1, 7, 3, (answer(msg.GroupsReset, n),), misses=False) for n, node in enumerate(NODES)]
    (bundle,) = bundled(NodeSaid(packet.node, packet) for packet in packets)
    assert bundle == PacketBundle(
        NODES, (1,) * 3, (7,) * 3, (3,) * 3, ((0, 10), (1, 11), (2, 12)), (msg.GroupsReset((), 2),)
    )


# ---- The controller -------------------------------------------------------------------------------------------------


def state_of(cluster: ToyCluster) -> object:
    job = cluster.controller.job
    workers = [(each.worker, each.node, each.rank, each.lost, each.gone) for each in job.roster.workers.values()]
    numbers = {name: each.channel.received for name, each in cluster.controller.connections.items()}
    return job.stage, job.generation, sorted(job.awaited), workers, job.membership, job.ended, numbers


def walk(cluster: ToyCluster, seed: int) -> list[object]:
    """The same faults for both."""
    rng, states = random.Random(seed), []
    cluster.go()
    for _ in range(6):
        match rng.choice(("kill", "kill", "cut off", "restart", "wait")):
            case "kill":
                if cluster.controller.job.stage == "training":
                    cluster.kill_rank(rng.randrange(3))
            case "cut off":
                node = cluster.nodes[rng.choice(sorted(cluster.nodes))]
                node.is_cut_off = not node.is_cut_off
                cluster.wait(LEASE_S * 1.4)
            case "restart":
                cluster.restart_controller().go()
            case _:
                cluster.wait(1.0)
        states.append(state_of(cluster))
    again = ControllerMachine.from_journal(cluster.settings, cluster.entries(), cluster.now_s).job
    assert again.membership == cluster.controller.job.membership or again.generation > cluster.controller.job.generation
    return states


@pytest.mark.parametrize("offset", range(20))
def test_with_a_relay_and_without_the_same_comes_of_the_same_faults(seed: int, offset: int) -> None:
    relayed, direct = RelayedCluster(), ToyCluster()
    assert walk(relayed, seed + offset) == walk(direct, seed + offset)
    assert any(isinstance(entry.event, AnswersReceived) for entry in relayed.entries())
    assert len(relayed.journal) < len(direct.journal)


def test_a_job_is_drained_with_a_relay_as_without() -> None:
    relayed, direct = RelayedCluster(), ToyCluster()
    for cluster in (relayed, direct):
        cluster.go()
        cluster.controller.drain("SIGTERM", cluster.now_s)
        cluster.go()
    ended = relayed.controller.job.ended
    assert ended is not None
    assert "drained at step 1, with a checkpoint" in ended.reason
    assert state_of(relayed) == state_of(direct)


def two_nodes() -> ControllerMachine:
    controller = ControllerMachine(RecoverySettings(2, 0, ranks_per_node=1))
    for number, node in enumerate(NODES[:2]):
        joined = msg.NodeJoined(node, 1, "", number, 2, (), 0)
        controller.receive(msg.Packet(node, 1, 0, 0, (joined,), misses=False), 100.0)
    controller.take_entries()
    controller.packets(100.0)
    return controller


def heartbeats(nodes: tuple[str, ...], received: tuple[int, ...]) -> PacketBundle:
    count = len(nodes)
    return PacketBundle(nodes, (1,) * count, (1,) * count, received, ((),) * count, ())


def test_numbers_that_cannot_be_are_of_one_node() -> None:
    controller = two_nodes()
    ((node, why),) = controller.receive_bundle(heartbeats(NODES[:2], (99, 1)), 100.5)
    assert node == "node-0"
    assert "acknowledges 99 messages" in why
    assert [each.heard_s for each in controller.connections.values()] == [100.0, 100.5]


def test_a_bundle_of_heartbeats_renews_leases_and_is_no_event() -> None:
    controller = two_nodes()
    assert controller.receive_bundle(heartbeats(NODES[:2], (1, 1)), 100.5) == []
    assert controller.take_entries() == []
    assert [each.heard_s for each in controller.connections.values()] == [100.5, 100.5]


def test_the_leases_of_nodes_whose_relay_is_lost_start_over() -> None:
    controller = two_nodes()
    controller.relay_lost(["node-0", "node-9"], 102.0)
    ends_s = {node: each.end_s(LEASE_S) for node, each in controller.connections.items()}
    assert ends_s == {"node-0": 102.0 + LEASE_S, "node-1": 100.0 + LEASE_S}


def test_to_a_node_without_a_connection_nothing_is_transmitted() -> None:
    controller = two_nodes()
    controller.call_off(msg.EndJob(1, "enough"), 101.0)
    alone, ((relay, bundle),) = controller.bundles(101.0, {"node-1": 4})
    assert (alone, relay, bundle.nodes) == ([], 4, ("node-1",))
    assert bundle.messages == (msg.EndJob(1, "enough"),)
    controller.reconnected("node-0")
    (packet,), bundles = controller.bundles(101.0, {"node-0": 5})
    assert isinstance(packet, msg.Packet)
    assert (packet.node, packet.first, len(packet.messages), bundles) == ("node-0", 0, 2, [])
