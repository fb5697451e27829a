"""Starts a job on several nodes, all of them on this machine."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.network.cluster import PATIENT, SCRIPT
from tests.support.watching import attempts

from keepstep.config import SECRET_VARIABLE, TOKEN_VARIABLE
from keepstep.errors import ConfigurationError
from keepstep.protocol.recovery import Stage
from keepstep.trace.record import journal, runfolder
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret

DEADLINE_S = 90.0
KEEPSTEP = [sys.executable, "-m", "keepstep.cli.main"]
SECRET = Secret(bytes(range(32)))


def free_endpoint() -> str:
    """Returns an address on which no process listens at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


class Nodes:
    """The processes of one job, and their output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.endpoint = free_endpoint()
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.prefix: tuple[str, ...] = ()
        """The beginning of each command, such as ``nohup``."""

    def start(self, name: str, *arguments: object, **variables: str) -> subprocess.Popen[bytes]:
        """Starts ``keepstep`` with these arguments. Its output goes into a file of this name."""
        environment = {k: v for k, v in os.environ.items() if k not in (SECRET_VARIABLE, TOKEN_VARIABLE)}
        return self.launch(name, [*self.prefix, *KEEPSTEP, *map(str, arguments)], environment | variables)

    def launch(self, name: str, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Starts any command. Its output goes into a file of this name."""
        with (self.folder / name).open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        self.started[name] = process
        return process

    def run(self, rank: int, *more: object, script: Path = SCRIPT, steps: int = 8) -> subprocess.Popen[bytes]:
        """Starts ``keepstep run`` as one of two nodes."""
        where = ["--nnodes", 2, "--nproc-per-node", 1, "--spares", 0, "--rdzv-endpoint", self.endpoint]
        where += ["--node-rank", rank, "--run-dir", self.folder / f"run-{rank}", *PATIENT, *more]
        return self.start(f"out-{rank}", "run", *where, script, steps, 0.01, **{SECRET_VARIABLE: SECRET.text()})

    def wait(self, name: str) -> tuple[int, str]:
        """Waits for the end of a process. Returns its exit code and its output."""
        try:
            code = self.started[name].wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{name} has not ended:\n" + "\n".join(f"-- {n}\n{self.output(n)}" for n in self.started))
        return code, self.output(name)

    def first_to_end(self) -> str:
        """Waits until a process has ended, and returns its name."""
        descriptors = [os.pidfd_open(process.pid) for process in self.started.values()]
        select.select(descriptors, [], [], DEADLINE_S)
        for descriptor in descriptors:
            os.close(descriptor)
        return next(name for name, process in self.started.items() if process.poll() is not None)

    def output(self, name: str) -> str:
        """Returns the output of a process so far."""
        return (self.folder / name).read_text(errors="replace")

    @contextlib.contextmanager
    def running(self) -> Iterator[Nodes]:
        """Ends all remaining processes at the end of the ``with`` block."""
        try:
            yield self
        finally:
            for process in self.started.values():
                end_all(process)


def end_all(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all of its descendants."""
    if process.poll() is None:
        for each in (*psutil.Process(process.pid).children(recursive=True), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def agent(
    nodes: Nodes, output: str, credentials: str, job: list[object], as_node: str, *,
    endpoints: str | None = None, script: tuple[object, ...] = (SCRIPT, 8, 0.01),
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Starts ``keepstep agent`` with the credentials of one node, under the name of this or another node."""
    text = Credentials.of(SECRET, Claim(Role.AGENT, credentials)).text()
    return nodes.start(
        output, "agent", "--controller", endpoints or nodes.endpoint, *job, "--node-name", as_node, "--run-dir",
        nodes.folder / f"run-{output}", *PATIENT, *script, **{TOKEN_VARIABLE: text},
    )  # fmt: skip


def await_controller(folder: Path, parent: int) -> psutil.Process:
    """Waits for the controller that a node hosts, and returns its process."""
    for _ in attempts(folder, DEADLINE_S):
        for child in psutil.Process(parent).children():
            with contextlib.suppress(psutil.Error):
                if "controller" in child.cmdline():
                    return child
    raise AssertionError("no controller has come up")


def await_training(folder: Path) -> None:
    """Waits until the job whose controller writes into this folder trains."""
    folder.mkdir(0o700, parents=True, exist_ok=True)
    for _ in attempts(folder, DEADLINE_S):
        with contextlib.suppress(ConfigurationError):  # the run has not begun yet
            if any(entry.stage == Stage.TRAINING for entry in journal.read(folder / runfolder.JOURNAL)):
                return
    raise AssertionError("the job has not come to train")


def await_output(nodes: Nodes, name: str, text: str) -> None:
    """Waits until a process has printed a text."""
    for _ in attempts(nodes.folder, DEADLINE_S):
        if text in nodes.output(name):
            return
        assert nodes.started[name].poll() is None, nodes.output(name)
    raise AssertionError(f"{name} did not print {text!r}:\n{nodes.output(name)}")
