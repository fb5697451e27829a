"""An agent's settings for the job that it serves."""

from __future__ import annotations

import dataclasses
import enum
import socket
from pathlib import Path

from keepstep.agent.spawner import SpawnerSettings
from keepstep.programs import first_on_path
from keepstep.protocol.deadlines import DEADLINES, Deadlines
from keepstep.systemcalls import loopback


@dataclasses.dataclass(frozen=True, slots=True)
class OutputSettings:
    """Where workers' stdout and stderr go, per local rank, as in torchrun's flags."""

    log_dir: Path | None = None
    redirect_stdout: frozenset[int] = frozenset()
    redirect_stderr: frozenset[int] = frozenset()
    tee_stdout: frozenset[int] = frozenset()
    tee_stderr: frozenset[int] = frozenset()
    shown: frozenset[int] | None = None
    """Local ranks shown on the console; None for all."""
    role: str = "default"

    @property
    def writes_files(self) -> bool:
        """Whether any stream goes to a log file."""
        return any((self.redirect_stdout, self.redirect_stderr, self.tee_stdout, self.tee_stderr))


@dataclasses.dataclass(frozen=True, slots=True)
class NodePlace:
    """A node's place in its job. The job-wide numbers are the same on every node."""

    node: str
    """Unique name of the node."""
    world_size: int
    ranks_per_node: int
    slots: int
    """Number of workers that this node can hold: ranks and spares."""
    num_nodes: int = 1
    """Number of nodes with ranks."""
    position: int = 0
    """torchrun's ``--node-rank``."""
    domain: str = ""
    """Failure domain of this node; empty: the node alone."""
    address: str = "127.0.0.1"
    """Address at which the process groups of this node's workers listen."""

    @classmethod
    def alone(cls, num_ranks: int, num_spares: int) -> NodePlace:
        """Returns the place of a job's only node."""
        return cls(socket.gethostname(), num_ranks, num_ranks, num_ranks + num_spares, address=loopback())


class HealthMode(enum.StrEnum):
    """The values of ``--health``."""

    OFF = "off"
    WARN = "warn"
    ACT = "act"


@dataclasses.dataclass(frozen=True, slots=True)
class HealthSettings:
    """Whether the agent reads its devices' health, and whether it acts on it."""

    mode: HealthMode = HealthMode.OFF
    by_bus: bool = False
    """Whether CUDA numbers the devices by their PCI bus id, as the driver does."""


@dataclasses.dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of one node's agent for a job."""

    command: tuple[str, ...]
    module: bool
    raw: bool
    fork: bool
    place: NodePlace
    run_dir: Path
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Variables that workers inherit from the spawner."""
    job_environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """torchrun's variables that are the same in all workers of a job."""
    parks_spares: bool = False
    """Whether spares wait before the script's first line."""
    shares_gpus: bool = False
    """Whether several processes may use one GPU."""
    preload: tuple[str, ...] = ()
    """Modules that workers import before the script's first line."""
    devices: tuple[str, ...] = ()
    """The node's devices, as CUDA_VISIBLE_DEVICES names them; empty if it has none."""
    drain_on: tuple[int, ...] = ()
    """Signals that drain the job, or its node, besides SIGTERM and SIGHUP."""
    health: HealthSettings = dataclasses.field(default_factory=HealthSettings)
    deadlines: Deadlines = DEADLINES
    output: OutputSettings = dataclasses.field(default_factory=OutputSettings)
    digest: bool = False
    observer: str | None = None
    checkpoint_root: str | None = None
    working_dir: Path | None = None
    """Working directory of the workers; None: that of the agent."""

    @property
    def spawner(self) -> SpawnerSettings:
        """The settings of the node's spawner."""
        path = None
        if self.preload and not self.raw:
            script = None if self.module else self.command[0]
            path = first_on_path(script, str(self.working_dir or Path.cwd()))
        return SpawnerSettings(self.fork, self.environment, self.working_dir, self.preload, path)
