"""Jobs on a real Ray cluster, of several raylets on this machine: whole, with nodes killed, and what cannot be run."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.integrations.raylets import Raylets
from tests.support.jobs import SCRIPTS, command
from tests.support.watching import attempts

from keepstep.cli import ahead as cli
from keepstep.errors import ConfigurationError
from keepstep.protocol.recovery import RecoveryMachine
from keepstep.trace.timeline.run import Run

NUM_NODES = 4
DEADLINE_S = 240.0
STEP_S = 0.02
GATES = (15, 30)
"""Steps of the script that wait until they are let go on."""


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    """The cluster. What a test kills of it is gone for those behind it."""
    cluster = Raylets(NUM_NODES)
    try:
        cluster.await_start()
        yield cluster
    finally:
        cluster.close()


class RayJob:
    """``keepstep run --engine ray`` in the background."""

    def __init__(self, folder: Path, raylets: Raylets, *arguments: object) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.run_dir.mkdir(mode=0o700)
        self._raylets = raylets
        self._run: Run | None = None
        words = ["run", "--engine", "ray", "--ray-address", raylets.address, "--nproc-per-node", 1, *arguments]
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command(*words), stdout=log, stderr=subprocess.STDOUT, env=surroundings(), cwd=folder
            )

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")

    @property
    def job(self) -> RecoveryMachine:
        """What the controller has decided so far, by its journal."""
        if self._run is None:
            self._run = Run(self.run_dir)
        self._run.poll()
        return self._run.job

    def wait_until(self, condition: Callable[[RecoveryMachine], bool], what: str) -> None:
        """Waits for something to be seen in the journal."""
        for _ in attempts(self.run_dir, DEADLINE_S):
            with contextlib.suppress(ConfigurationError):  # it has not begun yet
                if condition(self.job):
                    return
            assert self.process.poll() is None, f"{what}: the job has ended\n{self.output}"
        raise AssertionError(f"{what}: not within {DEADLINE_S:g} s\n{self.output}")

    def wait(self) -> int:
        """Waits for its end and for that of everything that it had started; returns its exit code."""
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job has not ended within {DEADLINE_S:g} s\n{self.output}") from None
        _, alive = psutil.wait_procs(self._raylets.of_jobs(), timeout=30)
        assert alive == []
        return code

    def close(self) -> None:
        """Ends what is left of it; Ray ends what its driver has started."""
        if self._run is not None:
            self._run.close()
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        self.process.wait()


def surroundings() -> dict[str, str]:
    """The environment of a job: no other cluster, and on each side as many threads."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "KEEPSTEP_"))}
    return own | {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def running(folder: Path, raylets: Raylets, *arguments: object) -> Iterator[RayJob]:
    """A job in the background; nothing of it survives the block."""
    job = RayJob(folder, raylets, "--run-dir", folder / "run", *arguments)
    try:
        yield job
    finally:
        job.close()


def digests(output: str) -> dict[str, str]:
    """What each rank said of its weights at the end."""
    words = [line.split() for line in output.splitlines()]
    return {rank: digest for word, rank, digest in (w for w in words if len(w) == 3) if word == "digest"}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, str]:
    """The digests of the same job on one node, without Ray."""
    words = command("run", "--nproc-per-node", 2, "--spares", 0, SCRIPTS / "gated.py", ".", STEP_S)
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, env=surroundings(), check=True)
    found = digests(done.stdout)
    assert found.keys() == {"0", "1"}
    return found


# ---- jobs -----------------------------------------------------------------------------------------------------------


def test_weights_are_those_of_a_job_without_ray(raylets: Raylets, undisturbed: dict[str, str], tmp_path: Path) -> None:
    with running(tmp_path, raylets, "--nnodes", 2, "--spares", 0, SCRIPTS / "gated.py", ".", STEP_S) as job:
        assert job.wait() == 0, job.output
        assert digests(job.output) == undisturbed
        assert len({worker.node for worker in job.job.roster.workers.values()}) == 2
        # Every line of every rank has come, whole and in order.
        for rank in range(2):
            steps = [line for line in job.output.splitlines() if line.startswith(f"rank {rank} ")]
            assert steps == [f"rank {rank} step {step}" for step in range(40)]


def test_too_few_nodes(raylets: Raylets, tmp_path: Path) -> None:
    flags = ("--nnodes", NUM_NODES + 1, "--spares", 0, "--ray-timeout", 2)
    with running(tmp_path, raylets, *flags, SCRIPTS / "gated.py", ".", STEP_S) as job:
        assert job.wait() == 2
        assert f"not found {NUM_NODES + 1} nodes with 1 CPU free on each within 2 s" in job.output
        assert f"{NUM_NODES} of its nodes are large enough" in job.output


def test_a_script_that_is_not_there(raylets: Raylets, tmp_path: Path) -> None:
    with running(tmp_path, raylets, "--nnodes", 1, "--spares", 0, "nowhere.py") as job:
        assert job.wait() == 2
        assert "the script 'nowhere.py' does not exist" in job.output
        assert "nothing can be run as asked on a node that Ray has found" in job.output


