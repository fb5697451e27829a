"""Real jobs for tests: runs the command as a user does, and ends all of its processes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
EXAMPLES = ROOT / "examples"
DEADLINE_S = 480.0
"""Deadline of a whole job or drill. The longest, which imports TRL in each process, took 279 s at a load of 22 on two
cores."""
MARK = "KEEPSTEP_TEST_MARK"
IGNORED = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}
IGNORING = ("/bin/sh", "-c", "trap '' HUP INT QUIT; exec \"$@\"", "sh")
"""The beginning of a command that ignores these signals: what `nohup` does, and a shell's ``&`` in a script."""


def command(*arguments: object) -> list[str]:
    """Returns the command line of ``keepstep`` with these arguments."""
    return [sys.executable, "-m", "keepstep.cli.main", *map(str, arguments)]


class RunningJob:
    """A job in the background, marked so that all of its processes can be found."""

    def __init__(self, *arguments: object, cwd: Path | None = None, prefix: Sequence[str] = ()) -> None:
        """Args:
        arguments: of ``keepstep``.
        cwd: the working directory; None: that of this process.
        prefix: the command that starts it, such as ``nohup``.
        """
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [*prefix, *command(*arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {MARK: self.mark},
            cwd=cwd,
        )

    def finish(self, deadline_s: float = DEADLINE_S) -> tuple[int, str, str]:
        """Waits for the end; returns exit code, stdout, stderr."""
        out, err = self.process.communicate(timeout=deadline_s)
        return self.process.returncode, out, err

    def processes(self) -> list[int]:
        """Returns the ids of all processes with the job's mark, including the launcher."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def wait_until_gone(self, deadline_s: float = 20.0) -> None:
        """Waits until no process of the job is left; fails when the deadline has passed."""
        end = time.monotonic() + deadline_s
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    descriptor = os.pidfd_open(pid)
                    ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
                    os.close(descriptor)
                    assert ready, f"process {pid} is still there: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}"

    def end(self) -> None:
        """Kills all remaining processes, for tests that failed halfway."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def ignored_by(pid: int) -> set[signal.Signals]:
    """Returns those of `IGNORED` that a process ignores."""
    return {number for number in IGNORED if _is_in("SigIgn", pid, number)}


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    return _is_in("SigCgt", pid, number)


def _is_in(mask: str, pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(mask))
    return bool(int(line.partition(":")[2], 16) & 1 << number - 1)


@contextlib.contextmanager
def running(*arguments: object, cwd: Path | None = None, prefix: Sequence[str] = ()) -> Iterator[RunningJob]:
    """Runs a job in the background. All of its processes end with the ``with`` block."""
    job = RunningJob(*arguments, cwd=cwd, prefix=prefix)
    try:
        yield job
    finally:
        job.end()


def run(*arguments: object, cwd: Path | None = None, prefix: Sequence[str] = ()) -> tuple[int, str, str]:
    """Runs the command to its end and checks that no process is left; returns exit code, stdout, stderr."""
    with running(*arguments, cwd=cwd, prefix=prefix) as job:
        result = job.finish()
        job.wait_until_gone()
    return result


def status(run_dir: Path) -> dict[str, Any]:
    """Returns the output of ``keepstep status --json``."""
    output = subprocess.run(
        command("status", run_dir, "--json"), capture_output=True, text=True, check=True, timeout=60
    )
    return dict(json.loads(output.stdout))


def drill(tmp_path: Path, *arguments: object) -> tuple[int, dict[str, Any], str]:
    """Runs a drill; returns exit code, the JSON result and all output."""
    path = tmp_path / "drill.json"
    code, out, err = run("drill", "--json", path, *arguments)
    result = json.loads(path.read_text()) if path.exists() else {}
    return code, result, out + err


def without_keepstep(name: str, folder: Path) -> Path:
    """Returns an example of docs/integrations before it was ported: a copy in the folder, without what its patch added.

    ``git apply`` refuses a patch of which any line, changed or not, is not in the example.
    """
    example = EXAMPLES / "integrations" / f"{name}.py"
    copy = folder / example.relative_to(ROOT)
    copy.parent.mkdir(parents=True)
    shutil.copy(example, copy)
    subprocess.run(["git", "apply", "--reverse", example.with_suffix(".patch")], cwd=folder, check=True)
    return copy
