"""One worker's process: the state that the agent's loop keeps, whether it is stopped, and what it handles."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from keepstep.agent.outputs import WorkerOutput
from keepstep.shared import lifeline, tagpage


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
    stopped: bool = False


def is_stopped(pid: int | None) -> bool:
    """Whether the process is stopped by a signal (state T)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] == "T"


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal. False where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
