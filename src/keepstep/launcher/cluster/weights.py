"""Weights in a job on several nodes: the controller knows the publishers, and a node's server is a child process."""

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
from keepstep.protocol.transfer.directory import ANNOUNCE_S
from keepstep.transports.rpc.directory import DirectoryCaller

FORGET_S = 60.0
"""How long a node is looked for that the controller does not know any more: it may have been started again itself."""
RESTART_S = 1.0
"""Between the end of a server and the start of the next one."""
END_S = 5.0
"""For a server to end when it is told to."""


class Publishers:
    """Where the nodes of a job publish weights, as far as it was heard. Asks in a thread of its own, until `close`."""

    def __init__(
        self,
        caller: DirectoryCaller,
        own_address: str | None,
        heard: Callable[[list[str]], None],
        note: Callable[[str], None],
    ) -> None:
        """Args:
        caller: to the controller; belongs to this object.
        own_address: where others reach this node, which is told to them; None: it does not publish.
        heard: given the addresses of all other nodes, after each answer.
        note: told of trouble, once each time.
        """
        self._caller, self._own_address, self._heard, self._note = caller, own_address, heard, note
        self._seen: dict[str, tuple[str, float]] = {}
        self._stop = threading.Event()
        self.error: KeepstepError | None = None
        """Why nothing is asked any more, if the controller does not answer such a question."""
        self._thread = threading.Thread(target=self._follow, name="keepstep-directory", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> list[str]:
        """Of all other nodes that publish, by their names."""
        return [address for _name, (address, _at_s) in sorted(self._seen.items())]

    def after(self, former: str | None) -> str | None:
        """The first address, or that which comes after one which did not answer; None: no node publishes."""
        addresses = self.addresses
        if former in addresses:
            addresses = addresses[addresses.index(former) + 1 :] or addresses
        return addresses[0] if addresses else None

    def close(self) -> None:
        """Asks no more."""
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
    """``keepstep weights serve`` of one node, as long as the node is part of its job."""

    def __init__(self, command: tuple[str, ...], secret: str) -> None:
        """Args:
        command: its command line.
        secret: of the job; it goes into the environment, which only this user can read.
        """
        self._command = command
        self._environment = {**os.environ, SECRET_VARIABLE: secret}  # environ: passed on to the child
        self._process: subprocess.Popen[bytes] | None = None

    async def run(self) -> None:
        """Keeps it running until `end`. Training continues without one that cannot be run."""
        while True:
            self._process = subprocess.Popen(self._command, env=self._environment)  # noqa: ASYNC220 - exec alone
            code = await ended(self._process)
            again = "training continues without it" if code == EXIT_USAGE else "it is started again"
            print(f"keepstep: the server of weights has ended ({code}): {again}", file=sys.stderr, flush=True)
            if code == EXIT_USAGE:
                return
            await asyncio.sleep(RESTART_S)

    async def end(self) -> None:
        """Has it end; the task of `run` is cancelled before."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        await ended_or_killed(process, END_S)
