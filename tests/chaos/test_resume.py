"""`session.resume`: the script's own checkpoint is loaded by ranks that start together, and by no replacement."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, drill, run

SCRIPT = SCRIPTS / "resumes.py"
JOB = ("--nproc-per-node", 2)
FAULTS = "kill@step=12,phase=forward,rank=1; kill@step=20,phase=forward,rank=0"


def ended(out: str) -> dict[int, tuple[int, int, float]]:
    """By rank: what resume() gave, the first step of the process, and what the rank holds at the end."""
    lines = re.findall(r"rank (\d) resumed at (\d+), began at (\d+), has (\S+)", out)
    return {int(rank): (int(start), int(first), float(total)) for rank, start, first, total in lines}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> float:
    """What each rank holds after 30 steps without a failure."""
    code, out, err = run("run", *JOB, "--spares", 0, SCRIPT, tmp_path_factory.mktemp("whole"))
    assert code == 0, err
    (total,) = {total for _start, _first, total in ended(out).values()}
    return total


@pytest.mark.parametrize("flags", [(), ("--sharded",)], ids=["replicas", "shards"])
def test_replacements_load_nothing(flags: tuple[str, ...], tmp_path: Path) -> None:
    code, result, output = drill(tmp_path, *JOB, "--faults", FAULTS, "--compare", "saved", SCRIPT, "saved", *flags)
    assert code == 0, output
    assert result["identical"]
    assert sorted(re.findall(r"rank \d loads", output)) == [f"rank {rank} loads" for rank in (0, 0, 1, 1)]


def test_a_second_run_that_loads_what_the_first_one_wrote_is_told_of_it(tmp_path: Path) -> None:
    """The weights are the same, and of what the drill was to show there is nothing before step 25."""
    fault = "kill@step=27,phase=forward,rank=1"
    code, result, output = drill(tmp_path, *JOB, "--faults", fault, SCRIPT, tmp_path / "saved")
    assert code == 0, output
    assert result["explanation"]["kind"] == "began at a later step"
    assert "The second run began at step 25, and the first one at step 0, because it loaded files" in output


def test_when_all_ranks_are_lost_fresh_ones_load_the_newest(tmp_path: Path, whole: float) -> None:
    code, out, err = run("run", *JOB, SCRIPT, tmp_path, "--kill-all-at", 17)
    assert code == 0, err
    assert ended(out) == dict.fromkeys(range(2), (15, 15, whole))
    assert out.count("loads") == 4


def test_a_job_that_is_started_again_goes_on_from_the_newest(tmp_path: Path, whole: float) -> None:
    code, out, err = run("run", *JOB, "--spares", 0, SCRIPT, tmp_path, "--steps", 21)
    assert code == 0, err
    code, out, err = run("run", *JOB, SCRIPT, tmp_path, "--start", 20)
    assert code == 0, err
    assert ended(out) == dict.fromkeys(range(2), (20, 20, whole))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--apart"], "resume(): load() has returned 0 on rank 1 and 5 on rank 0"),
        (["--new-group"], "load() of session.resume() has created a process group"),
        (["--start", 4], "the loop begins at start=4, and session.resume() has given 5"),
    ],
)
def test_what_is_not_one_answer_is_refused(flags: list[object], message: str, tmp_path: Path) -> None:
    code, _out, err = run("run", *JOB, "--spares", 0, SCRIPT, tmp_path, "--steps", 6)
    assert code == 0, err
    code, _out, err = run("run", *JOB, "--spares", 0, SCRIPT, tmp_path, *flags)
    assert code == 1
    assert message in err


def test_a_script_that_loads_by_itself_is_told_of_it(tmp_path: Path) -> None:
    """Its replacement loads a file that the other ranks have not loaded, with collectives that they do not run."""
    job = ("run", *JOB, SCRIPT, tmp_path, "--by-itself", "--sharded", "--kill-at", 12)
    code, _out, err = run(*job, cwd=tmp_path)  # the job cannot go on, and saves its state there
    assert code == 76
    assert re.search(r"at \S+resumes\.py:\d+: .*session\.resume\(load\)", err), err
