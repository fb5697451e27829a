"""A controller whose folder holds a run that has not ended: its journal is not moved aside by mistake."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path

import pytest
from tests.support.nodes import SECRET

from keepstep.controller.lease import RunLease
from keepstep.errors import ConfigurationError
from keepstep.launcher.cluster.service import ControllerOptions, run_controller
from keepstep.protocol.recovery import RecoverySettings
from keepstep.trace.record import runfolder

SETTINGS = RecoverySettings(1, 0)
TAKEN = "cannot listen on 127.0.0.1"
"""With this error ends a controller that would serve: its port is in use."""


def begun(folder: Path, *, has_ended: bool = False, journal: bytes = b"an entry\n") -> None:
    """The folder of a run whose controller was killed, or that has ended."""
    info = runfolder.new_run(("train.py",), "here", SETTINGS)
    runfolder.begin(folder, info)
    (folder / runfolder.JOURNAL).write_bytes(journal)
    if has_ended:
        runfolder.end(folder, info, 0, "all steps completed", 1)


def error_of(folder: Path, *, is_child: bool = False) -> str:
    """What a controller without ``--continue`` says of it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ControllerOptions(SETTINGS, folder, listen, SECRET, None, is_child=is_child)
        with pytest.raises(ConfigurationError) as caught:
            run_controller(options)
    return str(caught.value)


def test_an_unfinished_run_is_refused_and_stays(tmp_path: Path) -> None:
    begun(tmp_path)
    said = error_of(tmp_path)
    assert "the run in there has not ended, and its nodes may still train. --continue goes on with it" in said
    assert "(holder of its lease: no process)" in said
    assert (tmp_path / runfolder.JOURNAL).read_bytes() == b"an entry\n"
    assert not (tmp_path / "earlier-1").exists()


def test_who_serves_it_is_named(tmp_path: Path) -> None:
    begun(tmp_path)
    with contextlib.closing(RunLease(tmp_path, 60.0)) as lease:
        assert lease.take()
        assert f"the run in there is served by process {os.getpid()} on" in error_of(tmp_path)


def test_a_finished_run_is_moved_aside(tmp_path: Path) -> None:
    begun(tmp_path, has_ended=True)
    assert TAKEN in error_of(tmp_path)
    assert (tmp_path / "earlier-1" / runfolder.JOURNAL).exists()


def test_so_is_one_that_no_node_has_joined(tmp_path: Path) -> None:
    begun(tmp_path, journal=b"")
    assert TAKEN in error_of(tmp_path)
    assert (tmp_path / "earlier-1" / runfolder.INFO).exists()


def test_so_is_any_by_the_controller_that_a_launcher_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's own agent had joined the run, and is gone, too."""
    begun(tmp_path)
    reader, writer = os.pipe()
    with os.fdopen(reader) as told, os.fdopen(writer, "w"), monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", told)
        assert TAKEN in error_of(tmp_path, is_child=True)
    assert (tmp_path / "earlier-1" / runfolder.JOURNAL).exists()
