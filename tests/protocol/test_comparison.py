"""What follows from what the ranks say of their state."""

import pytest

from keepstep.protocol.comparison import Said, Verdict, compares, judge

KEPT, GIVEN = False, True
Rank = tuple[str, str, bool]


def judged(*ranks: Rank) -> tuple[tuple[int, ...], tuple[int, ...], dict[int, int]]:
    verdict = judge([Said(group.encode(), digest.encode(), given) for group, digest, given in ranks])
    return verdict.refused, verdict.apart, verdict.first


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param([("a", "1", KEPT)] * 3, ((), (), {}), id="equal"),
        pytest.param([("a", "1", KEPT), ("b", "2", KEPT), ("a", "1", GIVEN)], ((), (), {}), id="shards may differ"),
        pytest.param([("a", "1", KEPT), ("a", "2", GIVEN), ("a", "1", KEPT)], ((1,), (), {1: 0}), id="one restored"),
        pytest.param([("a", "2", GIVEN), ("a", "1", KEPT), ("a", "1", KEPT)], ((0,), (), {0: 1}), id="the first"),
        pytest.param([("a", "1", GIVEN), ("a", "2", GIVEN), ("a", "3", KEPT)], ((0, 1), (), {0: 2, 1: 2}), id="both"),
        pytest.param([("a", "1", GIVEN), ("a", "1", GIVEN), ("a", "2", KEPT)], ((0, 1), (), {0: 2, 1: 2}), id="more"),
        pytest.param([("a", "1", GIVEN), ("a", "2", GIVEN)], ((0, 1), (), {1: 0}), id="no rank is left to tell"),
        pytest.param([("a", "1", KEPT), ("a", "2", KEPT), ("a", "1", GIVEN)], ((), (1,), {1: 0}), id="apart before"),
        pytest.param(
            [("a", "1", KEPT), ("a", "2", KEPT), ("a", "3", GIVEN)], ((), (1, 2), {1: 0, 2: 0}), id="apart and restored"
        ),
        pytest.param(
            [("a", "1", KEPT), ("b", "1", KEPT), ("a", "2", KEPT), ("b", "2", GIVEN)],
            ((3,), (2,), {2: 0, 3: 1}),
            id="each in its own group",
        ),
    ],
)
def test_who_is_wrong(ranks: list[Rank], expected: object) -> None:
    assert judged(*ranks) == expected
    assert bool(Verdict(*judged(*ranks))) == (expected != ((), (), {}))


def test_when_replicas_are_compared() -> None:
    assert [step for step in range(40) if compares(step, 0, 1)] == [1, 2, 4, 8, 16]
    assert [step for step in range(20, 40) if compares(step, 30, 2)] == [30, 31]
    assert [step for step in range(1000, 1010) if compares(step, 1000, 1)] == [], "they were compared as they started"
