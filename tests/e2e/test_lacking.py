"""A system that lacks something, by a seccomp filter: one sentence with the call and a remedy, or the job runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, command

from keepstep.trust.tokens import Secret

TRIVIAL = ("--nproc-per-node", 1, "--spares", 0)
TINY = (SCRIPTS / "tiny.py", "--steps", 2)
LACKING = str(SCRIPTS / "lacking.py")
DEADLINE_S = 120.0
SECCOMP, LOCKS, PROCESSES = "seccomp", "--run-dir", "ulimit -u"


def lacking(calls: str, tmp_path: Path, *arguments: object) -> tuple[int, list[str]]:
    """Runs keepstep without these calls. Returns its exit code and the lines of its standard error."""
    words = [sys.executable, LACKING, *calls.split(), "--", *command(*arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # else OpenBLAS starts threads, and complains by itself
    ended = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    return ended.returncode, ended.stderr.splitlines()


@pytest.mark.parametrize(
    ("calls", "code", "call", "remedy"),
    [
        ("memfd_create=EPERM", 2, "memfd_create: Operation not permitted", SECCOMP),
        ("flock=ENOLCK", 2, "flock in /", LOCKS),
        ("bind=EACCES", 2, "bind at 127.0.0.1: Permission denied", "ip link set lo up"),
        ("prctl=EPERM", 2, "prctl(PR_SET_PDEATHSIG): Operation not permitted", SECCOMP),
        ("socketpair=EPERM", 2, "socketpair: Operation not permitted", SECCOMP),
        ("thread=EAGAIN", 1, "clone (a new thread): Resource temporarily unavailable", PROCESSES),
        ("pipe2=EMFILE", 1, "pipe2: Too many open files", "ulimit -n"),
    ],
)
def test_a_call_without_which_nothing_runs(calls: str, code: int, call: str, remedy: str, tmp_path: Path) -> None:
    ended, lines = lacking(calls, tmp_path, "run", *TRIVIAL, *TINY)
    assert (ended, len(lines)) == (code, 1), lines
    assert lines[0].startswith(f"keepstep run: {call}")
    assert remedy in lines[0]


@pytest.mark.parametrize("calls", ["pidfd_open=ENOSYS prlimit64=EPERM", "ipv4=EAFNOSUPPORT"])
def test_a_call_that_it_can_do_without(calls: str, tmp_path: Path) -> None:
    assert lacking(calls, tmp_path, "run", *TRIVIAL, *TINY) == (0, ["keepstep: 2 steps, no rank lost"])


def secret(tmp_path: Path) -> Path:
    (path := tmp_path / "secret").touch(0o600)
    path.write_text(Secret.new().text())
    return path


def test_on_several_nodes(tmp_path: Path) -> None:
    nodes = ("--nnodes", "1:2", "--min-nodes", 1, "--rdzv-endpoint", "127.0.0.1:1", "--secret-file", secret(tmp_path))
    code, lines = lacking("flock=EOPNOTSUPP", tmp_path, "run", *nodes, *TRIVIAL, *TINY)
    assert (code, len(lines)) == (2, 1), lines
    assert lines[0].startswith("keepstep run: flock in /")


def test_a_drill(tmp_path: Path) -> None:
    code, lines = lacking("flock=ENOSYS", tmp_path, "drill", *TRIVIAL, "--faults", "none", *TINY)
    assert (code, len(lines)) == (2, 1), lines
    assert lines[0].startswith("keepstep drill: flock in /")


@pytest.mark.parametrize(
    ("calls", "code", "call", "what"),
    [
        (
            "eventfd2=ENOSYS",
            2,
            "eventfd: Function not implemented: use Linux",
            ("serve", "--listen", "127.0.0.1:0"),
        ),
        ("thread=EAGAIN", 1, "clone (a new thread): ", ("receive", "--from", "127.0.0.1:1")),
    ],
)
def test_weights(calls: str, code: int, call: str, what: tuple[str, ...], tmp_path: Path) -> None:
    name, *flags = what
    arguments = (name, tmp_path / "weights", *flags, "--secret-file", secret(tmp_path))
    ended, lines = lacking(calls, tmp_path, "weights", *arguments)
    assert (ended, len(lines)) == (code, 1), lines
    assert lines[0].startswith(f"keepstep weights: {call}")


def test_the_page(tmp_path: Path) -> None:
    code, lines = lacking("listen=EPERM", tmp_path, "run", "--dashboard=127.0.0.1:0", *TRIVIAL, *TINY)
    assert (code, len(lines)) == (2, 1), lines
    assert "Operation not permitted" in lines[0]


def test_no_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, lines = lacking("mkdir=EROFS", tmp_path, "run", *TRIVIAL, *TINY)
    assert (code, len(lines)) == (2, 1), lines
    assert lines[0].startswith("keepstep run: mkdir /")
    assert "TMPDIR" in lines[0]


INIT = """
import resource
import keepstep
resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
keepstep.init()
"""


def test_a_rank_says_it_as_well(tmp_path: Path) -> None:
    """In one line of its own and one of the launcher's, without a traceback."""
    (script := tmp_path / "script.py").write_text(INIT)
    code, lines = lacking("", tmp_path, "run", *TRIVIAL, script)
    assert (code, len(lines)) == (1, 2), lines
    assert all("Too many open files" in line and "ulimit -n" in line for line in lines)
    assert lines[0].startswith("keepstep: ")
    assert lines[1].startswith("keepstep: rank 0 failed: LimitReached: ")
