"""What all programs of keepstep do alike: launcher, controller, agent, and their children."""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import os
import pkgutil
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from keepstep.config import has_safe_path
from keepstep.errors import ConfigurationError
from keepstep.systemcalls import checked_prctl

_PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""
_SIGBUS = " (mostly a full /dev/shm, through which DataLoader's workers send batches: docker run --shm-size=8g)"
END_AT_ONCE = signal.SIGRTMAX
"""Ends a child of keepstep at once. Its parent sends it, or the kernel when the parent dies. Terminals, schedulers and
`nohup` do not send or ignore real-time signals."""


OTHERS = (
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO),
    *(signal.SIGPWR, signal.SIGSTKFLT, *range(signal.SIGRTMIN, signal.SIGRTMAX)),
)
"""The signals that end a process which does not handle them, and that mean nothing to keepstep. Without those that tell
of an error of the process itself, such as SIGSEGV, and without SIGPIPE and SIGXFSZ, which Python ignores."""


DRAIN_ON = ("SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Signals that schedulers send ahead of the end of a job, if a user asks for it."""


class Program(enum.StrEnum):
    """The programs of a job, by what they do about signals."""

    LAUNCHER = "`keepstep run`, `keepstep drill`, `keepstep agent`"
    CONTROLLER = "`keepstep controller`"
    VIEW = "`keepstep controller --standby` while it waits, `keepstep dashboard`, `keepstep weights`"
    CHILD = "a job's own processes: controller, relays, spawner, sweeper, server of weights, page"


class Disposition(enum.StrEnum):
    """What a program does about a signal."""

    DRAIN = "drains the job, or its node; a second one ends it at once"
    END = "ends at once"
    FORWARD = "passes it on to those ranks that handle it"
    IGNORE = "ignores it"


DISPOSITIONS: dict[Program, dict[str, Disposition]] = {
    Program.LAUNCHER: {
        "SIGTERM": Disposition.DRAIN,
        "SIGHUP": Disposition.DRAIN,
        "SIGINT": Disposition.END,
        "SIGQUIT": Disposition.END,
        "others": Disposition.FORWARD,
    },
    Program.CONTROLLER: {
        "SIGTERM": Disposition.DRAIN,
        "SIGHUP": Disposition.DRAIN,
        "SIGINT": Disposition.END,
        "SIGQUIT": Disposition.END,
        "others": Disposition.IGNORE,
    },
    Program.VIEW: {
        "SIGTERM": Disposition.END,
        "SIGHUP": Disposition.END,
        "SIGINT": Disposition.END,
        "SIGQUIT": Disposition.END,
        "others": Disposition.IGNORE,
    },
    Program.CHILD: dict.fromkeys(("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "others"), Disposition.IGNORE),
}
"""Program -> signal -> what it does. A scheduler may signal all processes of a job at once, or its first one; only that
one, or the launcher of each node, acts. It tells its children in other ways: it closes a socket or a pipe."""


def dispositions(program: Program) -> dict[int, Disposition]:
    """Returns what a program does about each signal, but for those that were ignored when it was started.

    `nohup` ignores SIGHUP, and a shell without job control ignores SIGINT and SIGQUIT for a command in the background.
    Such a signal stays ignored, as in programs that do not handle it.
    """
    found: dict[int, Disposition] = {}
    for name, disposition in DISPOSITIONS[program].items():
        found |= dict.fromkeys(OTHERS if name == "others" else (signal.Signals[name],), disposition)
    return {number: each for number, each in found.items() if signal.getsignal(number) is not signal.SIG_IGN}


def leave_signals_to_parent() -> dict[int, Any]:
    """Has a child of a job ignore the signals that its parent acts on. Returns signal -> what it did before."""
    return {number: signal.signal(number, signal.SIG_IGN) for number in dispositions(Program.CHILD)}


def own_command(module: str, *arguments: str) -> list[str]:
    """Returns the command line that runs one of keepstep's own modules as a program.

    With ``-P`` Python does not put the working directory in front of the library: that may be the user's project, with
    a ``random.py`` in it.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def check_installed(what: str, modules: Sequence[str], extra: str) -> None:
    """Checks that the packages of an extra are installed. It imports none of them.

    Args:
        what: what needs them, such as a flag.
        modules: one name for each package.
        extra: the extra of keepstep that installs them.

    Raises:
        ConfigurationError: some are missing; the message names them and the extra.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"{what}: {', '.join(missing)} is missing: pip install 'keepstep[{extra}]'")


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


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel to send this process a signal when its parent dies. Exits at once if it has died already.

    Call it as early as possible.

    Args:
        parent: process id of the parent.
        number: the signal.

    Raises:
        CallRefused: the system refuses it: nothing would end this process after a SIGKILL of its parent.
    """
    checked_prctl(_PR_SET_PDEATHSIG, number, "PR_SET_PDEATHSIG")
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
    hint = _SIGBUS if -status == signal.SIGBUS else ""
    return f"killed by {signal_name(-status)}" + (" (core dumped)" if has_dumped else "") + hint
