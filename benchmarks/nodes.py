"""Time of a recovery from the loss of a machine, and effect of the controller on the steps of a job.

    python benchmarks/nodes.py                    everything; about a quarter of an hour on two idle cores; needs root
    python benchmarks/nodes.py --quick            a smoke test; nothing is written

A  three machines (network namespaces, as in tests/network): repeatedly the machine with rank 1 loses its power, which
   means that its link is cut and all of its processes are killed at the same moment. Measured is the time until all
   ranks have completed a step, next to the time of the lease alone
B  a job of two agents and a controller on this machine: the time of its steps while the controller runs, while it is
   dead, and while it is killed and restarted repeatedly, in turns

In part B the controller has one core to itself. On a cluster it would use a core of another machine, or an idle one.
The question is whether the steps need the controller, not how much a starting Python process slows others down. The
ranks share the other cores, and wait in each step, as hosts do while their devices compute.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - the machines are those of the tests
import page
import turns
from jobs import JobFailed
from page import RESULTS, Section
from rich.console import Console
from tests.network.cluster import SCRIPT, Cluster
from tests.network.lab import Lab, why_not

from keepstep.config import SECRET_VARIABLE
from keepstep.protocol.controller import LEASE_S
from keepstep.protocol.recovery import RecoveryMachine, Stage
from keepstep.trust.tokens import Secret

KEEPSTEP = [sys.executable, "-m", "keepstep.cli.main"]
DEADLINE_S = 120.0
TWO_AND_A_SPARE = ["--nproc-per-node", "1", "--nnodes", "2:3", "--spares", "1"]
TWO = ["--nnodes", "2", "--nproc-per-node", "1", "--spares", "0"]
IDLE_MS, BATCH = 40, 8
ALIVE, DEAD, RESTARTING = "alive", "dead", "restarting"
LIFE_S = 2.0
"""Time from the start of a controller to its next kill. By then it has received messages of its agents."""
QUICK = {"losses": 1, "pairs": 2, "block": 3.0}


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=10, help="A: machines that are lost (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=40, help="B: blocks of each kind (default: %(default)s)")
    parser.add_argument("--block", type=float, default=4.0, help="B: seconds of a block (default: %(default)s)")
    parser.add_argument("--only", choices=("A", "B"), help="one part")
    parser.add_argument("--results", type=Path, help="where the page goes (default: results)")
    return page.parsed(parser, QUICK)


# ---- A --------------------------------------------------------------------------------------------------------------


def measure_losses(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns the recovery time in milliseconds for each machine that has lost its power."""
    if (why := why_not()) is not None:
        raise JobFailed(why)
    found: dict[str, Any] = {"lease_s": LEASE_S, "to_step_ms": [], "beyond_lease_ms": []}
    script = [str(SCRIPT), str(1 << 30), "0.02"]
    with Lab(3, 0).built() as lab, Cluster(lab, folder, TWO_AND_A_SPARE, script).running() as cluster:
        for number in range(args.losses):
            cluster.wait_until(lambda job, number=number: _is_well(job, number), "training, and a spare")
            holder = next(worker for worker in cluster.job.roster.holders() if worker.rank == 1)
            node = int(holder.node.rpartition("-")[2])
            off_s = time.monotonic()
            cluster.power_off(node)
            cluster.wait_until(lambda job, number=number: _is_over(job, number), "a recovery")
            record = cluster.job.records[-1]
            assert record.resumed_s is not None
            found["to_step_ms"].append(1000 * (record.resumed_s - off_s))
            # The lease began with the last packet, up to one heartbeat interval before the power loss.
            found["beyond_lease_ms"].append(1000 * (record.resumed_s - record.failures[0].since_s - LEASE_S))
            lab.heal()
            cluster.start(node)
    return found


def _is_well(job: RecoveryMachine, num_recoveries: int) -> bool:
    is_training = job.stage is Stage.TRAINING and len(job.records) == num_recoveries
    return is_training and job.roster.num_ready_spares == 1


def _is_over(job: RecoveryMachine, number: int) -> bool:
    return len(job.records) > number and job.records[-1].resumed_s is not None


# ---- B --------------------------------------------------------------------------------------------------------------


