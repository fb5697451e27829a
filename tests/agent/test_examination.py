"""What is seen of a process without progress: of real ones, each of which does nothing in a way of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.agent.crew import DEADLINE_S

from keepstep.agent.processes import Examination, ProcessState
from keepstep.shared import tagpage, tracebacks

SCRIPT = """
import signal, sys
import threading
from keepstep.shared import tracebacks
how, page = sys.argv[1], int(sys.argv[2])
if how == "own handler":
    signal.signal(tracebacks.SIGNAL, lambda *_: None)
tracebacks.install(page)
training = threading.get_ident()

def listen():
    for _ in sys.stdin:
        tracebacks.dump(page, training)
threading.Thread(target=listen, daemon=True).start()

def load(pipe):
    print("ready", flush=True)
    if how == "spins":
        while True:
            pass
    if how == "sleeps":
        threading.Event().wait()
    pipe.read(1)
load(open(int(sys.argv[3]), "rb", buffering=0))
"""


class Child:
    """A process with a tag page and a link thread, that is where it stays."""

    def __init__(self, how: str, folder: Path) -> None:
        file = folder / "script.py"
        file.write_text(SCRIPT)
        page = tagpage.create("test")
        self.page = tagpage.TagReader(page)
        self.page.clear_stack()
        read, self._write = os.pipe()
        self.pipe = os.readlink(f"/proc/self/fd/{read}")
        self.process = subprocess.Popen(
            [sys.executable, file, how, str(page), str(read)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[page, read],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        os.close(page)
        os.close(read)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        self.began = Examination.begin(self.process.pid, time.monotonic())

    def ask(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def signal(self) -> None:
        self.page.clear_stack()
        assert self.page.stack() == ""
        self.process.send_signal(tracebacks.SIGNAL)

    def await_text(self, pattern: str, ask: Callable[[], None] = lambda: None) -> str:
        """What is seen of it, as soon as the pattern is in it. It may be asked before it is where it stays."""
        end_s, text = time.monotonic() + DEADLINE_S, ""
        while time.monotonic() < end_s:
            ask()
            threading.Event().wait(0.02)
            text = self.began.text(self.page.stack(), time.monotonic())
            if re.search(pattern, text):
                return text
        raise AssertionError(f"of the process was seen last: {text!r}")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.page.close()
        os.close(self._write)


@contextlib.contextmanager
def child(how: str, folder: Path) -> Iterator[Child]:
    running = Child(how, folder)
    try:
        yield running
    finally:
        running.end()


def test_a_process_that_reads_from_a_pipe(tmp_path: Path) -> None:
    with child("reads", tmp_path) as reading:
        where = r"^in load\(\) at script\.py:23, called from script\.py:24 \("
        reading.await_text(where, reading.ask)
        try:
            Path(f"/proc/{reading.process.pid}/syscall").read_text()
        except OSError:  # the system does not tell
            return
        reading.await_text(rf"{where}waits in read\(\) of {re.escape(reading.pipe)}, uses \d")


def test_a_process_that_computes(tmp_path: Path) -> None:
    with child("spins", tmp_path) as spinning:
        text = spinning.await_text(r"uses [1-9]\d*% of a core", spinning.ask)
        assert "in load() at script.py:" in text
        states = (ProcessState.of(spinning.process.pid) for _ in range(1000))
        assert any(state is not None and not state.sleeps for state in states), "it may wait for the other thread"


def test_a_process_that_waits_in_a_module_of_python(tmp_path: Path) -> None:
    with child("sleeps", tmp_path) as sleeping:
        text = sleeping.await_text(r"in wait\(\) at threading\.py:\d+", sleeping.ask)
        assert ", called from script.py:22, called from script.py:24 (" in text
        state = ProcessState.of(sleeping.process.pid)
        assert state is not None
        assert state.sleeps


def test_a_process_that_a_signal_has_stopped(tmp_path: Path) -> None:
    with child("reads", tmp_path) as stopped:
        stopped.process.send_signal(signal.SIGSTOP)
        assert "stopped by a signal" in stopped.await_text("stopped by a signal")
        state = ProcessState.of(stopped.process.pid)
        assert state is not None
        assert state.is_stopped


def test_a_signal_gets_the_stack_where_no_thread_answers(tmp_path: Path) -> None:
    """C code may hold the interpreter's lock; and again, where the last stack was longer."""
    with child("reads", tmp_path) as stuck:
        assert tracebacks.handles(stuck.process.pid, tracebacks.SIGNAL)
        for _ in range(2):
            stuck.await_text(r"^in load\(\) at script\.py:23, called from script\.py:24 ", stuck.signal)
            stuck.signal()
        assert stuck.process.poll() is None


def test_a_script_keeps_its_own_handler(tmp_path: Path) -> None:
    with child("own handler", tmp_path) as own:
        own.process.send_signal(tracebacks.SIGNAL)
        own.await_text(r"in load\(\)", own.ask)
        assert own.process.poll() is None


def test_a_process_that_is_gone_is_seen_nothing_of() -> None:
    assert Examination.begin(2**22 + 1, 0.0).text("", 1.0) == ""


@pytest.mark.parametrize(
    ("stack", "where"),
    [
        ("", ""),
        ('  File "<frozen runpy>", line 88 in _run_code\n', ""),
        ('  File "/a/train.py", line 7 in <module>\n', "at train.py:7"),
        (
            f'Current thread 0x1 (most recent call first):\n  File "{tagpage.__file__}", line 3 in read\n'
            '  File "/lib/site-packages/torch/nn/modules/module.py", line 9 in forward\n'
            + "".join(f'  File "/a/{name}.py", line {line} in {name}\n' for line, name in enumerate("abcd", 1)),
            "in a() at a.py:1, called from b.py:2, called from c.py:3",
        ),
        ('  File "/a/\x1b[2Jx.py", line 7 in f\x07\n', "in f\\x07() at \\x1b[2Jx.py:7"),
        (f'  File "/a/{"x" * 99}.py", line 7 in f\n', f"in f() at {'x' * 59}…:7"),
    ],
)
def test_the_frames_of_the_script_are_named(stack: str, where: str) -> None:
    assert tracebacks.where(stack) == where
