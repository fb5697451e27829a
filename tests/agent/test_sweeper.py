"""The sweeper: whose groups it ends, and whose not."""

import errno
import os
import subprocess
import sys
import textwrap

import pytest
from tests.agent.crew import DEADLINE_S

from keepstep.worker.process import sweeper

SWEPT = """
    import ctypes, os, subprocess
    from keepstep.worker.process.sweeper import Sweeper

    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the sweeper becomes a child of this process
    cats = [
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        for _ in range(3)
    ]
    began, ended, unknown = cats
    read, write = os.pipe()
    closed, closing = os.pipe()
    leave, leaving = os.pipe()
    spawner = os.fork()
    if spawner == 0:
        os.close(leaving)
        sweeper = Sweeper()
        os.close(write)
        sweeper.group_began(began.pid)
        sweeper.group_began(ended.pid)
        sweeper.group_ended(ended.pid)
        os.close(sweeper.descriptor)
        os.close(closing)
        os.read(leave, 1)
        os._exit(0)
    os.close(write)
    os.close(closing)
    print("read:", os.read(read, 1), os.read(closed, 1))  # when the sweeper and the spawner have closed their copies
    try:
        began.wait(0.2)
    except subprocess.TimeoutExpired:
        print("began: alive, for the spawner is")
    os.close(leaving)
    print("began:", began.wait())
    while True:  # until the sweeper itself has ended
        process, _status = os.waitpid(-1, 0)
        if process not in (spawner, *(cat.pid for cat in cats)):
            break
    for name, cat in (("ended", ended), ("unknown", unknown)):
        cat.stdin.write(b"alive")
        cat.stdin.close()
        print(f"{name}:", cat.stdout.read().decode())
"""


def test_whose_groups_it_ends_and_when() -> None:
    """A group that has ended is left alone, for its number may be another's by then; and nothing is held open."""
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SWEPT)], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    lines = ("read: b'' b''", "began: alive, for the spawner is", "began: -9", "ended: alive", "unknown: alive")
    assert process.stdout.splitlines() == list(lines), process.stderr


def test_the_spawners_exit_is_awaited_without_the_kernels_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    parents = [7, 7, 1]
    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(os, "getppid", lambda: parents.pop(0))
    sweeper._await_exit(7)
    assert parents == []
