"""Machines of a test: network namespaces with a cable each to one `wire`, made and removed by the test."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

WIRE = Path(__file__).with_name("wire.py")
SIOCETHTOOL = 0x8946
ETHTOOL_SETTERS = {"transmit checksums": 0x17, "scatter and gather": 0x19, "segmentation": 0x1F, "generic": 0x24}
"""ETHTOOL_STXCSUM, SSG, STSO and SGSO of <linux/ethtool.h>: frames on the wire are to be whole, as on a real one."""


def why_not() -> str | None:
    """Why there can be no such machines here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    name = f"ks{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


def why_no_clocks() -> str | None:
    """Why machines cannot have monotonic clocks of their own here; None where they can."""
    tried = subprocess.run([*_CLOCK, "1", "--fork", "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"time namespaces are not permitted: {tried.stderr.strip()}"


_CLOCK = ["unshare", "--time", "--boottime", "1", "--monotonic"]


class Lab:
    """So many machines on one wire. Addresses are 10.77.0.1 and up; nothing leads out.

    They share the file system, as if each had mounted it from one server.
    """

    def __init__(self, num_nodes: int, seed: int) -> None:
        self._prefix = f"ks{secrets.token_hex(3)}"
        self.num_nodes = num_nodes
        self._seed = seed
        self._wire: subprocess.Popen[str] | None = None
        self.clock_ahead_s: dict[int, int] = {}
        """By how much a machine's monotonic clock is ahead of the others'."""

    def address(self, node: int) -> str:
        """Where a machine is reached."""
        return f"10.77.0.{node + 1}"

    def inside(self, node: int, *command: str) -> list[str]:
        """The command line that runs a command on a machine."""
        ahead_s = self.clock_ahead_s.get(node)
        clock = () if ahead_s is None else (*_CLOCK, str(ahead_s), "--fork", "--kill-child")
        return ["ip", "netns", "exec", self._namespace(node), *clock, *command]

    def _namespace(self, node: int) -> str:
        return f"{self._prefix}n{node}"

    @contextlib.contextmanager
    def built(self) -> Iterator[Lab]:
        """Makes everything, and ends every process and removes everything afterwards."""
        hub = f"{self._prefix}w"
        try:
            _ip("netns", "add", hub)
            for node in range(self.num_nodes):
                self._plug_in(node, hub)
            ends = [f"{self._prefix}w{node}" for node in range(self.num_nodes)]
            command = ["ip", "netns", "exec", hub, sys.executable, str(WIRE), str(self._seed), *ends]
            self._wire = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._await("ready")
            yield self
        finally:
            for node in range(self.num_nodes):
                self.kill_all(node)
            if self._wire is not None:
                self._wire.kill()
                self._wire.communicate()
            for name in (hub, *(self._namespace(node) for node in range(self.num_nodes))):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _plug_in(self, node: int, hub: str) -> None:
        space, here, there = self._namespace(node), f"{self._prefix}c{node}", f"{self._prefix}w{node}"
        _ip("netns", "add", space)
        _ip("link", "add", here, "type", "veth", "peer", "name", there)
        _ip("link", "set", here, "address", f"02:00:00:00:00:{node + 1:02x}")
        whole_frames(here)
        whole_frames(there)
        _ip("link", "set", there, "netns", hub)
        _ip("link", "set", here, "netns", space)
        _ip("-n", hub, "link", "set", there, "up")
        _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", space, "link", "set", here, "up")
        _ip("-n", space, "address", "add", f"{self.address(node)}/24", "dev", here)

    # ---- what goes wrong --------------------------------------------------------------------------------------------

    def change(self, source: int, target: int, *, lose: float = 0.0, delay_s: float = 0.0) -> None:
        """What happens from now on to frames that go from one machine to another."""
        assert self._wire is not None
        assert self._wire.stdin is not None
        self._wire.stdin.write(json.dumps({"from": source, "to": target, "lose": lose, "delay_s": delay_s}) + "\n")
        self._wire.stdin.flush()
        self._await("done")

    def change_between(self, some: set[int], others: set[int], *, lose: float = 0.0, delay_s: float = 0.0) -> None:
        """The same for all frames between two sets of machines, both ways."""
        for one in some:
            for other in others:
                self.change(one, other, lose=lose, delay_s=delay_s)
                self.change(other, one, lose=lose, delay_s=delay_s)

    def cut_off(self, node: int) -> None:
        """Nothing goes to the machine or comes from it."""
        self.change_between({node}, set(range(self.num_nodes)) - {node}, lose=1.0)

    def heal(self) -> None:
        """All is well again."""
        all_members = set(range(self.num_nodes))
        self.change_between(all_members, all_members)

    def kill_all(self, node: int) -> None:
        """Everything that runs on the machine is gone at once, as if its power were."""
        for process in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def processes(self, node: int) -> list[psutil.Process]:
        """What runs on a machine."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self._namespace(node)], capture_output=True, text=True, check=False
        )
        found = []
        for pid in listed.stdout.split():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def _await(self, word: str) -> None:
        assert self._wire is not None
        assert self._wire.stdout is not None
        line = self._wire.stdout.readline()
        assert line.strip() == word, f"the wire said {line!r}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def whole_frames(interface: str) -> None:
    """Has the sender cut and sum up its frames itself: what reads them on the way must find what a wire would carry."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in ETHTOOL_SETTERS.values():
            value = bytearray(struct.pack("II", command, 0))
            address = (_Pointer(value)).address
            fcntl.ioctl(control, SIOCETHTOOL, struct.pack("16sP8x", interface.encode(), address))


class _Pointer:
    """The address of a buffer, which must stay alive."""

    def __init__(self, buffer: bytearray) -> None:
        import ctypes

        self._view = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        self.address = ctypes.addressof(self._view)
