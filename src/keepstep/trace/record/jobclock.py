"""The clock of a job. All times in its journal use it, even after its controller has moved to another machine.

It starts as the monotonic clock of the machine on which the job starts. A controller that continues on another machine,
or after a reboot, has another monotonic clock: it adds an offset so that the job's time advances by as much as the wall
clock has. The time never goes back before the last entry of the journal.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = "/proc/self/ns/time"


class JobClock:
    """Reads the present time on a job's clock."""

    def __init__(self, offset_ns: int = 0) -> None:
        """Args:
        offset_ns: how far the job's clock is ahead of this machine's monotonic clock.
        """
        self.offset_ns = offset_ns

    def now_ns(self) -> int:
        """The present time in nanoseconds."""
        return time.monotonic_ns() + self.offset_ns

    def now_s(self) -> float:
        """The present time in seconds."""
        return self.now_ns() / 1e9


def this_machine() -> str:
    """Identifies the monotonic clock of this process: the boot id of the kernel and the time namespace."""
    namespace = ""
    with contextlib.suppress(OSError):  # Linux before 5.6 has no time namespaces
        namespace = os.readlink(_TIME_NAMESPACE)
    return f"{_BOOT.read_text().strip()} {namespace}".strip()