def test_a_signal_ends_everything(raylets: Raylets, tmp_path: Path) -> None:
    flags = ("--nnodes", 2, "--spares", 0)
    with running(tmp_path, raylets, *flags, SCRIPTS / "gated.py", tmp_path, STEP_S, *GATES) as job:
        job.wait_until(lambda job: job.stage == "training", "the job trains")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 128 + signal.SIGINT, job.output


def test_weights_survive_the_kill_of_nodes(
    raylets: Raylets, undisturbed: dict[str, str], tmp_path: Path, seed: int
) -> None:
    """Twice: the second time what takes the rank over is on the node that Ray has found in place of the first."""
    choose = random.Random(seed)
    flags = ("--nnodes", "2:3", "--spares", 1, "--hang-after", DEADLINE_S)
    with running(tmp_path, raylets, *flags, SCRIPTS / "gated.py", tmp_path, STEP_S, *GATES) as job:
        for number, gate in enumerate(GATES):
            job.wait_until(lambda job: is_whole(job, with_spare=True), "there are a warm spare and all ranks")
            threading.Event().wait(choose.random() * GATES[0] * STEP_S * 1.5)  # at any moment, and in the gate at last
            known = {worker.node for worker in job.job.roster.workers.values()}
            victim = choose.choice([worker for worker in job.job.roster.holders() if worker.rank is not None])
            assert victim.pid is not None
            killed = raylets.power_off(raylets.node_of(victim.pid))
            assert {victim.pid} < {process.pid for process in killed}
            print(f"killed: rank {victim.rank} on {victim.node}, with {len(killed)} processes")
            is_last = number == len(GATES) - 1
            job.wait_until(
                lambda job, lost=victim.node, is_last=is_last: (
                    lost not in job.roster.nodes and is_whole(job, with_spare=not is_last)
                ),
                "the rank is taken over, and there is a new spare if there is a node for it",
            )
            there = {worker.node for worker in job.job.roster.holders()}
            there |= {spare.node for spare in job.job.roster.spares()}
            assert victim.node not in there
            assert is_last or len(there - known) == 1, "Ray has found a node"
            (tmp_path / str(gate)).touch()
        assert job.wait() == 0, job.output
        assert digests(job.output) == undisturbed
        assert [record.cause for record in job.job.records] == ["node lost"] * len(GATES)


def is_whole(job: RecoveryMachine, *, with_spare: bool) -> bool:
    """Whether all ranks train, with a warm spare beside them if that is asked for."""
    return job.stage == "training" and job.roster.num_holders == 2 and job.roster.num_ready_spares >= with_spare


# ---- output ---------------------------------------------------------------------------------------------------------


def test_lines_are_handed_on_whole() -> None:
    from keepstep.integrations import ray  # here, for only those of its tests that need it import Ray

    reading, writing = os.pipe()
    with open(reading, "rb") as pipe, open(writing, "wb", buffering=0) as agent:
        output = ray._Output(pipe)
        assert output.read() is None
        for written, taken in [
            (b"a\nb", b"a\n"),
            (b"c\nd", b"bc\n"),
            (b" 10%\r 2", b"d 10%\r"),
            (b"x" * ray.MAX_LINE_BYTES, b" 2" + b"x" * ray.MAX_LINE_BYTES),
            (b"last", b""),
        ]:
            agent.write(written)
            assert output.read() == len(written)
            assert output.take(is_last=False) == taken
        agent.write(b" words")
        assert output.take(is_last=True) == b"last words"
        agent.close()
        assert output.read() == 0


# ---- what cannot be -------------------------------------------------------------------------------------------------


def test_without_the_extra() -> None:
    program = """import sys
sys.modules["ray"] = None
from keepstep.cli.main import main
sys.exit(main(["run", *sys.argv[1:], "--no-python", "true"]))
"""
    words = [sys.executable, "-c", program, "--nproc-per-node", "1"]
    without = subprocess.run([*words, "--engine", "ray"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert without.returncode == 2
    assert "--engine ray: Ray is not installed" in without.stderr
    assert "pip install 'keepstep[ray]'" in without.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--node-rank", "1"], "--node-rank: --engine ray finds and names the nodes"),
        (["--rdzv-endpoint", "10.0.0.1"], "--rdzv-endpoint: --engine ray finds and names the nodes"),
        (["--secret-file", "x"], "--secret-file: --engine ray finds and names the nodes"),
        (["--nproc-per-node", "gpu"], "--nproc-per-node gpu: .* give a number"),
        (["--ray-timeout", "0"], "--ray-timeout 0.0: must be positive"),
        (["--ray-address", "ray://10.0.0.1:10001"], "give the command there"),
        (["--ray-address", "127.0.0.1:1"], "the Ray address 127.0.0.1:1: no Ray cluster answers there"),
        (["--otel"], "--otel: not supported on several nodes"),
    ],
)
def test_flags_that_cannot_be(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        cli.main(["--engine", "ray", *flags, "--no-python", "true"])


@pytest.mark.parametrize("bundle", ["CPU", "CPU=0", "CPU=x", "=1", "CPU=1,,GPU=1", "CPU=inf", "CPU=nan"])
def test_bundles_that_cannot_be(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--engine", "ray", "--ray-bundle", bundle, "--no-python", "true"])
    assert "is not NAME=N" in capsys.readouterr().err
