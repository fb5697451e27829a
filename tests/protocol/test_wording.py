"""The words for ranks, and for what is said of them."""

import pytest

from keepstep.protocol.phases import Phase
from keepstep.protocol.wording import MAX_CHARACTERS, by_reason, place_of, who


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([2, 1], "ranks 1 and 2"),
        ([0, 1, 2, 3, 5], "ranks 0 to 3 and 5"),
        (range(100_000), "ranks 0 to 99999"),
        (range(0, 90, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 37 more"),
    ],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert who(ranks) == words


def test_what_is_said_of_several_ranks_is_said_once() -> None:
    said = [(0, "killed by SIGKILL"), (9, "node b lost"), (8, "node b lost"), (10, "node b lost")]
    assert by_reason(said, what=" lost") == "rank 0 lost: killed by SIGKILL; ranks 8 to 10 lost: node b lost"


def test_a_large_job_has_no_longer_line() -> None:
    said = [(rank, f"{rank} " + "x" * 5000) for rank in range(43)]
    line = by_reason(said)
    assert line.count("; ") == 6
    assert line.endswith("; and 37 more")
    assert len(line) < 7 * (MAX_CHARACTERS + 20)
    assert by_reason(said[:1]) == f"rank 0: 0 {'x' * 5000}"


@pytest.mark.parametrize(
    ("phase", "step", "words"),
    [
        (Phase.STARTING, -1, "before the first step"),
        (Phase.UPDATED, -1, "before the first step"),
        (Phase.UPDATED, 7, "after step 7"),
        (Phase.OPTIMIZER, 7, "in optimizer of step 7"),
    ],
)
def test_places(phase: Phase, step: int, words: str) -> None:
    assert place_of(phase, step) == words
