"""What is read in /proc is what the kernel says there, and what it does not say is told or taken for the worst."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from keepstep.errors import CallRefused
from keepstep.procfs import available_bytes, bytes_moved, cores_idle_s, start_of, status_of

MEMORY = "MemTotal:        8000 kB\nMemFree:          300 kB\nMemAvailable:    5000 kB\nBuffers:          12 kB\n"
ODD_NAME = "a) S 1 (b"


def test_a_process_with_an_odd_name_and_its_start() -> None:
    program = f"open('/proc/self/comm', 'w').write({ODD_NAME!r}); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        fields, start = status_of(child.pid), start_of(child.pid)
        assert fields is not None
        assert start is not None
        known = psutil.Process(child.pid)
        assert known.name() == ODD_NAME
        assert int(fields[1]) == known.ppid() == os.getpid()
        own = start_of(os.getpid())
        assert own is not None
        assert own < start <= time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
        child.communicate(b"\n")
    assert status_of(child.pid) is None
    assert start_of(child.pid) is None


def test_available_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMORY)
    assert available_bytes(tmp_path / "meminfo") == 5000 * 1024
    assert 0 < available_bytes() <= psutil.virtual_memory().total


def test_memory_of_which_nothing_is_said_is_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(CallRefused, match=r"meminfo: No such file or directory; keepstep reads .*: mount /proc"):
        available_bytes(tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text(MEMORY.replace("MemAvailable", "MemSomething"))
    with pytest.raises(
        CallRefused, match=r"meminfo has no line MemAvailable; keepstep reads .*: use Linux's own /proc"
    ):
        available_bytes(tmp_path / "meminfo")


def test_idle_cores(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  11 12 13 1400 15 16 17 18 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\nintr 5\n")
    assert cores_idle_s(tmp_path / "stat") == 1400 / os.sysconf("SC_CLK_TCK")
    before = psutil.cpu_times().idle
    assert before <= cores_idle_s() <= psutil.cpu_times().idle


@pytest.mark.parametrize("content", [None, "", "cpu 1 2 3\n", "intr 1 2 3 4 5\n"])
def test_cores_of_which_nothing_is_said_are_never_idle(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "stat").write_text(content)
    assert cores_idle_s(tmp_path / "stat") == 0.0


def test_bytes_that_this_process_has_moved(tmp_path: Path) -> None:
    before = bytes_moved()
    (tmp_path / "file").write_bytes(bytes(100_000))
    assert len((tmp_path / "file").read_bytes()) == 100_000
    written = threading.Thread(target=(tmp_path / "other").write_bytes, args=[bytes(100_000)])
    written.start()
    written.join()  # other threads of this process count as well
    assert bytes_moved() - before >= 300_000
    (tmp_path / "io").write_text("rchar: 70\nwchar: 5\nsyscr: 1000\nread_bytes: 2000\n")
    assert bytes_moved(tmp_path / "io") == 75
    assert bytes_moved(tmp_path / "none") == 0
