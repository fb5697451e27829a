"""What all programs of keepstep do alike: launcher, controller, agent, and their children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pkgutil
import signal
import sys
from typing import NoReturn

from keepstep.config import has_safe_path

_PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""
_libc = ctypes.CDLL(None, use_errno=True)
END_AT_ONCE = signal.SIGRTMAX
"""Ends a child of keepstep at once. Its parent sends it, or the kernel when the parent dies. Terminals, schedulers and
`nohup` do not send or ignore real-time signals."""


def own_command(module: str, *arguments: str) -> list[str]:
    """Returns the command line that runs one of keepstep's own modules as a program.

    With ``-P`` Python does not put the working directory in front of the library: that may be the user's project, with
    a ``random.py`` in it.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def begin() -> None:
    """Gives a program of keepstep standard streams and the default action of SIGCHLD. Call it first.

    A service or a cron job may start it without standard streams. The next file or socket would get such a descriptor,
    and the output of a C library would go there. If SIGCHLD is ignored, the kernel reaps children itself, and their
    exit status is lost.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # Python's own, for a descriptor that was closed
            stream = os.fdopen(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def first_on_path(script: str | None, working_dir: str) -> str | None:
    """Returns what Python puts in front of its search path for modules when it runs a script; None for nothing.

    Args:
        script: path of a file, or of a folder or zip file with a ``__main__.py``; None for a module (``-m``).
        working_dir: the working directory of the process that runs it.
    """
    if script is not None and is_container(path := os.path.join(working_dir, script)):
        return path
    if has_safe_path():
        return None
    return working_dir if script is None else os.path.dirname(os.path.realpath(path))


def is_container(path: str) -> bool:
    """Whether Python looks for a ``__main__.py`` in what it is told to run: in a folder or a zip file."""
    return pkgutil.get_importer(path) is not None


def unless_ignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """Returns those of the signals that this program may handle: all but those that were ignored when it was started.

    `nohup` ignores SIGHUP, and a shell without job control ignores SIGINT and SIGQUIT for a command in the background.
    Such a signal stays ignored, as in programs that do not handle it.
    """
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel to send this process a signal when its parent dies. Exits at once if it has died already.

    Call it as early as possible.

    Args:
        parent: process id of the parent.
        number: the signal.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def flush() -> None:
    """Writes out what was printed. In place of a stream a script may have left None, a closed file, or anything."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # of a class of the script's own, which may lack flush()
            stream.flush()


def leave(code: int) -> NoReturn:
    """Ends this process without the interpreter's own end, but with everything printed.

    The interpreter does not free objects that are out of the garbage collector's sight (`gc.freeze`), and C++ bindings
    then report them as leaked, in thirty lines.
    """
    flush()
    os._exit(code)


def signal_name(number: int) -> str:
    """Returns the name of a signal, or its number: most real-time signals have no name in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ending(status: int, *, has_dumped: bool = False) -> str:
    """Describes how a process has ended.

    Args:
        status: as of `os.waitstatus_to_exitcode`: negative for a signal.
        has_dumped: whether it has left a core file.
    """
    if status >= 0:
        return f"exit code {status}"
    return f"killed by {signal_name(-status)}" + (" (core dumped)" if has_dumped else "")
