"""The table of what follows from a condition of a device."""

from keepstep.agent.health.conditions import RULES, XIDS, Action, Condition, rule_of_xid


def test_each_condition_has_a_rule() -> None:
    assert set(RULES) == set(Condition)


def test_what_the_application_causes_only_warns() -> None:
    """The list that NVIDIA's device plugin for Kubernetes ignores."""
    assert {xid: rule_of_xid(xid).action for xid in (13, 31, 43, 45, 68, 109)} == dict.fromkeys(
        (13, 31, 43, 45, 68, 109), Action.WARN
    )


def test_what_needs_a_reset_or_a_restart_costs_the_rank() -> None:
    """RESET_GPU and RESTART_BM in NVIDIA's catalog, but for 109 and 156."""
    for xid in (46, 62, 64, 79, 95, 110, 119, 120, 136, 140, 143, 155, 158):
        assert XIDS[xid].action is Action.REPLACE, xid


def test_an_xid_without_a_row_only_warns() -> None:
    assert 9999 not in XIDS
    assert rule_of_xid(9999).action is Action.WARN
