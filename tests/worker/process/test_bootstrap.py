"""A script as a worker runs it."""

import gc
import gzip
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.worker.ranks import run_ranks

from keepstep.worker.process import spawner
from keepstep.worker.process.bootstrap import run_script

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
