"""SIGTERM: the job ends at a step that all ranks have come to, and goes on from there when it is started again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from tests.support.jobs import SCRIPTS, RunningJob, run, running
from tests.support.watching import await_journal

SCRIPT = SCRIPTS / "drained.py"
MANY = 100_000


def await_line(job: RunningJob, what: str) -> str:
    """Reads what the job prints up to a line that holds ``what``, and returns that."""
    assert job.process.stdout is not None
    for line in job.process.stdout:
        if what in line:
            return line
    raise AssertionError(f"the job ended before it said {what!r}: {job.finish()}")


def descendants(pid: int) -> list[int]:
    return [each.pid for each in psutil.Process(pid).children(recursive=True)]


def drained(tmp_path: Path, *arguments: object, flags: tuple[object, ...] = ()) -> tuple[int, str, str]:
    """Runs a job until it trains, and has it drained."""
    with running("run", "--nproc-per-node", 2, *flags, SCRIPT, tmp_path, *arguments) as job:
        await_line(job, "trains")
        job.process.send_signal(signal.SIGTERM)
        result = job.finish()
        job.wait_until_gone()
    return result


def through(out: str) -> set[str]:
    return {line for line in out.splitlines() if "is through" in line}


@pytest.mark.parametrize(("way", "how"), [("checkpoint", "with a checkpoint"), ("handles", "without a checkpoint")])
def test_a_drained_job_goes_on_where_it_was(way: str, how: str, tmp_path: Path) -> None:
    undisturbed, first = tmp_path / "undisturbed", tmp_path / "first"
    undisturbed.mkdir()
    first.mkdir()
    code, out, err = drained(first, way, MANY, flags=("--report", tmp_path / "report.json"))
    assert code == 1, err
    found = re.search(rf"ended by SIGTERM: drained at step (\d+), {how}", err)
    assert found, err
    assert through(out) == set(), "a script that does not handle the signal never comes after its loop"
    step = int(found[1])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["recoveries"] == []
    if way == "handles":
        assert out.count(f"has saved after {step} steps") == 2, out
    else:
        assert max(path.name for path in first.iterdir()) == f"step_{step:010d}"
    num_steps = step + 5
    code, out, err = run("run", "--nproc-per-node", 2, SCRIPT, first, way, num_steps)
    assert code == 0, err
    again = through(out)
    code, out, err = run("run", "--nproc-per-node", 2, SCRIPT, undisturbed, way, num_steps)
    assert code == 0, err
    assert len(again) == 2
    assert again == through(out)


def test_a_drain_tears_no_copy_that_a_collective_goes_into(tmp_path: Path) -> None:
    code, _out, err = drained(tmp_path, "reduces", MANY)
    assert code == 1
    assert re.search(r"drained at step \d+, without a checkpoint", err), err


def test_what_ignores_the_signal_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    code, out, err = drained(tmp_path, "ignores", MANY, flags=("--grace", 1))
    assert code == 1
    assert re.search(r"drained at step \d+.*; remaining processes were killed after the grace period", err), err
    assert through(out) == set()


@pytest.mark.parametrize(
    ("number", "flags"),
    [
        (signal.SIGTERM, ()),
        (signal.SIGHUP, ()),
        (signal.SIGUSR1, ("--drain-on", "USR1")),
        (signal.SIGUSR2, ("--signals-to-handle", "SIGTERM,SIGUSR2")),
    ],
)
def test_a_signal_to_all_processes_is_one_drain_with_the_checkpoint(
    number: signal.Signals, flags: tuple[object, ...], tmp_path: Path
) -> None:
    """As Slurm, systemd and a container's init send it. The loaders' workers end, and keepstep keeps none of them."""
    with running("run", "--nproc-per-node", 2, "--grace", 8, *flags, SCRIPT, tmp_path, "loads", MANY) as job:
        await_line(job, "trains")
        for process in (each for each in (job.process.pid, *descendants(job.process.pid))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        code, _out, err = job.finish()
        job.wait_until_gone()
    assert code == 1, err
    found = re.search(rf"ended by {number.name}: drained at step (\d+), with a checkpoint", err)
    assert found, err
    assert (tmp_path / f"step_{int(found[1]):010d}").exists()


def test_what_only_helpers_get_changes_nothing(tmp_path: Path) -> None:
    """The launcher did not get it, so nobody has asked for a drain."""
    with running("run", "--nproc-per-node", 2, SCRIPT, tmp_path, "checkpoint", MANY) as job:
        await_line(job, "trains")
        for process in descendants(job.process.pid):
            os.kill(process, signal.SIGTERM)
            os.kill(process, signal.SIGHUP)
        await_line(job, "goes on")
        job.process.send_signal(signal.SIGTERM)
        code, _out, err = job.finish()
        job.wait_until_gone()
    assert code == 1
    assert "ended by SIGTERM: drained at step" in err


def test_other_signals_reach_the_ranks_that_handle_them(tmp_path: Path) -> None:
    with running("run", "--nproc-per-node", 2, SCRIPT, tmp_path, "counts", MANY) as job:
        await_line(job, "trains")
        job.process.send_signal(signal.SIGUSR1)
        await_line(job, "rank 1 has got SIGUSR1")
        job.process.send_signal(signal.SIGXCPU)
        job.process.send_signal(signal.SIGRTMIN + 3)
        await_line(job, "goes on")
        job.process.send_signal(signal.SIGTERM)
        code, out, err = job.finish()
        job.wait_until_gone()
    assert code == 1
    assert "rank 0 has got" not in out
    assert "keepstep: SIGXCPU is ignored, for no rank handles it; --drain-on SIGXCPU has it drain the job" in err
    assert "signal 37 is ignored, for no rank handles it\n" in err


def test_a_second_signal_ends_the_job_at_once(tmp_path: Path) -> None:
    flags = ("--nproc-per-node", 2, "--grace", 3600, "--run-dir", tmp_path)
    with running("run", *flags, SCRIPT, tmp_path, "ignores", MANY) as job:
        await_line(job, "trains")
        job.process.send_signal(signal.SIGTERM)
        await_journal(tmp_path / "journal.jsonl", "Terminate", 1)
        job.process.send_signal(signal.SIGTERM)
        code, _out, err = job.finish()
        job.wait_until_gone()
    assert code == 1
    assert err.splitlines()[-1] == "keepstep: ended by SIGTERM"


def test_an_unprotected_script_gets_the_signal_at_once(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import signal, sys, threading\n"
        "ended = threading.Event()\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saves', flush=True), sys.exit(0)))\n"
        "print('trains', flush=True)\n"
        "ended.wait(300)\n"
    )
    with running("run", "--nproc-per-node", 1, script) as job:
        await_line(job, "trains")
        job.process.send_signal(signal.SIGTERM)
        code, out, err = job.finish()
        job.wait_until_gone()
    assert (code, out) == (1, "saves\n")
    assert "ended by SIGTERM: training had not begun" in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--grace", -1), "--grace -1.0: must be a number of seconds, 0 or more"),
        (("--grace", "nan"), "--grace nan: must be a number of seconds, 0 or more"),
        (("--signals-to-handle", "SIGTERM,SIGALRM"), "SIGALRM is not supported"),
        (("--drain-on", "SIGALRM"), "'SIGALRM' is not SIGUSR1, SIGUSR2, SIGXCPU"),
    ],
)
def test_what_cannot_be_is_refused(flags: tuple[object, ...], said: str, tmp_path: Path) -> None:
    code, _out, err = run("run", "--nproc-per-node", 1, *flags, SCRIPT, tmp_path, "handles", 1)
    assert code == 2
    assert said in err
