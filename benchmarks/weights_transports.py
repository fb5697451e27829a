"""Speed of buckets from a feeder to a node with each transport, on one machine. Every round measures all of them.

    python benchmarks/weights_transports.py             512 MiB, 5 rounds; a minute
    python benchmarks/weights_transports.py --quick     a smoke test; nothing is written

Each way has a publisher, `keepstep weights serve` and `receive`, and a consumer, all of them processes of this machine.
They run all the time and publish in turn. UCX, which NIXL uses, may choose any transport: on one machine that is shared
memory, and the kernel copies from one process to the other. With ``UCX_TLS=tcp`` it uses TCP. For comparison a gloo
process group of two broadcasts one tensor, and a plain TCP connection sends from one process to another, without
pipeline, checksums or other copies. Without NIXL (``pip install 'keepstep[nixl]'``) its rows are left out.

Prints a table, and writes ``benchmarks/results/DATE-weights-transports.md``.
The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import page
from jobs import JobFailed
from page import RESULTS, Section
from rich.console import Console
from weights_nodes import MIB, Member

from keepstep.config import SECRET_VARIABLE
from keepstep.trust.tokens import Secret

QUICK = {"mib": 8, "runs": 1}
TCP, NIXL, NIXL_TCP = "TCP", "NIXL, shared memory", "NIXL, UCX over TCP"
GLOO, PLAIN = "only gloo's broadcast", "only one TCP connection"
UCX = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "all"}
WAYS = {TCP: ("tcp", {}), NIXL: ("nixl", UCX), NIXL_TCP: ("nixl", {**UCX, "UCX_TLS": "tcp"})}
Round = Callable[[int], float]


class ThisMachine:
    """Replaces `weights_links.Machines`: all processes run on this machine."""

    def inside(self, node: int, *command: str) -> list[str]:
        """Returns the command line unchanged."""
        return list(command)


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the weights (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="rounds, after a first one (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="folder for the page (default: benchmarks/results)")
    return page.parsed(parser, QUICK)


def free_address() -> str:
    """Returns an address on loopback that was free when it was chosen."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"127.0.0.1:{found.getsockname()[1]}"


@contextlib.contextmanager
def member(**settings: Any) -> Iterator[Member]:
    """Starts a process in one of the roles of `weights_roles.py`, and waits until it is ready."""
    with contextlib.closing(Member(ThisMachine(), 0, **settings)) as found:  # type: ignore[arg-type] - as Machines
        found.answer()
        yield found


@contextlib.contextmanager
def keepstep_link(transport: str, ucx: dict[str, str], num_bytes: int) -> Iterator[Round]:
    """Publishes over one link. Yields a function of a version that returns the seconds. Compares every bit."""
    environment = {**os.environ, **ucx, SECRET_VARIABLE: Secret.new().text()}
    root = free_address()
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="kb"))  # a short path, for sockets
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        source = stack.enter_context(member(role="publisher", folder=str(folder / "job"), num_bytes=num_bytes))
        for command in (["serve", "job", "--listen", root], ["receive", "node", "--from", root]):
            started = subprocess.Popen(
                [sys.executable, "-m", "keepstep.cli.main", "weights", *command, "--transport", transport],
                cwd=folder, env=environment, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            stack.callback(started.wait)
            stack.callback(started.terminate)
        engine = stack.enter_context(member(role="consumer", folder=str(folder / "node"), num_bytes=num_bytes))
        source.ask(do="wait", num=1)

        def publish(version: int) -> float:
            published = source.ask(do="publish", version=version)
            if published["failures"]:
                raise JobFailed(f"the consumer was left out: {published['failures']}")
            if engine.ask(version=version) != {"version": version, "digest": published["digest"]}:
                raise JobFailed("the consumer has other weights than were published")
            return float(published["seconds"])

        yield publish


@contextlib.contextmanager
def gloo(num_bytes: int) -> Iterator[Round]:
    """Sends the same number of bytes with a process group of two."""
    common = {
        "role": "broadcaster", "interface": "lo", "meeting": free_address(), "num_bytes": num_bytes, "world_size": 2,
    }  # fmt: skip
    ranks = [Member(ThisMachine(), 0, **common, rank=rank) for rank in range(2)]  # type: ignore[arg-type] - as Machines
    try:
        for each in ranks:
            each.answer()

        def broadcast(_version: int) -> float:
            for each in ranks:
                each.tell(do="broadcast")
            return max(float(each.answer()["seconds"]) for each in ranks)

        yield broadcast
    finally:
        for each in ranks:
            each.close()


@contextlib.contextmanager
def plain(num_bytes: int) -> Iterator[Round]:
    """Sends the same number of bytes over one connection."""
    host, _, port = free_address().partition(":")
    common = {"host": host, "port": int(port), "num_bytes": num_bytes}
    with member(role="relay", next="", **common) as relay, member(role="spring", **common) as spring:

        def send(_version: int) -> float:
            relay.tell()
            began_s = spring.ask()["began_s"]
            return float(relay.answer()["ended_s"]) - float(began_s)

        yield send


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns way -> seconds of each round, without the first one."""
    num_bytes = args.mib * MIB
    has_nixl = importlib.util.find_spec("nixl") is not None
    seconds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        rounds: dict[str, Round] = {
            way: stack.enter_context(keepstep_link(transport, ucx, num_bytes))
            for way, (transport, ucx) in WAYS.items()
            if transport == "tcp" or has_nixl
        }
        rounds |= {GLOO: stack.enter_context(gloo(num_bytes)), PLAIN: stack.enter_context(plain(num_bytes))}
        for version in range(args.runs + 1):
            for way, take in rounds.items():
                seconds.setdefault(way, []).append(take(version))
    return {"seconds": {way: found[1:] for way, found in seconds.items()}}


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the table."""
    num_bytes = result["mib"] * MIB
    rows = []
    for way, seconds in result["seconds"].items():
        ratios = [mine / tcp for mine, tcp in zip(seconds, result["seconds"][TCP], strict=True)]
        median = statistics.median(seconds)
        spread = f"{median:.3f} ({min(seconds):.3f}–{max(seconds):.3f})"
        rows.append([way, spread, f"{num_bytes / median / 1e9:.2f}", f"{statistics.median(ratios):.2f}"])
    notes = [
        "Seconds: median (min–max) of `Publisher.publish`, until the consumer has switched.",
        "times TCP: the median over the rounds of this way's time and TCP's in the same round.",
        f"{GLOO}, {PLAIN}: from one process to another; what a transport has to do, without all else.",
    ]
    return [Section("One link, by transport", ["", "seconds", "GB/s", "times TCP"], rows, notes)]


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    setup = f"* {result['mib']} MiB of weights in bf16, one publisher, one node, one consumer, in place.\n"
    head = page.heading("Weights over one link", result) + setup + page.measured_in(result) + "\n"
    return head + "\n".join(section.markdown() for section in sections(result))


def main() -> int:
    """Measures, prints the tables, and writes the page."""
    args = parse_arguments()
    console = Console()
    known = {**page.provenance("weights_transports.py"), "mib": args.mib}
    folder = args.results or (None if args.quick else RESULTS)
    return page.carry_out("weights-transports", known, lambda: measure(args), sections, markdown, console, folder)


if __name__ == "__main__":
    sys.exit(main())
