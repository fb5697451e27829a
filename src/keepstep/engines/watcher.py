"""The process that ends what a dead driver of servers has left open. It outlives the driver for a few seconds.

A driver that dies in the middle of a change would leave its server paused, or in a session, for ever. The driver says
at which servers it has a change under way; the watcher learns of its death from the kernel.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from keepstep.engines.server import RELEASE_S, Server
from keepstep.engines.sglang import SGLangServer
from keepstep.engines.vllm import VLLMServer
from keepstep.errors import ConfigurationError, KeepstepError
from keepstep.programs import leave_signals_to_parent, own_command
from keepstep.systemcalls import lock

SERVERS: dict[str, type[Server]] = {each.kind: each for each in (VLLMServer, SGLangServer)}
LOOK_MS = 1000
"""How often to look whether the driver lives, if the kernel does not report it."""
LOCK_S = 15.0
"""How long to wait for the process that drove a server before this one, or for its watcher."""
AGAIN_S = 1.0
"""After this time the watcher looks once more: a request of the driver may have come to the server after its death."""


class ChangeWatcher:
    """The driver's end of the pipe to its watcher."""

    def __init__(self, servers: Sequence[Server], files: Path | None = None) -> None:
        """Locks the servers, and starts the watcher.

        Args:
            servers: all servers that the driver may change.
            files: a folder with versions, which the watcher deletes if the driver has not.

        Raises:
            ConfigurationError: another process on this machine drives one of them.
        """
        self._urls = [server.url for server in servers]
        self._lock = threading.Lock()
        with contextlib.ExitStack() as stack:
            locks = [stack.enter_context(_locked(server)) for server in servers]
            self._process = subprocess.Popen(
                own_command("keepstep.engines.watcher", str(os.getpid())),
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, pass_fds=locks,
            )  # fmt: skip
            self._locks = stack.pop_all()
        self._tell([[server.described() for server in servers], None if files is None else str(files)])

    @contextlib.contextmanager
    def watching(self, server: Server) -> Iterator[None]:
        """Has the watcher end what is open at this server, should this process die inside of the block."""
        number = self._urls.index(server.url)
        self._tell([number, True])
        try:
            yield
        finally:
            self._tell([number, False])

    def _tell(self, content: object) -> None:
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError):  # the watcher was killed
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends the watcher."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        self._locks.close()


def main(driver: int) -> None:
    """Watches a driver, and ends what it leaves open.

    Args:
        driver: its process id.
    """
    leave_signals_to_parent()
    is_open: set[int] = set()
    lines = _lines(driver)
    first = next(lines, None)
    if first is None:
        return
    described, files = json.loads(first)
    servers = [SERVERS[each["kind"]](each["url"], api_key=each["api_key"]) for each in described]
    for line in lines:
        number, opens = json.loads(line)
        is_open = is_open | {number} if opens else is_open - {number}
    threads = [threading.Thread(target=end, args=(servers[number],)) for number in is_open]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if files is not None:
        shutil.rmtree(files, ignore_errors=True)


def end(server: Server) -> None:
    """Ends what is open at one server, and looks again."""
    until_s = time.monotonic() + RELEASE_S
    for _ in range(2):
        while True:
            try:
                server.end()
                break
            except KeepstepError as error:
                if time.monotonic() > until_s:
                    print(
                        f"keepstep: {server} was left in a change by a process that has died: {error}", file=sys.stderr
                    )
                    return
            server.stop.wait(0.2)
        server.stop.wait(AGAIN_S)


def _lines(driver: int) -> Iterator[bytes]:
    """Yields what the driver says, until it closes the pipe or dies."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    with contextlib.suppress(OSError):  # it is dead; or the system lacks the call, and the closed pipe has to tell it
        poll.register(os.pidfd_open(driver), select.POLLIN)
    unread = b""
    while True:
        ready = {descriptor for descriptor, _events in poll.poll(LOOK_MS)}
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            yield from lines
        elif ready or os.getppid() != driver:
            return


@contextlib.contextmanager
def _locked(server: Server) -> Iterator[int]:
    """Keeps other processes of this user on this machine from driving a server. Yields the lock's descriptor.

    The watcher inherits it: so the next driver waits until the watcher of a dead one has ended what that had left open.
    """
    name = f"keepstep-server-{os.getuid()}-{hashlib.sha256(server.url.encode()).hexdigest()[:16]}"
    path = Path(tempfile.gettempdir()) / name
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_uid != os.getuid() or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigurationError(f"{path} is not a file of this user")
        until_s = time.monotonic() + LOCK_S
        while True:
            try:
                lock(descriptor, path.parent, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise ConfigurationError(f"another process on this machine drives {server}") from None
                server.stop.wait(0.05)
        yield descriptor
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main(int(sys.argv[1]))