class Apart:
    """A controller and two agents, in separate processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        secret = Secret.new().text()
        self._environment = {**os.environ, SECRET_VARIABLE: secret, "OMP_NUM_THREADS": "1"}  # environ: inherited
        cores = sorted(os.sched_getaffinity(0))
        self._controllers_core, self._ranks_cores = set(cores[-1:]), set(cores[:-1] or cores)
        self._agents: list[subprocess.Popen[bytes]] = []
        self._controller: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[Apart]:
        """Starts all processes, waits until the ranks train, and ends them at the end of the ``with`` block."""
        try:
            self.start_controller()
            for number in range(2):
                command = ["agent", "--controller", self._endpoint, *TWO, "--node-name", f"node-{number}"]
                command += ["--run-dir", str(self.folder / f"node-{number}"), "--controller-timeout", "3600"]
                command += [str(turns.WATCHED), str(self.folder), str(IDLE_MS), str(BATCH)]
                self._agents.append(self._start(command, self._ranks_cores))
            yield self
        finally:
            self.kill_controller()
            for agent in self._agents:
                agent.terminate()
            for agent in self._agents:
                agent.wait()

    def start_controller(self) -> None:
        """Starts the controller, for the first time or again."""
        again = ["--continue"] if (self.folder / "run").exists() else []
        command = ["controller", "--listen", self._endpoint, "--run-dir", str(self.folder / "run")]
        self._controller = self._start([*command, *TWO, *again], self._controllers_core)

    def kill_controller(self) -> None:
        """Kills the controller. Does nothing if it is dead."""
        if self._controller is not None:
            self._controller.kill()
            self._controller.wait()
            self._controller = None

    def _start(self, command: list[str], cores: set[int]) -> subprocess.Popen[bytes]:
        with (self.folder / "output.log").open("ab") as log, _on(cores):
            return subprocess.Popen([*KEEPSTEP, *command], env=self._environment, stdout=log, stderr=log)

    def check_alive(self) -> None:
        """Raises:
        JobFailed: an agent has ended.
        """
        if any(agent.poll() is not None for agent in self._agents):
            raise JobFailed((self.folder / "output.log").read_text(errors="replace")[-2000:])

    def become(self, way: str, block_s: float) -> None:
        """Waits for one block with the controller alive, dead, or killed repeatedly."""
        end_s = time.monotonic() + block_s
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(left_s, LIFE_S) if way == RESTARTING else left_s)
            if way == RESTARTING:
                self.kill_controller()
                self.start_controller()
        self.check_alive()


@contextlib.contextmanager
def _on(cores: set[int]) -> Iterator[None]:
    """Restricts processes that start in the ``with`` block to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def measure_steps(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures the cost of a step in each state of the controller, next to the cost while it is alive."""
    with Apart(folder).running() as job:
        deadline_s = time.monotonic() + DEADLINE_S
        while len(turns.steps_of(folder)) < 30:
            job.check_alive()
            if time.monotonic() > deadline_s:
                raise JobFailed(f"no steps within {DEADLINE_S:g} s")
            time.sleep(0.1)
        blocks = []
        for number in range(2 * args.pairs):
            other = (DEAD, RESTARTING)[number % 2]
            blocks.append((time.monotonic_ns(), ALIVE))
            job.become(ALIVE, args.block)
            job.kill_controller()
            if other == RESTARTING:
                job.start_controller()
            blocks.append((time.monotonic_ns(), other))
            job.become(other, args.block)
            if other == DEAD:
                job.start_controller()
            # The restart belongs to neither state: it gets a separate block, which is not compared.
            blocks.append((time.monotonic_ns(), "coming back"))
            time.sleep(LIFE_S)
        blocks.append((time.monotonic_ns(), ALIVE))
    found = turns.pairs(turns.steps_of(folder), blocks, ALIVE)
    return {way: found[way] for way in (DEAD, RESTARTING)}


# ---- the page -------------------------------------------------------------------------------------------------------


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the tables of a result."""
    found = []
    if "losses" in result:
        losses = result["losses"]
        rows = [
            [name, str(len(values)), f"{statistics.median(values):.0f}", f"{min(values):.0f}", f"{max(values):.0f}"]
            for name, values in (
                ("power off, to the first step of all ranks", losses["to_step_ms"]),
                ("the same, beyond the lease", losses["beyond_lease_ms"]),
            )
        ]
        notes = [
            f"The lease is {losses['lease_s']:g} s, and begins with the last packet, up to a heartbeat (1 s) before "
            "the power goes. The first step is one with the replacement in it."
        ]
        found.append(Section("A machine is lost", ("ms", "of them", "median", "least", "most"), rows, notes))
    if "steps" in result:
        rows = [[way, *row] for way, measured in result["steps"].items() for row in turns.rows(measured)]
        found.append(Section("A step without its controller", ("controller", *turns.COLUMNS), rows, [turns.NOTE]))
    return found


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    head = page.heading("A job on several machines", result)
    return "\n".join([head + page.measured_in(result), *(section.markdown() for section in sections(result))])


def main() -> int:
    """Measures, prints the tables, and writes the page."""
    args = parse_arguments()
    console = Console()

    parts = (("A", "losses", measure_losses), ("B", "steps", measure_steps))

    def measure() -> dict[str, Any]:
        return page.measure_parts(parts, args, console)

    folder = args.results or (None if args.quick else RESULTS)
    return page.carry_out("nodes", page.provenance("nodes.py"), measure, sections, markdown, console, folder)


if __name__ == "__main__":
    sys.exit(main())
