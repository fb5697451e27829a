"""``keepstep trace``, ``keepstep report`` and what ``run`` and ``drill`` leave behind, as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, run
from tests.support.recorded import recorded_run

from keepstep.cli.main import main
from keepstep.drill.drill import Drill, run_drill
from keepstep.errors import ConfigurationError
from keepstep.launcher.flags import job_options, make_parser
from keepstep.trace.record import runfolder

TINY = SCRIPTS / "tiny.py"


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with one recovery."""
    return recorded_run(tmp_path_factory.getbasetemp()).folder


def command(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_exporting_and_reporting(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("trace", "export", folder, "-o", tmp_path / "trace.json") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'trace.json'}\n"
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert command("report", folder, "-o", tmp_path / "report.html") == 0
    assert (tmp_path / "report.html").read_text("utf-8").startswith("<!doctype html>")


def test_what_cannot_be_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (("trace", "export", tmp_path, "-o", tmp_path / "x.json"), "no run is recorded there"),
        (("trace", "export", folder, "-o", tmp_path / "no" / "x.json"), "no does not exist"),
        (("report", tmp_path / "nothing", "-o", tmp_path / "x.html"), "no run is recorded there"),
        (("report", folder, "-o", tmp_path), "is a folder; name a file"),
    ):
        assert command(*arguments) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_failure_has_a_trace_and_a_report(tmp_path: Path) -> None:
    code, _out, err = run(
        "run", "--nproc-per-node", 1, "--spares", 0, "--run-dir", tmp_path / "run", "--trace", tmp_path / "trace.json",
        TINY, "--steps", 3,
    )  # fmt: skip
    assert code == 0, err
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {0, 1, 2}
    assert command("report", tmp_path / "run", "-o", tmp_path / "report.html") == 0


def test_a_trace_of_a_run_that_failed_in_a_folder_that_goes(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit(3)")
    code, _out, err = run("run", "--nproc-per-node", 1, "--spares", 0, "--trace", tmp_path / "trace.json", script)
    assert code != 0, err
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["command"] == str(script)


def test_the_target_of_a_trace_is_checked_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^--trace .*does not exist"):
        job_options(make_parser("keepstep run").parse_args(["--trace", str(tmp_path / "no" / "t.json"), str(TINY)]))


def test_a_drill_keeps_both_runs(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    flags = ("--nproc-per-node", 2, "--run-dir", runs, "--faults", "kill@step=4,phase=backward,rank=1")
    (runs / "reference").mkdir(parents=True)
    (runs / "reference" / "left.txt").write_text("from an earlier drill")
    targets = (
        "--html",
        tmp_path / "drill.html",
        "--trace",
        tmp_path / "drill.json",
        "--json",
        tmp_path / "result.json",
    )
    code, out, err = run("drill", *flags, *targets, TINY, "--steps", 8)
    assert code == 0, out + err
    assert (runs / "earlier-1" / "reference" / "left.txt").exists()
    assert not (runs / "reference" / "left.txt").exists()
    assert {path.name for path in runs.iterdir()} == {"reference", "with-faults", "earlier-1"}
    assert runfolder.newest_run(runs) == runs / "with-faults"
    assert '"taken_by_worker":{"1":2}' in (tmp_path / "drill.html").read_text("utf-8")
    assert any(event["ph"] == "s" for event in json.loads((tmp_path / "drill.json").read_text())["traceEvents"])
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["identical"]
    assert command("trace", "export", runs, "-o", tmp_path / "exported.json") == 0


@pytest.mark.parametrize("flag", [(), ("--log-dir", "logs")], ids=["in the run's folder", "elsewhere"])
def test_a_quiet_drill_leaves_what_the_script_prints_to_logs(tmp_path: Path, flag: tuple[str, ...]) -> None:
    faults = ("--faults", "kill@step=4,phase=backward,rank=1")
    job = ("--nproc-per-node", 2, "--run-dir", tmp_path / "runs", *faults, *flag, TINY, "--steps", 8)
    code, out, err = run("drill", "--quiet", *job, cwd=tmp_path)
    assert code == 0, out + err
    assert "rank 0 of 2 began" not in out + err
    assert "rank 1 lost: killed by SIGKILL" in err
    for name in ("reference", "with-faults"):
        logs = tmp_path / "logs" / "none" / name if flag else tmp_path / "runs" / name / "logs"
        assert (logs / "worker_0" / "stdout.log").read_text().startswith("rank 0 of 2 began at 0")


@pytest.mark.parametrize("named", [True, False])
def test_a_quiet_drill_prints_the_end_of_a_run_that_fails(tmp_path: Path, named: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('begins', file=sys.stderr)\nraise KeyError('[its] error')\n")
    flags = ("--run-dir", "runs") if named else ()
    code, out, err = run("drill", "--quiet", "--nproc-per-node", 1, *flags, script, cwd=tmp_path)
    assert (code, out) == (1, "")
    told, *lines = err[err.index("keepstep drill: the run without") :].splitlines()
    assert "did not reach its end" in told
    log = tmp_path / "runs" / "reference" / "logs" / "worker_0" / "stderr.log"
    assert lines[:2] == [f"the last lines of {log if named else 'its stderr'}:", "  begins"]
    assert lines[-1] == "  KeyError: '[its] error'"


def test_two_drills_do_not_share_a_folder(tmp_path: Path) -> None:
    options = job_options(make_parser("keepstep drill").parse_args(["--run-dir", str(tmp_path), str(TINY)]))

    async def follow(title: str, job: object) -> None:
        pytest.fail("it has begun")

    (tmp_path / "reference").mkdir()
    with runfolder.occupied(tmp_path / "reference"), pytest.raises(ConfigurationError, match="another drill"):
        run_drill(options, Drill(), follow, tmp_path)
    assert (tmp_path / "reference").exists()


@pytest.mark.parametrize("flag", ["--html", "--json"])
def test_the_targets_of_a_drill_are_checked_before_it(
    tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("drill", flag, tmp_path / "no" / "file", TINY) == 2
    assert f"{flag} {tmp_path / 'no' / 'file'}: the folder {tmp_path / 'no'} does not exist" in capsys.readouterr().err
