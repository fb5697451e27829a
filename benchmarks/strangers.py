"""Effect of unauthenticated clients (strangers) on a controller and on the agents that it serves.

    python benchmarks/strangers.py               each kind of stranger in turn; about three minutes
    python benchmarks/strangers.py --quick       a smoke test with few of them; nothing is written

The controller's end of the transport runs in a separate process, with TLS on the loopback interface. One agent connects
before the strangers and asks for the time ten times a second; another one connects after them. The benchmark measures
when the controller has ended the strangers' connections, how many descriptors and how much memory they took at most,
how long the first agent waited for its answers, and how long the second one took to connect.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import page
import psutil
from page import RESULTS, Section
from rich.console import Console

from keepstep.protocol.messages import ClockAsked, ClockTold
from keepstep.transports.interface import Connected
from keepstep.transports.rpc.client import RpcControllerConnection
from keepstep.transports.rpc.server import ADMISSION_S, RpcNodeConnections
from keepstep.trust import certificates
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret, check

NONE, GARBAGE, HALF, SILENT, TLS, FRAMES = "none", "garbage", "half a handshake", "silence", "TLS and silence", "1 GiB"
KINDS = {
    NONE: "no strangers",
    GARBAGE: "random bytes",
    HALF: "the first half of a TLS handshake, then nothing",
    SILENT: "nothing at all",
    TLS: "a TLS handshake, then nothing",
    FRAMES: "a TLS handshake, then an HTTP/2 frame that claims 16 MiB and a message that claims 1 GiB",
}
COUNTS = {NONE: 0, GARBAGE: 2000, HALF: 2000, SILENT: 10_000, TLS: 500, FRAMES: 100}
FEW_FILES = 1024
"""Limit of open files, which the strangers exceed in one more round of silent connections."""
FIRST_BYTES = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
LARGE_FRAME = b"\xff\xff\xff\0\0\0\0\0\1" + b"\0\x40\0\0\0" + b"x" * 65536
QUESTION_S = 0.1
CALM_S = 2.0


async def serve(secret: Secret) -> None:
    """Runs the controller's end in a separate process. It answers requests for the time until it is killed."""
    connections = RpcNodeConnections(lambda token: check(secret, token).name, lambda address, why: None)
    print(await connections.start("127.0.0.1", 0, certificates.server(secret)), flush=True)
    while True:
        arrival = await connections.receive()
        if isinstance(arrival.message, ClockAsked):
            connections.send(arrival.node, ClockTold(arrival.message.asked_ns, time.monotonic_ns(), 0.2))


