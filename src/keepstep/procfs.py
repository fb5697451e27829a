"""What the kernel says of the machine and of its processes in /proc (Linux, Documentation/filesystems/proc.rst)."""

from __future__ import annotations

import os
from pathlib import Path

from keepstep.errors import CallRefused

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MEMORY, _MACHINE, _TRANSFERS = Path("/proc/meminfo"), Path("/proc/stat"), Path("/proc/self/io")


def status_of(pid: int | None) -> list[str] | None:
    """Returns the fields of ``/proc/PID/stat`` that follow the name, from the state on; None if it cannot be read.

    The name itself may contain spaces and parentheses.
    """
    try:
        content = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return content.rpartition(")")[2].split()


def start_of(pid: int) -> int | None:
    """Returns when a process was started, in ticks since the boot; None if that cannot be read.

    Together with the process id it names one process of this boot.
    """
    fields = status_of(pid)
    return None if fields is None else int(fields[19])


def available_bytes(memory: Path = _MEMORY) -> int:
    """Returns the memory that processes can still take without swapping.

    Args:
        memory: the kernel's file about memory.

    Raises:
        CallRefused: the file cannot be read, or does not say it.
    """
    try:
        lines = memory.read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise CallRefused(
            f"{memory}: {error.strerror}; keepstep reads the available memory there: mount /proc"
        ) from error
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise CallRefused(
        f"{memory} has no line MemAvailable; keepstep reads the available memory there: use Linux's own /proc"
    )


def cores_idle_s(machine: Path = _MACHINE) -> float:
    """Returns for how long the machine's cores have been idle since the boot, all added up, in seconds.

    Returns 0 if that cannot be read: then no core seems ever to be idle.

    Args:
        machine: the kernel's file about the machine.
    """
    try:
        first = machine.read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return int(first[4]) / TICKS_PER_S if first[:1] == ["cpu"] and len(first) > 4 else 0.0


def bytes_moved(transfers: Path = _TRANSFERS) -> int:
    """Returns the bytes that this process has read and written so far; 0 if that cannot be read.

    Args:
        transfers: the kernel's file about what this process has read and written.
    """
    try:
        lines = transfers.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "wchar:")))
