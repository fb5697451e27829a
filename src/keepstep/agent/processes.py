"""One worker's process: the state that the agent's loop keeps, and what the operating system says of it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import platform
from pathlib import Path

from keepstep.agent.outputs import WorkerOutput
from keepstep.procfs import TICKS_PER_S, status_of
from keepstep.shared import lifeline, tagpage, tracebacks

SYSTEM_CALLS = {"x86_64": {0: "read", 1: "write"}, "aarch64": {63: "read", 64: "write"}}
"""Machine -> number of a system call -> its name. From arch/x86/entry/syscalls/syscall_64.tbl, and from
include/uapi/asm-generic/unistd.h of Linux."""
ANSWER_S = 2.0
"""How long a worker's link thread may take to write the stack, before a signal asks the training thread itself."""
RENEW_S = 10.0
"""While a rank makes no progress, the agent asks for the stack again at this interval."""


@dataclasses.dataclass(slots=True)
class AgentWorker:
    """The state of one worker's process in the agent's event loop. Decisions are taken by `AgentMachine`."""

    worker: int
    rank: int | None
    page: tagpage.TagReader
    output: WorkerOutput
    lifeline: lifeline.Lifeline
    listener: asyncio.Task[None]
    writer: asyncio.StreamWriter | None = None
    unwritten: bytes = b""
    """Frames of orders from before the connection to the worker was open."""
    pid: int | None = None
    resume_step: int = 0
    watched_generation: int | None = None
    events_read: int = 0
    phases_read: int = 0
    durations_read: int = 0
    durations_ns: int = 0
    last_forward_ns: int = 0
    progress: int = -1
    moved_s: float = 0.0
    looked_s: float = 0.0
    """When the agent last read the state of its process. It does so while there is no progress."""
    stopped: bool = False
    unread: bool = False
    has_joined: bool = False
    """Whether its link thread listens."""
    examination: Examination | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of a process in the kernel."""

    letter: str
    """That of its main thread: R runs, S sleeps, D sleeps and cannot be interrupted, T is stopped by a signal."""
    used_s: float
    """Processor time of all of its threads, in seconds."""

    @classmethod
    def of(cls, pid: int | None) -> ProcessState | None:
        """Returns the present state; None where the system does not tell."""
        fields = status_of(pid)
        return None if fields is None else cls(fields[0], (int(fields[11]) + int(fields[12])) / TICKS_PER_S)

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped by a signal."""
        return self.letter == "T"

    @property
    def sleeps(self) -> bool:
        """Whether the main thread waits for something."""
        return self.letter in ("S", "D")


@dataclasses.dataclass(slots=True)
class Examination:
    """What can be seen of a process that has made no progress for a while. No decision depends on it."""

    pid: int
    began_s: float
    before: ProcessState | None
    """The state when it began."""
    asked_s: float
    was_signalled: bool = False

    @classmethod
    def begin(cls, pid: int, now_s: float) -> Examination:
        return cls(pid, now_s, ProcessState.of(pid), now_s)

    def text(self, stack: str, now_s: float) -> str:
        """Returns what the process does, as the end of a sentence; empty where nothing can be seen.

        Example: ``in load() at data.py:17, called from train.py:40 (waits in write() to pipe:[8], uses 0% of a core)``.
        """
        seen = ", ".join(self._seen(now_s))
        where = tracebacks.where(stack)
        return f"{where} ({seen})" if where and seen else where or seen

    def _seen(self, now_s: float) -> list[str]:
        state = ProcessState.of(self.pid)
        if state is None:
            return []
        seen = [call] if (call := _blocked_call(self.pid)) else []
        if state.letter == "D":
            seen.append("waits in the kernel (state D), in most cases for a disk or a network file system")
        if state.is_stopped:
            seen.append("stopped by a signal")
        elif self.before is not None and now_s > self.began_s:
            seen.append(f"uses {max(0.0, state.used_s - self.before.used_s) / (now_s - self.began_s):.0%} of a core")
        return seen


def _blocked_call(pid: int) -> str:
    """Returns the read or write in which the main thread waits, and of which file; empty if there is none, or if the
    system does not tell."""
    try:
        words = Path(f"/proc/{pid}/syscall").read_text(encoding="ascii").split()
        name = SYSTEM_CALLS.get(platform.machine(), {}).get(int(words[0])) if words[0].isdigit() else None
        if name is None:
            return ""
        file = os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}")
    except OSError:
        return ""
    return f"waits in {name}() {'of' if name == 'read' else 'to'} {tracebacks.short(file)}"
