"""The sbatch script as it stands, on nodes of this machine, with commands in place of those of Slurm that it calls."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.network.cluster import SCRIPT
from tests.slurm.script import SBATCH, small_job
from tests.support.nodes import DEADLINE_S, SECRET, Nodes, await_training, end_all

from keepstep.launcher.flags import make_parser
from keepstep.trust.tokens import write_private

JOB = 4242

SCONTROL = """#!/bin/sh
case "$*" in
    "show hostnames n[0-2]") printf '127.0.0.1\\n127.0.0.2\\n127.0.0.3\\n' ;;
    "--oneliner show node 127.0.0.1")
        head -n 1 "$SLURM_SUBMIT_DIR/node-state"
        sed -i '1{$!d}' "$SLURM_SUBMIT_DIR/node-state" ;;
    "requeue 4242") echo requeued >> "$SLURM_SUBMIT_DIR/requeued" ;;
    *) exit 2 ;;
esac
"""
SQUEUE = """#!/bin/sh
test "$*" = "--noheader --jobs=4242 --format=%T" || exit 2
cat "$SLURM_SUBMIT_DIR/job-state"
"""
SCANCEL = """#!/bin/sh
test "$*" = "--signal=TERM 4242.0" || exit 2
echo told >> "$SLURM_SUBMIT_DIR/told"
"""
SLEEP = """#!/bin/sh
"""
SRUN = """#!{python}
# Starts one task for each node, and waits for all of them, as with --no-kill: whatever becomes of one, the others stay.
import argparse, os, subprocess, sys
parser = argparse.ArgumentParser()
for flag in ("--no-kill", "--label"):
    parser.add_argument(flag, action="store_true", required=True)
for flag, value in (("--kill-on-bad-exit", "0"), ("--wait", "0"), ("--ntasks-per-node", "1"), ("--cpu-bind", "none")):
    parser.add_argument(flag, choices=[value], required=True)
for flag in ("--nodes", "--cpus-per-task"):
    parser.add_argument(flag, type=int, required=True)
parser.add_argument("command", nargs=argparse.REMAINDER)
chosen = parser.parse_args()
tasks = []
for node in range(chosen.nodes):
    tasks.append(subprocess.Popen(chosen.command, env={{**os.environ, "SLURM_NODEID": str(node)}}, process_group=0))
    with open(f"{{os.environ['SLURM_SUBMIT_DIR']}}/pid-{{node}}.new", "w") as file:
        file.write(str(tasks[-1].pid))
    os.rename(file.name, file.name.removesuffix(".new"))
