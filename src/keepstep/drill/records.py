"""What each rank's state was at every step of a run: written by its workers, read by the drill when the run is over.

Each worker appends to a file of its own, one line for each state, so that a worker that is killed leaves whole lines.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec

from keepstep.protocol.phases import Phase
from keepstep.protocol.worker import WorkerMachine

FOLDER = "states"
"""Of a run's folder."""
FINISHED = "finished"
"""The moment after the last step, as `keepstep.worker.session.Session` names it to its observer."""

HOLDS_NAN = "nan"
"""Begins the digest of a tensor that holds NaN, as `keepstep.worker.state.digests` writes it."""


class _Line(msgspec.Struct, frozen=True, array_like=True):
    """One state in a worker's file. ``names`` is None where they are those of the line before."""

    rank: int
    step: int
    at_s: float
    digests: tuple[str, ...]
    names: tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class StepState:
    """The state of one rank from which a step began, or the job ended."""

    at_s: float
    """When, in monotonic seconds."""
    names: tuple[str, ...]
    """Of everything protected."""
    digests: tuple[str, ...]
    """In the order of the names."""

    def differing(self, other: StepState) -> list[str]:
        """The names whose digests differ, or that only one of the states has, in this state's order."""
        if (self.names, self.digests) == (other.names, other.digests):
            return []
        mine = dict(zip(self.names, self.digests, strict=True))
        theirs = dict(zip(other.names, other.digests, strict=True))
        return [name for name in mine | theirs if mine.get(name) != theirs.get(name)]


States: TypeAlias = dict[int, dict[int, StepState]]
"""rank -> step -> the state that the step began from; after the last step, under the number of the next."""


class StateSource(Protocol):
    """What a recorder needs of a worker's `keepstep.worker.coordination.Coordination`."""

    machine: WorkerMachine
    digests: Callable[[], dict[str, str]]


class StateRecorder:
    """Records a worker's state at the beginning of each step, and after the last. Runs in its training thread."""

    def __init__(self, worker: StateSource, run_dir: Path) -> None:
        self._worker = worker
        (run_dir / FOLDER).mkdir(exist_ok=True)
        path = run_dir / FOLDER / str(worker.machine.worker)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._is_between_steps = True
        self._names: tuple[str, ...] | None = None

    def observe(self, moment: str) -> None:
        """A moment of this rank's step or recovery has come."""
        if moment == FINISHED or (moment == Phase.FORWARD and self._is_between_steps):
            self._record()
        if moment in list(Phase):
            self._is_between_steps = moment in (Phase.UPDATED, Phase.STARTING)

    def _record(self) -> None:
        machine = self._worker.machine
        step = machine.steps.parameters_at
        assert machine.rank is not None
        assert step is not None
        digests = self._worker.digests()
        names = tuple(digests)
        line = _Line(
            machine.rank, step, time.monotonic(), tuple(digests.values()), None if names == self._names else names
        )
        self._names = names
        os.write(self._descriptor, msgspec.json.encode(line) + b"\n")


def read_states(run_dir: Path) -> States:
    """The states of all ranks of a run that is over.

    A step that a rank began more than once counts by the last time, also if another process began it.
    """
    found: States = {}
    folder = run_dir / FOLDER
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        names: tuple[str, ...] = ()
        for text in path.read_bytes().split(b"\n")[:-1]:  # behind the last newline is what a killed worker began
            line = msgspec.json.decode(text, type=_Line)
            names = names if line.names is None else line.names
            steps = found.setdefault(line.rank, {})
            if line.step not in steps or steps[line.step].at_s < line.at_s:
                steps[line.step] = StepState(line.at_s, names, line.digests)
    return dict(sorted(found.items()))
