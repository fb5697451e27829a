"""What a job leaves behind, and how one ends that cannot begin."""

import contextlib
import dataclasses
import os
from pathlib import Path

import psutil
import pytest

from keepstep.errors import ConfigurationError
from keepstep.launcher.flags import job_options, make_parser
from keepstep.launcher.job import LOGS, JobOptions, check_memory, clear_up, run_job
from keepstep.launcher.recording import make_folder


@pytest.fixture(autouse=True)
def _temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def options(*flags: str) -> JobOptions:
    """A job of one process, which need not be a script of ours; its spawner has nothing to import."""
    flags = ("--start-method", "spawn", "--spares", "0", "--no-python", *flags)
    return job_options(make_parser("keepstep run").parse_args(list(flags)))


def test_a_fresh_run_folder_goes_with_its_job(tmp_path: Path) -> None:
    job = options("true")
    assert job.agent.run_dir.parent == tmp_path
    assert run_job(job)["exit_code"] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_fresh_run_folder_stays_for_the_logs_in_it(tmp_path: Path) -> None:
    job = options("--redirects", "1", "echo", "a word")
    run_job(job)
    (log,) = job.agent.run_dir.rglob("*.log")
    assert log.read_text() == "a word\n"


def test_a_fresh_run_folder_goes_when_its_logs_are_elsewhere(tmp_path: Path) -> None:
    job = options("--redirects", "1", "--log-dir", str(tmp_path / "logs"), "echo", "a word")
    run_job(job)
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_a_run_folder_with_a_name_stays(tmp_path: Path) -> None:
    run_job(options("--run-dir", str(tmp_path / "run"), "true"))
    assert (tmp_path / "run" / "journal.jsonl").exists()


def test_a_job_that_was_refused_at_the_last_moment_leaves_nothing(tmp_path: Path) -> None:
    job = options("--redirects", "1", "true")
    assert job.agent.run_dir.is_dir()
    clear_up(job)
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_is_not_there_ends_the_job(tmp_path: Path) -> None:
    job = options("--run-dir", str(tmp_path / "run"), "--redirects", "2", "/no/such/command")
    result = run_job(job)
    assert result["exit_code"] != 0
    assert "exit code 127" in result["reason"]
    logs = sorted((tmp_path / "run" / LOGS).rglob("stderr.log"))
    assert logs[0].read_text() == "keepstep: cannot run '/no/such/command': No such file or directory\n"


def test_more_than_fits_is_refused() -> None:
    job = options("true")
    available = psutil.virtual_memory().total
    check_memory(job, available // 2**10)
    many = dataclasses.replace(job.recovery, world_size=3, num_spares=1)
    with pytest.raises(ConfigurationError, match="--nproc-per-node 3 with --spares 1: 4 processes need at least"):
        check_memory(dataclasses.replace(job, recovery=many), available)


def test_logs_follow_the_run_folder(tmp_path: Path) -> None:
    """As in a drill, which gives each of its runs a folder of its own."""
    job = options("--redirects", "1", "echo", "a word")
    (tmp_path / "other").mkdir()
    run_job(dataclasses.replace(job, agent=dataclasses.replace(job.agent, run_dir=tmp_path / "other")))
    (log,) = (tmp_path / "other" / LOGS).rglob("*.log")
    assert log.read_text() == "a word\n"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o755, 0o700])
def test_a_run_folder_in_which_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    refused = pytest.raises(ConfigurationError, match="no other user may write")
    with refused if mode & 0o022 else contextlib.nullcontext():
        assert make_folder("--run-dir", folder, 0o700) == folder
    assert make_folder("--log-dir", folder) == folder


def test_a_run_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigurationError, match="must belong to this user"):
        make_folder("--run-dir", tmp_path, 0o700)
    assert make_folder("--run-dir", tmp_path / "below", 0o700).is_dir()
