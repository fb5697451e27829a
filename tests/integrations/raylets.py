"""Several Ray nodes on this machine, each of which can be killed with everything on it.

Run as a program it holds the cluster, so that nothing of Ray is in the process of the tests, and ends it when its input
ends, however that comes about.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

DEADLINE_S = 240.0
STORE_BYTES = 80 << 20
"""About the least that Ray takes for its object store, of which the jobs need nothing."""
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10000,
    "health_check_failure_threshold": 3,
}
"""Ray looks more often than by default whether a node is there, and has no less patience with one that is slow."""


class Raylets:
    """A cluster: a node for Ray itself, on which nothing else has room, and some with one CPU."""

    def __init__(self, num_nodes: int) -> None:
        self._folder = tempfile.mkdtemp(prefix="ks-")  # its path is part of a socket's, of which 107 characters count
        environment = os.environ | {"RAY_TMPDIR": self._folder, "RAY_USAGE_STATS_ENABLED": "0"}
        self._log = (Path(self._folder) / "log").open("w+b")
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(num_nodes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment,
        )  # fmt: skip
        self.address = ""
        self._raylets: dict[int, psutil.Process] = {}

    def await_start(self) -> None:
        """Waits until all nodes are up."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise AssertionError(f"no cluster has come up:\n{(Path(self._folder) / 'log').read_text(errors='replace')}")
        self.address, raylets = json.loads(line)
        self._raylets = {pid: psutil.Process(pid) for pid in raylets}

    def below(self, raylet: int) -> list[psutil.Process]:
        """Everything that runs on a node, but Ray's own raylet."""
        return self._raylets[raylet].children(recursive=True)

    def of_jobs(self) -> list[psutil.Process]:
        """Everything of keepstep's that runs on any node."""
        found = []
        for raylet in self._raylets:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in self.below(raylet):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if any(word.startswith("keepstep.") for word in process.cmdline()):
                            found.append(process)
        return found

    def node_of(self, pid: int) -> int:
        """The raylet below which a process runs."""
        return next(parent.pid for parent in psutil.Process(pid).parents() if parent.pid in self._raylets)

    def power_off(self, raylet: int) -> list[psutil.Process]:
        """SIGKILL to a raylet and everything that runs below it, when all of it stands still; returns what that was."""
        stopped: dict[int, psutil.Process] = {}
        while new := [p for p in (self._raylets[raylet], *self.below(raylet)) if p.pid not in stopped]:
            for process in new:
                stopped[process.pid] = process
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGSTOP)
        for process in stopped.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        del self._raylets[raylet]
        return list(stopped.values())

    def close(self) -> None:
        """Ends the cluster and whatever is left of it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            everything = psutil.Process(self._process.pid).children(recursive=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=30)
            self._process.kill()
            for process in everything:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(everything, timeout=10)
        self._process.wait()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def main(num_nodes: int) -> None:
    """Holds a cluster until the input ends."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES, "_system_config": HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [cluster.add_node(wait=False, num_cpus=1, object_store_memory=STORE_BYTES) for _ in range(num_nodes)]
        cluster.wait_for_nodes()
        raylets = [process.process.pid for node in nodes for process in node.all_processes["raylet"]]
        print(json.dumps([cluster.address, raylets]), flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
