"""Effects of a node's machine, which its shell performs."""

from __future__ import annotations

import dataclasses

from keepstep.protocol import messages as msg


@dataclasses.dataclass(frozen=True, slots=True)
class Spawn:
    """Start a worker's process; then call `spawned`, and `exited` when it has ended."""

    worker: int
    rank: int | None
    device: int
    local_rank: int | None
    local_world_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Kill:
    """Kill a worker's process and all that it started."""

    worker: int


@dataclasses.dataclass(frozen=True, slots=True)
class Signal:
    """Send SIGTERM to workers."""

    workers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class HandOver:
    """Give an order to workers."""

    workers: tuple[int, ...]
    order: msg.WorkerOrder


@dataclasses.dataclass(frozen=True, slots=True)
class Leave:
    """End every process of this node's part of the job, and then this one."""

    exit_code: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Depart:
    """Tell the controller that the node leaves the job."""

    message: msg.NodeLeft


@dataclasses.dataclass(frozen=True, slots=True)
class LookCloser:
    """Read the operation counts on the pages of these workers; then call `looked_closer`."""

    workers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ReleaseMemory:
    """Let go of the snapshots of workers that are gone; of all of them where it is None."""

    workers: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class PassMemory:
    """Tell a worker where snapshots of a rank are: in the memory of these workers, be they alive or gone."""

    worker: int
    rank: int
    keepers: tuple[int, ...]


AgentEffect = Spawn | Kill | Signal | HandOver | Leave | Depart | LookCloser | PassMemory | ReleaseMemory
