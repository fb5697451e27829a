"""How many recoveries what has happened may begin, and what is said of one too many."""

import pytest

from keepstep.sim.faults import RELAY_FAULTS, SILENCES, WEIGHTS
from keepstep.sim.oracle.causes import HARMLESS, REPEATED_EVERY_S, Causes, most_recoveries
from keepstep.sim.oracle.checks import Check, ViolationError


def test_what_is_said_of_faults_is_said_of_faults_that_there_are() -> None:
    assert HARMLESS | REPEATED_EVERY_S.keys() <= {*WEIGHTS, *RELAY_FAULTS, *SILENCES}


def test_a_fault_may_begin_one_recovery_and_what_lasts_may_begin_more() -> None:
    assert most_recoveries("kill", 18.0) == 1
    assert most_recoveries("cut data", 5.0) == 3
    assert most_recoveries("clock jump", 18.0) == 0


def test_a_process_that_is_hurt_twice_is_lost_once() -> None:
    causes = Causes()
    causes.add("kill of process 3")
    causes.add("kill of process 3")
    causes.begins("rank 1 lost")
    with pytest.raises(
        ViolationError, match=r"recovery 2 begins \(rank 0: late\).* begin 1 at most: kill of process 3"
    ):
        causes.begins("rank 0: late")


def test_a_node_that_drains_begins_a_recovery_for_each_of_its_ranks_at_the_most() -> None:
    """Two may move one after the other, and the two that are left are lost with it at one moment."""
    causes = Causes()
    causes.node_leaves("node-17", 4)
    for rank in range(4):
        causes.begins(f"rank {rank} lost: its node drains")
    with pytest.raises(ViolationError, match=r"begin 4 at most: node-17 drains"):
        causes.begins("ranks [26, 27] lost: node node-17 has left")


def test_a_recovery_needs_a_cause() -> None:
    with pytest.raises(ViolationError, match="may begin none") as raised:
        Causes().begins("rank 0: late")
    assert raised.value.check is Check.NO_CAUSE
