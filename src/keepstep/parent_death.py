"""Ends this process when its parent process ends, even if SIGKILL ends the parent."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""
_libc = ctypes.CDLL(None, use_errno=True)


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
