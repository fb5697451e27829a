"""An agent's settings for the job that it serves."""

from __future__ import annotations

import dataclasses
import enum
import socket
from pathlib import Path

from keepstep.protocol.node.liveness import LivenessSettings


@dataclasses.dataclass(frozen=True, slots=True)
class OutputSettings:
    """Where workers' stdout and stderr go, per local rank, as torchrun's flags say it."""

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
    """Where a node stands in its job. The same job-wide numbers are told to every node."""

    node: str
    """Its name, which no other has."""
    world_size: int
    ranks_per_node: int
    slots: int
    """How many workers fit on this node: ranks and spares."""
    num_nodes: int = 1
    """How many nodes the ranks are spread over."""
    position: int = 0
    """torchrun's ``--node-rank``."""
    domain: str = ""
    """What fails together with this node; empty: nothing else."""
    address: str = "127.0.0.1"
    """Where the process groups of this node's workers listen."""

    @classmethod
    def alone(cls, num_ranks: int, num_spares: int) -> NodePlace:
        """That of a job's only node."""
        return cls(socket.gethostname(), num_ranks, num_ranks, num_ranks + num_spares)


class HealthMode(enum.StrEnum):
    """What ``--health`` says."""

    OFF = "off"
    WARN = "warn"
    ACT = "act"


@dataclasses.dataclass(frozen=True, slots=True)
class HealthSettings:
    """Whether the agent looks at its devices, and whether anything follows from it."""

    mode: HealthMode = HealthMode.OFF
    by_bus: bool = False
    """CUDA numbers the devices by their place on the bus, as the driver does."""


@dataclasses.dataclass(frozen=True, slots=True)
class AgentSettings:
    """One node's part of a job."""

    command: tuple[str, ...]
    module: bool
    raw: bool
    fork: bool
    place: NodePlace
    run_dir: Path
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """What workers inherit from the process that starts them."""
    job_environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """torchrun's variables that are the same in all workers of a job."""
    parks_spares: bool = False
    """Spares wait before the script's first line."""
    shares_gpus: bool = False
    """Several processes may use one GPU."""
    preload: tuple[str, ...] = ()
    """Modules that are imported before the script's first line."""
    devices: tuple[str, ...] = ()
    """The node's devices as CUDA_VISIBLE_DEVICES names them; empty: it has none."""
    health: HealthSettings = dataclasses.field(default_factory=HealthSettings)
    liveness: LivenessSettings = dataclasses.field(default_factory=LivenessSettings)
    output: OutputSettings = dataclasses.field(default_factory=OutputSettings)
    digest: bool = False
    observer: str | None = None
    checkpoint_root: str | None = None
    working_dir: Path | None = None
    """Of the workers; None for that of the agent."""
