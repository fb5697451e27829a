"""Scripts that use torch's default store, in jobs that lose a rank."""

import json
import re
from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, run

STORE = SCRIPTS / "store.py"


def through(how: str, folder: Path) -> tuple[list[str], str]:
    """Runs the script to its end; returns what it printed and all messages."""
    report = folder / "report.json"
    code, out, err = run("run", "--nproc-per-node", 3, "--report", report, STORE, how, folder)
    assert code == 0, err
    lines = sorted(out.splitlines())
    assert [line[:17] for line in lines if "is through" in line] == [f"rank {rank} is through" for rank in range(3)]
    assert [each["generation"] for each in json.loads(report.read_text())["recoveries"]] == [2]
    return lines, err


def test_a_replacement_gets_of_the_store_what_its_rank_got_when_it_started(tmp_path: Path) -> None:
    """Barriers that it has passed, counters, values, keys of a group; rank 0 is lost, who had set most of it."""
    lines, err = through("start", tmp_path)
    known = [json.loads(line.partition(": ")[2]) for line in lines]
    assert len({each["run"] for each in known}) == 1
    assert sorted(each["ticket"] for each in known) == [1, 2, 3]
    assert len({each["first"] for each in known}) == 1
    for rank, each in enumerate(known):
        rest = {name: each[name] for name in ("others", "mesh", "there", "gone")}
        assert rest == {"others": ["here"] * 3, "mesh": 3, "there": False, "gone": rank == 0}
    assert re.search(r"rank 0: a replacement gives the store another value for '.*run' \(set\)", err)


def test_a_wait_in_the_first_step_for_a_key_of_the_lost_rank_is_interrupted(tmp_path: Path) -> None:
    through("first step", tmp_path)


def test_a_replacement_may_wait_in_its_own_first_step(tmp_path: Path) -> None:
    through("first step of a replacement", tmp_path)


def test_a_wait_in_a_later_step_is_an_error_that_says_so(tmp_path: Path) -> None:
    code, _out, err = run("run", "--nproc-per-node", 3, STORE, "later step", tmp_path)
    assert code == 1, err
    assert re.search(r"UsageError: step 4: no rank has set key '.*of rank 0' of the store, and inside of a step", err)


def test_a_wait_between_two_steps_gets_what_a_survivor_sets(tmp_path: Path) -> None:
    lines, _err = through("between", tmp_path)
    assert "rank 1 got what rank 2 has set" in lines


def test_a_wait_between_two_steps_that_no_rank_can_end_is_an_error_that_says_so(tmp_path: Path) -> None:
    lines, _err = through("vain", tmp_path)
    expected = r"rank 1: generation 2: a rank was lost, .* none will set '.*of rank 0'\."
    assert [line for line in lines if re.match(expected, line)], lines


def test_a_wait_before_the_first_step_does_not_keep_all_ranks_from_restarting(tmp_path: Path) -> None:
    through("lose in start-up", tmp_path)


def test_a_thread_waits_on_through_a_recovery(tmp_path: Path) -> None:
    lines, _err = through("thread", tmp_path)
    assert "thread of rank 1 got what rank 0 has set" in lines


@pytest.mark.parametrize("nproc", [1, 2])
def test_torch_may_meet_on_the_store_as_soon_as_it_is_initialised(
    nproc: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    code, _out, err = run("run", "--nproc-per-node", nproc, SCRIPTS / "tiny.py", "--steps", 3)
    assert code == 0, err
