"""System calls that a container's profile, an old kernel or a limit may refuse: one sentence each, with a remedy.

Every program of keepstep runs in `needed`, so no call needs code of its own. Where a call's remedy differs from that of
its error, the table says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import errno
import fcntl
import os
import resource
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, TracebackType

from keepstep.errors import CallRefused, KeepstepError, LimitReached

EXIT_WITHOUT_THREAD = 1
_USUAL_FILES = 1024
"""Linux's default limit on open files of a process."""
_libc = ctypes.CDLL(None, use_errno=True)
_PACKAGE = os.path.join(os.path.dirname(__file__), "")
_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
_ALLOW = "allow the call in the container's seccomp profile or security module"
_LINUX = f"use Linux 5.3 or newer, and a sandbox that has the call, or {_ALLOW}"
_OTHER = "name a folder on another file system (--run-dir, --log-dir, TMPDIR)"
_PROCESSES = (
    "raise the limit on processes and threads: ulimit -u (LimitNPROC=, TasksMax= of systemd), and pids.max of the "
    "container (docker run --pids-limit)"
)
_FILES = "raise the limit on open files: ulimit -n (LimitNOFILE= of systemd, docker run --ulimit nofile=65536)"
_MEMORY = "start fewer processes, or raise the memory limit of the container or the batch job"
_SPACE = "free space there, or name another folder (--run-dir, --log-dir, TMPDIR)"
_NETWORK = "bring up the loopback interface (ip link set lo up), with 127.0.0.1 or ::1"

_LACKING: dict[int, str] = {
    errno.EPERM: _ALLOW,
    errno.EACCES: _ALLOW,
    errno.ENOSYS: _LINUX,
    errno.EOPNOTSUPP: _OTHER,
    errno.ENOLCK: _OTHER,
    errno.EAFNOSUPPORT: _NETWORK,
    errno.EADDRNOTAVAIL: _NETWORK,
    errno.EROFS: "name a folder that can be written (--run-dir, --log-dir, TMPDIR)",
}
"""Errors that stay until the system is changed -> what to do."""
_LIMITS: dict[int, str] = {
    errno.EMFILE: _FILES,
    errno.ENFILE: "raise the machine's limit on open files: sysctl fs.file-max",
    errno.ENOMEM: _MEMORY,
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
}
"""Errors that may pass -> what to do."""
_STARTING = frozenset({"clone", "fork", "vfork"})
"""Calls for which EAGAIN is a limit. For others it means that there is nothing to read or write yet."""
_PATH = "give this user access to it, or name another folder (--run-dir, --log-dir, TMPDIR)"
_NAMES = {
    "epoll": "epoll_create1",
    "fork_exec": "fork",
    "mkdtemp": "mkdir",
    "pipe": "pipe2",
    "recv_fds": "recvmsg",
    "send_fds": "sendmsg",
    "set_inheritable": "ioctl",
    "start_joinable_thread": "clone",
    "start_new_thread": "clone",
    "urandom": "getrandom",
}
"""Python's name -> the system call's, where they differ."""
_NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")
"""What Python and C++ say if a thread cannot be started."""


