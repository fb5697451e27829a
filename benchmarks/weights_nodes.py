"""Time to publish weights to other machines over limited links, and how much of a link's bandwidth is used.

    python benchmarks/weights_nodes.py                          1, 2 and 4 nodes, 1 and 5 Gbit/s; 6 minutes, as root
    python benchmarks/weights_nodes.py --nodes 2 --gbit 1       one case
    python benchmarks/weights_nodes.py --quick                  a smoke test; nothing is written

The machines are network namespaces of this one (`weights_links.py`), so they share its processors. Each node has one
consumer. The publisher is on a separate machine, together with `keepstep weights serve`. The benchmark compares
keepstep, without and with TLS, with `torch.distributed.broadcast` over gloo, and with a safetensors file and a
checkpoint of `torch.distributed.checkpoint` that every node reads over HTTP. The floor is plain TCP through all nodes
in a row. For 100 and 1,000 nodes there is a model (`weights_model.py`).

Prints tables, and writes ``benchmarks/results/DATE-weights-nodes.md``. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import page
import weights_model
from jobs import JobFailed
from page import RESULTS, Section
from rich.console import Console
from weights_links import INTERFACE, Machines, address

from keepstep.config import SECRET_VARIABLE
from keepstep.trust.tokens import Secret

MIB = 1 << 20
QUICK = {"mib_per_gbit": 4, "nodes": [1, 2], "gbit": [1.0], "runs": 1}
PORT = 29700
END_S = 10.0
"""Time in which a member must end by itself."""
ROLES = Path(__file__).with_name("weights_roles.py")
FIRST, TLS, BROADCAST, HTTP = "keepstep", "keepstep, TLS", "broadcast, gloo", "safetensors, HTTP"
CHECKPOINT = "checkpoint, HTTP"
WAYS = {
    FIRST: "`Publisher.publish`, until every consumer has switched; a chain of nodes",
    TLS: "the same with TLS 1.3 on every link",
    BROADCAST: "all weights as one tensor, `dist.broadcast` from rank 0, until all have it",
    HTTP: "a safetensors file in memory, recreated; all nodes read it at once from one web server and copy it",
    CHECKPOINT: "`torch.distributed.checkpoint` to a folder in memory, recreated; all nodes read its files at once "
    "from one web server into a folder of their own and load them",
}


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mib-per-gbit",
        type=int,
        default=128,
        help="size of the weights for each Gbit/s of a link, so that an update takes as long (default: %(default)s)",
    )
    parser.add_argument(
        "--nodes", type=int, action="append", help="nodes with consumers; repeatable (default: 1, 2, 4)"
    )
    parser.add_argument("--gbit", type=float, action="append", help="of each link; repeatable (default: 1, 5)")
    parser.add_argument(
        "--runs",
        type=int,
        default=3,
        help="of keepstep, after a first one; one less of the others (default: %(default)s)",
    )
    parser.add_argument("--results", type=Path, help="folder for the page (default: benchmarks/results)")
    args = page.parsed(parser, QUICK)
    args.nodes, args.gbit = args.nodes or [1, 2, 4], args.gbit or [1.0, 5.0]
    return args


class Member:
    """A process on one of the machines."""

    def __init__(self, machines: Machines, node: int, **settings: Any) -> None:
        self.role = settings["role"]
        command = machines.inside(node, sys.executable, str(ROLES), json.dumps(settings))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, **order: Any) -> None:
        """Sends an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Waits for the next answer, and returns it.

        Raises:
            JobFailed: the process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise JobFailed(f"{self.role} has ended")
        return dict(json.loads(line))

    def ask(self, **order: Any) -> dict[str, Any]:
        """Sends an order, and returns the answer."""
        self.tell(**order)
        return self.answer()

    def close(self) -> None:
        """Ends the process, with SIGKILL if it still waits in a collective after an error."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def members(machines: Machines, roles: list[tuple[int, dict[str, Any]]]) -> Iterator[list[Member]]:
    """Starts processes on machines, and waits until all of them are ready."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(contextlib.closing(Member(machines, node, **role))) for node, role in roles]
        for each in found:
            each.answer()
        yield found


