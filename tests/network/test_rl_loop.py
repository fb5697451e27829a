"""The loop of ``rl_loop.py`` with its trainers on one machine and its generators on another; all are killed in turn."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chaos.test_rl_loop import check_samples, samples
from tests.network.lab import Lab, why_not
from tests.support.jobs import EXAMPLES

from keepstep.trust.tokens import Secret

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

TRAINERS, GENERATORS = 0, 1
STEPS = 30
ANSWERS = 12
"""One process is killed each time that so many samples have been drawn."""
KILLED = ("generator-0", "receive", "generator-1")
FAULTS = "kill@step=8,phase=forward,rank=1;kill@step=20,phase=barrier,rank=0"
DEADLINE_S = 600.0
"""For the drill; it takes a minute where nothing else runs."""


class Loop:
    """All programs of the loop, on both machines. They share all files except the folder that names a machine."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.logs = folder / "logs"
        self.secret_file = folder / "job.secret"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.logs.mkdir()
        (folder / "trainers").mkdir()
        (folder / "generators").mkdir()
        self.secret_file.write_text(Secret.new().text())
        self.secret_file.chmod(0o600)

    def start(self, what: str, node: int, *command: str) -> None:
        with (self.logs / f"{what}.log").open("ab") as log:
            self.processes[what] = subprocess.Popen(
                self.lab.inside(node, sys.executable, *command), stdout=log, stderr=log, cwd=self.folder
            )

    def start_program(self, what: str) -> None:
        """Each as the docstring of the example has it."""
        trainer, generator = (f"{self.lab.address(node)}" for node in (TRAINERS, GENERATORS))
        secret = ["--secret-file", str(self.secret_file)]
        metrics = ["--metrics", str(self.folder / f"{what}.prom")]
        weights = ["-m", "keepstep.cli.main", "weights"]
        example, steps = str(EXAMPLES / "rl_loop.py"), ["--steps", str(STEPS)]
        match what:
            case "serve":
                flags = [str(self.folder / "trainers/weights"), "--listen", f"{trainer}:29600", "--node", "t", *secret]
                self.start(what, TRAINERS, *weights, "serve", *flags, *metrics)
            case "receive":
                flags = [str(self.folder / "generators/weights"), "--from", f"{trainer}:29600", "--node", "g", *secret]
                self.start(what, GENERATORS, *weights, "receive", *flags, *metrics)
            case "trainers":
                job = ["-m", "keepstep.cli.main", "drill", "--faults", FAULTS, "--nproc-per-node", "2", "--spares", "1"]
                where = ["--generators", f"{generator}:7000,{generator}:7001", *secret]
                self.start(what, TRAINERS, *job, example, "train", str(self.folder / "trainers"), *steps, *where)
            case _:
                number = what.removeprefix("generator-")
                listen = ["--listen", f"{generator}:700{number}", *secret]
                self.start(what, GENERATORS, example, "generate", str(self.folder / "generators"), number, *listen)

    def kill(self, what: str) -> None:
        """SIGKILL; another one takes its place."""
        self.processes[what].kill()
        self.processes[what].wait()
        self.start_program(what)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Everything; ended afterwards."""
        try:
            for what in ("serve", "receive", "generator-0", "generator-1", "trainers"):
                self.start_program(what)
            yield
        finally:
            for node in range(self.lab.num_nodes):
                self.lab.kill_all(node)
            for process in self.processes.values():
                process.wait()

    def printed(self) -> str:
        """By all, the end of it."""
        files = sorted(self.logs.iterdir())
        return "\n".join(f"---- {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in files)


def test_generators_on_another_machine(seed: int) -> None:
    """Trainers, generators and what brings the weights are killed; weights and samples are those of every other run."""
    folder = Path(tempfile.mkdtemp(prefix="rl"))  # a short name, for sockets are in it
    try:
        with Lab(2, seed).built() as lab:
            loop = Loop(lab, folder)
            killed = []
            with loop.running():
                victims, due = itertools.cycle(KILLED), ANSWERS
                until_s = time.monotonic() + DEADLINE_S
                while loop.processes["trainers"].poll() is None:
                    assert time.monotonic() < until_s, loop.printed()
                    threading.Event().wait(0.1)
                    if len(samples(folder / "generators")) >= due:
                        killed.append(next(victims))
                        loop.kill(killed[-1])
                        due = len(samples(folder / "generators")) + ANSWERS
            assert loop.processes["trainers"].returncode == 0, loop.printed()
        for what, node in (("serve", "t"), ("receive", "g")):
            metrics = (folder / f"{what}.prom").read_text("utf-8")
            assert f'keepstep_weights_node_tunnels{{node="{node}"}}' in metrics
        assert set(killed) == set(KILLED), killed
        assert "weights identical: yes" in loop.printed()
        assert not [path for path in (folder / "trainers").iterdir() if path.name.startswith("samples")]
        check_samples(samples(folder / "generators"), STEPS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
