"""The dashboard's process: where it listens, what it refuses, and that it ends with the process that started it."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.dashboard.served import DEADLINE_S, served
from tests.support.jobs import IGNORED, IGNORING, command, handles, ignored_by
from tests.support.watching import attempts

from keepstep.dashboard import process
from keepstep.dashboard.process import DEFAULT, listen, serving
from keepstep.errors import ConfigurationError, PeerLost


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "keepstep.dashboard" in child.cmdline()]


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("127.0.0.1", "must be HOST:PORT"),
        ("127.0.0.1:http", "must be HOST:PORT"),
        ("127.0.0.1:70000", "must be HOST:PORT"),
        ("127.0.0.1:-1", "must be HOST:PORT"),
        ("203.0.113.7:0", "Cannot assign requested address"),
    ],
)
def test_an_address_that_cannot_be_is_refused(address: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem) as caught:
        listen(address, "--dashboard")
    assert str(caught.value).startswith(f"--dashboard {address}: ")


def test_a_port_that_is_taken_is_refused_unless_it_is_the_default() -> None:
    with listen("127.0.0.1:0", "--x") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match="Address already in use"):
            listen(f"127.0.0.1:{port}", "--x")
    with listen(DEFAULT, "--x") as first, listen(DEFAULT, "--x") as second:
        assert first.getsockname()[1] != second.getsockname()[1]


@pytest.mark.parametrize("address", [":0", "127.0.0.1:0", "[::1]:0", "localhost:0"])
def test_it_listens_on_this_machine_only(address: str) -> None:
    with listen(address, "--x") as listening:
        assert listening.getsockname()[0] in ("127.0.0.1", "::1")


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "NEEDED", ("starlette", "no_such_module"))
    with pytest.raises(
        ConfigurationError, match=r"--x: no_such_module is missing: pip install 'keepstep\[dashboard\]'"
    ):
        listen(DEFAULT, "--x")


def test_beyond_this_machine_it_says_what_that_means(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(recorded, "0.0.0.0:0", "--x") as link:
        assert link.startswith("http://0.0.0.0:")
    assert "beyond this machine and without TLS" in capsys.readouterr().err


def test_it_is_gone_when_the_block_is_left(recorded: Path) -> None:
    with served(recorded) as client:
        (child,) = children()
        assert child.nice() > 0
        assert os.getsid(child.pid) == child.pid
    assert not psutil.pid_exists(child.pid)
    with socket.socket() as line:
        assert line.connect_ex(("127.0.0.1", client.port)) == errno.ECONNREFUSED


def test_the_token_is_in_no_process_list_and_in_no_environment(recorded: Path) -> None:
    with served(recorded) as client:
        (child,) = children()
        assert client.token not in " ".join(child.cmdline())
        assert client.token not in str(child.environ())


def test_it_ends_when_its_parent_is_killed(recorded: Path) -> None:
    program = "import sys, time; from pathlib import Path; from keepstep.dashboard.process import serving\n"
    program += (
        "with serving(Path(sys.argv[1]), '127.0.0.1:0', '--x') as link: print(link, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(recorded)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as starter:
        assert starter.stdout is not None
        assert b"token=" in starter.stdout.readline()
        (child,) = psutil.Process(starter.pid).children()
        descriptor = os.pidfd_open(child.pid)
        starter.kill()
        ready, _, _ = select.select([descriptor], [], [], DEADLINE_S)
        os.close(descriptor)
        assert ready


def test_one_that_is_killed_takes_nothing_along(recorded: Path) -> None:
    with served(recorded):
        (child,) = children()
        child.send_signal(signal.SIGKILL)
        child.wait(DEADLINE_S)


def test_one_that_does_not_come_up_is_an_error(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PeerLost, match="the dashboard's process"), serving(recorded, "127.0.0.1:0", "--x"):
        pass
    assert children() == []


def test_signals_that_were_ignored_at_its_start_stay_ignored(recorded: Path, tmp_path: Path) -> None:
    """`nohup keepstep dashboard`: the command, and the process that serves the page."""
    program = [*IGNORING, *command("dashboard", recorded, "--listen", "127.0.0.1:0")]
    process = subprocess.Popen(program, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        assert b"dashboard: http" in process.stderr.readline()
        (child,) = psutil.Process(process.pid).children()
        assert any(handles(process.pid, signal.SIGTERM) for _ in attempts(tmp_path, DEADLINE_S))
        assert [ignored_by(pid) for pid in (process.pid, child.pid)] == [IGNORED] * 2
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.communicate()