@contextlib.contextmanager
def needed(call: str = "", remedy: str = "") -> Iterator[None]:
    """Turns the refusal of a system call in the block into one sentence.

    Args:
        call, remedy: as for `refusal`.

    Raises:
        CallRefused, LimitReached: the system has refused a call. Other exceptions are raised as they are.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if (refused := refusal(error, call, remedy)) is None:
            raise
        raise refused.with_traceback(error.__traceback__) from None


def refusal(error: BaseException, call: str = "", remedy: str = "") -> KeepstepError | None:
    """Returns the sentence about the refusal of a system call; None if the error is none, such as a lost connection.

    Args:
        error: an exception that was raised and caught.
        call: name of the system call; empty: that of the expression that has raised the error.
        remedy: what to do; empty: what helps against such an error in general.
    """
    if lacks_threads(error):
        return LimitReached(f"{call or 'clone'} (a new thread): Resource temporarily unavailable: {_PROCESSES}")
    if not isinstance(error, OSError) or error.errno is None:
        return None
    place = "" if call else _place(error.__traceback__)
    call = call or _call_of(error.__traceback__)
    what = call + (f" {os.fsdecode(error.filename)}" if isinstance(error.filename, str | bytes) else "")
    said = f"{what}: {os.strerror(error.errno)}{place}"
    if error.errno == errno.EAGAIN and call in _STARTING:
        return LimitReached(f"{said}: {remedy or _PROCESSES}")
    if error.errno in _LIMITS:
        return LimitReached(f"{said}: {remedy or _LIMITS[error.errno]}")
    if error.errno in _LACKING:
        usual = _PATH if error.filename is not None and error.errno == errno.EACCES else _LACKING[error.errno]
        return CallRefused(f"{said}: {remedy or usual}")
    return None


def lacks_threads(error: BaseException) -> bool:
    """Whether an error says that no thread can be started: in Python, or in C++ (`std::system_error`)."""
    return isinstance(error, RuntimeError) and str(error) in _NO_THREAD


def own_refusal(error: BaseException) -> KeepstepError | None:
    """As `refusal`, but only of a call that keepstep has made, not the script or another library."""
    if isinstance(error, CallRefused | LimitReached):
        return error
    for code, _line, _at in reversed(_codes(error.__traceback__)):
        if code.co_filename.startswith(_PACKAGE):
            return refusal(error)
        if not code.co_filename.startswith(_LIBRARY) or "site-packages" in code.co_filename:
            return None
    return None


def open_files() -> int:
    """Raises this process's limit on open files as far as it may, and returns it."""
    limit = _USUAL_FILES
    with contextlib.suppress(OSError, ValueError):  # a profile forbids it: then what there is has to do
        limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            limit = hard
    return limit


def start_thread(function: Callable[..., None], *arguments: object, name: str) -> None:
    """Starts a daemon thread that this process cannot do without. Ends the process if no thread can be started.

    The caller may be a callback of a C++ library, which drops exceptions, or be needed to end what others wait for.
    """
    try:
        threading.Thread(target=function, args=arguments, name=name, daemon=True).start()
    except RuntimeError as error:
        if (refused := refusal(error)) is None:
            raise
        os.write(2, f"keepstep: this process ends: {refused}\n".encode())
        os._exit(EXIT_WITHOUT_THREAD)


def check_threads(count: int) -> None:
    """Tries to have so many threads more at the same time.

    Raises:
        LimitReached: there is no room for them.
    """
    over = threading.Event()
    begun: list[threading.Thread] = []
    try:
        with needed():
            for _ in range(count):
                thread = threading.Thread(target=over.wait, daemon=True)
                thread.start()
                begun.append(thread)
    finally:
        over.set()
        for thread in begun:
            thread.join()


def tell_of_threads() -> None:
    """Has a refusal that ends a thread of this program printed as one sentence instead of a traceback."""

    def ended(arguments: threading.ExceptHookArgs) -> None:
        refused = arguments.exc_value and refusal(arguments.exc_value)
        if refused:
            print(f"keepstep: {refused}", file=sys.stderr, flush=True)
        else:
            threading.__excepthook__(arguments)

    threading.excepthook = ended


def memory_file(name: str, num_bytes: int = 0, flags: int = os.MFD_CLOEXEC) -> int:
    """Creates an anonymous file in memory and returns its descriptor, which the caller owns.

    Args:
        name: a name for people, shown in ``/proc/PID/fd`` only. It is no path.
        num_bytes: its size.
        flags: of `os.memfd_create`.
    """
    with needed("memfd_create"):
        descriptor = os.memfd_create(f"keepstep-{name}", flags)
    if num_bytes:
        try:
            with needed("ftruncate"):
                os.ftruncate(descriptor, num_bytes)
        except (OSError, KeepstepError):
            os.close(descriptor)
            raise
    return descriptor


