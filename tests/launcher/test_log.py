"""The log of events: what stands in it, and that nothing depends on it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from tests.support.recorded import Recorded, entries, overtaken_run, recorded_run

from keepstep.errors import ConfigurationError
from keepstep.launcher.flags import job_options, make_parser
from keepstep.launcher.job import run_job
from keepstep.launcher.log import EventLog
from keepstep.trace.record import runfolder
from keepstep.trace.record.recorder import Recorder
from keepstep.trace.timeline.run import Run

ALWAYS = ["timestamp", "level", "event", "message", "job", "generation", "rank", "step", "node"]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return recorded_run(tmp_path_factory.getbasetemp())


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_command(*flags: str) -> dict[str, object]:
    """Runs a job of one process that need not be a script of ours."""
    flags = ("--start-method", "spawn", "--spares", "0", *flags)
    return run_job(job_options(make_parser("keepstep run").parse_args(list(flags))))


def test_a_line_for_each_event(recorded: Recorded) -> None:
    run = Run(recorded.folder)
    run.poll()
    lines = lines_of(recorded.log)
    assert [(line["event"], line["message"], line["level"]) for line in lines] == [
        (event.kind, event.text, event.level) for event in run.events
    ]
    for line, event in zip(lines, run.events, strict=True):
        assert list(line)[: len(ALWAYS)] == ALWAYS
        assert line["job"] == run.info.run
        assert (line["generation"], line["rank"], line["step"], line["node"]) == event[4:]
        assert str(line["timestamp"]).endswith("Z")
        at = datetime.datetime.fromisoformat(str(line["timestamp"]))
        assert at.timestamp() == pytest.approx(run.info.unix_ns(event.at_s) / 1e9, abs=1e-5)


def test_a_recovery_is_reported_with_its_parts(recorded: Recorded) -> None:
    (line,) = [line for line in lines_of(recorded.log) if line["event"] == "recovered"]
    (recovery,) = recorded.report["recoveries"]
    assert line["milliseconds"] == recovery["milliseconds"]
    assert (line["cause"], line["ranks"], line["steps_recomputed"]) == ("signal", [1], recovery["steps_recomputed"])


def test_a_job_that_ends_badly(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = overtaken_run(tmp_path_factory.getbasetemp())
    last = lines_of(run.log)[-1]
    assert (last["event"], last["level"], last["message"]) == ("job ended", "error", run.report["reason"])


def test_a_second_job_goes_on_in_the_same_file(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    for _ in range(2):
        run_command("--run-dir", str(tmp_path / "run"), "--log-json", str(log), "--no-python", "true")
    jobs = [line["job"] for line in lines_of(log) if line["event"] == "job ended"]
    assert len(jobs) == len(set(jobs)) == 2


def test_the_standard_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_command("--run-dir", str(tmp_path / "run"), "--log-json", "-", "--no-python", "true")
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert lines[-1]["event"] == "job ended"
    assert not (tmp_path / "-").exists()


def test_a_full_disk_ends_the_log_and_not_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = run_command("--run-dir", str(tmp_path / "run"), "--log-json", "/dev/full", "--no-python", "true")
    assert result["exit_code"] == 0
    said = [line for line in capfd.readouterr().err.splitlines() if "--log-json" in line]
    assert len(said) == 1
    assert "No space left on device" in said[0]


def test_what_only_the_launcher_knows_is_told_at_the_end(recorded: Recorded, tmp_path: Path) -> None:
    info, journal = runfolder.read_info(recorded.folder), entries(recorded.folder)
    for name, read in (("whole", journal), ("cut", journal[:-1])):
        with EventLog(tmp_path / name, info) as log:
            log.decided(read)
            log.ended(143, "ended by SIGTERM", info.started_ns)
    assert (tmp_path / "whole").read_text() == recorded.log.read_text()
    last = lines_of(tmp_path / "cut")[-1]
    assert (last["event"], last["level"], last["message"]) == ("job ended", "error", "ended by SIGTERM")


@pytest.mark.parametrize(("name", "what"), [("no/such/folder", "does not exist"), (".", "is a folder")])
def test_a_file_that_cannot_be(tmp_path: Path, name: str, what: str) -> None:
    arguments = ["--log-json", str(tmp_path / name), "--no-python", "true"]
    with pytest.raises(ConfigurationError, match=f"--log-json .*{what}"):
        job_options(make_parser("keepstep run").parse_args(arguments))


def test_a_file_that_is_no_file_any_more(recorded: Recorded, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--log-json .*: Is a directory"):
        EventLog(tmp_path, runfolder.read_info(recorded.folder))


def test_a_listener_that_fails_is_left_alone(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []

    def listen(new: list[object]) -> None:
        told.append(new)
        raise ValueError("it does not understand")

    journal = entries(recorded.folder)
    with Recorder(tmp_path, listen) as recorder:
        recorder.decided(journal[:1])
        recorder.decided(journal[1:])
    assert told == [journal[:1]]
    assert "it does not understand" in capsys.readouterr().err
    assert (tmp_path / runfolder.JOURNAL).read_bytes() == (recorded.folder / runfolder.JOURNAL).read_bytes()
