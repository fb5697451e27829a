"""Published weights in a job on several nodes. The controller keeps the list of publishers; each node's server is a
child process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from keepstep.config import SECRET_VARIABLE
from keepstep.errors import KeepstepError, PeerLost, RemoteProtocolError
from keepstep.launcher.cluster.hosting import EXIT_USAGE, ended, ended_or_killed
from keepstep.programs import END_AT_ONCE
from keepstep.protocol.transfer.directory import ANNOUNCE_S
from keepstep.transports.rpc.directory import DirectoryCaller

FORGET_S = 60.0
"""How long a node is kept that the controller does not list any more: the controller may have been restarted."""
RESTART_S = 1.0
"""Delay between the end of a server and the start of the next one."""
END_S = 5.0
"""How long a server may take to exit."""


class Publishers:
    """The addresses of the nodes that publish weights. A thread asks the controller for them until `close`."""

    def __init__(
        self,
        caller: DirectoryCaller,
        own_address: str | None,
        heard: Callable[[list[str]], None],
        note: Callable[[str], None],
    ) -> None:
        """Args:
        caller: client of the controller's directory; this object closes it.
        own_address: this node's address, which is announced to the others; None: it does not publish.
        heard: called in the thread with the addresses of all other nodes, after each answer.
        note: called in the thread with the text of each new error.
        """
        self._caller, self._own_address, self._heard, self._note = caller, own_address, heard, note
        self._seen: dict[str, tuple[str, float]] = {}
        self._stop = threading.Event()
        self.error: KeepstepError | None = None
        """The error that has ended the thread, if any."""
        self._thread = threading.Thread(target=self._follow, name="keepstep-directory", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> list[str]:
        """Addresses of all other nodes that publish, sorted by the nodes' names."""
        return [address for _name, (address, _at_s) in sorted(self._seen.items())]

    def after(self, former: str | None) -> str | None:
        """Returns the address after ``former``, which did not answer, or the first one; None if no node publishes."""
        addresses = self.addresses
        if former in addresses:
            addresses = addresses[addresses.index(former) + 1 :] or addresses
        return addresses[0] if addresses else None

    def close(self) -> None:
        """Ends the thread and closes the connection."""
        self._stop.set()
        self._thread.join()
        self._caller.close()

    def _follow(self) -> None:
        last_trouble = ""
        while not self._stop.is_set():
            try:
                self._ask()
                last_trouble = ""
            except (PeerLost, RemoteProtocolError) as error:
                if str(error) != last_trouble:
                    self._note(str(error))
                last_trouble = str(error)
            except KeepstepError as error:
                self.error = error
                self._note(str(error))
                return
            self._stop.wait(ANNOUNCE_S)

    def _ask(self) -> None:
        now_s = time.monotonic()
        found = {each.name: (each.address, now_s) for each in self._caller.find(self._own_address)}
        kept = {name: seen for name, seen in self._seen.items() if now_s < seen[1] + FORGET_S}
        others = {name: seen for name, seen in (kept | found).items() if seen[0] != self._own_address}
        self._seen = others
        self._heard(self.addresses)


class HostedWeights:
    """Keeps ``keepstep weights serve`` running as a child process while the node is part of its job."""

    def __init__(self, command: tuple[str, ...], secret: str) -> None:
        """Args:
        command: its command line.
        secret: the job's secret. The child gets it in its environment, which only this user can read.
        """
        self._command = command
        self._environment = {**os.environ, SECRET_VARIABLE: secret}  # environ: passed on to the child
        self._process: subprocess.Popen[bytes] | None = None

    async def run(self) -> None:
        """Keeps the server running until the task is cancelled. If the server exits with `EXIT_USAGE`, it returns, and
        training continues without the server."""
        while True:
            try:
                self._process = subprocess.Popen(self._command, env=self._environment)  # noqa: ASYNC220 - exec alone
            except OSError as error:
                code, how = None, f"it could not be started: {error.strerror}"
            else:
                code, how = await ended(self._process)
            again = "training continues without it" if code == EXIT_USAGE else "it is started again"
            print(f"keepstep: the server of weights has ended ({how}): {again}", file=sys.stderr, flush=True)
            if code == EXIT_USAGE:
                return
            await asyncio.sleep(RESTART_S)

    async def end(self) -> None:
        """Ends the server and waits for its exit. The caller must have cancelled `run`."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(END_AT_ONCE)
        await ended_or_killed(process, END_S)