sys.exit(max(task.wait() % 256 for task in tasks))
"""


def node(*states: str) -> str:
    """What Slurm says of a node, each time that it is asked; the last one from then on."""
    line = "NodeName=127.0.0.1 Arch=x86_64 CPUAlloc=1 Boards=1 State={} ThreadsPerCore=1 Reason=a State=DOWN [root]\n"
    return "".join(line.format(state) for state in states)


def install(
    folder: Path, *more: tuple[str, str], job_state: str = "RUNNING\n", states: tuple[str, ...] = ("ALLOCATED",)
) -> None:
    """Puts the commands into a folder, and what they answer."""
    (folder / "bin").mkdir(exist_ok=True)
    commands = (("scontrol", SCONTROL), ("squeue", SQUEUE), ("scancel", SCANCEL), ("sleep", SLEEP), *more)
    for name, text in commands:
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "job-state").write_text(job_state)
    (folder / "node-state").write_text(node(*states))


class Job:
    """The script, with fewer ranks, in a folder from which it is submitted."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        self.run = folder / f"run-{JOB}"
        self.started: list[subprocess.Popen[bytes]] = []
        install(folder, ("srun", SRUN.format(python=sys.executable)))
        write_private(folder / "job.secret", SECRET.text())
        port = int(Nodes(folder).endpoint.rpartition(":")[2])
        (folder / "train.sbatch").write_text(small_job(script, port))

    def start(self) -> subprocess.Popen[bytes]:
        """The batch script, as Slurm starts it on the first node."""
        environment = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(self.folder),
            "SLURM_JOB_ID": str(JOB),
            "SLURM_STEP_ID": "0",
            "SLURM_JOB_NODELIST": "n[0-2]",
            "SLURM_JOB_NUM_NODES": "3",
        }
        with (self.folder / "output").open("wb") as output:
            process = subprocess.Popen(
                ["bash", "train.sbatch"], cwd=self.folder, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        self.started.append(process)
        return process

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Its exit code."""
        try:
            return process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(self.output())

    def output(self) -> str:
        """What all nodes have printed."""
        return (self.folder / "output").read_text(errors="replace")

    def task(self, node: int) -> psutil.Process:
        """What srun has started on a node."""
        return psutil.Process(int((self.folder / f"pid-{node}").read_text()))

    def power_off(self, node: int) -> None:
        """All that runs on a node is killed, from the top."""
        task = self.task(node)
        for each in (task, *task.children(recursive=True)):
            each.kill()


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    """Two ranks on three nodes; whatever is left of them is ended."""
    found = Job(tmp_path, getattr(request, "param", f"{SCRIPT} 200 0.02"))
    yield found
    for process in found.started:
        end_all(process)


def test_the_job_outlives_a_node(job: Job) -> None:
    process = job.start()
    await_training(job.run / "node-0")
    job.power_off(1)
    assert job.wait(process) == 0, job.output()
    assert not (job.folder / "requeued").exists()
    report = json.loads((job.run / "report.json").read_text())
    assert [recovery["cause"] for recovery in report["recoveries"]] == ["node lost"]
    assert len(set(re.findall(r"^digest \d (\S+)", job.output(), re.MULTILINE))) == 1


def test_who_is_left_without_the_first_node_requeues_the_job(job: Job) -> None:
    """Slurm keeps what is left of the allocation for a job that has asked for --no-kill."""
    path = job.folder / "train.sbatch"
    path.write_text(path.read_text().replace("--report", "--controller-timeout 3 --report"))
    process = job.start()
    await_training(job.run / "node-0")
    (job.folder / "node-state").write_text(node("DOWN+NOT_RESPONDING"))
    job.power_off(0)
    job.wait(process)
    assert (job.folder / "requeued").read_text() == "requeued\n" * 2


@pytest.mark.parametrize("job", [f"{SCRIPT} no-number 1"], indirect=True, ids=["bad script"])
def test_how_the_job_ended_is_what_the_batch_script_ends_with(job: Job) -> None:
    assert job.wait(job.start()) == 1, job.output()
    assert json.loads((job.run / "report.json").read_text())["exit_code"] == 1


def test_a_job_that_is_cancelled_ends_as_one(job: Job) -> None:
    """``scancel`` sends SIGTERM to every task."""
    process = job.start()
    await_training(job.run / "node-0")
    for node in range(3):
        os.killpg(job.task(node).pid, signal.SIGTERM)
    assert job.wait(process) == 1, job.output()
    assert not (job.folder / "requeued").exists()


ENDED = "#!/bin/sh\nexit 1\n"
TOLD = "#!/bin/sh\nkill -{signal} $PPID\nexit 1\n"
REPORTED = "#!/bin/sh\ntouch report.json\nexit 1\n"


def end(folder: Path, node_rank: int, keepstep: str, job_state: str, states: tuple[str, ...]) -> None:
    """Has an agent end in this way, with Slurm's answers to what its shell asks then."""
    install(folder, ("keepstep", keepstep), job_state=job_state, states=states)
    (on_each_node,) = re.findall(r"^on_each_node='(.*?)^'", SBATCH.read_text(), re.MULTILINE | re.DOTALL)
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    environment |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": str(JOB), "SLURM_STEP_ID": "0"}
    environment |= {"SLURM_NODEID": str(node_rank)}
    command = ["bash", "-c", on_each_node, "node", "127.0.0.1", str(folder)]
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == 1, ended.stderr


@pytest.mark.parametrize(
    ("job_state", "states", "keepstep", "starts_over"),
    [
        ("RUNNING\n", ("DOWN+NOT_RESPONDING",), ENDED, True),
        ("RUNNING\n", ("DOWN*",), ENDED, True),
        ("RUNNING\n", ("DOWN",), ENDED, True),
        ("RUNNING\n", ("DOWN+DRAIN",), ENDED, True),
        ("RUNNING\n", ("ALLOCATED+NOT_RESPONDING", "DOWN+NOT_RESPONDING"), ENDED, True),
        ("RUNNING\n", ("ALLOCATED*", "ALLOCATED*+DRAIN", "DOWN*+DRAIN"), ENDED, True),
        ("RUNNING\n", ("ALLOCATED+NOT_RESPONDING", "ALLOCATED"), ENDED, False),
        ("RUNNING\n", ("ALLOCATED",), ENDED, False),
        ("RUNNING\n", ("ALLOCATED+DRAIN",), ENDED, False),
        ("RUNNING\n", ("COMPLETING",), ENDED, False),
        ("RUNNING\n", (), ENDED, False),
        ("COMPLETING\n", ("DOWN",), ENDED, False),
        ("CANCELLED\n", ("DOWN",), ENDED, False),
        ("", ("DOWN",), ENDED, False),
        ("", (), ENDED, False),
        ("RUNNING\n", ("DOWN",), TOLD.format(signal="TERM"), False),
        ("RUNNING\n", ("DOWN",), TOLD.format(signal="USR1"), False),
        ("RUNNING\n", ("DOWN",), REPORTED, False),
    ],
)
def test_a_job_starts_over_only_if_slurm_says_that_its_first_node_is_down(
    job_state: str, states: tuple[str, ...], keepstep: str, starts_over: bool, tmp_path: Path
) -> None:
    """It took a node for down that squeue did not list, which is so at every end of a job, and in silence."""
    end(tmp_path, 1, keepstep, job_state, states)
    assert (tmp_path / "requeued").exists() is starts_over
    assert not (tmp_path / "told").exists()


@pytest.mark.parametrize(("keepstep", "tells"), [(ENDED, True), (REPORTED, False), (TOLD.format(signal="TERM"), False)])
def test_the_first_agent_tells_the_others_if_it_fails_alone(keepstep: str, tells: bool, tmp_path: Path) -> None:
    """They held the allocation for as long as they wait for a controller."""
    end(tmp_path, 0, keepstep, "RUNNING\n", ("ALLOCATED",))
    assert (tmp_path / "told").exists() is tells
    assert not (tmp_path / "requeued").exists()


def test_flags_are_those_of_keepstep() -> None:
    text = SBATCH.read_text()
    (line,) = re.findall(r"keepstep run .*", text)
    rest = text[text.index('bash -c "$on_each_node"') : text.index("# What srun returns")]
    shown = set(re.findall(r"(?<!\S)--[a-z-]+", line + rest))
    known = {option for action in make_parser("keepstep run")._actions for option in action.option_strings}
    assert shown <= known
    assert len(shown) == 10
    (grace,) = re.findall(r"--grace (\d+)", rest)
    assert int(grace) < 30, "Slurm's KillWait by default"


def test_the_script_is_sound() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    ended = subprocess.run([shellcheck, SBATCH], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.stdout == ""
    assert ended.returncode == 0