@contextlib.contextmanager
def programs(machines: Machines, folder: Path, is_encrypted: bool) -> Iterator[None]:
    """Runs `keepstep weights` on every machine."""
    environment = {**os.environ, SECRET_VARIABLE: Secret.new().text()}
    root = f"{address(0)}:{PORT}"
    tls = ["--tls"] if is_encrypted else []
    commands = [(0, ["serve", str(folder / "job"), "--listen", root, "--fanout", "1"])]
    for node in range(1, machines.num_nodes):
        own = ["--node", f"node-{node}", "--listen", f"{address(node)}:{PORT}"]
        commands.append((node, ["receive", str(folder / f"node-{node}"), "--from", root, *own]))
    started = [
        subprocess.Popen(
            machines.inside(node, sys.executable, "-m", "keepstep.cli.main", "weights", *command, *tls),
            env=environment, stderr=subprocess.DEVNULL,
        )
        for node, command in commands
    ]  # fmt: skip
    try:
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def measure_keepstep(machines: Machines, num_bytes: int, runs: int, is_encrypted: bool) -> list[float]:
    """Returns the seconds of each update, without the first one. Compares every bit."""
    folder = Path(tempfile.mkdtemp(prefix="kb"))  # a short path, for sockets
    nodes = range(1, machines.num_nodes)
    roles: list[tuple[int, dict[str, Any]]] = [
        (0, {"role": "publisher", "folder": str(folder / "job"), "num_bytes": num_bytes})
    ]
    roles += [(n, {"role": "consumer", "folder": str(folder / f"node-{n}"), "num_bytes": num_bytes}) for n in nodes]
    seconds = []
    try:
        with programs(machines, folder, is_encrypted), members(machines, roles) as (source, *consumers):
            source.ask(do="wait", num=len(consumers))
            for version in range(runs + 1):
                published = source.ask(do="publish", version=version)
                if published["failures"]:
                    raise JobFailed(f"consumers were left out: {published['failures']}")
                for each in consumers:
                    if each.ask(version=version) != {"version": version, "digest": published["digest"]}:
                        raise JobFailed("a consumer has other weights than were published")
                seconds.append(published["seconds"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return seconds[1:]


def measure_broadcast(machines: Machines, num_bytes: int, runs: int) -> list[float]:
    """Returns the same for gloo. The slowest rank counts."""
    common = {
        "role": "broadcaster", "interface": INTERFACE, "meeting": f"{address(0)}:{PORT}", "num_bytes": num_bytes,
        "world_size": machines.num_nodes,
    }  # fmt: skip
    seconds = []
    with members(machines, [(rank, {**common, "rank": rank}) for rank in range(machines.num_nodes)]) as ranks:
        for _ in range(runs + 1):
            for each in ranks:
                each.tell(do="broadcast")
            seconds.append(max(each.answer()["seconds"] for each in ranks))
    return seconds[1:]


def measure_http(machines: Machines, num_bytes: int, runs: int, kind: str) -> list[float]:
    """Returns the same for files, ``safetensors`` or ``checkpoint``: the time to save, and of the slowest node."""
    common = {"meeting": f"{address(0)}:{PORT}", "num_bytes": num_bytes, "kind": kind}
    roles = [(0, {"role": "web_server", **common})]
    roles += [(node, {"role": "web_client", **common}) for node in range(1, machines.num_nodes)]
    seconds = []
    with members(machines, roles) as (server, *clients):
        for _ in range(runs + 1):
            saved = server.ask(do="save")
            for each in clients:
                each.tell(do="load", files=saved["files"])
            seconds.append(saved["seconds"] + max(each.answer()["seconds"] for each in clients))
    return seconds[1:]


def measure_floor(machines: Machines, num_bytes: int, runs: int) -> list[float]:
    """Returns the same for plain TCP from the publisher's machine through all nodes in a row, which forward it."""
    nodes = range(1, machines.num_nodes)
    common = {"port": PORT, "num_bytes": num_bytes}
    roles: list[tuple[int, dict[str, Any]]] = [
        (n, {"role": "relay", "host": address(n), "next": address(n + 1) if n + 1 in nodes else "", **common})
        for n in reversed(nodes)
    ]
    seconds = []
    with members(machines, [*roles, (0, {"role": "spring", "host": address(1), **common})]) as (*relays, spring):
        for _ in range(runs):
            for each in relays:
                each.tell()
            began_s = spring.ask()["began_s"]
            seconds.append(max(each.answer()["ended_s"] for each in relays) - began_s)
    return seconds


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measures all cases."""
    cases = []
    others = max(1, args.runs - 1)
    for gbit_per_s in args.gbit:
        num_bytes = round(args.mib_per_gbit * gbit_per_s) * MIB
        for num_nodes in args.nodes:
            console.print(f"{gbit_per_s:g} Gbit/s, {num_nodes} nodes ...", highlight=False)
            with Machines(num_nodes + 1, gbit_per_s).built() as machines:
                cases.append({
                    "gbit_per_s": gbit_per_s,
                    "nodes": num_nodes,
                    "mib": num_bytes // MIB,
                    "floor": measure_floor(machines, num_bytes, others),
                    FIRST: measure_keepstep(machines, num_bytes, args.runs, is_encrypted=False),
                    TLS: measure_keepstep(machines, num_bytes, args.runs, is_encrypted=True),
                    BROADCAST: measure_broadcast(machines, num_bytes, others),
                    HTTP: measure_http(machines, num_bytes, others, "safetensors"),
                    CHECKPOINT: measure_http(machines, num_bytes, others, "checkpoint"),
                })  # fmt: skip
    console.print("the model ...", highlight=False)
    model = weights_model.sections(((1 / 64, 5.0),), nodes=(1, 3)) if args.quick else weights_model.sections()
    return {"cases": cases, "model": model}


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the tables."""
    columns = ["", *(f"{case['gbit_per_s']:g} Gbit/s, {case['nodes']} nodes" for case in result["cases"])]
    rows = [["floor, plain TCP", *(f"{statistics.median(case['floor']):.3f}" for case in result["cases"])]]
    rows += [[way, *(_spread(case[way]) for case in result["cases"])] for way in WAYS]
    rows += [[f"{way}: share of the link", *_shares(result["cases"], way)] for way in WAYS]
    rows += [[f"{way}: floor / measured", *_against_floor(result["cases"], way)] for way in (FIRST, TLS)]
    rows += [[f"{way}: times as long as with the fewest nodes", *_against_fewest(result["cases"], way)] for way in WAYS]
    notes = [
        "Seconds: median (min–max). floor: as many bytes through all nodes in a row by plain TCP, with one process on "
        "each that hands on what it receives and does nothing else: what these cores can do.",
        *(f"{way}: {what}." for way, what in WAYS.items()),
        "share of the link: the bits of the weights by the median and the rate of one link, one way. Headers of "
        "Ethernet, IP and TCP take some 5 % of it where packets have 1,500 bytes.",
    ]
    return [
        Section("Publishing to other machines", columns, rows, notes),
        *result["model"],
    ]


def _shares(cases: list[dict[str, Any]], way: str) -> list[str]:
    return [
        f"{case['mib'] * MIB * 8 / (case['gbit_per_s'] * 1e9 * statistics.median(case[way])):.0%}" for case in cases
    ]


def _against_floor(cases: list[dict[str, Any]], way: str) -> list[str]:
    return [f"{statistics.median(case['floor']) / statistics.median(case[way]):.0%}" for case in cases]


def _against_fewest(cases: list[dict[str, Any]], way: str) -> list[str]:
    first = {case["gbit_per_s"]: case for case in reversed(cases)}
    return [f"{statistics.median(case[way]) / statistics.median(first[case['gbit_per_s']][way]):.2f}" for case in cases]


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f}–{max(seconds):.3f})"


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    setup = (
        f"* {result['mib_per_gbit']} MiB of weights in bf16 for each Gbit/s of a link, one publisher, one\n"
        "  consumer on each node, in place.\n"
        "* The machines are network namespaces on these cores, joined by the kernel's bridge; tc-tbf limits each\n"
        "  link, both ways.\n"
    )
    head = page.heading("Publishing weights to other machines", result) + setup + page.measured_in(result) + "\n"
    return head + "\n".join(section.markdown() for section in sections(result))


def main() -> int:
    """Measures, prints the tables, and writes the page."""
    args = parse_arguments()
    console = Console()
    known = {**page.provenance("weights_nodes.py"), "mib_per_gbit": args.mib_per_gbit}
    folder = args.results or (None if args.quick else RESULTS)
    return page.carry_out("weights-nodes", known, lambda: measure(args, console), sections, markdown, console, folder)


if __name__ == "__main__":
    sys.exit(main())
