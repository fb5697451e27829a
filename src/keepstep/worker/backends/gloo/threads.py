"""Observes the threads that run the collectives of one gloo communicator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME = "pt_gloo_runloop"
"""The name that torch gives the threads that run a communicator's collectives."""
_SHOWN = ("Name", "State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")


class GlooThreads:
    """The threads that were started while `recording` ran."""

    def __init__(self) -> None:
        self._threads: list[str] = []
        self._before: list[dict[str, str]] | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records every thread that the block starts."""
        before = set(os.listdir("/proc/self/task"))
        yield
        self._threads = [thread for thread in os.listdir("/proc/self/task") if thread not in before]

    def have_rested(self) -> bool:
        """Whether all threads sleep, and none of them has run since the last call.

        A thread that was preempted is runnable, and one that ran in between has context switches: neither rests.
        """
        now = [look for thread in self._threads if (look := _look(thread))["Name"] == _NAME]
        rested = now == self._before and all(look["State"].startswith("S") for look in now)
        self._before = now
        return rested


def _look(thread: str) -> dict[str, str]:
    """Name, state and number of context switches of one thread."""
    try:
        lines = Path(f"/proc/self/task/{thread}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {"Name": ""}  # it has ended
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {name: fields[name] for name in _SHOWN}
