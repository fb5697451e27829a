"""A job on one machine, engines on two others, and everything between them fails in turn.

What is seen by the engines: no weights that are torn or of two versions, no wait beyond its deadline, and after every
failure a whole new version everywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.network.lab import Lab, why_not

from keepstep.config import SECRET_VARIABLE
from keepstep.protocol.recovery import Stage
from keepstep.trace.timeline.run import Run
from keepstep.trust.tokens import Secret

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

DEADLINE_S = 4.0
"""Of publishers, links and consumers."""
PATIENCE_S = 120.0
"""For what a test waits for: processes start slowly on a loaded machine."""
PORT = 29600
HERE = Path(__file__).parent
TRAINER, SERVER = 0, 0
ENGINE_NODES = (1, 2)
NUM_VERSIONS, NUM_FAULTS = 50, 10


@dataclasses.dataclass
class Engine:
    """One engine, and what it has written down."""

    node: int
    name: str
    out: Path

    def lines(self) -> list[str]:
        """What it has seen so far, also in its former lives."""
        return self.out.read_text().splitlines() if self.out.exists() else []

    def versions(self) -> list[int]:
        """The whole versions among it."""
        return [int(line.split()[0]) for line in self.lines() if line[0].isdigit()]

    @property
    def version(self) -> int:
        """The last one; -1: none since it was started."""
        lines = self.lines()
        since = lines[len(lines) - lines[::-1].index("ready") :] if "ready" in lines else []
        return max((int(line.split()[0]) for line in since if line[0].isdigit()), default=-1)


class Rollout:
    """The job, its server of weights, and two engines on each of two machines."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.sockets = Path(tempfile.mkdtemp(prefix="ks"))  # short names
        self.secret = Secret.new()
        self.engines = [
            Engine(node, f"engine-{node}{letter}", folder / f"engine-{node}{letter}.txt")
            for node in ENGINE_NODES
            for letter in "ab"
        ]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._run: Run | None = None

    def start(self, what: str, node: int, *command: str) -> None:
        """Starts a program on a machine, again if it has ended."""
        if what in self.processes:
            self.processes[what].wait()
        environment = {**os.environ, SECRET_VARIABLE: self.secret.text()}
        with (self.folder / f"{what}.log").open("ab") as log:
            self.processes[what] = subprocess.Popen(
                self.lab.inside(node, sys.executable, *command), stdout=log, stderr=log, env=environment
            )

    def start_trainer(self) -> None:
        """Two ranks and a spare."""
        command = ["-m", "keepstep.cli.main", "run", "--nproc-per-node", "2", "--spares", "1", "--hang-after", "30"]
        command += ["--run-dir", str(self.folder / "run")]
        script = [str(HERE / "train_counting.py"), "100000", "0.25", str(self.sockets / "job"), str(DEADLINE_S)]
        self.start("trainer", TRAINER, *command, *script)

    def start_server(self) -> None:
        """What leads other machines to the job's publishers."""
        address = f"{self.lab.address(SERVER)}:{PORT}"
        flags = ["--listen", address, "--deadline", str(DEADLINE_S), "--fanout", "1"]
        self.start("server", SERVER, "-m", "keepstep.cli.main", "weights", "serve", str(self.sockets / "job"), *flags)

    def start_receiver(self, node: int) -> None:
        """What stands in for the publishers on a machine of engines."""
        flags = ["--from", f"{self.lab.address(SERVER)}:{PORT}", "--node", f"node-{node}"]
        flags += ["--listen", f"{self.lab.address(node)}:{PORT}", "--deadline", str(DEADLINE_S)]
        command = ["-m", "keepstep.cli.main", "weights", "receive", str(self.sockets / f"node-{node}")]
        self.start(f"receiver-{node}", node, *command, *flags)

    def start_engine(self, engine: Engine) -> None:
        """An engine."""
        folder = str(self.sockets / f"node-{engine.node}")
        self.start(
            engine.name, engine.node, str(HERE / "engine.py"), folder, engine.name, str(DEADLINE_S), str(engine.out)
        )

    def start_node(self, node: int) -> None:
        """All that runs on a machine of engines."""
        self.start_receiver(node)
        for engine in self.engines:
            if engine.node == node:
                self.start_engine(engine)

    @contextlib.contextmanager
    def running(self) -> Iterator[Rollout]:
        """Everything; ended afterwards."""
        try:
            self.start_trainer()
            self.start_server()
            for node in ENGINE_NODES:
                self.start_node(node)
            self.wait_for(lambda: self.everyone_has(1), "a first version everywhere")
            self._run = Run(self.folder / "run")
            yield self
        finally:
            for node in range(self.lab.num_nodes):
                self.lab.kill_all(node)
            for process in self.processes.values():
                process.wait()
            if self._run is not None:
                self._run.close()
            shutil.rmtree(self.sockets, ignore_errors=True)

    def kill(self, what: str) -> None:
        """SIGKILL."""
        self.processes[what].kill()
        self.processes[what].wait()

    def kill_rank(self, rank: int) -> None:
        """SIGKILL to the process that holds a rank, once there is one and a spare waits."""

        assert self._run is not None
        run = self._run

        def is_ready() -> bool:
            run.poll()
            job = run.job
            return job.stage is Stage.TRAINING and job.roster.num_ready_spares > 0

        self.wait_for(is_ready, "a warm spare")
        holder = next(worker for worker in run.job.roster.holders() if worker.rank == rank)
        assert holder.pid is not None
        os.kill(holder.pid, signal.SIGKILL)

    def power_off(self, node: int) -> None:
        """Everything on a machine of engines is gone."""
        self.lab.cut_off(node)
        self.lab.kill_all(node)
        self.lab.heal()

    # ---- looking ----------------------------------------------------------------------------------------------------

    def everyone_has(self, version: int) -> bool:
        """Whether all engines use this version, or a later one."""
        return all(engine.version >= version for engine in self.engines)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for something that files will show."""
        until_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until_s, f"{what}: not within {PATIENCE_S:g} s\n{self.logs()}"
            threading.Event().wait(0.05)

    def wait_for_version(self, version: int, what: str) -> None:
        """Waits until all engines use this version, or a later one."""
        self.wait_for(lambda: self.everyone_has(version), what)

    def logs(self) -> str:
        """What has been printed, the end of it."""
        seen = {engine.name: engine.lines()[-3:] for engine in self.engines}
        texts = [
            f"---- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob("*.log"))
        ]
        return "\n".join([str(seen), *texts])

    def check(self) -> None:
        """What must never have been seen was not seen."""
        for engine in self.engines:
            for line in engine.lines():
                assert not line.startswith("torn"), f"{engine.name}: {line}\n{self.logs()}"
                if line != "ready":
                    assert float(line.split()[1]) <= DEADLINE_S + 1, f"{engine.name}: {line}"


def break_everything(rollout: Rollout, lab: Lab) -> list[tuple[str, Callable[[], None]]]:
    """What fails, one after the other; each is mended by what stands there too."""
    first, second = rollout.engines[0], rollout.engines[3]

    def restart(engine: Engine) -> Callable[[], None]:
        return lambda: (rollout.kill(engine.name), rollout.start_engine(engine))[-1]

    def power_cycle(node: int) -> Callable[[], None]:
        return lambda: (rollout.power_off(node), rollout.start_node(node))[-1]

    def cut_and_heal(some: set[int], others: set[int]) -> Callable[[], None]:
        def cut() -> None:
            lab.change_between(some, others, lose=1.0)
            threading.Event().wait(DEADLINE_S)  # as long as it takes to be noticed
            lab.heal()

        return cut

    return [
        ("an engine", restart(first)),
        ("a rank", lambda: rollout.kill_rank(1)),
        ("the link between the machines of engines", cut_and_heal({1}, {2})),
        ("an engine at the end of the chain", restart(second)),
        ("the machine at the end of the chain", power_cycle(2)),
        ("rank 0", lambda: rollout.kill_rank(0)),
        ("the machine in the middle of the chain", power_cycle(1)),
        ("the trainer's link", cut_and_heal({0}, {1, 2})),
        ("the server", lambda: (rollout.kill("server"), rollout.start_server())[-1]),
        ("a receiver", lambda: (rollout.kill("receiver-1"), rollout.start_receiver(1))[-1]),
    ]


def test_no_failure_tears_weights_on_any_machine(tmp_path: Path, seed: int) -> None:
    with Lab(3, seed).built() as lab, Rollout(lab, tmp_path).running() as rollout:
        faults = break_everything(rollout, lab)
        assert len(faults) == NUM_FAULTS
        for what, fail in faults:
            before = max(engine.version for engine in rollout.engines)
            fail()
            rollout.wait_for_version(before + 1, f"a whole version after the loss of {what}")
            rollout.check()
        rollout.wait_for_version(NUM_VERSIONS, f"version {NUM_VERSIONS} everywhere")
        rollout.check()
        for engine in rollout.engines:
            assert len(set(engine.versions())) > NUM_FAULTS, engine.versions()
