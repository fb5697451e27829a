"""Two controllers of one run: one serves, the other one takes its place when it is gone, and never do both speak."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.network.cluster import SCRIPT
from tests.support.nodes import KEEPSTEP, SECRET, Nodes, agent, await_output, free_endpoint
from tests.support.watching import attempts

from keepstep.config import SECRET_VARIABLE
from keepstep.controller.lease import FOLDER
from keepstep.errors import ConfigurationError
from keepstep.launcher.cluster.hosting import EXIT_SUPERSEDED
from keepstep.protocol.controller import ReportsReceived, Restarted
from keepstep.protocol.lease import Lease
from keepstep.protocol.recovery import RecoveryMachine, Stage
from keepstep.trace.record import journal, runfolder
from keepstep.trace.timeline.run import opened

DEADLINE_S = 90.0
NUM_STEPS = 12
TAKEOVER_S = 8
"""Longer than a busy machine lets a process stand still that no process has stopped."""
GIVEN_UP_S = 40.0
"""It takes them four seconds; gRPC's own idea of a connection that is dead is a minute."""
JOB: list[object] = ["--nnodes", 2, "--nproc-per-node", 1, "--spares", 1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a rank says of its weights after a run in which nothing fails."""
    command = [*KEEPSTEP, "run", "--nproc-per-node", "2", "--spares", "0", "--run-dir"]
    command += [str(tmp_path_factory.mktemp("reference")), str(SCRIPT), str(NUM_STEPS), "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    (digest,) = {line.split()[2] for line in ended.stdout.splitlines() if line.startswith("digest ")}
    return digest


class Succession:
    """A job of two ranks that stands still in the middle until it is let go on, and controllers for it."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.run_dir = nodes.folder / "run"
        self.run_dir.mkdir(0o700)
        self.endpoints = {"first": free_endpoint(), "second": free_endpoint()}
        self._gate = nodes.folder / "gate"
        self.num_relays = 0
        """Of each controller."""

    def controller(self, name: str, *more: object, run_dir: Path | None = None) -> subprocess.Popen[bytes]:
        """Starts one, at an endpoint of its own."""
        folder = run_dir or self.run_dir
        return self.nodes.start(
            name, "controller", "--listen", self.endpoints[name], *JOB, "--run-dir", folder, "--takeover-after",
            TAKEOVER_S, "--relays", self.num_relays, *more, **{SECRET_VARIABLE: SECRET.text()},
        )  # fmt: skip

    def begin(self) -> None:
        """Starts the first controller, one that stands by, and the agents; returns in the middle of the job."""
        self.controller("first")
        await_output(self.nodes, "first", "controller listens")
        self.controller("second", "--standby")
        await_output(self.nodes, "second", f"standby for process {self.nodes.started['first'].pid}")
        for name in ("node-a", "node-b"):
            endpoints = ",".join(self.endpoints.values())
            script = (SCRIPT, NUM_STEPS, 0.01, self._gate)
            agent(self.nodes, name, name, JOB, as_node=name, endpoints=endpoints, script=script)
        self.wait_until(lambda: all(self._gate.with_name(f"gate.{rank}").exists() for rank in (0, 1)), "the gate")
        self.wait_until(lambda: self.look(lambda job: job.roster.num_ready_spares == 1), "a spare")

    def go_on(self) -> None:
        """The job stands still no longer."""
        self._gate.touch()

    def has_heard_again(self) -> bool:
        """Whether an agent has spoken to the controller that has taken the place of another one."""
        entries = journal.read(self.run_dir / runfolder.JOURNAL)
        again = [number for number, entry in enumerate(entries) if isinstance(entry.event, Restarted)]
        return bool(again) and any(isinstance(entry.event, ReportsReceived) for entry in entries[again[-1] :])

    def wait_until(self, condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Waits for something that comes about with a change of the run's folder, or soon after."""
        for _ in attempts(self.run_dir, deadline_s):
            if condition():
                return
        logs = "\n".join(f"-- {name}\n{self.nodes.output(name)}" for name in self.nodes.started)
        raise AssertionError(f"{what}: not within {deadline_s:g} s\n{logs}")

    def look(self, question: Callable[[RecoveryMachine], bool]) -> bool:
        """What is so in the job, by its journal."""
        with contextlib.suppress(ConfigurationError), opened(self.run_dir) as run:
            return question(run.job)
        return False

    def kill_rank(self, rank: int) -> None:
        """SIGKILL to the process that holds a rank."""
        with opened(self.run_dir) as run:
            (pid,) = (worker.pid for worker in run.job.roster.holders() if worker.rank == rank)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def wait_for_the_end(self, *names: str) -> None:
        """Everything of these names ends well."""
        assert {name: self.nodes.wait(name) for name in names if self.nodes.wait(name)[0]} == {}

    def digests(self) -> list[str]:
        """What the ranks have said of their weights."""
        lines = [line for name in ("node-a", "node-b") for line in self.nodes.output(name).splitlines()]
        return [line.split()[2] for line in lines if line.startswith("digest ")]

    def lease(self) -> Lease:
        """What lies in the run's folder."""
        (found,) = filter(None, (Lease.parse(name) for name in os.listdir(self.run_dir / FOLDER)))
        return found


@pytest.fixture
def succession(nodes: Nodes) -> Iterator[Succession]:
    """A job that has not begun."""
    found = Succession(nodes)
    yield found
    for process in found.nodes.started.values():
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)  # one that stands still cannot be ended in order


def test_a_controller_is_killed_and_the_second_one_takes_its_place(succession: Succession, undisturbed: str) -> None:
    succession.begin()
    succession.nodes.started["first"].kill()
    await_output(succession.nodes, "second", "controller listens")
    assert "takes over from process" in succession.nodes.output("second")
    succession.kill_rank(1)
    succession.go_on()
    succession.wait_for_the_end("second", "node-a", "node-b")
    assert succession.digests() == [undisturbed] * 2
    with opened(succession.run_dir) as run:
        (record,) = run.job.records
        assert [failure.rank for failure in record.failures] == [1]
        assert run.info.pid == succession.nodes.started["second"].pid
        assert run.info.clock_offset_ns == 0, "it is the clock of the same machine"
    entries = journal.read(succession.run_dir / runfolder.JOURNAL)
    assert sum(isinstance(entry.event, Restarted) for entry in entries) == 1
    assert [entry.at_s for entry in entries] == sorted(entry.at_s for entry in entries)
    assert (succession.lease().term, succession.lease().is_free) == (2, True)


@pytest.mark.parametrize("num_relays", [0, 1])
def test_a_controller_that_was_paused_is_silent_afterwards(
    succession: Succession, undisturbed: str, num_relays: int
) -> None:
    """The second one serves by then, and a rank is lost. The first finds that out before it transmits anything.

    Relays of the first one do not stand still. They end, or agents would stay with them.
    """
    succession.num_relays = num_relays
    succession.begin()
    first = succession.nodes.started["first"]
    first.send_signal(signal.SIGSTOP)
    await_output(succession.nodes, "second", "controller listens")
    succession.kill_rank(1)
    succession.wait_until(succession.has_heard_again, "the agents, which have given up the first one", GIVEN_UP_S)
    first.send_signal(signal.SIGCONT)
    code, said = succession.nodes.wait("first")
    assert code == EXIT_SUPERSEDED
    second = succession.nodes.started["second"].pid
    assert f"is served by process {second} on" in said
    succession.go_on()
    succession.wait_for_the_end("second", "node-a", "node-b")
    assert succession.digests() == [undisturbed] * 2
    with opened(succession.run_dir) as run:
        (record,) = run.job.records
        assert [failure.rank for failure in record.failures] == [1]
        assert run.job.generation == 2
        assert run.job.stage is Stage.ENDED


@pytest.mark.parametrize("flag", ["--continue", None])
def test_a_second_controller_by_mistake_is_refused(succession: Succession, undisturbed: str, flag: str | None) -> None:
    succession.begin()
    succession.nodes.started["second"].terminate()
    code, said = succession.nodes.wait("second")
    assert (code, said.splitlines()[-1]) == (1, "keepstep: ended by SIGTERM while it waited")
    succession.controller("second", *([flag] if flag else []))
    code, said = succession.nodes.wait("second")
    assert code == 2
    assert f"the run in there is served by process {succession.nodes.started['first'].pid} on" in said
    succession.go_on()
    succession.wait_for_the_end("first", "node-a", "node-b")
    assert succession.digests() == [undisturbed] * 2
    assert succession.lease().term == 1


def test_a_controller_with_the_wrong_folder_says_so_and_harms_no_node(
    succession: Succession, undisturbed: str, tmp_path: Path
) -> None:
    succession.begin()
    for name in ("second", "first"):
        succession.nodes.started[name].kill()
        succession.nodes.wait(name)
    wrong = tmp_path / "wrong"
    wrong.mkdir(0o700)
    succession.controller("first", run_dir=wrong)
    for name in ("first", "node-a", "node-b"):
        await_output(succession.nodes, name, "in the middle of a run of which this controller's folder holds nothing")
    succession.nodes.started["first"].kill()
    succession.nodes.wait("first")
    succession.controller("first", "--continue")
    succession.go_on()
    succession.wait_for_the_end("first", "node-a", "node-b")
    assert succession.digests() == [undisturbed] * 2


def test_a_standby_ends_with_the_job(succession: Succession) -> None:
    succession.begin()
    succession.nodes.started["first"].terminate()
    ended = {name: succession.nodes.wait(name)[0] for name in succession.nodes.started}
    assert set(ended.values()) == {1}, ended
    assert f"the run in {succession.run_dir} has ended: ended by SIGTERM" in succession.nodes.output("second")
    assert "controller listens" not in succession.nodes.output("second")


def test_a_standby_has_to_fit(succession: Succession) -> None:
    """A mistake is found while the first controller lives, not when it is gone. If none serves, the first does."""
    succession.controller("first", "--standby")
    await_output(succession.nodes, "first", "controller listens")
    succession.controller("second", "--standby", "--spares", 7)
    code, said = succession.nodes.wait("second")
    assert code == 2
    assert "was started with other settings" in said


@pytest.mark.parametrize("seconds", ["0", "0.5", "-1", "nan", "inf"])
def test_times_that_cannot_be(succession: Succession, seconds: str) -> None:
    succession.controller("first", "--takeover-after", seconds)
    code, said = succession.nodes.wait("first")
    assert code == 2
    assert f"--takeover-after {float(seconds)}: allowed are 1 to 3600 s" in said


def test_there_is_nothing_to_go_on_with(succession: Succession) -> None:
    succession.controller("first", "--continue")
    code, said = succession.nodes.wait("first")
    assert code == 2
    assert "no run is recorded there" in said
    assert Path(succession.run_dir / FOLDER).is_dir()