def check_system() -> None:
    """Tries the calls that each rank needs, once for all ranks.

    Raises:
        CallRefused, LimitReached: the system refuses one.
    """
    with needed("eventfd"):
        os.close(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    os.close(memory_file("check", 1))


def check_locks(folder: Path) -> Path:
    """Returns a folder that has locks.

    Raises:
        CallRefused: it has none.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(BlockingIOError):  # another job has it
            lock(descriptor, folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)
    return folder


def lock(descriptor: int, folder: Path, operation: int) -> None:
    """Locks an open file of a folder.

    Args:
        descriptor: of the file.
        folder: for messages.
        operation: as `fcntl.flock` takes it.

    Raises:
        BlockingIOError: another process holds the lock.
        CallRefused: the file system has no locks.
    """
    with needed(
        f"flock in {folder}", "name a folder on a file system with locks (--run-dir, TMPDIR), such as a local disk"
    ):
        fcntl.flock(descriptor, operation)


def checked_prctl(option: int, value: int, what: str) -> None:
    """Calls `prctl`.

    Args:
        option, value: its arguments.
        what: name of the option, for messages.

    Raises:
        CallRefused: the system refuses it.
    """
    if _libc.prctl(option, value, 0, 0, 0):
        with needed(f"prctl({what})"):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def loopback() -> str:
    """Returns the address of this machine that only its own processes reach: 127.0.0.1, or ::1 where that is missing.

    Raises:
        CallRefused: it has neither.
    """
    refused = ""
    for host in ("127.0.0.1", "::1"):
        try:
            bound(host, 0).close()
        except OSError as error:
            refused = refused or f"{_call_of(error.__traceback__)} at 127.0.0.1: {error.strerror}"
        else:
            return host
    raise CallRefused(f"{refused}, nor at ::1: {_NETWORK}, and {_ALLOW}")


def bound(host: str, port: int) -> socket.socket:
    """Returns a TCP socket that is bound to an IP address and a port; 0 is any free one. It does not listen yet."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignores connections in TIME_WAIT
        found.bind((host, port))
    except OSError:
        found.close()
        raise
    return found


def _codes(trace: TracebackType | None) -> list[tuple[CodeType, int, int]]:
    """Returns code, line and offset of the instruction of each frame, the innermost last."""
    found = []
    while trace is not None:
        found.append((trace.tb_frame.f_code, trace.tb_lineno, trace.tb_lasti))
        trace = trace.tb_next
    return found


def _call_of(trace: TracebackType | None) -> str:
    """Returns the name of the system call in the expression that has raised an error, as far as Python shows it.

    It reads the compiled code: there may be no descriptor left to open the source.
    """
    code, _line, at = _codes(trace)[-1]
    steps = list(dis.get_instructions(code))
    raised = next((step for step in steps if step.offset == at), steps[0])
    names = [
        str(step.argval).strip("_")
        for step in steps
        if step.offset < at and step.opname.startswith("LOAD_") and _begin(step) == _begin(raised)
    ]
    if names and names[-1] == "init":
        names.pop()
    if raised.opname.startswith("RAISE") or not names:
        return "a system call"
    return _NAMES.get(names[-1], names[-1])


def _begin(step: dis.Instruction) -> tuple[int | None, int | None]:
    """Returns line and column at which an instruction's expression begins: `a.b` begins where `a.b(c)` does."""
    return (None, None) if step.positions is None else (step.positions.lineno, step.positions.col_offset)


def _place(trace: TracebackType | None) -> str:
    """Returns the innermost place in keepstep of an error's traceback, in brackets; empty if there is none."""
    for code, line, _at in reversed(_codes(trace)):
        if code.co_filename.startswith(_PACKAGE) and code.co_filename != __file__:
            return f" ({os.path.relpath(code.co_filename, _PACKAGE)}, line {line})"
    return ""
