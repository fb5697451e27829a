"""Machines of `weights_nodes.py`: network namespaces on one switch, each with a link whose bandwidth is limited.

The kernel's bridge is the switch. Both ends of each link have a token bucket (tc-tbf), so the link is full duplex: a
machine sends and receives at the given rate at the same time. Needs root.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Iterator

from jobs import JobFailed

BURST_BYTES = 512 << 10
"""Size of a token bucket. Linux passes up to 64 KiB to it at a time."""
LATENCY_MS = 20
"""How long a packet may wait in the queue of a link, as in a switch with some MiB of buffers."""
NETWORK = "10.78.0"
INTERFACE = "link0"


def address(node: int) -> str:
    """Returns the address of a machine."""
    return f"{NETWORK}.{node + 1}"


class Machines:
    """A number of machines, linked by a switch."""

    def __init__(self, num_nodes: int, gbit_per_s: float) -> None:
        self._prefix = f"kb{secrets.token_hex(3)}"
        self.num_nodes, self.gbit_per_s = num_nodes, gbit_per_s

    def inside(self, node: int, *command: str) -> list[str]:
        """Returns the command line that runs a command on a machine."""
        return ["ip", "netns", "exec", f"{self._prefix}n{node}", *command]

    @contextlib.contextmanager
    def built(self) -> Iterator[Machines]:
        """Creates the machines, and removes them at the end of the ``with`` block.

        Raises:
            JobFailed: the kernel or the user's rights do not allow it.
        """
        hub = f"{self._prefix}w"
        names = [hub, *(f"{self._prefix}n{node}" for node in range(self.num_nodes))]
        try:
            _run("ip", "netns", "add", hub)
            _run("ip", "-n", hub, "link", "add", "switch", "type", "bridge")
            _run("ip", "-n", hub, "link", "set", "switch", "up")
            for node in range(self.num_nodes):
                self._plug_in(node, hub)
            yield self
        finally:
            for name in names:
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _plug_in(self, node: int, hub: str) -> None:
        space, there = f"{self._prefix}n{node}", f"port{node}"
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", INTERFACE, "netns", space, "type", "veth", "peer", "name", there, "netns", hub)
        _run("ip", "-n", hub, "link", "set", there, "master", "switch")
        _run("ip", "-n", hub, "link", "set", there, "up")
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", space, "link", "set", INTERFACE, "up")
        _run("ip", "-n", space, "address", "add", f"{address(node)}/24", "dev", INTERFACE)
        for where, interface in ((space, INTERFACE), (hub, there)):
            limit = ["rate", f"{self.gbit_per_s:g}gbit", "burst", str(BURST_BYTES), "latency", f"{LATENCY_MS}ms"]
            _run("tc", "-n", where, "qdisc", "add", "dev", interface, "root", "tbf", *limit)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise JobFailed(f"there is no `{command[0]}` (iproute2)") from None
    except subprocess.CalledProcessError as error:
        raise JobFailed(f"{' '.join(command)}: {error.stderr.strip()} (it needs root)") from None
