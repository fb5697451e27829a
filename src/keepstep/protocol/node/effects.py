"""The effects of the agent's machine, which the agent's loop performs."""

from __future__ import annotations

import dataclasses

from keepstep.protocol import messages as msg


@dataclasses.dataclass(frozen=True, slots=True)
class Spawn:
    """Start a worker's process, then call `spawned`. Call `exited` when it has ended."""

    worker: int
    rank: int | None
    device: int
    local_rank: int | None
    local_world_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Kill:
    """Kill a worker's process and all processes that it has started."""

    worker: int


@dataclasses.dataclass(frozen=True, slots=True)
class Signal:
    """Send SIGTERM to these workers."""

    workers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class HandOver:
    """Send an order to these workers."""

    workers: tuple[int, ...]
    order: msg.WorkerOrder


@dataclasses.dataclass(frozen=True, slots=True)
class Leave:
    """End all workers of the node, then the agent itself, with this exit code."""

    exit_code: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Depart:
    """Tell the controller that the node leaves the job."""

    message: msg.NodeLeft


@dataclasses.dataclass(frozen=True, slots=True)
class LookCloser:
    """Read the operation counts on the pages of these workers, the snapshots in their memory, and what their processes
    do; then call `looked_closer`."""

    workers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ReleaseMemory:
    """Free the snapshots of these dead workers; None: of all dead workers."""

    workers: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class PassMemory:
    """Tell a worker where a rank's snapshots are: in the memory of these workers, alive or dead."""

    worker: int
    rank: int
    keepers: tuple[int, ...]


AgentEffect = Spawn | Kill | Signal | HandOver | Leave | Depart | LookCloser | PassMemory | ReleaseMemory