class Agent:
    """One agent's connection, and how long it waited for its answers."""

    def __init__(self, port: int, secret: Secret, name: str) -> None:
        self.name = name
        self.connected_s: float | None = None
        self.waited_ms: list[float] = []
        credentials = Credentials.of(secret, Claim(Role.AGENT, name))
        self._connection = RpcControllerConnection([f"127.0.0.1:{port}"], credentials, patience_s=1000.0)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Connects and sends requests until the ``with`` block ends."""
        tasks = [asyncio.create_task(each) for each in (self._connection.run(), self._ask(), self._hear())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self) -> None:
        while True:
            self._connection.send(ClockAsked(self.name, time.monotonic_ns()))
            await asyncio.sleep(QUESTION_S)

    async def _hear(self) -> None:
        begun_s = time.monotonic()
        while True:
            match await self._connection.receive():
                case Connected() if self.connected_s is None:
                    self.connected_s = time.monotonic() - begun_s
                case ClockTold(asked_ns):
                    self.waited_ms.append((time.monotonic_ns() - asked_ns) / 1e6)


async def stranger(kind: str, port: int, ended_s: list[float]) -> None:
    """Opens one connection, and holds it until the controller ends it."""
    tls = None
    if kind in (TLS, FRAMES):
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        tls.set_alpn_protocols(["h2"])
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
        words = {GARBAGE: os.urandom(4096), HALF: FIRST_BYTES, FRAMES: PREFACE + LARGE_FRAME}
        writer.write(words.get(kind, b""))
        while await reader.read(1 << 16):
            pass
    ended_s.append(time.monotonic())


async def strike(kind: str, count: int, port: int, secret: Secret, server: psutil.Process) -> dict[str, Any]:
    """Measures ``count`` strangers of one kind at once."""
    early, late = Agent(port, secret, "early"), Agent(port, secret, "late")
    ended_s: list[float] = []
    most_files = most_rss = 0
    async with early.running():
        await asyncio.sleep(CALM_S)
        early.waited_ms.clear()
        begun_s, rss_before = time.monotonic(), server.memory_info().rss
        strangers = [asyncio.create_task(stranger(kind, port, ended_s)) for _ in range(count)]
        await asyncio.sleep(0.5)
        async with late.running():
            while time.monotonic() < begun_s + 2.5 * ADMISSION_S and (late.connected_s is None or len(ended_s) < count):
                most_files = max(most_files, server.num_fds())
                most_rss = max(most_rss, server.memory_info().rss)
                await asyncio.sleep(0.25)
            await asyncio.sleep(CALM_S)
    for task in strangers:
        task.cancel()
    await asyncio.gather(*strangers, return_exceptions=True)
    return {
        "kind": kind,
        "count": count,
        "ended_s": [each - begun_s for each in sorted(ended_s)],
        "most_files": most_files,
        "more_mib": max(0, most_rss - rss_before) / 2**20,
        "waited_ms": early.waited_ms,
        "connected_s": late.connected_s,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures every kind, each with a new controller."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rounds = [(kind, round(count * args.share), hard) for kind, count in COUNTS.items()]
    rounds.append((SILENT, round(3000 * args.share), FEW_FILES))
    found = []
    for kind, count, files in rounds:
        secret = Secret.new()
        command = [sys.executable, __file__, "--serve", secret.text(), "--files", str(files)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            try:
                struck = asyncio.run(strike(kind, count, port, secret, psutil.Process(server.pid)))
                found.append(struck | {"files": files})
            finally:
                server.kill()
    return {"rounds": found}


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the table of a result."""
    rows = []
    for each in result["rounds"]:
        ended_s = each["ended_s"]
        after = f"{ended_s[len(ended_s) // 2]:.1f} / {ended_s[-1]:.1f}" if ended_s else "-"
        median, most = np.percentile(each["waited_ms"], [50, 99])
        joined = "never" if each["connected_s"] is None else f"{each['connected_s']:.2f}"
        name = each["kind"] + (f", at most {each['files']:,} open files" if each["files"] == FEW_FILES else "")
        cells = (f"{each['count']:,}", f"{len(ended_s):,}", after, f"{each['most_files']:,}", f"{each['more_mib']:.0f}")
        rows.append([name, *cells, f"{median:.1f} / {most:.0f}", joined])
    columns = ("strangers", "how many", "ended", "after, s", "files", "more MiB", "agent waits, ms", "newcomer, s")
    notes = [f"{name}: {what}." for name, what in KINDS.items()]
    notes.append(
        "ended: those whose connections the controller has ended. after: the median and the last of them. files, more "
        "MiB: the controller's, at most."
    )
    notes.append("agent waits: for an answer, median and 99th percentile. newcomer: until it is connected.")
    return [Section("Strangers at a controller's port", columns, rows, notes)]


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    head = page.heading("Strangers at a controller's port", result)
    return "\n".join([head + page.measured_in(result), *(section.markdown() for section in sections(result))])


def main() -> int:
    """Measures, shows, writes; or serves, for the process that measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of the strangers that come (default: all)")
    parser.add_argument("--results", type=Path, help="where the page goes (default: results)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--files", type=int, help=argparse.SUPPRESS)
    args = page.parsed(parser, {"share": 0.01})
    if args.serve:
        resource.setrlimit(resource.RLIMIT_NOFILE, (args.files, args.files))
        asyncio.run(serve(Secret.parse(args.serve, "--serve")))
    folder = args.results or (None if args.quick else RESULTS)
    return page.carry_out(
        "strangers", page.provenance("strangers.py"), lambda: measure(args), sections, markdown, Console(), folder
    )


if __name__ == "__main__":
    sys.exit(main())
