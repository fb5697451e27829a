"""The sbatch script as it stands, on a real Slurm of three virtual nodes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.slurm.cluster import NODES, Slurm, free_port, lacking
from tests.slurm.script import small_job
from tests.support.nodes import SECRET, await_training

from keepstep.trust.tokens import write_private

SCRIPT = Path(__file__).parent.parent / "scripts" / "tiny.py"
FOREVER = 1_000_000
pytestmark = pytest.mark.skipif(bool(lacking()), reason=f"not installed: {', '.join(lacking())}")


class Job:
    """One job, in the folder from which it is submitted."""

    def __init__(self, slurm: Slurm, folder: Path, steps: int, *flags: object, sbatch: tuple[str, ...] = ()) -> None:
        """Args:
        flags: for ``keepstep run``.
        sbatch: flags for that.
        """
        self.slurm = slurm
        self.checkpoints = folder / "checkpoints"
        write_private(folder / "job.secret", SECRET.text())
        script = f"{SCRIPT} --steps {steps} --step-s 0.02 --checkpoint-dir {self.checkpoints}"
        (folder / "train.sbatch").write_text(small_job(script, free_port(), *flags))
        command = ["sbatch", "--parsable", "--nodes=3", "--cpus-per-task=1", *sbatch, "train.sbatch"]
        self.number = slurm.call(*command, cwd=folder).strip()
        self.run = folder / f"run-{self.number}"
        self._output = folder / f"train-{self.number}.log"

    def state(self) -> dict[str, str]:
        """What Slurm says of it."""
        return self.slurm.job(self.number)

    def output(self) -> str:
        """What all nodes have printed."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def await_training(self) -> None:
        """Waits until it trains and has written a checkpoint."""
        await_training(self.run / "node-0")
        self.slurm.wait_for(lambda: any(self.checkpoints.glob("step_*")), "there is a checkpoint")

    def await_end(self, restarts: int = 0) -> tuple[str, str]:
        """Waits until nothing of it is left. Returns its last state and exit code, as Slurm shows them."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        self.slurm.wait_for(lambda: self.state()["JobState"] in ended, f"the job ends: {self.state()}\n{self.output()}")
        state = self.state()
        assert state["Restarts"] == str(restarts), state
        return state["JobState"], state["ExitCode"]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    folder = tmp_path / "slurm"
    folder.mkdir()
    with Slurm(folder).running() as started:
        started.environment["PATH"] = f"{Path(sys.executable).parent}:{started.environment['PATH']}"
        yield started


def drained_at(job: Job, signal: str) -> int:
    """The step at which the job was drained, with a checkpoint."""
    found = re.search(rf"ended by {signal}: drained at step (\d+), with a checkpoint", job.output())
    assert found, job.output()
    assert max(path.name for path in job.checkpoints.iterdir()) == f"step_{int(found[1]):010d}"
    assert json.loads((job.run / "report.json").read_text())["exit_code"] == 1
    return int(found[1])


def test_a_job_completes(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, 20)
    assert job.await_end() == ("COMPLETED", "0:0"), job.output()
    assert job.output().count("of 2 began at 0") == 2


def test_a_job_that_is_cancelled_is_drained_and_not_started_again(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, FOREVER)
    job.await_training()
    slurm.call("scancel", job.number)
    assert job.await_end() == ("CANCELLED", "0:15"), job.output()
    assert drained_at(job, "SIGTERM") > 0


def test_the_signal_before_the_time_limit_drains_the_job(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, FOREVER, sbatch=("--time=2", "--signal=USR1@100"))
    assert job.await_end() == ("FAILED", "1:0"), job.output()
    assert drained_at(job, "SIGUSR1") > 0


@pytest.mark.parametrize("how", ["its power", "by an administrator"])
def test_a_job_outlives_a_node(how: str, slurm: Slurm, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, 200)
    job.await_training()
    if how == "its power":
        slurm.power_off(NODES[1])
    else:
        slurm.set_down(NODES[1])
    assert job.await_end() == ("COMPLETED", "0:0"), job.output()
    report = json.loads((job.run / "report.json").read_text())
    assert [recovery["cause"] for recovery in report["recoveries"]] == ["node lost"]


def test_a_job_that_has_lost_its_first_node_starts_over_from_its_checkpoint(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, 200, "--controller-timeout", 10)
    job.await_training()
    slurm.power_off(NODES[0])
    slurm.set_down(NODES[0])  # it takes Slurm half a minute to find out
    slurm.wait_for(lambda: job.state()["JobState"] == "PENDING", "it is requeued")
    slurm.start_node(NODES[0])
    slurm.call("scontrol", "update", f"jobid={job.number}", "starttime=now")  # instead of two minutes later
    assert job.await_end(restarts=1) == ("COMPLETED", "0:0"), job.output()
    first = set(re.findall(r"of 2 began at (\d+)", job.output()))
    assert len(first) == 1
    assert first != {"0"}


def test_a_job_ends_if_its_first_agent_fails_alone(slurm: Slurm, tmp_path: Path) -> None:
    """The others do not wait for a controller that will not come."""
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / "node-0").touch()
    job = Job(slurm, tmp_path, FOREVER)
    state, _exit_code = job.await_end()
    assert state == "FAILED", job.output()
    assert set(re.findall(r"^(\d): keepstep: ended by SIGTERM", job.output(), re.MULTILINE)) == {"1", "2"}
