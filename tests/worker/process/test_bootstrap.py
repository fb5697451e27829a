"""A script as a worker runs it."""

import gc
import gzip
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.worker.ranks import run_ranks

from keepstep.protocol.messages import WorkerFailed
from keepstep.worker.process import bootstrap, spawner
from keepstep.worker.process.bootstrap import EXIT_EXCEPTION, run_script

SCRIPT = """
import builtins, sys, weakref

class Thing: pass

thing = Thing()
builtins.thing_of_the_script = weakref.ref(thing)
{ending}
"""


def running(_rank: int, _size: int, script: Path) -> Any:
    code = run_script((str(script),), module=False)
    gc.collect()
    return code, sys.modules["builtins"].thing_of_the_script() is not None


@pytest.mark.parametrize(
    ("ending", "code"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError('its own')", 1)], ids=["end", "exit", "error"]
)
def test_what_a_script_leaves_behind_stays_until_its_process_ends(ending: str, code: int, tmp_path: Path) -> None:
    """As under plain Python. A DDP that goes while torch's threads run may hang."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(ending=ending))
    assert run_ranks(1, running, script) == [(code, True)]


WRITING = """
import gzip, sys

text = open("text", "w")
text.write("text")
binary = open("binary", "wb")
binary.write(b"binary")
packed = gzip.open("packed", "wt")
packed.write("packed")
both = open("both", "w+")
both.write("both")
{ending}
"""


def leaving(_rank: int, _size: int, script: Path) -> Any:
    os.chdir(script.parent)
    pid = os.fork()
    if pid == 0:
        spawner._leave(run_script((str(script),), module=False))
    _pid, status = os.waitpid(pid, 0)
    written = [(script.parent / name).read_text() for name in ("text", "binary", "both")]
    with gzip.open("packed", "rt") as file:
        return os.waitstatus_to_exitcode(status), [*written, file.read()]


@pytest.mark.parametrize(
    ("ending", "code"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError('its own')", 1)], ids=["end", "exit", "error"]
)
def test_files_that_a_script_leaves_open_are_written(ending: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WRITING.format(ending=ending))
    assert run_ranks(1, leaving, script) == [(code, ["text", "binary", "both", "packed"])]


RAISING = """
import torch
from keepstep.errors import ConfigurationError

raise {error}
"""


class Link:
    """What a session says to its agent, and what had been printed by then."""

    worker = 4

    def __init__(self, captured: pytest.CaptureFixture[str]) -> None:
        self.sent: list[WorkerFailed] = []
        self.printed: list[str] = []
        self._captured = captured

    def send(self, message: WorkerFailed) -> None:
        self.sent.append(message)
        self.printed.append(self._captured.readouterr().err)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Link:
    """That of a script which runs in this process."""
    found = Link(capsys)
    session = SimpleNamespace(_coordination=SimpleNamespace(link=found), drains_after=lambda _: False)
    monkeypatch.setattr(bootstrap, "current_session", lambda: session)
    for name, value in (("argv", sys.argv), ("orig_argv", sys.orig_argv), ("path", [*sys.path])):
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    return found


@pytest.mark.parametrize(
    ("error", "is_fatal"),
    [
        ("torch.AcceleratorError('CUDA error: an illegal memory access was encountered')", False),
        ("RuntimeError('CUDA error: uncorrectable ECC error encountered')", False),
        ("torch.cuda.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')", False),
        ("ConfigurationError('no such thing')", True),
    ],
)
def test_an_error_of_the_device_costs_the_rank_and_not_the_job(
    error: str, is_fatal: bool, tmp_path: Path, link: Link
) -> None:
    """A fresh process on another device need not meet it again. If all ranks meet it, the controller ends the job."""
    script = tmp_path / "script.py"
    script.write_text(RAISING.format(error=error))
    assert run_script((str(script),), module=False) == EXIT_EXCEPTION
    (failed,) = link.sent
    assert (failed.worker, failed.fatal) == (4, is_fatal)
    assert error.split("'")[1] in failed.error


@pytest.mark.parametrize(
    "error",
    [
        "ValueError('its own')",
        "ConfigurationError('no such thing')",
        "errors.UsageError('not like this')",
        "errors.StepInterrupted(2)",
        "KeyboardInterrupt",
        "setattr(sys, 'excepthook', None) or ValueError('with a hook that fails')",
    ],
)
def test_an_error_is_printed_before_it_is_reported(error: str, tmp_path: Path, link: Link) -> None:
    """The report may end the job, and the agent then kills the process, in the middle of a line."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nfrom keepstep import errors\n" + RAISING.format(error=error))
    assert run_script((str(script),), module=False) == EXIT_EXCEPTION
    (printed,) = link.printed
    assert printed.count(f'File "{script}", line 7, in <module>') >= 1
    assert link.sent[0].error.rstrip(": ") in printed
    assert str(script) in link.sent[0].traceback
    assert bootstrap.__file__ not in printed
