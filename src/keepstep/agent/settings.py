"""What an agent is told about the job it serves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from keepstep.protocol.liveness import LivenessSettings


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
class AgentSettings:
    """One node's part of a job."""

    node: str
    command: tuple[str, ...]
    module: bool
    raw: bool
    fork: bool
    world_size: int
    num_spares: int
    run_dir: Path
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    liveness: LivenessSettings = dataclasses.field(default_factory=LivenessSettings)
    output: OutputSettings = dataclasses.field(default_factory=OutputSettings)
    digest: bool = False
    observer: str | None = None
    checkpoint_root: str | None = None
