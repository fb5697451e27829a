"""Event loops of keepstep's programs: output that nobody reads, and tasks that fail."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from keepstep import eventloop

PROGRAM = """
import asyncio, os, sys
from keepstep import eventloop

async def main():
    for number in range({lines}):
        print("line", number, "x" * 90)
    print("through", file=sys.stderr, flush=True)
    {then}

eventloop.run(main())
"""


def start(lines: int, then: str = "pass", **streams: Any) -> subprocess.Popen[bytes]:
    program = textwrap.dedent(PROGRAM).format(lines=lines, then=then)
    return subprocess.Popen([sys.executable, "-c", program], **streams)


def test_a_reader_that_stops_holds_no_event_loop_up() -> None:
    """What is more than the buffer is dropped, and a line says so."""
    read, write = os.pipe()
    with start(40_000, "await asyncio.to_thread(sys.stdin.read)", stdin=-1, stdout=write, stderr=-1) as program:
        os.close(write)
        assert program.stdin is not None
        assert program.stderr is not None
        assert program.stderr.readline() == b"through\n"  # though nobody has read 4 MB
        with os.fdopen(read) as output:
            program.stdin.close()
            lines = output.read().splitlines()
        assert program.wait(60) == 0
    number = 0
    for line in lines:
        if missing := re.fullmatch(r"keepstep: (\d+) lines are missing here, because nobody had read for long", line):
            number += int(missing[1])
        else:
            assert line == f"line {number} " + "x" * 90, "in order, and none is cut"
            number += 1
    assert number == 40_000
    assert len(lines) < 40_000


def test_a_reader_that_leaves_is_one_line() -> None:
    read, write = os.pipe()
    os.close(read)
    with start(40_000, "await asyncio.to_thread(sys.stdin.read)", stdin=-1, stdout=write, stderr=-1) as program:
        os.close(write)
        _out, err = program.communicate(b"", timeout=60)
        assert program.returncode == 0
    gone = "keepstep: <stdout> is not written any more, training continues: [Errno 32] Broken pipe"
    assert sorted(err.decode().splitlines()) == [gone, "through"]


def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("wb") as full, start(3, stdout=full, stderr=-1) as program:
        _out, err = program.communicate(timeout=60)
        assert program.returncode == 0
    gone = "keepstep: <stdout> is not written any more, training continues: [Errno 28] No space left on device"
    assert sorted(err.decode().splitlines()) == [gone, "through"]


def test_a_terminal_that_another_program_has_made_non_blocking() -> None:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETFL, os.O_NONBLOCK)
    with start(5_000, stdout=write) as program, os.fdopen(read) as output:
        os.close(write)
        assert [line.split()[1] for line in output] == [str(number) for number in range(5_000)]
        assert program.wait(60) == 0


def test_a_task_that_fails_ends_the_program(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise ValueError("in a task")

    async def main() -> None:
        asyncio.get_running_loop().create_task(fails())
        await asyncio.Event().wait()

    with pytest.raises(ValueError, match="in a task"):
        eventloop.run(main())
    assert 'raise ValueError("in a task")' in caplog.text


def test_a_callback_that_fails_ends_the_program() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError):
        eventloop.run(main())


def test_streams_are_what_they_were_before() -> None:
    async def main() -> bool:
        return sys.stdout.isatty()

    before = (sys.stdout, sys.stderr)
    assert eventloop.run(main()) is before[0].isatty()
    assert (sys.stdout, sys.stderr) == before
