"""Records of each rank's state at every step of a run. Workers write them; the drill reads them after the run.

After the last step each worker also has torch save its ``state_dict()``s. The drill compares these value by value, and
so finds a value as well that keepstep does not take for state.

Each worker appends one line for each state to its own file, so that a killed worker leaves complete lines.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec

from keepstep.protocol.phases import Phase
from keepstep.protocol.worker import WorkerMachine

IN_A_STEP = ("forward", "backward", "synced", "barrier", "optimizer", "updated")
"""The moments of a step."""
FOLDER = "states"
"""Folder of the records below a run's folder."""
FINISHED = "finished"
"""The moment after the last step, as `keepstep.worker.session.Session` names it to its observer."""
STATE_DICTS = "state_dicts"
"""Folder, below a run's folder, of what torch saves of each rank's objects after the last step."""

HOLDS_NAN = "nan"
"""Prefix of the digest of a tensor that holds NaN, from `keepstep.worker.state.digests`."""


class _Line(msgspec.Struct, frozen=True, array_like=True):
    """One state in a worker's file. ``names`` is None if they equal those of the line before."""

    rank: int
    step: int
    at_s: float
    phases: tuple[str, ...]
    between_s: float
    digests: tuple[str, ...]
    sketches: tuple[tuple[float, float, float] | None, ...]
    framework_step: int | None
    names: tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class StepState:
    """The state of one rank at the start of a step, or after the last one."""

    at_s: float
    """When it was recorded, in monotonic seconds."""
    names: tuple[str, ...]
    """Names of all protected values."""
    digests: tuple[str, ...]
    """Their digests, in the same order."""
    phases: tuple[str, ...] = ()
    """The moments of the step before."""
    between_s: float = 0.0
    """How long ago that step ended, in seconds."""
    sketches: tuple[tuple[float, float, float] | None, ...] = ()
    """Projection, norm and resolution of each, in the same order; see `keepstep.worker.state.digests.Sketch`."""
    framework_step: int | None = None
    """The step before, as the framework counts whose loop runs; None: it is no framework's."""

    def differs_by(self, other: StepState, name: str) -> float | None:
        """Returns about by how much a tensor differs, as a multiple of its norm and of its dtype's resolution.

        None: it is no tensor of finite numbers in both states.
        """
        one, another = (dict(zip(each.names, each.sketches, strict=False)).get(name) for each in (self, other))
        if one is None or another is None:
            return None
        (mine, norm, resolution), (its, other_norm, _) = one, another
        return abs(mine - its) / (max(norm, other_norm) * resolution) if mine != its else 0.0

    def differing(self, other: StepState) -> list[str]:
        """Returns the names whose digests differ, or that only one state has, in this state's order."""
        if (self.names, self.digests) == (other.names, other.digests):
            return []
        mine = dict(zip(self.names, self.digests, strict=True))
        theirs = dict(zip(other.names, other.digests, strict=True))
        return [name for name in mine | theirs if mine.get(name) != theirs.get(name)]


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlace:
    """A step of a run without failures."""

    step: int
    phases: tuple[str, ...]
    """The moments that it had, of `IN_A_STEP`."""
    after_s: float
    """Seconds from its end to the beginning of the next step."""


States: TypeAlias = dict[int, dict[int, StepState]]
"""rank -> step -> state at the start of the step. The state after the last step has the number of the next one."""


class StateSource(Protocol):
    """The part of `keepstep.worker.coordination.Coordination` that a recorder needs."""

    machine: WorkerMachine
    framework_step: int | None
    digests: Callable[[], Mapping[str, tuple[str, tuple[float, float, float] | None]]]
    save_state_dicts: Callable[[Path], None]


class StateRecorder:
    """Records a worker's state at the start of each step and after the last one. Runs in its training thread."""

    def __init__(self, worker: StateSource, run_dir: Path) -> None:
        self._worker = worker
        self._state_dicts = run_dir / STATE_DICTS
        self._state_dicts.mkdir(exist_ok=True)
        (run_dir / FOLDER).mkdir(exist_ok=True)
        path = run_dir / FOLDER / str(worker.machine.worker)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._is_between_steps = True
        self._phases: list[str] = []
        self._ended_s: float | None = None
        self._names: tuple[str, ...] | None = None

    def observe(self, moment: str) -> None:
        """Records the state if a step begins, or after the last one.

        Args:
            moment: the rank's current moment in a step or a recovery.
        """
        if moment == FINISHED or (moment == Phase.FORWARD and self._is_between_steps):
            self._record()
            self._phases.clear()
        if moment in IN_A_STEP and moment not in self._phases:
            self._phases.append(moment)
        if moment == Phase.UPDATED:
            self._ended_s = time.monotonic()
        if moment == FINISHED:
            self._save()
        if moment in list(Phase):
            self._is_between_steps = moment in (Phase.UPDATED, Phase.STARTING)

    def _save(self) -> None:
        """Has torch save the rank's last state. A failure is told, and seen when the drill compares."""
        path = self._state_dicts / f"rank{self._worker.machine.rank}.pt"
        try:
            self._worker.save_state_dicts(path)
        except (OSError, RuntimeError) as error:
            path.unlink(missing_ok=True)
            print(f"keepstep drill: {path.name} was not saved: {error}", file=sys.stderr, flush=True)

    def _record(self) -> None:
        machine = self._worker.machine
        step = machine.steps.parameters_at
        assert machine.rank is not None
        assert step is not None
        now_s = time.monotonic()
        between_s = 0.0 if self._ended_s is None else now_s - self._ended_s
        digests = self._worker.digests()
        names = tuple(digests)
        line = _Line(
            machine.rank,
            step,
            now_s,
            tuple(self._phases),
            between_s,
            tuple(digest for digest, _sketch in digests.values()),
            tuple(sketch for _digest, sketch in digests.values()),
            self._worker.framework_step,
            None if names == self._names else names,
        )
        self._names = names
        os.write(self._descriptor, msgspec.json.encode(line) + b"\n")


def read_states(run_dir: Path) -> States:
    """Reads the states of all ranks of an ended run.

    If a rank began a step more than once, the last time counts, even in another process.
    """
    found: States = {}
    folder = run_dir / FOLDER
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        names: tuple[str, ...] = ()
        for text in path.read_bytes().split(b"\n")[:-1]:  # drops a line that a killed worker did not complete
            line = msgspec.json.decode(text, type=_Line)
            names = names if line.names is None else line.names
            steps = found.setdefault(line.rank, {})
            if line.step not in steps or steps[line.step].at_s < line.at_s:
                content = (line.digests, line.phases, line.between_s, line.sketches, line.framework_step)
                steps[line.step] = StepState(line.at_s, names, *content)
    return dict(sorted(found.items()))


def places_of(states: States) -> list[StepPlace]:
    """Returns the steps of a run without failures, as rank 0 went through them."""
    own = states.get(0, {})
    steps = sorted(own)
    return [StepPlace(one, own[two].phases, own[two].between_s) for one, two in pairwise(steps)]
