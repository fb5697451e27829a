"""Jobs whose ranks are silent for a while: what is a pause costs nothing, and what hangs is replaced."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs import SCRIPTS, run, running, status
from tests.support.watching import attempts

SILENT = SCRIPTS / "silent.py"
RANKS = ("--nproc-per-node", 2, "--spares", 1)
QUICKLY = ("--hang-after", 1)


def report_of(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    report = tmp_path / "report.json"
    code, out, err = run("run", "--report", report, *RANKS, *arguments)
    assert code == 0, err
    assert out.count("is through") == 2
    return dict(json.loads(report.read_text()))


@pytest.mark.parametrize("flags", [(), QUICKLY], ids=["by default", "hang-after 1"])
def test_a_replacement_whose_first_batch_takes_long_is_waited_for(flags: tuple[object, ...], tmp_path: Path) -> None:
    """The first one of the ranks took as long. It was killed nine times, for the others were quicker by then."""
    report = report_of(tmp_path, *flags, SILENT, "lazy", 2)
    assert [recovery["failed_ranks"] for recovery in report["recoveries"]] == [[1]]
    assert report["recoveries"][0]["cause"] in ("signal", "process died")


def test_storage_that_does_not_answer_costs_nothing(tmp_path: Path) -> None:
    """All ranks wait for it in their own code, for longer than their deadline. Both were killed, and all was lost."""
    assert report_of(tmp_path, *QUICKLY, SILENT, "all pause", 4)["recoveries"] == []


def test_a_save_behind_the_update_in_the_step_costs_nothing(tmp_path: Path) -> None:
    assert report_of(tmp_path, *QUICKLY, SILENT, "save", 4)["recoveries"] == []


def test_a_rank_that_hangs_is_replaced(tmp_path: Path) -> None:
    report = report_of(tmp_path, *QUICKLY, SILENT, "hang", 0)
    (recovery,) = report["recoveries"]
    assert (recovery["cause"], recovery["failed_ranks"]) == ("hang", [1])
    assert "no progress in forward of step 20" in recovery["detail"]
    assert re.search(r": in wait\(\) at threading\.py:\d+, called from silent\.py:\d+ \(", recovery["detail"])


def test_output_that_nobody_reads_is_waited_for(tmp_path: Path) -> None:
    """A terminal after Ctrl-S, a pager, a log shipper that stalls: rank 0 was replaced, as long as nobody read."""
    report, run_dir = tmp_path / "report.json", tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    flags = ("--run-dir", run_dir, "--report", report, *RANKS, *QUICKLY, "--explain-after", 3)
    with running("run", *flags, SILENT, "prints", 0) as job:
        for _ in attempts(run_dir, 120.0):
            assert job.process.poll() is None, job.finish()
            if (run_dir / "control.sock").exists() and (told := status(run_dir)["standstill"]) is not None:
                break
        else:
            raise AssertionError("of no rank was said that it waits")
        code, out, err = job.finish()
        job.wait_until_gone()
    assert code == 0, err
    assert out.count("is through") == 2
    assert re.search(r"rank 0 has waited for somebody to read its output for \S+ s \(forward of step \d+\)", told), told
    assert re.search(r", at silent\.py:\d+ \((waits in write\(\) to pipe:\[\d+\], )?uses \d+% of a core\)", told), told
    assert json.loads(report.read_text())["recoveries"] == []


def pids_in_the_step(folder: Path) -> dict[int, int]:
    """The processes of the ranks that are in the step, as they have written it down: rank -> pid."""
    names = (path.name.split("-at-") for path in folder.glob("*-at-*"))
    return {int(rank): int(pid) for rank, pid in names}


def test_processes_that_are_all_stopped_for_a_while_go_on(tmp_path: Path) -> None:
    """As by `scontrol suspend`, past their deadline: which ranks were stopped first is no reason to end those."""
    report, run_dir, folder = tmp_path / "report.json", tmp_path / "run", tmp_path / "ranks"
    folder.mkdir()
    run_dir.mkdir(mode=0o700)
    flags = ("--run-dir", run_dir, "--report", report, *RANKS, *QUICKLY)
    with running("run", *flags, SILENT, "stopped", 0, folder) as job:
        for _ in attempts(folder, 120.0):
            assert job.process.poll() is None, job.finish()
            if len(pids_in_the_step(folder)) == 2:
                break
        for pid in pids_in_the_step(folder).values():
            os.kill(pid, signal.SIGSTOP)
        (folder / "go on").touch()
        for _ in attempts(run_dir, 120.0):
            if "and none is replaced" in (status(run_dir)["standstill"] or ""):
                break
        else:
            raise AssertionError("of no rank was said that it is waited for")
        for pid in pids_in_the_step(folder).values():
            os.kill(pid, signal.SIGCONT)
        code, out, err = job.finish()
        job.wait_until_gone()
    assert code == 0, err
    assert out.count("is through") == 2
    assert json.loads(report.read_text())["recoveries"] == []
    assert "ranks 0, 1 have fallen silent together" in " ".join(err.split())
