"""What is known of published weights, from what ranks have told."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.published import FOLDER, news, told_of

from keepstep.protocol.messages import PublicationStage
from keepstep.trace.weights.publications import (
    MAX_COMMITS,
    MAX_FAILURES,
    Publication,
    Publications,
    describe_publication,
    gigabytes,
    publication_text,
)

COMMITTED, UNDER_WAY = PublicationStage.COMMITTED, PublicationStage.UNDER_WAY


def test_two_ranks_tell_of_the_same_updates() -> None:
    """Each update counts once, its bytes are those of both, and it took from the first begin to the last end."""
    found = told_of().found[FOLDER]
    assert (found.version, found.under_way) == (3, (5, 5.0))
    assert (found.num_committed, found.num_broken_off, found.num_lost_consumers) == (3, 1, 1)
    assert (found.last_bytes, found.last_seconds, found.last_bytes_per_s) == (2 * 10**9, 0.5, 4e9)
    assert (found.sent_bytes, found.seconds) == (6 * 10**9, 1.5)
    assert [(each.version, each.text) for each in found.failures] == [
        (2, "engine-1/dead: has shown nothing for 3 s"),
        (4, "version 4 was not published: rank 1: is gone"),
    ]


def test_consumers_belong_to_the_node_through_which_they_come() -> None:
    found = told_of().found[FOLDER]
    assert found.consumers() == {"a": [3], "engine-1": [1, 3]}


@pytest.mark.parametrize(
    ("version", "lag"), [(3, (0, 0.0)), (2, (1, 7.0)), (1, (2, 8.0)), (None, (3, 9.0)), (99, (3, 9.0))]
)
def test_lag_counts_from_the_first_version_that_was_missed(version: int | None, lag: tuple[int, float]) -> None:
    assert told_of().found[FOLDER].lag(version, now_s=10.0) == lag


def test_a_consumer_that_comes_ends_no_update() -> None:
    found = told_of().found[FOLDER]
    found.take("a", news(0, PublicationStage.ATTACHED, None, 6.0, (("near", 3), ("new", None))))
    assert found.under_way == (5, 5.0)
    assert found.consumers()["a"] == [3, None]


def test_a_job_that_goes_back_publishes_a_version_again() -> None:
    """Versions 4, 5, and after a recovery 4 once more: who has that 4 lacks nothing, who has 5 lacks it."""
    found = Publication(FOLDER)
    for generation, version, at_s in ((1, 4, 1.0), (1, 5, 2.0), (2, 4, 3.0)):
        found.take("a", news(0, COMMITTED, version, at_s, generation=generation))
    assert (found.version, found.num_committed) == (4, 3)
    assert found.lag(4, 5.0) == (0, 0.0)
    assert found.lag(5, 5.0) == (1, 2.0)


def test_a_device_that_was_replaced_does_not_count_in_the_next_update() -> None:
    found = told_of().found[FOLDER]
    found.take("c", news(0, COMMITTED, 6, 6.0))
    assert sorted(found.last_devices) == [0]
    assert found.last_bytes == 10**9
    assert found.devices[0].node == "c"


def test_however_long_a_job_runs_what_is_kept_stays_small() -> None:
    found = Publications()
    for version in range(3 * MAX_COMMITS):
        found.take("a", news(0, COMMITTED, version, float(version), failures=("x: is gone",)))
    publication = found.found[FOLDER]
    assert (len(publication.commits), len(publication.failures)) == (MAX_COMMITS, MAX_FAILURES)
    assert publication.num_lost_consumers == 3 * MAX_COMMITS
    assert publication.commits[-1] == (3 * MAX_COMMITS - 1, 3 * MAX_COMMITS - 1.0)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    told_of().write(tmp_path / "weights.json")
    assert Publications.read(tmp_path / "weights.json") == told_of()


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"found": {"a": 1}}', b"[" * 100_000])
def test_what_is_no_such_file_tells_nothing(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "weights.json"
    if content is not None:
        path.write_bytes(content)
    assert Publications.read(path) == Publications()


def test_as_plain_data() -> None:
    described = describe_publication(told_of().found[FOLDER], now_s=10.0)
    assert described == {
        "folder": FOLDER,
        "version": 3,
        "age_s": 7.0,
        "under_way": 5,
        "under_way_s": 5.0,
        "consumers": 3,
        "lag_versions": 2,
        "lag_s": 8.0,
        "nodes": [
            {"node": "a", "consumers": 1, "lag_versions": 0, "lag_s": 0.0},
            {"node": "engine-1", "consumers": 2, "lag_versions": 2, "lag_s": 8.0},
        ],
        "seconds": 0.5,
        "bytes": 2 * 10**9,
        "unchanged_bytes": 0,
        "bytes_per_s": 4 * 10**9,
        "committed": 3,
        "broken_off": 1,
        "lost_consumers": 1,
        "failures": [
            {"age_s": 6.0, "version": 4, "text": "version 4 was not published: rank 1: is gone"},
            {"age_s": 8.0, "version": 2, "text": "engine-1/dead: has shown nothing for 3 s"},
        ],
    }


def test_in_one_line() -> None:
    assert publication_text(describe_publication(told_of().found[FOLDER], now_s=10.0)) == (
        "weights in /run/weights: version 3 (5 under way), 3 consumers on 2 nodes, up to 2 behind for 8.0 s, "
        "last 2.00 GB at 4.00 GB/s, 1 broken off, 1 left out"
    )
    fresh = Publication(FOLDER)
    fresh.take("a", news(0, PublicationStage.ATTACHED, None, 1.0, (("near", None),)))
    assert publication_text(describe_publication(fresh, 2.0)) == "weights in /run/weights: no version yet, 1 consumer"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 MB"), (12_345, "0.0123 MB"), (16_789_504, "16.8 MB"), (5 * 10**8, "0.50 GB")]
)
def test_sizes_for_people(num_bytes: int, text: str) -> None:
    assert gigabytes(num_bytes) == text
