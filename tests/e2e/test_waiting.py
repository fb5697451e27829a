"""Jobs in which ranks wait for each other: what is said of them, and that none waits for ever."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

from tests.support.jobs import SCRIPTS, RunningJob, run, running, status
from tests.support.watching import attempts

WAITING = SCRIPTS / "waiting.py"
SOON = ("--nproc-per-node", 3, "--explain-after", 1.5)
QUICKLY = ("--nproc-per-node", 3, "--hang-after", 2)


def explained(job: RunningJob, run_dir: Path, *patterns: str) -> str:
    """What the status says of ranks that wait, as soon as all patterns are in it; a loaded machine brings the ranks to
    where they wait one after the other."""
    text = None
    for _ in attempts(run_dir, 120.0):
        assert job.process.poll() is None, job.finish()
        if (run_dir / "control.sock").exists():
            text = status(run_dir)["standstill"]
            if text is not None and all(re.search(pattern, text) for pattern in patterns):
                return str(text)
    raise AssertionError(f"of ranks that wait was said last: {text}")


def lines_about(err: str, what: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("keepstep:") and what in line]


def report_of(*arguments: object, tmp_path: Path) -> tuple[int, dict[str, Any], str]:
    report = tmp_path / "report.json"
    code, _out, err = run("run", "--report", report, *arguments)
    return code, json.loads(report.read_text()), err


def test_ranks_that_call_different_collectives_are_reported_with_groups_and_counts(tmp_path: Path) -> None:
    with running("run", "--run-dir", tmp_path, *SOON, "--log-json", tmp_path / "log", WAITING, "disagree") as job:
        text = explained(
            job,
            tmp_path,
            r"ranks 0 and 2 have been in all_gather #\d+ of world for \d+(\.\d)? s \(after step 3\)",
            r"rank 1 has been in barrier #1 of group 0-1\.0 for \d+(\.\d)? s \(after step 3\)",
            r"ranks 0 and 2 have entered (\d+) collectives of world, rank 1 has entered (\d+)",
        )
        job.process.send_signal(signal.SIGTERM)
        _code, _out, err = job.finish()
        job.wait_until_gone()
    numbers = re.search(r"have entered (\d+) collectives of world, rank 1 has entered (\d+)", text)
    assert numbers
    assert int(numbers[1]) == int(numbers[2]) + 1
    assert lines_about(err, "of world, rank 1 has entered"), err
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {event["level"] for event in told if event["event"] == "ranks wait"} == {"warning"}


def test_a_stall_in_a_step_is_explained_with_the_recovery_that_it_begins(tmp_path: Path) -> None:
    code, report, err = report_of(*QUICKLY, WAITING, "disagree in a step", tmp_path=tmp_path)
    assert code == 0, err
    (recovery,) = report["recoveries"]
    assert (recovery["cause"], recovery["failed_ranks"]) == ("stuck collective", [])
    assert "rank 1 has been in barrier #1 of group 0-1.0" in recovery["detail"]
    assert "(forward of step 4)" in recovery["detail"]


def test_a_long_evaluation_of_one_rank_is_reported_once_and_kills_no_rank(tmp_path: Path) -> None:
    finished = tmp_path / "finished"
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with running("run", "--run-dir", run_dir, *SOON, WAITING, "evaluate", finished) as job:
        text = explained(job, run_dir, r"ranks 1 and 2 have been in all_reduce #\d+ of world for")
        finished.touch()
        code, out, err = job.finish()
        job.wait_until_gone()
    assert code == 0, err
    assert out.count("is through") == 3
    where = r"in wait\(\) at threading\.py:\d+, called from waiting\.py:\d+, called from waiting\.py:\d+ \("
    assert re.search(rf"rank 0 has computed for \S+ s \(after step 3, in no collective\), {where}", text), text
    assert len(lines_about(err, "ranks 1 and 2 have been in")) == 1, err
    assert "recover" not in err


def test_a_rank_that_hangs_beside_a_receive_nothing_waits_for_is_the_one_that_hangs(tmp_path: Path) -> None:
    """It cannot wait for a message that it never asks after. As long as that counted, the job had to stall first."""
    code, report, err = report_of(*QUICKLY, WAITING, "hang beside a recv", tmp_path=tmp_path)
    assert code == 0, err
    (recovery,) = report["recoveries"]
    assert (recovery["cause"], recovery["failed_ranks"]) == ("hang", [0])


def test_a_rank_with_fewer_steps_than_the_others_ends_the_job_with_a_message(tmp_path: Path) -> None:
    code, report, err = report_of(*SOON, WAITING, "unevenly", tmp_path=tmp_path)
    assert code == 1, err
    assert report["recoveries"] == []
    assert "rank 0 ended its loop after 10 steps, and ranks 1 and 2 are in step 10" in report["reason"]
    assert report["reason"] in err.replace("\n", " ")


def test_a_rank_that_left_the_loop_and_waits_behind_it_is_reported(tmp_path: Path) -> None:
    """It may come back into a loop, so the job goes on. When all have waited for each other for too long the
    collective is broken, and its script ends."""
    code, report, err = report_of(*QUICKLY, "--explain-after", 0.5, WAITING, "leave", tmp_path=tmp_path)
    assert code == 1, err
    told = lines_about(err, "rank 0 has been in barrier #1 of group 0-1.0")
    assert "(after step 3)" in told[0]
    assert re.search(r"ranks 1 and 2 have been in all_reduce #\d+ of world for \S+ s \(backward of step 4\)", told[0])
    assert report["reason"] == "ranks [0] ended their script while the others still train"
