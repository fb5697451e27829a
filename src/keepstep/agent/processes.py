"""One worker's process: the state that the agent's loop keeps, and its exit status."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from pathlib import Path

from keepstep.agent.outputs import WorkerOutput
from keepstep.shared import lifeline, tagpage


@dataclasses.dataclass(slots=True)
class AgentWorker:
    """One worker's process as its agent's loop sees it; what follows from it is the machine's to say."""

    worker: int
    rank: int | None
    page: tagpage.TagReader
    output: WorkerOutput
    lifeline: lifeline.Lifeline
    listener: asyncio.Task[None]
    writer: asyncio.StreamWriter | None = None
    unwritten: bytes = b""
    """Orders that came before the connection to it was open."""
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
    stopped: bool = False


def ending(status: int) -> str:
    """How a process ended; empty where it ended with exit code 0, which may be well."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit code {status}" if status else ""


def is_stopped(pid: int | None) -> bool:
    """Whether the kernel holds the process stopped (state T)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] == "T"
