"""A job on the machines of a `Lab`: ``keepstep run`` on each of them, as their users would start it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from tests.network.lab import Lab
from tests.support.watching import attempts

from keepstep.config import SECRET_VARIABLE
from keepstep.errors import ConfigurationError
from keepstep.protocol.recovery import RecoveryMachine
from keepstep.trace.timeline.run import Run
from keepstep.trust.tokens import Secret

PORT = 29400
PATIENT = ("--hang-after", 30)
"""The steps here take milliseconds, and a loaded machine lets a process wait for its processor for longer than the
default. What these tests lose is not found by that: a stopped process has a rule of its own."""
DEADLINE_S = 240.0
SCRIPT = Path(__file__).with_name("train.py")
SHARDED_SCRIPT = Path(__file__).with_name("train_fsdp2.py")


class Cluster:
    """One job."""

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        flags: list[str],
        script: list[str],
        *,
        is_apart: bool = False,
        standby: int | None = None,
    ) -> None:
        """Args:
        lab: the machines.
        folder: below it every machine has its own.
        flags: that the controller and every agent is given.
        script: what is trained, with its arguments.
        is_apart: the controller is a program of its own on machine 0; otherwise a child of the agent's there.
        standby: the machine on which a second controller stands by, and nothing else runs.
        """
        self._standby = standby
        self.lab = lab
        self._is_apart = is_apart
        self.folder = folder
        self.secret = Secret.new()
        self._flags = flags
        self._script = script
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._run: Run | None = None
        (folder / "node-0").mkdir(mode=0o700)

    # ---- life -------------------------------------------------------------------------------------------------------

    def start(self, node: int) -> None:
        """Starts this machine's part of the job."""
        where = f"{self.lab.address(0)}:{PORT}"
        if self._is_apart:
            others = [] if self._standby is None else [f"{self.lab.address(self._standby)}:{PORT}"]
            command = ["agent", "--controller", ",".join([where, *others])]
        else:
            command = ["run", "--rdzv-endpoint", where]
        command += ["--node-rank", str(node), "--run-dir", str(self.folder / f"node-{node}"), *map(str, PATIENT)]
        self._start(node, [*command, *self._flags, *self._script])

    def start_controller(self, *more: str, node: int = 0) -> None:
        """Starts a controller of the job on a machine where there is nothing else. They share one folder."""
        where = f"{self.lab.address(node)}:{PORT}"
        command = ["controller", "--listen", where, "--run-dir", str(self.folder / "node-0")]
        self._start(node, [*command, *self._flags, *more])

    def _start(self, node: int, arguments: list[str]) -> None:
        command = self.lab.inside(node, sys.executable, "-m", "keepstep.cli.main", *arguments)
        environment = {**os.environ, SECRET_VARIABLE: self.secret.text()}
        with (self.folder / f"node-{node}.log").open("ab") as log:
            self.nodes[node] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def start_all(self) -> None:
        """Starts everything."""
        if self._is_apart:
            self.start_controller()
        for node in range(self._is_apart, self.lab.num_nodes):
            if node == self._standby:
                self.start_controller("--standby", node=node)
            else:
                self.start(node)

    @contextlib.contextmanager
    def running(self) -> Iterator[Cluster]:
        """Started on all machines; whatever is left of it afterwards is ended."""
        try:
            self.start_all()
            yield self
        finally:
            for node, process in self.nodes.items():
                if process.poll() is None:
                    self.lab.kill_all(node)
                    process.kill()
                process.wait()
            if self._run is not None:
                self._run.close()

    def power_off(self, node: int) -> None:
        """The machine is gone from one moment to the next: nothing is sent by it any more, not even that it ends."""
        self.lab.cut_off(node)
        self.lab.kill_all(node)

    def kill_controller(self) -> int:
        """SIGKILL to the job's controller; returns its process id, 0 if there is none just now."""
        for process in self.lab.processes(0):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "controller" in process.cmdline():
                    process.send_signal(signal.SIGKILL)
                    return process.pid
        return 0

    def kill_rank(self, rank: int) -> bool:
        """SIGKILL to the process that holds a rank; False if it has none just now."""
        holder = next((worker for worker in self.job.roster.holders() if worker.rank == rank), None)
        if holder is None or holder.pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(holder.pid, signal.SIGKILL)
            return True
        return False

    # ---- looking ----------------------------------------------------------------------------------------------------

    @property
    def job(self) -> RecoveryMachine:
        """What the controller has decided so far, by its journal."""
        if self._run is None:
            self._run = Run(self.folder / "node-0")
        self._run.poll()
        return self._run.job

    def wait_until(self, condition: Callable[[RecoveryMachine], bool], what: str) -> None:
        """Waits for something to be seen in the journal."""

        def is_seen() -> bool:
            try:
                return condition(self.job)
            except ConfigurationError:  # it has not begun yet
                return False

        self.wait_for(is_seen, what)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for something that comes about with, or soon after, an entry of the journal."""
        for _ in attempts(self.folder / "node-0", DEADLINE_S):
            if condition():
                return
            ended = {node: process.returncode for node, process in self.nodes.items() if process.poll() is not None}
            assert len(ended) < len(self.nodes), f"{what}: all nodes have ended, with {ended}\n{self.logs()}"
        raise AssertionError(f"{what}: not within {DEADLINE_S:g} s\n{self.logs()}")

    def let_pass(self, seconds: float) -> None:
        """A random instant is a time to wait, not something to wait for."""
        threading.Event().wait(seconds)

    def wait(self, nodes: set[int] | None = None) -> dict[int, int]:
        """Waits for the end of the job on some machines, or all; returns their exit codes."""
        deadline_s = time.monotonic() + DEADLINE_S
        codes = {}
        for node in self.nodes if nodes is None else nodes:
            try:
                codes[node] = self.nodes[node].wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"node {node} has not ended within {DEADLINE_S:g} s\n{self.logs()}") from None
        return codes

    def digests(self) -> dict[int, str]:
        """What each rank said of its weights at the end."""
        found = {}
        for path in self.folder.glob("node-*.log"):
            for line in path.read_text(errors="replace").splitlines():
                if line.startswith("digest "):
                    _, rank, digest = line.split()
                    found[int(rank)] = digest
        return found

    def log(self, node: int) -> str:
        """What a machine's part has printed."""
        return (self.folder / f"node-{node}.log").read_text(errors="replace")

    def logs(self) -> str:
        """What all nodes have printed."""
        return "\n".join(
            f"---- {path.name}\n{path.read_text(errors='replace')}" for path in sorted(self.folder.glob("*.log"))
        )
