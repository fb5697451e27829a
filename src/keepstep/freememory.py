"""The memory available to a process: the machine's, limited by its control groups.

A container or a Slurm job is killed when it exceeds the limit of its control group, even if the machine has memory
left. Files: cgroup v2 (Linux, Documentation/admin-guide/cgroup-v2.rst, Memory Interface Files).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from keepstep.procfs import available_bytes

_PROC, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def free_bytes(membership: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Returns the available bytes: the minimum over the machine and the process's control groups.

    Cached files that the kernel can drop count as available.

    Args:
        membership: the file that names this process's control group.
        groups: the root folder of the control groups.

    Raises:
        CallRefused: the system does not say what the machine has.
    """
    return max(0, min([available_bytes(), *_left_in_groups(membership, groups)]))


def killed_together(membership: Path = _PROC, groups: Path = _GROUPS) -> Path | None:
    """Returns the control group whose processes the kernel kills all together when one is out of memory; None: none.

    Args:
        membership, groups: as for `free_bytes`.
    """
    for folder in _own_groups(membership, groups):
        with suppress(OSError):  # the root has no such file, and an old kernel none at all
            if (folder / "memory.oom.group").read_text().strip() == "1":
                return folder
    return None


def _own_groups(membership: Path, groups: Path) -> Iterator[Path]:
    """Yields the folders of the process's control groups, from its own to the root; nothing if that is not known."""
    with suppress(OSError):
        names = [line.removeprefix("0::/") for line in membership.read_text().splitlines() if line.startswith("0::/")]
        for name in names:
            own = groups / name
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(groups))


def _left_in_groups(membership: Path, groups: Path) -> Iterator[int]:
    """Yields the bytes left in each control group. Skips groups without a limit, and those that cannot be read."""
    for folder in _own_groups(membership, groups):
        with suppress(OSError, ValueError):  # "max" means no limit
            yield _left_in(folder)


def _left_in(folder: Path) -> int:
    limit = int((folder / "memory.max").read_text())
    taken = int((folder / "memory.current").read_text())
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return limit - taken + int(stat.get("inactive_file", 0))
