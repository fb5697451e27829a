"""What a page is told of shards and snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.published import FOLDER

from keepstep.dashboard import wire
from keepstep.dashboard.report import page_data
from keepstep.sim.recording import SNAPSHOT_BYTES
from keepstep.trace.timeline.run import Run, opened


@pytest.fixture
def found(sharded: Path) -> Iterator[Run]:
    with opened(sharded) as run:
        yield run


def test_a_job_says_who_holds_what_and_where_it_can_go_back_to(found: Run) -> None:
    job = wire.describe_job(found)
    assert job["shards"] == [0, 1, 2, 3]
    assert job["snapshots"] == {"step": 10, "every": 2, "bytes": 4 * SNAPSHOT_BYTES, "without_second_copy": 0}


def test_of_a_job_whose_ranks_are_replicas_nothing_is_reported(shown: Run) -> None:
    job = wire.describe_job(shown)
    assert (job["shards"], job["snapshots"]) == ([], None)
    kinds = {kind for window in page_data(shown)["windows"] for kind in window["phases"]["p"]}
    assert kinds <= set(range(6))


def test_a_recovery_says_where_each_state_came_from(found: Run) -> None:
    scene = wire.describe_scene(found, found.scenes[0])
    assert scene["origins"] == dict.fromkeys("0123", "snapshot in memory")


def test_moments_are_among_the_phases_of_a_report(found: Run) -> None:
    (window,) = page_data(found)["windows"]
    kinds, times = window["phases"]["p"], window["phases"]["t"]
    assert [kinds.count(kind) for kind in (7, 8)] == [6 * 4 + 1, 4]
    assert kinds.count(6) >= kinds.count(7)
    assert times == sorted(times)


def test_a_page_is_told_of_published_weights(publishing: Path, shown: Run) -> None:
    with opened(publishing) as run:
        (told,) = page_data(run)["snapshot"]["weights"]
    assert (told["folder"], told["version"], told["under_way"], told["consumers"]) == (FOLDER, 3, 5, 3)
    assert page_data(shown)["snapshot"]["weights"] == []
