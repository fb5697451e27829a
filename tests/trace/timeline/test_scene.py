"""Recoveries as they are drawn: of simulated jobs, in which everything fails at every time, and all must make sense."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.protocol.phases import Phase
from keepstep.shared.tagpage import PHASES
from keepstep.sim.run import case_of, run
from keepstep.trace.record.phaselog import NO_RANK
from keepstep.trace.timeline.run import Run
from keepstep.trace.timeline.scene import Scene, SceneSpan, SpanKind

SEEDS = range(150)
ORDER = [*SpanKind]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Simulated runs, each of which fails in ways of its own."""
    found = []
    for seed in SEEDS:
        folder = tmp_path_factory.mktemp(f"seed-{seed}-")
        run(case_of(seed), record=folder)
        found.append(folder)
    return found


def whole_runs(folders: list[Path]) -> Iterator[Run]:
    for folder in folders:
        each = Run(folder)
        each.poll()
        yield each
        each.close()


def by_rank(scene: Scene) -> dict[int, list[SceneSpan]]:
    return {rank: list(spans) for rank, spans in itertools.groupby(scene.spans(), key=lambda span: span.rank)}


def test_spans_follow_each_other(folders: list[Path]) -> None:
    num_spans = 0
    for each in whole_runs(folders):
        for scene in each.scenes:
            for spans in by_rank(scene).values():
                num_spans += len(spans)
                for before, after in itertools.pairwise(spans):
                    assert before.end_s == after.begin_s
                    assert ORDER.index(before.kind) < ORDER.index(after.kind)
                assert all(span.end_s is None or span.begin_s <= span.end_s for span in spans)
                assert all(span.begin_s >= scene.record.begun_s for span in spans)
    assert num_spans > 1000


def test_only_the_last_recovery_can_be_open(folders: list[Path]) -> None:
    num_open = 0
    for each in whole_runs(folders):
        for scene in each.scenes:
            is_open = any(span.end_s is None for span in scene.spans())
            assert not (is_open and scene is not each.scenes[-1])
            assert scene.end_s is not None or scene is each.scenes[-1]
            num_open += is_open
    assert num_open > 0


def test_a_recovery_says_who_was_lost_and_who_came(folders: list[Path]) -> None:
    num_replaced = 0
    for each in whole_runs(folders):
        for scene in each.scenes:
            lost = {failure.rank for failure, _ in scene.failures()}
            assert lost == {failure.rank for failure in scene.record.failures}
            assert all(scene.since_s <= at_s for _, at_s in scene.failures())
            assert scene.since_s <= scene.record.begun_s
            for rank, (worker, node) in scene.replacements.items():
                assert each.job.roster.workers[worker].node == node
                assert scene.places[rank][0] != worker
                num_replaced += 1
            received = [span.rank for span in scene.spans() if span.kind is SpanKind.RESTORE]
            actions = scene.record.actions
            assert all(actions[rank] == "restore" for rank in received)
    assert num_replaced > 50


def test_time_is_lost_once(folders: list[Path]) -> None:
    num_lost = 0
    for each in whole_runs(folders):
        intervals = each.ledger.lost(each.now_s)
        num_lost += len(intervals)
        for begin_s, end_s in intervals:
            assert begin_s <= end_s
        goodput = each.goodput
        assert goodput is None or 0 <= goodput <= 1
    assert num_lost > 50


def test_every_step_that_a_controller_heard_of_was_seen(folders: list[Path]) -> None:
    """Two sources that know nothing of each other: the journal's decisions, and the pages of the ranks."""
    for each in whole_runs(folders):
        assert each.pace.step >= each.job.progress.trained_to - 1


def test_a_rank_is_held_by_one_worker_in_a_generation(folders: list[Path]) -> None:
    num_checked = 0
    for each in whole_runs(folders):
        changes = each.history.window(0, 1 << 62, lead=False)
        changes = changes[(changes["rank"] != NO_RANK) & (changes["phase"] == PHASES.index(Phase.OPTIMIZER))]
        held: dict[tuple[int, int], int] = {}
        for generation, rank, worker in changes[["generation", "rank", "worker"]].tolist():
            assert held.setdefault((generation, rank), worker) == worker
            num_checked += 1
    assert num_checked > 1000


def test_a_run_is_the_same_in_pieces(folders: list[Path], tmp_path: Path) -> None:
    """Read as it grows, line by line and byte by byte, it comes to what it is when read at its end."""
    for folder in folders[:25]:
        whole = Run(folder)
        whole.poll()
        growing = tmp_path / folder.name
        (growing / "phases").mkdir(parents=True)
        (growing / "run.json").write_bytes((folder / "run.json").read_bytes())
        piecewise = Run(growing)
        scenes: dict[int, Scene] = {}
        frames = (folder / "phases" / "00000001.frames").read_bytes()
        journal = (folder / "journal.jsonl").read_bytes()
        for part in range(1, 41):
            for name, data in (("phases/00000001.frames", frames), ("journal.jsonl", journal)):
                (growing / name).write_bytes(data[: len(data) * part // 40])
            scenes |= piecewise.poll().scenes
        assert piecewise.job.records == whole.job.records
        assert [scene.spans() for scene in piecewise.scenes] == [scene.spans() for scene in whole.scenes]
        assert [scenes[number].spans() for number in sorted(scenes)] == [scene.spans() for scene in whole.scenes]
        assert piecewise.events == whole.events
        assert (piecewise.pace.step, sum(piecewise.pace.buckets)) == (whole.pace.step, sum(whole.pace.buckets))
        assert piecewise.now_s == whole.now_s
        for each in (whole, piecewise):
            each.close()
