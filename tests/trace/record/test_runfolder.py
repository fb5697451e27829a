"""A run's folder: held by one job at a time; an earlier run is moved aside, and nothing of it is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash
from msgspec.json import schema

from keepstep.controller.startup import StartUpRecord
from keepstep.errors import ConfigurationError
from keepstep.protocol.recovery import RecoverySettings
from keepstep.shared.tagpage import MOMENTS, PHASES
from keepstep.trace.record import runfolder
from keepstep.trace.record.journal import Journal
from keepstep.trace.record.phaselog import PHASE_DTYPE, PhaseLog
from keepstep.trace.record.runfolder import RunInfo
from keepstep.trace.weights.publications import Publications


def info(what: str = "train.py") -> RunInfo:
    return runfolder.new_run((what,), "node", RecoverySettings(3, 1))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = info()
    runfolder.begin(tmp_path, written)
    assert runfolder.read_info(tmp_path) == written
    runfolder.end(tmp_path, written, 3, "why", written.started_ns + 5)
    ended = runfolder.read_info(tmp_path).ended
    assert ended is not None
    assert (ended.exit_code, ended.reason, ended.at_ns) == (3, "why", written.started_ns + 5)


FORM = {2: "fb37eb3c2ef7f039"}
"""`runfolder.FORMAT` -> a digest of what the files are made of that no reader can check by itself."""


def test_the_number_of_the_format_changes_with_what_would_be_misread() -> None:
    """If this fails, raise `FORMAT` and enter the new digest here."""
    names = [str(each) for each in (*PHASES, *MOMENTS)]
    schemas = [without_docstrings(schema(kind)) for kind in (RunInfo, Publications)]
    form = repr((PHASE_DTYPE.descr, names, schemas)).encode()
    assert {runfolder.FORMAT: xxhash.xxh3_64_hexdigest(form)} == FORM


def without_docstrings(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_docstrings(each) for key, each in value.items() if key != "description"}
    return [without_docstrings(each) for each in value] if isinstance(value, list) else value


def test_two_runs_have_two_names() -> None:
    assert info().run != info().run


def test_a_folder_belongs_to_one_job_until_its_process_ends(tmp_path: Path) -> None:
    assert not runfolder.is_occupied(tmp_path)
    program = "import sys; from pathlib import Path; from keepstep.trace.record import runfolder\n"
    program += "with runfolder.occupied(Path(sys.argv[1])): print('there', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"there\n"
        assert runfolder.is_occupied(tmp_path)
        with pytest.raises(ConfigurationError, match="another job is running there"), runfolder.occupied(tmp_path):
            pass
        other.kill()
    assert not runfolder.is_occupied(tmp_path)
    with runfolder.occupied(tmp_path):
        assert runfolder.is_occupied(tmp_path)


def test_who_has_the_lease_replaces_the_lock(tmp_path: Path) -> None:
    """The process that has lost it may stand still, or be on a machine whose locks a server still keeps."""
    with runfolder.occupied(tmp_path):
        with runfolder.occupied(tmp_path, is_displacing=True):
            with pytest.raises(ConfigurationError, match="another job"), runfolder.occupied(tmp_path):
                pass
            assert runfolder.is_occupied(tmp_path)
        assert not runfolder.is_occupied(tmp_path), "what the first one holds is of no meaning any more"
    assert [each.name for each in tmp_path.iterdir()] == ["run.lock"]


def test_what_an_earlier_run_left_is_moved_aside(tmp_path: Path) -> None:
    first, second, third = info("first.py"), info("second.py"), info("third.py")
    for each in (first, second, third):
        runfolder.begin(tmp_path, each)
        (tmp_path / runfolder.JOURNAL).write_text(each.run)
        (tmp_path / runfolder.PHASES).mkdir()
        (tmp_path / runfolder.PHASES / "1.frames").write_text(each.run)
    folders = [tmp_path / "earlier-1", tmp_path / "earlier-2", tmp_path]
    for folder, each in zip(folders, (first, second, third), strict=True):
        assert runfolder.read_info(folder) == each
        assert (folder / runfolder.JOURNAL).read_text() == each.run
        assert (folder / runfolder.PHASES / "1.frames").read_text() == each.run


def test_the_newest_of_several_runs_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no run is recorded there"):
        runfolder.newest_run(tmp_path)
    with pytest.raises(ConfigurationError, match="no run is recorded there"):
        runfolder.newest_run(tmp_path / "nothing")
    for name in ("reference", "with-faults"):
        (tmp_path / name).mkdir()
        runfolder.begin(tmp_path / name, info())
        assert runfolder.newest_run(tmp_path) == tmp_path / name
    runfolder.begin(tmp_path, info())
    assert runfolder.newest_run(tmp_path) == tmp_path


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b'{"run":1}'])
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / runfolder.INFO).write_bytes(damage)
    with pytest.raises(ConfigurationError, match=r"run\.json: not what keepstep writes"):
        runfolder.read_info(tmp_path)


def test_times_can_be_put_on_the_clock_on_the_wall() -> None:
    each = info()
    assert each.unix_ns(each.started_ns / 1e9 + 1.5) == pytest.approx(each.started_unix_ns + 1_500_000_000, abs=1000)


def test_the_lock_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    with runfolder.occupied(tmp_path):
        assert os.stat(tmp_path / "run.lock").st_mode & 0o777 == 0o600


def test_files_of_a_run_are_for_this_user_only(tmp_path: Path) -> None:
    """Also in a folder that others may read, as ``mkdir`` makes one."""
    runfolder.begin(tmp_path, info())
    Journal(tmp_path / runfolder.JOURNAL).close()
    PhaseLog(tmp_path / runfolder.PHASES)
    StartUpRecord(tmp_path / runfolder.START_UP)
    names = (runfolder.INFO, runfolder.JOURNAL, runfolder.PHASES, runfolder.START_UP)
    assert {name: (tmp_path / name).stat().st_mode & 0o077 for name in names} == dict.fromkeys(names, 0)
