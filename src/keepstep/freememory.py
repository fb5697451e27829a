"""The memory available to a process: the machine's, limited by its control groups.

A container or a Slurm job is killed when it exceeds the limit of its control group, even if the machine has memory
left. Files: cgroup v2 (Linux, Documentation/admin-guide/cgroup-v2.rst, Memory Interface Files).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_PROC, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def free_bytes(membership: Path = _PROC, groups: Path = _GROUPS) -> int:
    """The least of what the machine and the control groups leave. Cached files that can be dropped count as free.

    Args:
        membership: the file that names this process's group.
        groups: where the groups are.
    """
    available = int(psutil.virtual_memory().available)
    return max(0, min([available, *_left_in_groups(membership, groups)]))


def _left_in_groups(membership: Path, groups: Path) -> Iterator[int]:
    """Of each group from the process's own up; one that has no limit, or cannot be read, says nothing."""
    with suppress(OSError):
        names = [line.removeprefix("0::/") for line in membership.read_text().splitlines() if line.startswith("0::/")]
        for name in names:
            own = groups / name
            for folder in (own, *own.parents):
                if folder.is_relative_to(groups):
                    with suppress(OSError, ValueError):  # "max" is no number
                        yield _left_in(folder)


def _left_in(folder: Path) -> int:
    limit = int((folder / "memory.max").read_text())
    taken = int((folder / "memory.current").read_text())
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return limit - taken + int(stat.get("inactive_file", 0))
