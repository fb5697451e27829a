"""Processor time, memory and latency of a controller with many nodes, over a real network stack.

    python benchmarks/controller.py               1,024 agents; about two minutes on two idle cores
    python benchmarks/controller.py --quick       a smoke test with few agents; nothing is written

It runs a real ``keepstep controller`` with TLS on the loopback interface, and the agents in two other processes. Each
agent has its own connection, token and machine, but no workers (benchmarks/fleet.py). The benchmark measures the
controller's processor time without failures, with heartbeats alone and with the phases that agents report; its memory;
and after the loss of a rank the time until `Stop` has reached every agent, and until all have acknowledged it.

The fleet shares the machine's cores with the controller, so the times of the orders include the fleet's own work: for
1,024 agents some 200 ms of processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import page
import psutil
from jobs import JobFailed
from page import RESULTS, Section
from rich.console import Console

from keepstep.config import SECRET_VARIABLE
from keepstep.errors import ConfigurationError
from keepstep.protocol import messages as msg
from keepstep.protocol.controller import AnswersReceived, ReportsReceived
from keepstep.trace.record import journal, runfolder
from keepstep.trace.timeline.run import Run
from keepstep.trust.tokens import Secret

KEEPSTEP = [sys.executable, "-m", "keepstep.cli.main"]
FLEET = Path(__file__).with_name("fleet.py")
DEADLINE_S = 180.0
STOP_MS = 300.0
"""The limit for the time of an order to stop."""
PROCESSES = 2
"""Number of the fleet's processes. The fleet has more to do than the controller."""
QUICK = {"agents": 16, "seconds": 3.0, "losses": 2}


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1024, help="that hold a rank each (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of calm that are measured (default: %(default)s)")
    parser.add_argument("--losses", type=int, default=30, help="ranks that are lost (default: %(default)s)")
    parser.add_argument("--relays", type=int, default=0, help="of the controller (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="where the page goes (default: results)")
    return page.parsed(parser, QUICK)


class Fleet:
    """A controller, and the processes that hold its agents."""

    def __init__(self, folder: Path, num_agents: int, num_relays: int = 0) -> None:
        self.run_dir = folder / "run"
        self.run_dir.mkdir(mode=0o700)
        self._log = folder / "controller.log"
        self.num_agents = num_agents
        self._num_relays = num_relays
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        self._environment = {**os.environ, SECRET_VARIABLE: Secret.new().text()}
        self._processes: list[subprocess.Popen[str]] = []
        self.controller: psutil.Process | None = None
        self._run: Run | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[Fleet]:
        """Starts all processes, and ends them at the end of the ``with`` block."""
        try:
            command = ["controller", "--listen", self._endpoint, "--run-dir", str(self.run_dir), "--spares", "1"]
            command += ["--nnodes", f"{self.num_agents}:{self.num_agents + 1}", "--nproc-per-node", "1"]
            command += ["--relays", str(self._num_relays)]
            with self._log.open("wb") as log:
                self.controller = psutil.Process(self._start([*KEEPSTEP, *command], log).pid)
            total, first = self.num_agents + 1, 0
            for left in range(PROCESSES, 0, -1):
                count = (total - first) // left
                numbers = [str(first), str(count), str(self.num_agents)]
                self._start([sys.executable, str(FLEET), self._endpoint, *numbers])
                first += count
            yield self
        finally:
            if self._run is not None:
                self._run.close()
            for process in self._processes:
                process.kill()
                process.communicate()

    def _start(self, command: list[str], log: IO[bytes] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        self._processes.append(process)
        return process

    def wait_until_trained(self, num_recoveries: int) -> None:
        """Waits until all ranks train after this number of recoveries, and the spare is warm.

        It reads the journal only after the controller has printed that all ranks train, because to replay the journal
        takes a core that controller and agents need until then.
        """
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            for process in self._processes:
                if process.poll() is not None:
                    raise JobFailed(f"a process has ended with {process.returncode}\n{self._log.read_text()}")
            if self._log.read_text().count("training continues") < num_recoveries:
                time.sleep(0.05)
                continue
            with contextlib.suppress(ConfigurationError):  # the run has not begun
                self._run = self._run or Run(self.run_dir)
                self._run.poll()
                job = self._run.job
                if job.stage == "training" and len(job.records) == num_recoveries and job.roster.num_ready_spares:
                    return
            time.sleep(0.05)
        raise JobFailed(f"{num_recoveries} recoveries did not come within {DEADLINE_S:g} s")

    def lose(self, rank: int) -> None:
        """Makes the worker of a rank die."""
        assert self._run is not None
        (node,) = [each.node for each in self._run.job.roster.holders() if each.rank == rank]
        number = int(node.removeprefix("node-"))
        fleet = self._processes[1 + min(PROCESSES - 1, number // ((self.num_agents + 1) // PROCESSES))]
        assert fleet.stdin is not None
        fleet.stdin.write(f"lose {number}\n")
        fleet.stdin.flush()

    def processor_s(self) -> float:
        """Returns the processor time of the controller and its relays so far, in seconds."""
        assert self.controller is not None
        programs = [self.controller, *self.controller.children()]
        return sum(times.user + times.system for times in (program.cpu_times() for program in programs))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures everything in one job."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    fleet = Fleet(folder, args.agents, args.relays)
    begun_s = time.monotonic()
    with fleet.running():
        fleet.wait_until_trained(0)
        joined_s = time.monotonic() - begun_s
        assert fleet.controller is not None
        before_s, began_s = fleet.processor_s(), time.monotonic()
        time.sleep(args.seconds)
        calm = (fleet.processor_s() - before_s) / (time.monotonic() - began_s)
        rss = fleet.controller.memory_info().rss
        for number in range(args.losses):
            fleet.lose(number * args.agents // args.losses)
            fleet.wait_until_trained(number + 1)
        return {
            "agents": args.agents,
            "start_s": joined_s,
            "processor_percent": 100 * calm,
            "memory_mib": rss / 2**20,
            "stops_ms": stops_ms(fleet.run_dir, args.agents - 1),
        }


def stops_ms(run_dir: Path, num_survivors: int) -> list[float]:
    """Returns for each recovery the time from `Stop` to the last acknowledgement of a survivor, from the journal."""
    found = []
    began_s, acknowledged = 0.0, 0
    for entry in journal.read(run_dir / runfolder.JOURNAL):
        if any(isinstance(order, msg.Stop) for _, order, _ in entry.orders):
            began_s, acknowledged = entry.at_s, 0
        if isinstance(entry.event, ReportsReceived | AnswersReceived):
            event = entry.event
            reports = event.spoken() if isinstance(event, AnswersReceived) else event.reports
            answers = [each for each in reports if isinstance(each, msg.SafePointReached)]
            acknowledged += sum(len(each.workers) for each in answers)
            if answers and acknowledged == num_survivors:
                found.append(1000 * (entry.at_s - began_s))
    return found


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the table of a result."""
    stops = result["stops_ms"]
    rows = [
        ["from the start until all train, s", f"{result['start_s']:.1f}"],
        ["controller while all is well, percent of a core", f"{result['processor_percent']:.1f}"],
        ["controller's memory, MiB", f"{result['memory_mib']:.0f}"],
        ["order to stop, until all have acknowledged it: median, ms", f"{statistics.median(stops):.0f}"],
        ["the same, worst, ms", f"{max(stops):.0f}"],
        [f"within {STOP_MS:g} ms", f"{sum(stop <= STOP_MS for stop in stops)} of {len(stops)}"],
    ]
    note = f"{len(stops)} lost ranks. Agents and controller share the cores."
    return [Section(f"A controller and {result['agents']:,} agents", ("", "measured"), rows, [note])]


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    head = page.heading("A controller of many nodes", result)
    return "\n".join([head + page.measured_in(result), *(section.markdown() for section in sections(result))])


def main() -> int:
    """Measures, prints the tables, and writes the page."""
    args = parse_arguments()

    def measured() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as folder:
            return measure(args, Path(folder))

    folder = args.results or (None if args.quick else RESULTS)
    return page.carry_out(
        "controller", page.provenance("controller.py"), measured, sections, markdown, Console(), folder
    )


if __name__ == "__main__":
    sys.exit(main())
