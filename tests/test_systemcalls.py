"""A system call that is refused is one sentence: the call, the error, a remedy. Other errors stay what they are."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keepstep import systemcalls
from keepstep.errors import CallRefused, ConfigurationError, LimitReached
from keepstep.systemcalls import needed, own_refusal, refusal

SOURCE = Path(systemcalls.__file__).parent


def refuses(error: int) -> Callable[..., Any]:
    """A call that fails."""

    def call(*_arguments: object, **_keywords: object) -> None:
        raise OSError(error, os.strerror(error))

    return call


def caught(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except (OSError, RuntimeError) as error:
        return error
    raise AssertionError("nothing was raised")


def low_on_files(call: Callable[[], object]) -> BaseException:
    """The error of a call that finds no free descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        return caught(call)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: os.memfd_create("x"), "memfd_create"),
        (lambda: os.eventfd(0), "eventfd"),
        (lambda: os.pidfd_open(os.getpid()), "pidfd_open"),
        (lambda: os.pipe(), "pipe2"),
        (lambda: select.epoll(), "epoll_create1"),
        (lambda: socket.socket(), "socket"),
        (lambda: socket.socketpair(), "socketpair"),
        (lambda: subprocess.Popen(["true"]), ("pipe2", "open", "fork")),
    ],
)
def test_the_call_is_named(call: Callable[[], object], name: str | tuple[str, ...]) -> None:
    found = refusal(low_on_files(call))
    assert isinstance(found, LimitReached)
    said = str(found)
    assert said.startswith(name), said
    assert "Too many open files" in said
    assert "ulimit -n" in said


@pytest.mark.parametrize(
    ("error", "kind", "remedy"),
    [
        (errno.EPERM, CallRefused, "seccomp"),
        (errno.EACCES, CallRefused, "seccomp"),
        (errno.ENOSYS, CallRefused, "Linux 5.3"),
        (errno.ENOLCK, CallRefused, "--run-dir"),
        (errno.EOPNOTSUPP, CallRefused, "--run-dir"),
        (errno.EROFS, CallRefused, "TMPDIR"),
        (errno.EADDRNOTAVAIL, CallRefused, "ip link set lo up"),
        (errno.EAFNOSUPPORT, CallRefused, "ip link set lo up"),
        (errno.EMFILE, LimitReached, "ulimit -n"),
        (errno.ENFILE, LimitReached, "fs.file-max"),
        (errno.ENOMEM, LimitReached, "memory limit"),
        (errno.ENOSPC, LimitReached, "free space"),
    ],
)
def test_each_error_has_its_remedy(
    error: int, kind: type[Exception], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "memfd_create", refuses(error))
    with pytest.raises(kind, match=remedy) as told:
        systemcalls.memory_file("x")
    assert str(told.value).startswith(f"memfd_create: {os.strerror(error)}")


@pytest.mark.parametrize("error", [errno.ENOENT, errno.EAGAIN, errno.EPIPE, errno.ECONNRESET, errno.EBADF])
def test_other_errors_stay_what_they_are(error: int) -> None:
    with pytest.raises(OSError, match=os.strerror(error)), needed():
        refuses(error)()
    with pytest.raises(RuntimeError, match="of the script"), needed():
        raise RuntimeError("of the script")


def test_a_process_or_thread_too_many() -> None:
    with (
        pytest.raises(LimitReached, match=r"^fork: Resource temporarily unavailable.*ulimit -u.*pids.max"),
        needed("fork"),
    ):
        refuses(errno.EAGAIN)()
    for text in ("can't start new thread", "Resource temporarily unavailable"):
        with pytest.raises(LimitReached, match=r"^clone \(a new thread\): Resource.*ulimit -u"), needed():
            raise RuntimeError(text)


def test_threads_are_tried_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    systemcalls.check_threads(3)
    start, limit = threading.Thread.start, before + 2

    def limited(thread: threading.Thread) -> None:
        if threading.active_count() >= limit:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    systemcalls.check_threads(2)
    with pytest.raises(LimitReached):
        systemcalls.check_threads(3)
    assert threading.active_count() == before


def test_a_folder_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert systemcalls.check_locks(tmp_path) == tmp_path
    monkeypatch.setattr(fcntl, "flock", refuses(errno.ENOLCK))
    with pytest.raises(ConfigurationError, match=f"flock in {tmp_path}: No locks available: .*--run-dir"):
        systemcalls.check_locks(tmp_path)


@pytest.mark.parametrize(("lacking", "found"), [((), "127.0.0.1"), ((socket.AF_INET,), "::1")])
def test_the_loopback_address(lacking: tuple[int, ...], found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_with(lacking, monkeypatch)
    assert systemcalls.loopback() == found


def test_no_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    only_with((socket.AF_INET, socket.AF_INET6), monkeypatch)
    with pytest.raises(CallRefused, match=r"127\.0\.0\.1: .*::1: .*ip link set lo up"):
        systemcalls.loopback()


def only_with(lacking: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def made(family: int = socket.AF_INET) -> socket.socket:
        if family in lacking:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return real(family)

    monkeypatch.setattr(socket, "socket", made)


def test_the_limit_on_open_files_need_not_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuses(errno.EPERM))
    assert systemcalls.open_files() == 256
    monkeypatch.setattr(resource, "getrlimit", refuses(errno.EPERM))
    assert systemcalls.open_files() == 1024


def test_an_error_of_the_script_is_its_own(tmp_path: Path) -> None:
    """Only keepstep's own calls are told without a traceback; the standard library's belong to who has called it."""
    ours = low_on_files(lambda: systemcalls.bound("127.0.0.1", 0))
    theirs = low_on_files(lambda: socket.socket())
    assert isinstance(own_refusal(ours), LimitReached)
    assert own_refusal(theirs) is None
    assert own_refusal(CallRefused("told")) is not None


ENDS = """
import sys, threading
from keepstep import systemcalls
def refuse(_self): raise RuntimeError("can't start new thread")
if sys.argv[1] == "start":
    threading.Thread.start = refuse
    systemcalls.start_thread(print, name="x")
else:
    systemcalls.tell_of_threads()
    thread = threading.Thread(target=lambda: refuse(0))
    thread.start()
    thread.join()
    threading.Thread(target=lambda: 1 / 0).start()
"""


@pytest.mark.parametrize(("case", "code"), [("start", 1), ("inside", 0)])
def test_a_thread_that_cannot_be_started_is_told_in_a_sentence(case: str, code: int) -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS, case], capture_output=True, text=True, check=False)
    assert ended.returncode == code
    first, *rest = ended.stderr.splitlines()
    assert first.startswith("keepstep: ")
    assert "clone (a new thread): Resource temporarily unavailable: " in first
    assert ("ZeroDivisionError" in ended.stderr, bool(rest)) == (case == "inside",) * 2


def test_memory_files_locks_and_limits_are_made_in_one_place() -> None:
    """So that none is refused with a traceback."""
    calls = ("os.memfd_create(", "fcntl.flock(", "RLIMIT_NOFILE", "_libc.prctl(")
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if any(call in path.read_text(encoding="utf-8") for call in calls)
    }
    assert found == {"systemcalls.py"}
