"""The process that starts workers and collects their exit status.

With ``fork`` it imports torch once and forks: a worker starts in about ten milliseconds instead of seconds. With
``spawn`` it starts a fresh interpreter each time and imports nothing. It has a single thread, so forking is safe, and
the workers are its children: it collects their exit status. If it dies, the kernel kills its workers, and its sweeper
kills the workers' children. If the agent dies, the kernel kills the spawner.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from keepstep.errors import CallRefused, LimitReached
from keepstep.programs import begin, end_with_parent, flush, leave, leave_signals_to_parent, own_command
from keepstep.systemcalls import open_files, refusal
from keepstep.transports.spawning import (
    LIFELINE_FD,
    LINK_FD,
    PAGE_FD,
    SNAPSHOTS_FD,
    SpawnerFailed,
    SpawnerReady,
    SpawnerReport,
    SpawnWorker,
    WorkerExited,
    WorkerRefused,
    WorkerSpawned,
    receive_request,
)
from keepstep.worker.process.sweeper import Sweeper, kill_group

EXIT_NOT_FOUND = 127
EXIT_NOT_EXECUTABLE = 126
"""Exit codes of a command that could not be executed, as in a shell."""
RunScript = Callable[[tuple[str, ...], bool], int]


class Spawner:
    """Answers requests on ``endpoint`` until its other end closes."""

    def __init__(
        self, endpoint: socket.socket, sweeper: Sweeper, run_script: RunScript | None, on_signals: Mapping[int, Any]
    ) -> None:
        """Args:
        endpoint: the socket to the agent.
        sweeper: kills the workers' children if this process is killed.
        run_script: what a forked worker runs; None to start fresh interpreters.
        on_signals: what the signals did that this program ignores, as `signal.signal` returns it.
        """
        self._on_signals = on_signals
        self._endpoint = endpoint
        self._sweeper = sweeper
        self._run_script = run_script
        self._wake_read, self._wake_write = os.pipe()
        self._children: dict[int, int] = {}
        """pid -> worker"""

    def serve(self) -> None:
        """Answers requests until the agent is gone; then kills every worker."""
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._report(SpawnerReady(measure_worker_bytes() if self._run_script else 0))
        while True:
            readable, _, _ = select.select([self._endpoint.fileno(), self._wake_read], [], [])
            if self._wake_read in readable:
                os.read(self._wake_read, 4096)
                self._reap()
            if self._endpoint.fileno() in readable and not self._answer():
                break
        for pid in self._children:
            kill_group(pid)

    def _answer(self) -> bool:
        received = receive_request(self._endpoint)
        if received is None:
            return False
        request, descriptors = received
        parent = os.getpid()
        read, begun = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:  # a limit on processes or memory; the workers that run are not concerned
            for descriptor in (*descriptors, read, begun):
                os.close(descriptor)
            self._report(WorkerRefused(request.worker, str(refusal(error, "fork") or error), time.monotonic()))
            return True
        if pid == 0:
            os.close(read)
            self._become_worker(request, descriptors, parent, begun)
        for descriptor in (*descriptors, begun):
            os.close(descriptor)
        os.read(read, 1)  # ends when the worker leads its group: the agent may kill the group as soon as it knows of it
        os.close(read)
        self._children[pid] = request.worker
        self._report(WorkerSpawned(request.worker, pid))
        return True

    def _become_worker(self, request: SpawnWorker, descriptors: list[int], parent: int, begun: int) -> NoReturn:
        """Runs a worker in the forked process. Closes ``begun`` when the worker leads its own process group."""
        code = 1
        try:
            os.setsid()
            self._sweeper.group_began(os.getpid())
            os.close(begun)
            end_with_parent(parent)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._endpoint.close()
            for descriptor in (self._wake_read, self._wake_write, self._sweeper.descriptor):
                os.close(descriptor)
            _adopt(request, descriptors)
            os.environ.update(request.environment)  # environ: the worker's own settings, into the fork
            for number, action in self._on_signals.items():
                signal.signal(number, action)
            if self._run_script is None or request.raw:
                _execute(request)
            code = self._run_script(request.command, request.module)
        except BaseException:  # a fork must never return into the spawner's loop
            traceback.print_exc()
        finally:
            _leave(code)

    def _reap(self) -> None:
        while self._children:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            at_s = time.monotonic()
            pid = ended.si_pid
            kill_group(pid)  # the worker's children, such as loader processes; its PID is its own until it is reaped
            self._sweeper.group_ended(pid)
            _, status = os.waitpid(pid, 0)
            worker = self._children.pop(pid, None)
            if worker is not None:
                code = os.waitstatus_to_exitcode(status)
                self._report(WorkerExited(worker, pid, code, os.WCOREDUMP(status), at_s))

    def _report(self, report: SpawnerReport) -> None:
        with contextlib.suppress(ConnectionError):  # the agent is gone; `serve` will see the end of its requests
            self._endpoint.send(msgspec.json.encode(report))


def _adopt(request: SpawnWorker, descriptors: list[int]) -> None:
    """Puts the received descriptors where the worker expects them."""
    wanted = [LINK_FD, PAGE_FD, LIFELINE_FD, SNAPSHOTS_FD]
    wanted += [1] if request.redirect_stdout else []
    wanted += [2] if request.redirect_stderr else []
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(wanted) + 1) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for source, target in zip(aside, wanted, strict=True):
        os.dup2(source, target, inheritable=True)
        os.close(source)


def _execute(request: SpawnWorker) -> NoReturn:
    """Turns this fork into a fresh interpreter, or into the user's own command."""
    command = list(request.command)
    if not request.raw:
        flag = ["-m"] if request.module else []
        command = own_command("keepstep.worker.process.bootstrap", *flag, *command)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a child would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"keepstep: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE)


