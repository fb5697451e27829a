"""The Python stack of a worker's training thread, for sentences about a rank that makes no progress.

Its agent asks for it (`DumpTraceback`). The worker's link thread then writes it behind the tag page, in the same memory
file, for which the agent reads it. The link thread cannot run while C code holds the interpreter's lock: then the agent
sends `SIGNAL`, whose handler needs no lock. No decision depends on a stack.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from keepstep.protocol.messages import printable
from keepstep.shared.tagpage import PAGE_BYTES

SIGNAL = signal.SIGRTMAX - 1
"""A real-time signal, because scripts and schedulers use the others. glibc and debuggers use the lowest ones."""
MAX_FRAMES = 100
"""Most frames of a stack, as `faulthandler` writes. The innermost ones are kept."""
MAX_SHOWN = 3
"""Most frames in a sentence."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
_OWN = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = re.compile(r"/(site|dist)-packages/torch/")
_INSTALLED = re.compile(r"/lib/python3[.\d]*/|/(site|dist)-packages/")
_MAX_NAME = 60
"""Longest name in a sentence, in characters."""


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal. False where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def install(descriptor: int) -> None:
    """Has `SIGNAL` write the stack of the thread that gets it, which is the main thread, behind the tag page.

    A handler of the script has precedence. Processes that the script forks inherit this one; no one signals them.

    Args:
        descriptor: of the tag page's file. It must stay open.
    """
    if signal.getsignal(SIGNAL) is signal.SIG_DFL and not handles(os.getpid(), SIGNAL):
        faulthandler.register(SIGNAL, file=descriptor, all_threads=False)


def dump(descriptor: int, thread: int) -> None:
    """Writes the present stack of a thread behind the tag page, as `faulthandler` would. Runs in another thread.

    Args:
        descriptor: of the tag page's file.
        thread: the thread's identifier.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return
    calls = [(each.f_code, line) for each, line in traceback.walk_stack(frame)][:MAX_FRAMES]
    lines = [f'  File "{code.co_filename}", line {line} in {code.co_name}\n' for code, line in calls]
    with suppress(OSError):  # the size of files is limited, or the memory is: the sentence comes without the stack
        os.ftruncate(descriptor, PAGE_BYTES)
        os.pwrite(descriptor, "".join(lines).encode(errors="backslashreplace"), PAGE_BYTES)


def where(stack: str) -> str:
    """Returns where a stack is, as the end of a sentence; empty if it shows no code of the script.

    Example: ``in load() at data.py:17, called from train.py:40``. Frames of keepstep and torch are left out; those of
    other installed modules, too, but for the innermost one.
    """
    shown: list[str] = []
    for frame in _FRAME.finditer(stack):
        file, function = frame["file"], short(frame["function"])
        place = f"{short(os.path.basename(file))}:{frame['line']}"
        if file.startswith((_OWN, "<frozen ")) or _TORCH.search(file) or (shown and _INSTALLED.search(file)):
            continue
        if shown:
            shown.append(f"called from {place}")
        else:
            shown.append(f"at {place}" if function == "<module>" else f"in {function}() at {place}")
    return ", ".join(shown[:MAX_SHOWN])


def short(name: str) -> str:
    """A name of the script's as a terminal may get it, in one line."""
    shown = printable(" ".join(name.split()))
    return shown if len(shown) <= _MAX_NAME else f"{shown[: _MAX_NAME - 1]}…"
