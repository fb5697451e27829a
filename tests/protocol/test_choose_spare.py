"""Which spare takes a lost rank: near the rank after a software fault, far from it after the loss of a node."""

import itertools

import pytest

from keepstep.protocol.recovery.placement.topology import Placement, choose_spare

LOST = Placement("a", "rack 1")
SAME_NODE, SAME_RACK, ELSEWHERE = LOST, Placement("b", "rack 1"), Placement("c", "rack 2")


def best_of(*places: Placement, node_at_fault: bool) -> Placement:
    """The place of the spare that is taken, which is the same whatever numbers the spares have."""
    taken = set()
    for order in itertools.permutations(places):
        chosen = choose_spare(LOST, dict(enumerate(order)), node_at_fault)
        assert chosen is not None
        taken.add(order[chosen])
    assert len(taken) == 1, f"it depends on their numbers: {taken}"
    return taken.pop()


def test_a_software_fault_prefers_the_lost_ranks_node_and_then_its_domain() -> None:
    assert best_of(SAME_NODE, SAME_RACK, ELSEWHERE, node_at_fault=False) == SAME_NODE
    assert best_of(SAME_RACK, ELSEWHERE, node_at_fault=False) == SAME_RACK


def test_a_fault_of_the_node_prefers_another_domain() -> None:
    assert best_of(SAME_RACK, ELSEWHERE, node_at_fault=True) == ELSEWHERE
    assert best_of(SAME_NODE, SAME_RACK, node_at_fault=True) == SAME_RACK  # the node is back by now


@pytest.mark.parametrize("node_at_fault", [False, True])
def test_a_place_in_quarantine_comes_after_all_others(node_at_fault: bool) -> None:
    near, far = Placement("a", "rack 1", penalty=1), Placement("c", "rack 2", penalty=1)
    assert best_of(near, ELSEWHERE, node_at_fault=node_at_fault) == ELSEWHERE
    assert best_of(far, SAME_RACK, node_at_fault=node_at_fault) == SAME_RACK
    assert best_of(Placement("a", "rack 1", penalty=2), near, node_at_fault=node_at_fault) == near


@pytest.mark.parametrize("node_at_fault", [False, True])
def test_among_equals_it_is_the_lowest_number(node_at_fault: bool) -> None:
    assert choose_spare(LOST, dict.fromkeys((7, 4, 9), ELSEWHERE), node_at_fault) == 4
    assert choose_spare(LOST, {}, node_at_fault) is None
