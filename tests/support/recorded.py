"""Runs with failures, for tests of the views, statistics and exports of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from tests.support.jobs import SCRIPTS

from keepstep.drill.faults import parse, write_plan
from keepstep.launcher.flags import job_options, make_parser
from keepstep.launcher.job import Companion, run_job
from keepstep.protocol.controller import JournalEntry
from keepstep.protocol.phases import Phase
from keepstep.sim.cluster.layout import ClusterLayout, NodeLayout
from keepstep.sim.faults import SimulatedFault
from keepstep.sim.run import Case, case_of
from keepstep.sim.run import run as simulate
from keepstep.trace.record import runfolder
from keepstep.trace.record.journal import read

NUM_RANKS = 3
NUM_STEPS = 30
KILLED_AT = 12
KILL = f"kill@step={KILLED_AT},phase=backward,rank=1"


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A run that has ended: its folder, which tests must not change, the job's report, and its log."""

    folder: Path
    report: dict[str, Any]
    log: Path


def record(folder: Path, *flags: object, faults: str = "", companion: Companion | None = None) -> dict[str, Any]:
    """Runs a small job with faults to its end. Returns its report.

    Args:
        folder: the run folder.
        flags: the flags of ``keepstep run``, the script and its flags.
        faults: as for ``keepstep drill``.
        companion: the job's companion.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = job_options(make_parser("keepstep run").parse_args(["--run-dir", str(folder), *map(str, flags)]))
    write_plan(folder, parse(faults, options.recovery.world_size) if faults else [])
    agent = dataclasses.replace(options.agent, digest=True, observer="keepstep.drill.worker_injector:install")
    return run_job(dataclasses.replace(options, agent=agent), companion)


@functools.cache
def recorded_run(base: Path) -> Recorded:
    """Returns a run that has lost one rank and completed, recorded once for all tests of a pytest session.

    Args:
        base: the base folder of the session's temporary folders.
    """
    folder, log = base / "recorded" / "run", base / "recorded" / "events.jsonl"
    script = (SCRIPTS / "tiny.py", "--steps", NUM_STEPS)
    meet = ("--meet-at", KILLED_AT)  # otherwise the others may still update in the previous step
    log.parent.mkdir()
    report = record(folder, "--nproc-per-node", NUM_RANKS, "--log-json", log, *script, *meet, faults=KILL)
    assert (report["exit_code"], len(report["recoveries"])) == (0, 1), report
    return Recorded(folder, report, log)


@functools.cache
def overtaken_run(base: Path) -> Recorded:
    """Returns a run whose rank 0 dies in step 5 repeatedly: the first recovery is superseded, the second incomplete.

    The job may end before the signal of rank 0's second death is known.

    Args:
        base: the base folder of the session's temporary folders.
    """
    folder, log = base / "overtaken" / "run", base / "overtaken" / "events.jsonl"
    log.parent.mkdir()
    flags = ("--nproc-per-node", 2, "--max-restarts", 0, "--log-json", log, SCRIPTS / "tiny.py", "--kill-at", 5)
    with contextlib.chdir(log.parent):  # where the survivor saves its state
        report = record(folder, *flags)
    assert (report["exit_code"], len(report["recoveries"])) == (76, 2), report
    return Recorded(folder, report, log)


LONE, PAIRED = ("0", "1", "2", "3"), ("0", "1", "0", "1")
"""The shards of four ranks: each without a replica, as under FSDP2, and each with one, as under HSDP."""


def simulate_shards(folder: Path, shards: tuple[str, ...], snapshot_every: int) -> None:
    """Records a simulated job on healthy nodes that loses a rank in a backward, and completes.

    Args:
        folder: the run folder.
        shards: the shard of each rank.
        snapshot_every: steps from one snapshot to the next.
    """
    layout = case_of(1).layout
    nodes = tuple(NodeLayout(name, 2, name) for name in ("a", "b", "c"))
    settings = dataclasses.replace(
        layout.settings, world_size=len(shards), num_spares=1, ranks_per_node=2, max_restarts=None
    )
    layout = ClusterLayout(nodes, shards, settings, snapshot_every=snapshot_every)
    kill = SimulatedFault("kill", 3.0, phase=Phase.BACKWARD, pick=1)
    outcome = simulate(Case(1, layout, (kill,)), record=folder)
    assert (outcome.check, outcome.num_recoveries) == (None, 1), outcome.detail


def entries(folder: Path) -> list[JournalEntry]:
    """Returns the journal entries of a run."""
    return read(folder / runfolder.JOURNAL)


class GrowingRun:
    """A copy of a run as it was while its job ran. Its journal is written again, entry by entry."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.folder = folder
        self.lines = (source / runfolder.JOURNAL).read_bytes().splitlines(keepends=True)
        shutil.copytree(source / runfolder.PHASES, folder / runfolder.PHASES)
        self._info = runfolder.read_info(source)
        runfolder.write(folder, msgspec.structs.replace(self._info, ended=None))
        (folder / runfolder.JOURNAL).touch()

    def grow(self) -> None:
        """Writes the next entry."""
        with (self.folder / runfolder.JOURNAL).open("ab") as file:
            file.write(self.lines.pop(0))

    def end(self) -> None:
        """Writes the remaining entries and the end of the run."""
        while self.lines:
            self.grow()
        runfolder.write(self.folder, self._info)


@contextlib.contextmanager
def growing(source: Path, folder: Path) -> Iterator[GrowingRun]:
    """Yields a copy that grows. During the ``with`` block its launcher appears to run."""
    folder.mkdir()
    with runfolder.occupied(folder):
        yield GrowingRun(source, folder)
