"""Weights of a job with two controllers: the first one dies while engines and servers look for each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.network.cluster import PATIENT
from tests.support.nodes import Nodes, await_output, free_endpoint
from tests.weights.remote.test_job import DEADLINE_S, SCRIPT, VARIABLES, Engine, Job

TAKEOVER_S = 8
"""Longer than a busy machine lets a process stand still that nobody has stopped."""
WHERE: list[object] = ["--nnodes", 2, "--nproc-per-node", 1, "--spares", 1]


class StandbyJob(Job):
    """Two agents, apart from two controllers that share a folder."""

    def begin(self, num_relays: int) -> None:
        """Starts a controller and one that stands by."""
        run_dir = self.nodes.folder / "run-0"  # where `kill_rank` looks
        run_dir.mkdir(0o700)
        endpoints = {"first": free_endpoint(), "second": free_endpoint()}
        self.nodes.endpoint = ",".join(endpoints.values())
        for name, more in (("first", []), ("second", ["--standby"])):
            self.nodes.start(
                name, "controller", "--listen", endpoints[name], *WHERE, "--run-dir", run_dir, "--takeover-after",
                TAKEOVER_S, "--relays", num_relays, *more, **VARIABLES,
            )  # fmt: skip
            await_output(self.nodes, name, "standby for process" if more else "controller listens")

    def train(self, rank: int) -> None:
        """Starts an agent."""
        folder = self.sockets / f"t{rank}"
        weights = ["--weights", folder, "--weights-deadline", DEADLINE_S]
        self.nodes.start(
            f"t{rank}", "agent", "--controller", self.nodes.endpoint, *WHERE, "--node-name", f"t{rank}", "--run-dir",
            self.nodes.folder / f"run-t{rank}", *PATIENT, *weights, SCRIPT, 100_000, 0.2, folder, DEADLINE_S,
            **VARIABLES,
        )  # fmt: skip
        self.engines[f"t{rank}"] = Engine(folder, f"engine-{rank}")


@pytest.mark.parametrize("num_relays", [0, 2])
def test_engines_and_servers_find_each_other_by_the_controller_that_takes_over(tmp_path: Path, num_relays: int) -> None:
    """A server of weights dies with the controller: only the next one can be told where the next server listens."""
    job = StandbyJob(Nodes(tmp_path))
    with job.running():
        job.begin(num_relays)
        job.train(0)
        job.train(1)
        job.receive("e0")
        job.wait_for_versions()

        (server,) = job.children("t1", "serve")
        job.nodes.started["first"].kill()
        server.kill()
        job.receive("e1")  # it asks while nobody answers
        await_output(job.nodes, "second", "takes over from process")
        job.wait_for_versions()

        job.kill_rank(1)
        (server,) = job.children("t0", "serve")  # which feeds the engines' nodes
        server.kill()
        job.wait_for_versions()
