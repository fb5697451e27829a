"""Observes the threads that run the collectives of one gloo communicator."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from keepstep.errors import ConfigurationError

_NAME = "pt_gloo_runloop"
"""The name that torch gives the threads that run a communicator's collectives."""
_NAMED_S = 5.0
"""Deadline for a new thread to give itself that name."""
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

    def check(self) -> None:
        """Checks that the threads of a communicator are among those recorded, under the name that torch gives them.

        Raises:
            ConfigurationError: torch is another one than those that keepstep was tested with.
        """
        end_s = time.monotonic() + _NAMED_S
        while not any(_look(thread)["Name"] == _NAME for thread in self._threads):
            if time.monotonic() > end_s:
                raise ConfigurationError(
                    f"torch {torch.__version__}: no thread of a gloo group is named {_NAME}, and keepstep has to know "
                    "when they rest: install a release of torch that this release of keepstep was tested with"
                )
            threading.Event().wait(_NAMED_S / 1000)  # procfs tells of no event

    def have_rested(self) -> bool:
        """Whether all threads sleep, and none of them has run since the last call.

        A thread that was preempted is runnable, and one that ran in between has context switches: neither rests. If
        threads were recorded and none that is left has the name, it is not known what they do, so they do not rest.
        """
        looks = [look for thread in self._threads if (look := _look(thread))["Name"]]
        now = [look for look in looks if look["Name"] == _NAME]
        rested = now == self._before and all(look["State"].startswith("S") for look in now)
        self._before = now
        return rested and bool(now or not looks)


def _look(thread: str) -> dict[str, str]:
    """Name, state and number of context switches of one thread."""
    try:
        lines = Path(f"/proc/self/task/{thread}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {"Name": ""}  # it has ended
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {name: fields[name] for name in _SHOWN}
