"""Signals that a scheduler sends to every process of a job, as Slurm, systemd and a container's init send SIGTERM.

Launcher and agents drain the job then. For that its ranks must complete a step, so the signal must not end them; they
get SIGTERM when the drain is over. A script's own handler runs in any case. For a script without one, a handler in C
that does nothing stands in for the default action. `signal.getsignal` does not show it, and a handler of the script
takes its place. Children of this process do not have it: a program that is executed begins without handlers, and a fork
restores the default.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import threading
from types import FrameType
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.signal.argtypes, _libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
_DEFAULT = None
"""``SIG_DFL``: a null pointer."""
_NOTHING = ctypes.cast(_libc.abs, ctypes.c_void_p).value
"""The address of ``abs``: a C function that takes an int, as a handler does, and changes nothing."""
_outlived: set[int] = set()
"""The signals on which the launcher drains."""
ENDING_S = 1.0
"""How long the end of a child is waited for if a connection is broken, perhaps to a child."""
_SIGACTION_BYTES = 256
"""More than any ``struct sigaction`` has; its first member is the handler."""
held_back: list[Exception] = []
"""The last error that `hold_back_child_errors` has held back, until it is raised."""


def outlive_signals(*numbers: int) -> None:
    """Has those signals do nothing whose action is the default one.

    Args:
        numbers: the signals on which the launcher drains; those of the first call are remembered for later ones.
    """
    _outlived.update(numbers)
    for number in _outlived:
        if _handler(number) == _DEFAULT:
            _libc.signal(number, _NOTHING)


def restore_default(number: int = signal.SIGTERM) -> bool:
    """Ends `outlive_signals` for one. Returns whether it was in effect."""
    if _handler(number) != _NOTHING:
        return False
    _libc.signal(number, _DEFAULT)
    return True


def has_lost_child(error: BaseException) -> bool:
    """Whether a child process of this one, such as a worker of a data loader, was ended by one of those signals.

    Args:
        error: the exception that may have come of that. Of torch's, the one that names the signal is its cause, or was
            held back; torch forgets the process.
    """
    for each in (error, *held_back):
        cause: BaseException | None = each
        while cause is not None:
            if any(f"killed by signal: {signal.strsignal(number)}" in str(cause) for number in _outlived):
                return True
            cause = cause.__cause__ or cause.__context__
    children = tuple(getattr(multiprocessing.process, "_children", ()))
    if isinstance(error, OSError | EOFError):
        # The kernel closes the connections of a process before it reports its end.
        ending = multiprocessing.connection.wait([each.sentinel for each in children], ENDING_S)
        for each in children:
            if each.sentinel in ending:
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PID, each.pid, os.WEXITED | os.WNOWAIT)
    return any(-(each.exitcode or 0) in _outlived for each in children)


class _LoaderErrors:
    """A handler of SIGCHLD that raises where the script waits for a loader, and nowhere else."""

    def __init__(self, handler: Any) -> None:
        """``handler``: the script's, which is torch's if the script has a loader."""
        self._handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handler(number, frame)
        except Exception as error:  # torch raises a RuntimeError, a script of its own whatever it likes
            if _is_in_loader(frame):
                raise
            held_back[:] = [error]


def hold_back_child_errors() -> None:
    """Has the handler of SIGCHLD raise no error in the middle of an update or of a recovery.

    torch's raises one wherever the main thread is when a loader's worker has died. The loader also finds that by itself
    when the script asks it for a batch.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    is_wrapped = isinstance(handler, _LoaderErrors) or not callable(handler)
    if not is_wrapped and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, _LoaderErrors(handler))


def _is_in_loader(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("torch.utils.data"):
            return True
        frame = frame.f_back
    return False


def _handler(number: int) -> int | None:
    """The address of the present handler of a signal."""
    action = (ctypes.c_void_p * (_SIGACTION_BYTES // ctypes.sizeof(ctypes.c_void_p)))()
    _libc.sigaction(number, None, action)
    return action[0]


def _restore_all() -> None:
    for number in _outlived:
        restore_default(number)


os.register_at_fork(after_in_child=_restore_all)
