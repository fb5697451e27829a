"""Sums of an epoch survive a loss where epochs begin and end, and each line of them is written once."""

from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, drill, run

NUM_BATCHES = 7


def check(folder: Path, places: list[tuple[int, str, int]], *options: object) -> None:
    """Drills kills at (step, phase, rank)."""
    faults = ";".join(f"kill@step={step},phase={phase},rank={rank}" for step, phase, rank in places)
    ranks = ("--nproc-per-node", 2, "--spares", 1, "--compare", "means*", "--faults", faults)
    code, result, output = drill(folder, *ranks, SCRIPTS / "means.py", *options)
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []


@pytest.mark.parametrize(("form", "updates"), [("--accelerate", 2), ("--by-hand", 1)])
def test_a_rank_is_lost_where_epochs_begin_and_end(tmp_path: Path, form: str, updates: int) -> None:
    steps = NUM_BATCHES * updates
    beginnings, ends = ([n * (steps + 2) + at for n in range(3)] for at in (0, steps + 1))
    places = [
        (3, "backward", 1),
        (ends[0] - 1, "updated", 0),
        (beginnings[1] + 1, "forward", 0),
        (ends[1], "forward", 1),
        (beginnings[2], "forward", 0),
        (ends[2] - 1, "updated", 0),
    ]
    check(tmp_path, places, form, "--updates", updates)


def test_a_rank_is_lost_at_the_ends_of_epochs_in_one_loop(tmp_path: Path) -> None:
    """In the backward: a rank's line of a step is lost with the rank behind the update."""
    steps = NUM_BATCHES * 2
    places = [(3, "backward", 1), (steps - 1, "backward", 0), (2 * steps, "forward", 1), (3 * steps - 1, "backward", 0)]
    check(tmp_path, places, "--one-loop", "--updates", 2)


BEGINNINGS, ENDS = (range(at, 3 * (NUM_BATCHES + 2), NUM_BATCHES + 2) for at in (0, NUM_BATCHES + 1))


@pytest.mark.parametrize(
    ("places", "options"),
    [
        (
            [
                (3, "backward", 1),
                (ENDS[0], "forward", 0),
                (BEGINNINGS[1] + 4, "updated", 1),
                (BEGINNINGS[2], "forward", 0),
                (BEGINNINGS[2] + 5, "optimizer", 1),
            ],
            (),
        ),
        (
            [
                (ENDS[0] - 1, "updated", 0),
                (BEGINNINGS[1] + 1, "forward", 1),
                (ENDS[1], "synced", 0),
                (BEGINNINGS[2] + 3, "barrier", 1),
                (ENDS[2], "updated", 1),
            ],
            ("--by-hand",),
        ),
    ],
    ids=["sums of an epoch", "set to zero by hand"],
)
def test_shards_without_replicas_go_back_to_no_epoch_before(
    tmp_path: Path, places: list[tuple[int, str, int]], options: tuple[str, ...]
) -> None:
    check(tmp_path, places, "--shards", *options)


@pytest.mark.parametrize(
    ("phases", "ranks"),
    [(("forward", "synced", "barrier"), (1, 0, 0)), (("optimizer", "synced", "updated"), (0, 0, 1))],
)
def test_a_line_of_an_end_of_an_epoch_is_written_once(
    tmp_path: Path, phases: tuple[str, ...], ranks: tuple[int, ...]
) -> None:
    check(tmp_path, list(zip(ENDS, phases, ranks, strict=True)))


def test_a_drill_of_which_nothing_is_said(tmp_path: Path) -> None:
    options = ("--nproc-per-node", 2, "--spares", 1, "--compare", "means*")
    code, result, output = drill(tmp_path, *options, SCRIPTS / "means.py")
    assert code == 0, output
    assert result["missed"] == []
    assert any("phase=updated,rank=0" in fault["specification"] for fault in result["faults"]), result["faults"]


@pytest.mark.parametrize(
    "options",
    [("--dies",), ("--shards", "--dies"), ("--dies-after",)],
    ids=["replicas", "shards", "and in the one after it"],
)
def test_a_rank_is_lost_in_the_call_that_writes_its_line(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The job does not go on behind the end of the epoch, although the snapshot there is all that a shard needs."""
    wrote = []
    for dies in ([], [options[-1], tmp_path / "struck"]):
        folder = tmp_path / f"run-{len(wrote)}"
        folder.mkdir()
        job = ("--nproc-per-node", 2, "--spares", 1, SCRIPTS / "means.py", *options[:-1], *dies)
        code, _, err = run("run", *job, cwd=folder)
        assert code == 0, err
        wrote.append([(folder / f"means-of-{rank}.txt").read_text() for rank in (0, 1)])
    assert (tmp_path / "struck").exists()
    assert wrote[0] == wrote[1]
