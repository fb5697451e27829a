"""Who feeds whom, and when a tree is faster than a chain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.protocol.transfer.topology import ROOT, FedNode, choose_fanout, choose_feeder, update_s

MIB = 1 << 20


def come(num_nodes: int, fanout: int, without_address: frozenset[int] = frozenset()) -> list[FedNode]:
    """So many nodes come one after the other."""
    present: list[FedNode] = []
    for number in range(1, num_nodes + 1):
        address = None if number in without_address else f"n{number}:1"
        present.append(FedNode(number, address, choose_feeder(present, fanout, ())))
    return present


def test_a_chain() -> None:
    assert [node.feeder for node in come(4, fanout=1)] == [ROOT, 1, 2, 3]


def test_a_tree_fills_up_from_the_root() -> None:
    assert [node.feeder for node in come(7, fanout=2)] == [ROOT, ROOT, 1, 1, 2, 2, 3]


def test_a_node_that_cannot_feed_others_is_an_end_of_the_tree() -> None:
    assert [node.feeder for node in come(4, fanout=2, without_address=frozenset({1}))] == [ROOT, ROOT, 2, 2]


def test_where_no_node_has_room_the_root_feeds() -> None:
    assert [node.feeder for node in come(3, fanout=1, without_address=frozenset({1, 2}))] == [ROOT, ROOT, ROOT]


def test_a_feeder_that_does_not_answer_is_gone_around() -> None:
    present = come(3, fanout=1)
    assert choose_feeder(present[:2], 1, {"n2:1"}) == ROOT
    assert choose_feeder(present[:2], 1, {"n9:1"}) == 2


def test_a_lost_node_leaves_its_place_to_the_next_that_comes() -> None:
    """Nodes that it fed come again with higher numbers."""
    present = [node for node in come(3, fanout=1) if node.number != 1]
    assert choose_feeder(present, 1, ()) == ROOT


@given(st.integers(1, 40), st.integers(1, 5), st.frozensets(st.integers(1, 40)))
def test_every_way_leads_to_the_root_and_no_address_feeds_too_many(
    num_nodes: int, fanout: int, without: frozenset[int]
) -> None:
    present = come(num_nodes, fanout, without)
    for node in present:
        assert node.feeder < node.number
        assert node.feeder not in without
        fed = sum(each.feeder == node.number for each in present)
        assert fed <= fanout


def test_a_chain_is_best_for_much_data() -> None:
    """16 GB over links of 5 GB/s, to 8 nodes."""
    assert choose_fanout(8, 16 << 30, 4 * MIB, 5e9, 0.001) == 1


def test_a_tree_is_best_for_little_data_and_many_nodes() -> None:
    """64 MiB, to 512 nodes: 511 steps of 1 ms would take longer than to send everything several times."""
    assert choose_fanout(512, 64 * MIB, 4 * MIB, 5e9, 0.001) > 1


def test_a_chain_while_nothing_was_measured() -> None:
    assert choose_fanout(1000, MIB, MIB, 0.0, 0.001) == 1
    assert choose_fanout(1, MIB, MIB, 1e9, 0.001) == 1
    assert choose_fanout(1000, 0, 0, 1e9, 0.001) == 1


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_the_time_of_a_chain_hardly_depends_on_the_number_of_nodes(num_nodes: int) -> None:
    """512 MiB at 1 Gbit/s."""
    one = update_s(1, 1, 512 * MIB, 4 * MIB, 125e6, 0.002)
    assert one == pytest.approx(4.297, abs=0.001)
    assert update_s(num_nodes, 1, 512 * MIB, 4 * MIB, 125e6, 0.002) <= 1.2 * one
