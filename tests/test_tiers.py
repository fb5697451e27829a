"""The tiers of the tests are what they say: each line names tests that are there, and `make test` stays short."""

import re
from pathlib import Path

import pytest
from tests.conftest import QUICK, tier_of, tiers

HERE = Path(__file__).parent
DURATIONS = HERE / "durations.txt"
MOST_S = 600.0
"""For the tests of `make test` together: two cores take half of it, for `make test` runs two files at a time."""


def is_there(test: str) -> bool:
    """Whether a test's id, or its beginning, leads to a test."""
    path, _colons, function = test.partition("::")
    file = HERE.parent / path
    if not function:
        return file.exists()
    name = re.escape(function.partition("[")[0])
    return file.is_file() and re.search(rf"^def {name}", file.read_text("utf-8"), re.MULTILINE) is not None


def test_every_line_leads_to_a_test() -> None:
    assert [test for test in tiers() if not is_there(test)] == []


@pytest.mark.parametrize(
    ("test", "tier"),
    [
        ("tests/chaos/test_drills.py::test_each_kind_of_fault", "quick"),
        ("tests/chaos/test_drills.py::test_awkward_moments", "full"),
        ("tests/chaos/test_drills.py::test_every_kind_in_every_phase[train_gpt.py-2]", "nightly"),
        ("tests/protocol/test_resume.py::test_anything", "quick"),
        ("tests/chaos/test_nothing.py::test_anything", "full"),
    ],
)
def test_the_longest_line_counts(test: str, tier: str) -> None:
    assert tier_of(test) == tier


def test_make_test_stays_short() -> None:
    """By the record: `make durations` rewrites it. A slow test belongs to another tier, or has to become quick."""
    lines = [line.split(" ", 1) for line in DURATIONS.read_text("utf-8").splitlines()]
    slowest = [test for _seconds, test in lines[:-1]]
    assert [test for test in slowest if not is_there(test) or tier_of(test) != QUICK] == []
    total_s = sum(float(seconds) for seconds, _test in lines)
    assert total_s <= MOST_S, "\n".join(f"{seconds} s {test}" for seconds, test in lines[:30])
