"""``keepstep top``: what a frame says of a run, and that the terminal is left as it was found."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tests.support.jobs import command, run
from tests.support.published import published_run
from tests.support.recorded import (
    LONE,
    NUM_RANKS,
    NUM_STEPS,
    PAIRED,
    GrowingRun,
    Recorded,
    growing,
    overtaken_run,
    recorded_run,
    simulate_shards,
)

from keepstep.cli.terminal.screen import Screen
from keepstep.protocol import messages as msg
from keepstep.protocol.controller import Event, JournalEntry, ReportsReceived, relive
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import RecoveryMachine, RecoverySettings
from keepstep.shared.tagpage import PHASES
from keepstep.trace.record import runfolder
from keepstep.trace.record.phaselog import PHASE_DTYPE
from keepstep.trace.record.recorder import Recorder
from keepstep.trace.timeline.run import Run
from keepstep.trace.timeline.stragglers import Straggler

WAIT_S = 60.0
MAX_READS = 2000
"""It draws five frames a second: what has not come in so many reads does not come."""


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return recorded_run(tmp_path_factory.getbasetemp())


def frame(found: Run, width: int = 120, height: int = 40) -> list[str]:
    """The lines of one frame."""
    screen = Screen(found)
    screen.take(found.poll())
    console = Console(width=width, record=True, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115 the console's
    with console.file:
        console.print(screen.draw(width, height))
        return console.export_text().splitlines()


def test_a_run_that_has_ended(recorded: Recorded) -> None:
    code, out, err = run("top", recorded.folder)
    assert (code, err) == (0, "")
    assert f"ended, exit code 0   generation 2   step {NUM_STEPS}" in out
    assert "recoveries 1" in out
    assert "lost ranks 1" in out
    (recovery,) = recorded.report["recoveries"]
    assert f"last recovery  1, signal  {recovery['detail']}" in out
    assert f"from step {recovery['resume_step']}" in out
    lines = out.splitlines()
    ranks = [line.split()[:3] for line in lines[lines.index("") + 2 :][:NUM_RANKS]]
    assert ranks == [[str(rank), "done", str(NUM_STEPS - 1)] for rank in range(NUM_RANKS)]
    pids = [str(worker.pid) for worker in relived(recorded.folder).roster.workers.values() if worker.done]
    assert all(any(pid in line for line in lines) for pid in pids)
    assert [line.split()[1:3] for line in lines if "rank lost" in line] == [["rank", "lost"]]
    assert "job ended          all ranks have finished" in lines[-1]


def relived(folder: Path) -> RecoveryMachine:
    found = Run(folder)
    found.poll()
    return found.job


def test_a_recovery_step_by_step(recorded: Recorded, tmp_path: Path) -> None:
    """While the journal grows: first a rank is lost, then all are at something, and then they train again.

    A survivor whose connection broke may have told so before the loss was known: then the rank is still to stop. One
    packet of the node may say that all ranks are reset and that all have their state: then nothing is between the two.
    """
    seen: list[str] = []
    with growing(recorded.folder, tmp_path / "copy") as copy:
        while copy.lines:
            copy.grow()
            found = Run(copy.folder)
            lines = frame(found)
            if any(line.startswith("recovery under way") for line in lines):
                (row,) = [line for line in lines if line.split()[:1] == ["1"]]
                seen.append(row.split()[1])
                (lane,) = [line for line in lines if line.split()[:2] == ["rank", "1"]]
                assert ("×" if seen[-1] == "lost" else "█") in lane
    assert set(seen[: seen.index("lost")]) <= {"stop"}
    at_once = [line for line in (recorded.folder / "journal.jsonl").read_text().splitlines() if '"GroupsReset"' in line]
    assert {"reset", "restore"} - set(seen) <= ({"restore"} if '"StateRecovered"' in at_once[-1] else set())
    assert any("last recovery" in line for line in frame(Run(recorded.folder)))


def test_a_recovery_that_was_cut_short(tmp_path_factory: pytest.TempPathFactory) -> None:
    overtaken = overtaken_run(tmp_path_factory.getbasetemp())
    lines = frame(Run(overtaken.folder))
    assert lines[1].startswith("ended, exit code 76")
    (title,) = [line for line in lines if line.startswith("last recovery")]
    cause = overtaken.report["recoveries"][1]["cause"]  # a signal, if the job does not end before that is known
    assert title.startswith(f"last recovery  2, {cause}, not completed")
    (row,) = [line for line in lines if line.split()[:1] == ["0"]]
    assert row.split()[1] == "lost"


def test_a_launcher_that_was_killed(recorded: Recorded, tmp_path: Path) -> None:
    with growing(recorded.folder, tmp_path / "copy") as copy:
        copy.grow()
        assert frame(Run(copy.folder))[1].startswith("starting ")
    assert frame(Run(copy.folder))[1].startswith("its launcher is gone (starting)")


# ---- Many ranks -----------------------------------------------------------------------------------------------------

NODES, RANKS_PER_NODE = 4, 16
LOST_RANK, SLOW_RANK = 17, 40


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """64 ranks on 4 nodes in a forward, of which one was lost and one is slow."""
    folder = tmp_path / "many"
    folder.mkdir()
    settings = RecoverySettings(NODES * RANKS_PER_NODE, 0)
    runfolder.begin(folder, runfolder.new_run(("train.py",), "node-0", settings))
    at_s = runfolder.read_info(folder).started_ns / 1e9
    machine = RecoveryMachine(settings)
    with Recorder(folder) as recorder:

        def happens(event: Event) -> None:
            orders = tuple((effect.node, effect.order, effect.reason) for effect in relive(machine, event, at_s))
            recorder.decided([JournalEntry(at_s, event, machine.stage, machine.generation, orders)])

        for number in range(NODES):
            happens(
                ReportsReceived(
                    f"node-{number}", 1, (msg.NodeJoined(f"node-{number}", RANKS_PER_NODE, "", 0, 0, (), 0),)
                )
            )
        holders = {worker.rank: worker for worker in machine.roster.holders()}
        first = holders[0]
        happens(ReportsReceived(first.node, 1, (msg.WorkerJoined(first.worker, 1),)))
        for node in machine.roster.nodes:
            there = [worker for worker in holders.values() if worker.node == node]
            recorder.observed(msg.PhasesObserved(node, 0, phases(there, round(at_s * 1e9))))
        lost = holders[LOST_RANK]
        report = msg.WorkerLost(lost.worker, msg.Cause.SIGNAL, "killed by SIGKILL", True, None, at_s)
        happens(ReportsReceived(lost.node, 1, (report,)))
    found = Run(folder)
    monkeypatch.setattr(found.stragglers, "found", lambda: [Straggler(SLOW_RANK, "forward", 30.0, 20.0)])
    return found


def phases(workers: list[object], at_ns: int) -> bytes:
    records = np.zeros(len(workers), PHASE_DTYPE)
    records["at_ns"], records["step"], records["phase"] = at_ns, 5, PHASES.index(Phase.FORWARD)
    records["worker"] = [worker.worker for worker in workers]
    records["rank"] = [worker.rank for worker in workers]
    return records.tobytes()


def test_published_weights_have_a_line(recorded: Recorded, tmp_path: Path) -> None:
    code, out, err = run("top", published_run(recorded.folder, tmp_path / "run"))
    assert (code, err) == (0, "")
    assert "weights in /run/weights: version 3 (5 under way), 3 consumers on 2 nodes, up to 2 behind" in out


def test_ranks_that_do_not_fit_are_folded_by_node(many: Run) -> None:
    lines = frame(many, height=30)
    head = next(at for at, line in enumerate(lines) if line.split()[:2] == ["rank", "phase"])
    rows = [line.split() for line in lines[head + 1 : head + 1 + 2 + NODES]]
    assert [row[:2] for row in rows[:2]] == [[str(LOST_RANK), "lost"], [str(SLOW_RANK), "stop"]]
    assert "slow: forward 1.5x" in lines[head + 2]
    assert sorted(row[-3] for row in rows[2:]) == [f"node-{number}" for number in range(NODES)]
    assert {row[-2] for row in rows[2:]} == {str(RANKS_PER_NODE)}
    assert len(lines) <= 30


@pytest.mark.parametrize("height", [16, 24, 30, 80, 120])
@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_a_frame_fits(many: Run, recorded: Recorded, width: int, height: int) -> None:
    for found in (many, Run(recorded.folder)):
        lines = frame(found, width, height)
        assert len(lines) <= height
        assert max(map(len, lines)) <= width


def test_all_ranks_are_shown_where_they_fit(many: Run) -> None:
    lines = frame(many, height=100)
    shown = [line.split()[0] for line in lines if len(line.split()) > 2 and line.split()[2] == "5"]
    assert shown == [str(rank) for rank in range(NODES * RANKS_PER_NODE)]


def test_nodes_that_do_not_fit_are_counted(many: Run) -> None:
    lines = frame(many, height=18)
    assert any("nodes more" in line for line in lines)
    assert any(line.split()[:2] == [str(LOST_RANK), "lost"] for line in lines)


# ---- On a terminal --------------------------------------------------------------------------------------------------


class OnTerminal:
    """``keepstep top`` on a terminal of its own."""

    def __init__(self, folder: Path, prefix: Sequence[str] = ()) -> None:
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, 120))
        self._theirs = theirs
        self.before = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            [*prefix, *command("top", folder)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm"},
        )
        self.output = b""

    def await_output(self, text: str, since: int = 0) -> None:
        for _ in range(MAX_READS):
            if text.encode() in self.output[since:]:
                return
            ready, _, _ = select.select([self._ours], [], [], WAIT_S)
            assert ready, f"{text!r} did not come, but {self.output[since:]!r}"
            self.output += os.read(self._ours, 1 << 16)
        raise AssertionError(f"{text!r} did not come")

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    def ends(self) -> int:
        """Waits for the end, and checks that the terminal was given back."""
        self.await_output("\x1b[?1049l")
        self.process.wait(WAIT_S)
        while select.select([self._ours], [], [], 0.0)[0]:
            self.output += os.read(self._ours, 1 << 16)
        assert termios.tcgetattr(self._theirs) == self.before
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def copy(recorded: Recorded, tmp_path: Path) -> Iterator[GrowingRun]:
    with growing(recorded.folder, tmp_path / "copy") as found:
        found.grow()
        yield found


@pytest.fixture
def terminal(copy: GrowingRun) -> Iterator[OnTerminal]:
    found = OnTerminal(copy.folder)
    yield found
    found.close()


@pytest.mark.parametrize("key", [b"q", b"Q"])
def test_a_viewer_may_leave(terminal: OnTerminal, key: bytes) -> None:
    terminal.await_output("starting")
    terminal.press(key)
    assert terminal.ends() == 0


def test_it_follows_a_run_and_ends_with_it(terminal: OnTerminal, copy: GrowingRun) -> None:
    terminal.await_output("starting")
    copy.end()
    terminal.await_output("ended, exit code 0")
    assert terminal.ends() == 0
    after = terminal.output.index(b"\x1b[?1049l")
    terminal.await_output("all ranks have finished", since=after)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_terminal_is_given_back_when_it_is_ended(terminal: OnTerminal, number: signal.Signals, code: int) -> None:
    terminal.await_output("starting")
    terminal.process.send_signal(number)
    assert terminal.ends() == code


def test_a_signal_that_was_ignored_at_its_start_does_not_end_it(copy: GrowingRun) -> None:
    prefix = ("/bin/sh", "-c", "trap '' TERM; exec \"$@\"", "sh")
    with contextlib.closing(OnTerminal(copy.folder, prefix)) as terminal:
        terminal.await_output("starting")
        terminal.process.send_signal(signal.SIGTERM)
        terminal.press(b"q")
        assert terminal.ends() == 0


def sharded(folder: Path, shards: tuple[str, ...]) -> list[str]:
    simulate_shards(folder, shards, 2)
    with contextlib.closing(Run(folder)) as found:
        return frame(found)


def test_ranks_of_one_shard_stand_together(tmp_path: Path) -> None:
    lines = sharded(tmp_path / "paired", PAIRED)
    at = next(number for number, line in enumerate(lines) if line.split()[:2] == ["rank", "shard"])
    assert [line.split()[:3] for line in lines[at + 1 :][:4]] == [
        ["0", "0", "┌"],
        ["2", "└", "done"],
        ["1", "1", "┌"],
        ["3", "└", "done"],
    ]


def test_ranks_without_replicas_say_so_and_where_their_states_came_from(tmp_path: Path) -> None:
    lines = sharded(tmp_path / "lone", LONE)
    at = next(number for number, line in enumerate(lines) if line.split()[:2] == ["rank", "shard"])
    assert [line.split()[:3] for line in lines[at + 1 :][:4]] == [[str(n), str(n), "done"] for n in range(4)]
    assert any("newest snapshot step 10" in line for line in lines)
    assert any("killed by SIGKILL; all ranks from snapshots in memory" in line for line in lines)
