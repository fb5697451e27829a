"""Ends this process together with the one that started it, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
"""Of <linux/prctl.h>."""
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel for a signal when the parent dies, and ends this process if that has happened already.

    Args:
        parent: the process id of the parent; call this first of all, for it may have died by then.
        number: the signal.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
