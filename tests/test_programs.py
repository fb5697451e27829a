"""What all of keepstep's programs do alike."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.programs import END_AT_ONCE, Disposition, Program, dispositions, ending, own_command

SOURCE = Path(__file__).parents[1] / "src" / "keepstep"


def test_a_program_is_started_in_one_way_only() -> None:
    """So that it never takes a module of the working directory for one of the library."""
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"sys\.executable,", path.read_text())
    }
    # The second one tells a script what Python would have been started with.
    assert found == {"programs.py", "worker/process/bootstrap.py"}


STREAMS = """
import json, os, sys
from keepstep.programs import begin
begin()
with open("/dev/null") as next_one:
    found = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    names = [os.get_inheritable(number) for number in range(3)], next_one.fileno() > 2
print("a word")
print("another", file=sys.stderr, flush=True)
read = sys.stdin.read()
with open(sys.argv[1], "w") as file:
    json.dump([found, *names, read], file)
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (0, 1, 2), ()])
def test_streams_that_are_closed_lead_nowhere(closed: tuple[int, ...], tmp_path: Path) -> None:
    """Else the next file or socket has the number of a stream, and what is printed goes into it."""
    streams = [tmp_path / name for name in ("stdin", "stdout", "stderr")]
    streams[0].write_text("the input")
    opened = [os.open(path, os.O_RDWR | os.O_CREAT) for path in streams]
    closing = " ".join(f"{number}>&-" for number in closed)
    command = ["/bin/sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, "-c", STREAMS, str(tmp_path / "found")]
    subprocess.run(command, stdin=opened[0], stdout=opened[1], stderr=opened[2], check=True)
    for descriptor in opened:
        os.close(descriptor)
    where, are_inherited, is_other, read = json.loads((tmp_path / "found").read_text())
    assert where == ["/dev/null" if number in closed else str(path) for number, path in enumerate(streams)]
    assert are_inherited == [True] * 3
    assert is_other
    assert read == ("" if 0 in closed else "the input")
    assert streams[1].read_text() == ("" if 1 in closed else "a word\n")
    assert streams[2].read_text() == ("" if 2 in closed else "another\n")


def test_children_are_waited_for_also_where_they_were_to_be_ignored() -> None:
    """With SIGCHLD ignored the kernel reaps them, and each seems to have ended with 0."""
    program = "import sys; from keepstep.programs import begin; begin(); import subprocess;"
    program += "sys.exit(subprocess.call([sys.executable, '-c', 'raise SystemExit(3)']))"
    ignoring = f"import os, signal, sys; signal.signal({signal.SIGCHLD:d}, signal.SIG_IGN);"
    ignoring += "os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", ignoring, sys.executable, "-c", program]
    assert subprocess.run(command, check=False).returncode == 3


def test_a_program_is_started_without_the_working_directory() -> None:
    assert own_command("keepstep.cli.main", "status") == [sys.executable, "-P", "-m", "keepstep.cli.main", "status"]


def test_what_was_ignored_at_the_start_is_not_to_be_handled() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        found = dispositions(Program.LAUNCHER)
        assert signal.SIGHUP not in found
        assert found[signal.SIGTERM] is Disposition.DRAIN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("program", Program)
def test_every_signal_that_would_end_a_program_has_a_disposition(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those that tell of its own error, for SIGKILL, and for `END_AT_ONCE`."""
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)
    of_errors = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS}
    harmless = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH, signal.SIGPIPE, signal.SIGXFSZ}
    stopping = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
    others = {signal.SIGKILL, signal.SIGTRAP, END_AT_ONCE}
    assert dispositions(program).keys() == signal.valid_signals() - of_errors - harmless - stopping - others


def test_handlers_of_signals_are_set_where_that_is_asked() -> None:
    """Any other place may forget to ask whether the signal was ignored."""
    setting = re.compile(r"signal\.signal\(|add_signal_handler\(|sigwait\(")
    found = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if setting.search(path.read_text())}
    assert found == {
        "launcher/signals.py",
        "cli/cluster/weights.py",
        "cli/top.py",
        # They ignore signals, or restore what there was; a fault of the drill removes a handler.
        "programs.py",
        "drill/worker_injector.py",
        "worker/process/spawner.py",
        "worker/process/termination.py",
    }


@pytest.mark.parametrize(
    ("status", "has_dumped", "how"),
    [
        (0, False, "exit code 0"),
        (3, False, "exit code 3"),
        (-9, False, "killed by SIGKILL"),
        (-11, True, "killed by SIGSEGV (core dumped)"),
        (
            -7,
            False,
            "killed by SIGBUS (mostly a full /dev/shm, through which DataLoader's workers send batches: "
            "docker run --shm-size=8g)",
        ),
        (-34, False, "killed by SIGRTMIN"),
        (-35, False, "killed by signal 35"),
        (-63, True, "killed by signal 63 (core dumped)"),
    ],
)
def test_how_a_process_has_ended(status: int, has_dumped: bool, how: str) -> None:
    assert ending(status, has_dumped=has_dumped) == how


def test_a_number_of_a_signal_is_named_in_one_place() -> None:
    """`signal.Signals` raises an error for most real-time signals."""
    found = {
        path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if "signal.Signals(" in path.read_text()
    }
    assert found == {"programs.py"}
