"""Runs a job's controller as a child process on the node that owns the endpoint, and restarts it when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from keepstep.config import SECRET_VARIABLE
from keepstep.errors import ConfigurationError
from keepstep.launcher.signals import DRAIN, END
from keepstep.programs import END_AT_ONCE, ending
from keepstep.trace.record import runfolder

MAX_QUICK_DEATHS = 10
QUICK_S = 5.0
"""A controller that dies within this time counts as a quick death. After more than `MAX_QUICK_DEATHS` of them in a row,
keepstep gives up."""
EXIT_USAGE = 2
"""Exit code of a controller that a `ConfigurationError` has ended. No job ends with this code."""
EXIT_SUPERSEDED = 77
"""Exit code of a controller that has lost the lease of its run. No job ends with this code."""
LOOK_S = 0.05
"""How often to look for the exit of a process that the kernel does not report."""
END_DEADLINE_S = 20.0
"""When the job ends, the controller waits up to ten seconds for its agents and then writes a report."""


class HostedController:
    """Keeps a job's controller running: when its process dies, it starts another one."""

    def __init__(self, command: tuple[str, ...], run_dir: Path, secret: str) -> None:
        """Args:
        command: its command line, without ``--continue`` or ``--standby``.
        run_dir: folder of its journal.
        secret: the job's secret. The child gets it in its environment, which only this user can read.
        """
        self._command = command
        self._run_dir = run_dir
        self._environment = {**os.environ, SECRET_VARIABLE: secret}  # environ: passed on to the child
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ending = False
        self._drained_by: int | None = None

    async def run(self) -> int:
        """Keeps the controller running until the job has ended. Returns the job's exit code.

        Raises:
            ConfigurationError: the controller exits with `EXIT_USAGE`, or dies too often in a row.
        """
        num_quick = 0
        again: tuple[str, ...] = ()
        while True:
            started_s = time.monotonic()
            code, how = await self._once(again)
            if code == EXIT_USAGE and not self._is_ending:
                raise ConfigurationError("the controller of the job did not start")
            if self._is_ending or self._has_ended():
                return code
            is_own = code != -signal.SIGKILL  # a SIGKILL comes from outside; the next process may survive
            num_quick = num_quick + 1 if is_own and time.monotonic() < started_s + QUICK_S else 0
            if num_quick > MAX_QUICK_DEATHS:
                raise ConfigurationError(f"the controller of the job died {num_quick} times in a row")
            print(f"keepstep: the controller died ({how}); restarting it", file=sys.stderr, flush=True)
            again = ("--standby",) if code == EXIT_SUPERSEDED else ("--continue",)
            again += () if self._drained_by is None else ("--drain", str(self._drained_by))

    def drain(self, number: int) -> None:
        """Tells the controller to drain the job. If it is being restarted, the new process gets ``--drain``.

        Args:
            number: the signal that drains this program.
        """
        self._drained_by = number
        self._tell(DRAIN, number)

    async def end(self, number: int = END_AT_ONCE) -> None:
        """Ends the job at once and waits for the controller's exit. Kills the controller at the deadline.

        Args:
            number: the signal that has ended this program, if one has, so that the controller names it as the reason.
        """
        self._is_ending = True
        process = self._process
        if process is None or process.poll() is not None:
            return
        self._tell(END, number)
        await ended_or_killed(process, END_DEADLINE_S)

    def _tell(self, what: str, number: int) -> None:
        """Writes to the standard input of the controller, which ignores signals: a scheduler may send them to all."""
        if self._process is not None and self._process.poll() is None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(f"{what} {number}\n".encode())

    async def _once(self, again: tuple[str, ...]) -> tuple[int, str]:
        self._process = subprocess.Popen(  # noqa: ASYNC220 - exec alone
            [*self._command, *again], env=self._environment, stdin=subprocess.PIPE, bufsize=0
        )
        try:
            return await ended(self._process)
        finally:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _has_ended(self) -> bool:
        try:
            return runfolder.read_info(self._run_dir).ended is not None
        except ConfigurationError:
            return False


async def ended_or_killed(process: subprocess.Popen[bytes], deadline_s: float) -> None:
    """Waits for the exit of a process. Kills it at the deadline."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            await ended(process)
    if process.poll() is None:
        process.kill()
        process.wait()


async def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Waits for the exit of a process, without a thread. Returns its exit code, and how it has ended, in words."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:  # an old kernel lacks the call, a container's profile forbids it, or there is no descriptor left
        while (found := process.poll()) is None:  # noqa: ASYNC110 - nothing else tells of it
            await asyncio.sleep(LOOK_S)
        return found, ending(found)
    loop.add_reader(descriptor, lambda: None if over.done() else over.set_result(None))
    try:
        await over
        has_dumped = _has_dumped(descriptor)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    code = process.wait()
    return code, ending(code, has_dumped=has_dumped)


def _has_dumped(descriptor: int) -> bool:
    """Whether a process that has ended has left a core file."""
    try:
        found = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:  # another `poll` has reaped it
        return False
    return found is not None and found.si_code == os.CLD_DUMPED
