"""A job on two nodes, of which none holds all weights, with engines on both and on a third; and what may die in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from tests.network.cluster import PATIENT
from tests.support.nodes import SECRET, Nodes, await_controller
from tests.support.watching import attempts
from tests.weights.remote.train_sharded import Counting

import keepstep
from keepstep.config import SECRET_VARIABLE
from keepstep.trace.timeline.run import Run

SCRIPT = Path(__file__).with_name("train_sharded.py")
DEADLINE_S = 6.0
"""Of publishers, links and consumers."""
PATIENCE_S = 150.0
"""Processes start slowly on a loaded machine."""
VARIABLES = {SECRET_VARIABLE: SECRET.text()}


class Engine:
    """A consumer in the test's own process."""

    def __init__(self, folder: Path, name: str) -> None:
        self.model = Counting()
        self.subscriber = keepstep.Subscriber(folder, into=self.model, name=name, deadline_s=DEADLINE_S)
        self.subscriber.start()

    def look(self) -> int:
        """The version that is used now; -1 if there is none yet."""
        try:
            with self.subscriber.using() as version, torch.no_grad():
                seen = {value for each in self.model.parameters() for value in each.unique().tolist()}
        except keepstep.WeightsNotReady:
            return -1
        assert seen == {float(version)}, f"torn: {version} has {sorted(seen)}"
        return version


class Job:
    """Two nodes of training with a spare each, and nodes with engines."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.sockets = Path(tempfile.mkdtemp(prefix="ks"))  # short names
        self.engines: dict[str, Engine] = {}

    def train(self, rank: int) -> None:
        """Starts a node of training."""
        folder = self.sockets / f"t{rank}"
        where = ["--nnodes", 2, "--nproc-per-node", 1, "--spares", 2, "--rdzv-endpoint", self.nodes.endpoint]
        where += ["--node-rank", rank, "--run-dir", self.nodes.folder / f"run-{rank}", *PATIENT]
        weights = ["--weights", folder, "--weights-deadline", DEADLINE_S]
        self.nodes.start(f"t{rank}", "run", *where, *weights, SCRIPT, 100_000, 0.2, folder, DEADLINE_S, **VARIABLES)
        self.engines[f"t{rank}"] = Engine(folder, f"engine-{rank}")

    def receive(self, name: str) -> None:
        """Starts a node with an engine."""
        flags = ["--job", self.nodes.endpoint, "--node", name, "--deadline", DEADLINE_S]
        self.nodes.start(name, "weights", "receive", self.sockets / name, *flags, **VARIABLES)
        self.engines[name] = Engine(self.sockets / name, name)

    def wait_for_versions(self, num: int = 3) -> None:
        """So many newer versions come to all engines, each whole at any time."""
        last = max(engine.look() for engine in self.engines.values())
        seen = {}
        for _ in attempts(self.nodes.folder, PATIENCE_S):
            seen = {name: engine.look() for name, engine in self.engines.items()}
            if min(seen.values()) >= last + num:
                return
        outputs = "\n".join(f"-- {name}\n{self.nodes.output(name)[-3000:]}" for name in self.nodes.started)
        raise AssertionError(f"after version {last}: {seen}\n{outputs}")

    def kill_rank(self, rank: int) -> None:
        """SIGKILL to the process that holds it."""
        with contextlib.closing(Run(self.nodes.folder / "run-0")) as run:
            run.poll()
            (pid,) = [worker.pid for worker in run.job.roster.holders() if worker.rank == rank]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def children(self, node: str, word: str) -> list[psutil.Process]:
        """Processes of a node in whose command a word stands."""
        found = []
        for process in psutil.Process(self.nodes.started[node].pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if word in process.cmdline():
                    found.append(process)
        return found

    @contextlib.contextmanager
    def running(self) -> Iterator[Job]:
        """Everything that was started is ended afterwards."""
        try:
            with self.nodes.running():
                yield self
        finally:
            for engine in self.engines.values():
                engine.subscriber.close()
            shutil.rmtree(self.sockets, ignore_errors=True)


def test_engines_of_all_nodes_follow_a_job_whatever_dies_in_it(tmp_path: Path) -> None:
    """No address of a server, and no token, is passed by hand; only where the controller is, and the secret."""
    with Job(Nodes(tmp_path)).running() as job:
        job.train(0)
        job.train(1)
        job.receive("e0")
        job.wait_for_versions()

        job.kill_rank(1)
        job.wait_for_versions()

        (server,) = job.children("t1", "serve")
        server.kill()
        job.wait_for_versions()

        await_controller(tmp_path, job.nodes.started["t0"].pid).kill()
        job.receive("e1")  # asks the next one
        job.wait_for_versions()

        (server,) = job.children("t0", "serve")  # which feeds the engines' nodes
        server.kill()
        job.wait_for_versions()
