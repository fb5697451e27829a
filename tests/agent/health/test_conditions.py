"""The table of what follows from a condition of a device."""

import re
from pathlib import Path

from keepstep.agent.health import machine, watch
from keepstep.agent.health.conditions import RULES, UNKNOWN_XID, XIDS, DeviceCondition, HealthAction, rule_of_xid

PAGE = Path(__file__).parents[3] / "docs" / "observe.md"
ROW = re.compile(r"^\| ([^|]+) \| (replace|drain|warn) \| ([^|]+) \|$", re.MULTILINE)


def test_each_condition_has_a_rule() -> None:
    assert set(RULES) == set(DeviceCondition)


def test_what_the_application_causes_only_warns() -> None:
    """The list that NVIDIA's device plugin for Kubernetes ignores."""
    assert {xid: rule_of_xid(xid).action for xid in (13, 31, 43, 45, 68, 109)} == dict.fromkeys(
        (13, 31, 43, 45, 68, 109), HealthAction.WARN
    )


def test_what_needs_a_reset_or_a_restart_costs_the_rank() -> None:
    """RESET_GPU and RESTART_BM in NVIDIA's catalog, except for 109 and 156."""
    for xid in (46, 62, 64, 79, 95, 110, 119, 120, 136, 140, 143, 155, 158):
        assert XIDS[xid].action is HealthAction.REPLACE, xid


def test_an_xid_without_a_row_only_warns() -> None:
    assert 9999 not in XIDS
    assert rule_of_xid(9999).action is HealthAction.WARN


def test_the_table_of_the_page_is_that_of_the_code() -> None:
    expected = [(str(condition), str(rule.action), rule.meaning) for condition, rule in RULES.items()]
    expected += [(f"Xid {xid}", str(rule.action), rule.meaning) for xid, rule in sorted(XIDS.items())]
    expected += [("any other Xid", str(UNKNOWN_XID.action), UNKNOWN_XID.meaning)]
    assert ROW.findall(PAGE.read_text("utf-8")) == expected


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    text = " ".join(PAGE.read_text("utf-8").split())
    for fact in (
        f"and every {watch.LOOK_EVERY_S:g} s the counters",
        f"keepstep reports a slowdown when it has lasted for {machine.SLOW_S:g} s",
        f"the same Xid of a device again after {machine.REPEAT_S:g} s",
        f"also when no call has returned for {machine.SILENT_S:g} s",
    ):
        assert fact in text