def _leave(code: int) -> NoReturn:
    """Ends a forked worker as an interpreter would: exit handlers, what its modules hold, buffers. Then it exits,
    without the spawner's stack."""
    from keepstep.worker.process.bootstrap import free_what_the_script_holds  # imported already: it ran the script

    try:
        threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter itself calls; joins executors, too
        atexit._run_exitfuncs()
        flush()
        free_what_the_script_holds()
        _write_out_files()
    except BaseException:  # such as Ctrl-C while a thread is joined
        traceback.print_exc()
    finally:
        os._exit(code)


def _write_out_files() -> None:
    """Writes out the buffers of open files, such as those that the script has not closed.

    An interpreter that ends does so when it frees the file objects; here they are not freed. A text file comes before
    its buffer. A compressed file, which is complete only when it is closed, comes before its buffer, too.
    """
    buffers = (io.BufferedWriter, io.BufferedRandom)
    files = [
        each for each in gc.get_objects() if issubclass(type(each), io.IOBase) and not isinstance(each, io.RawIOBase)
    ]
    for file in sorted(files, key=lambda each: (not isinstance(each, io.TextIOWrapper), isinstance(each, buffers))):
        with contextlib.suppress(Exception):  # of a class of the script's own; the interpreter ignores it, too
            if file.closed or not file.writable():
                continue
            if isinstance(file, (io.TextIOWrapper, *buffers)):
                file.flush()
            else:
                file.close()


def measure_worker_bytes() -> int:
    """Forks once to measure the private memory, in bytes, of a worker that has done nothing yet."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        gc.collect()
        os.write(write, str(private_bytes()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return int(text or 0)


def private_bytes() -> int:
    """Memory that this process shares with no other, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) * 1024


def preload(modules: list[str], path: str | None) -> RunScript:
    """Imports what every worker needs, so that forks share it. Returns the function that a worker runs.

    Args:
        modules: the modules that the user has named.
        path: where they are looked for first.
    """
    import torch._dynamo  # noqa: F401 - optimizers import it at their first use, which takes about a second

    from keepstep.worker.process.bootstrap import run_script

    if path is not None:  # after our own imports: a module of the user must not take the place of one of theirs
        sys.path.insert(0, path)
    for module in modules:
        importlib.import_module(module)
    if path is not None:
        sys.path.remove(path)
    return run_script


def main() -> None:
    """Entry of the program that `keepstep.agent.spawner.SpawnerProcess` starts."""
    begin()
    on_signals = leave_signals_to_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--fork", action="store_true")
    parser.add_argument("--preload", action="append", default=[])
    parser.add_argument("--preload-path")
    gc.disable()  # imports make no garbage, and looking for it takes a quarter of the time of importing torch
    arguments = parser.parse_args()
    endpoint = socket.socket(fileno=arguments.fd)
    try:
        os.setsid()
        end_with_parent(arguments.parent)
        sweeper = Sweeper()
        open_files()
        run_script = preload(arguments.preload, arguments.preload_path) if arguments.fork else None
        gc.freeze()  # forked workers then share the interpreter's objects instead of copying them
        gc.enable()
        Spawner(endpoint, sweeper, run_script, on_signals).serve()
    except BaseException as error:  # its objects are frozen, so it must not end as an interpreter does
        _tell(endpoint, error)
        leave(1)
    leave(0)


def _tell(endpoint: socket.socket, error: BaseException) -> None:
    """Reports the refusal of a system call to the agent, which prints it. Prints any other error."""
    refused = error if isinstance(error, CallRefused | LimitReached) else refusal(error)
    if refused is None:
        traceback.print_exc()
        return
    with contextlib.suppress(OSError):  # the agent is gone
        endpoint.send(msgspec.json.encode(SpawnerFailed(str(refused), isinstance(refused, LimitReached))))


if __name__ == "__main__":
    main()
