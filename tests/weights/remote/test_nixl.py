"""Buckets over NIXL, with the real library: `make test-engines` runs this in an environment that has it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch
from tests.weights.remote.nodes import (
    PATIENCE_S,
    SECRET,
    check_late_consumer,
    check_versions_on_two_nodes,
    consumer,
    equal,
    nodes,
    publisher,
    wait_for,
    weights,
    zeros,
)

pytest.importorskip("nixl", reason="NIXL is not installed: make test-engines")

import keepstep
from keepstep.config import SECRET_VARIABLE
from keepstep.errors import ConfigurationError, PublisherLost, RemoteProtocolError, SubscriberLost
from keepstep.weights.channels.connection import ConnectionEnded, ConnectionStalled
from keepstep.weights.memory.buffers import SlotBuffer, SlotPart
from keepstep.weights.remote.messages import NIXL, TCP
from keepstep.weights.remote.node import Links
from keepstep.weights.remote.transports.nixl import NixlTransport, RegisteredMemory

SLOT_BYTES = 1 << 16
START_S = 90.0
"""For a process that imports torch and NIXL, and opens NIXL twice, on a machine with other work."""


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX takes shared memory and TCP on loopback, where it finds no RDMA; and says nothing of what fails."""
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_TLS", "all")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")


def test_every_bit_comes_to_a_chain_of_nodes(tmp_path: Path) -> None:
    """To several consumers on one node, and to a node behind another; each bucket once to each node."""
    held = weights()
    with nodes(tmp_path, transport=NIXL) as made, publisher(tmp_path, held) as source:
        made.receive("n1")
        made.receive("n2")
        link = dict(made.server._feeder.links)["n1"]
        assert isinstance(link._transport, NixlTransport)
        check_versions_on_two_nodes(tmp_path, made, source, held)


def test_late_consumers_and_late_nodes(tmp_path: Path) -> None:
    """From the publisher's copies, and from what a node keeps."""
    held = weights()
    with nodes(tmp_path, transport=NIXL, keeps=True) as made, publisher(tmp_path, held, copies=True) as source:
        made.receive("n1")
        with consumer(tmp_path / "n1", zeros(held), "first"):
            source.wait_for_consumers(1, PATIENCE_S)
            source.publish(7)
            made.receive("n2")
            for node in ("n2", "n1"):
                check_late_consumer(tmp_path / node, held, 7)


def test_a_node_without_it_behind_one_that_has_it(tmp_path: Path) -> None:
    """A node with NIXL offers both, and each caller chooses."""
    held = weights()
    with nodes(tmp_path, transport=NIXL) as made, publisher(tmp_path, held) as source:
        first = made.receive("n1")
        made.set_transport(TCP)
        made.receive("n2")
        into = zeros(held)
        with consumer(tmp_path / "n2", into, "e"):
            source.wait_for_consumers(1, PATIENCE_S)
            assert source.publish(1).failures == ()
            assert equal(into, held)
        assert made.receivers["n2"].fed_by == first._feeder.address  # type: ignore[union-attr] - it has one


# ---- what fails -----------------------------------------------------------------------------------------------------


@contextmanager
def node_process(folder: Path, name: str, root: str, deadline_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """``keepstep weights receive`` as users start it."""
    command = [sys.executable, "-m", "keepstep.cli.main", "weights", "receive", str(folder / name), "--from", root]
    command += ["--listen", "127.0.0.1:0", "--node", name, "--deadline", str(deadline_s), "--transport", NIXL]
    environment = {**os.environ, SECRET_VARIABLE: SECRET.text()}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_feeder_that_is_lost_in_the_middle(tmp_path: Path, number: signal.Signals) -> None:
    """It is named, others have the version, and the node behind it gets the next one by another way."""
    deadline_s = 6.0
    held = {f"w{each}": torch.full((50_000,), float(each)) for each in range(40)}  # 8 MB in buckets of 64 KiB
    with ExitStack() as stack:
        made = stack.enter_context(nodes(tmp_path, deadline_s=deadline_s, transport=NIXL))
        source = stack.enter_context(publisher(tmp_path, held, copies=True, deadline_s=deadline_s))
        feeder = stack.enter_context(node_process(tmp_path, "n1", made.server.address, deadline_s))
        wait_for(lambda: "n1" in made.server.nodes, START_S)
        behind = made.receive("n2")
        assert made.server.nodes["n2"][0] == "n1"
        into, here = zeros(held), zeros(held)
        strikes: list[signal.Signals] = [number]

        def load(name: str, tensor: torch.Tensor) -> None:
            if strikes:
                feeder.send_signal(strikes.pop())
            into[name].copy_(tensor)

        engine = stack.enter_context(
            closing(keepstep.Subscriber(tmp_path / "n2", load=load, name="e", deadline_s=deadline_s))
        )
        engine.start()
        near = stack.enter_context(consumer(tmp_path / "job", here, "near", deadline_s))
        source.wait_for_consumers(2, PATIENCE_S)
        began_s = time.monotonic()
        (failure,) = source.publish(1).failures
        assert time.monotonic() < began_s + 2 * deadline_s
        assert isinstance(failure, SubscriberLost)
        assert str(failure).startswith("n2/e: node 'n1' at 127.0.0.1:")
        assert near.version == 1
        assert equal(here, held)
        wait_for(lambda: behind.fed_by == made.server.address)
        source.wait_for_consumers(2, PATIENCE_S)
        held["w0"].add_(1)
        assert source.publish(2).failures == ()
        assert engine.version == 2
        assert equal(into, held)


def test_a_node_that_is_killed_disturbs_nobody(tmp_path: Path) -> None:
    held = {f"w{each}": torch.full((50_000,), float(each)) for each in range(40)}
    with ExitStack() as stack:
        made = stack.enter_context(nodes(tmp_path, transport=NIXL))
        source = stack.enter_context(publisher(tmp_path, held))
        steady = made.receive("n1")
        into = zeros(held)
        stack.enter_context(consumer(tmp_path / "n1", into, "steady"))
        lost = stack.enter_context(node_process(tmp_path, "n2", made.server.address, PATIENCE_S))
        wait_for(lambda: "n2" in made.server.nodes, START_S)

        def load(name: str, tensor: torch.Tensor) -> None:
            lost.kill()

        engine = stack.enter_context(closing(keepstep.Subscriber(tmp_path / "n2", load=load, name="e")))
        engine.start()
        source.wait_for_consumers(2, PATIENCE_S)
        (failure,) = source.publish(1).failures
        assert str(failure).startswith("n2/e: ")
        assert equal(into, held)
        assert steady.switch.version == 1
        wait_for(lambda: isinstance(engine.last_error, PublisherLost))


PEER = f"""
import sys
from keepstep.weights.memory.buffers import SlotBuffer
from keepstep.weights.remote.node import Links
from keepstep.weights.remote.transports.nixl import RegisteredMemory

memory = RegisteredMemory("a reader", is_read_by_others=True)
buffer = SlotBuffer.create(2, {SLOT_BYTES})
buffer.view(0).fill_(7)
buffer.view(1).fill_(8)
memory.register(buffer)
print("here:", memory.description().hex(), buffer.address(0), flush=True)
sys.stdin.read()
"""


@contextmanager
def peer() -> Iterator[tuple[subprocess.Popen[str], bytes, int]]:
    """A process that lets its memory be read: what it says of it, and where its first slot is."""
    command = [sys.executable, "-c", PEER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in iter(process.stdout.readline, "") if line.startswith("here:"))
            _, description, address = line.split()
            yield process, bytes.fromhex(description), int(address)
        finally:
            process.kill()


@contextmanager
def reader() -> Iterator[tuple[RegisteredMemory, SlotBuffer]]:
    """One end that reads, and its slots."""
    with (
        closing(SlotBuffer.create(2, SLOT_BYTES)) as buffer,
        closing(RegisteredMemory("the peer", is_read_by_others=False)) as memory,
    ):
        yield memory, buffer


def until() -> float:
    """A deadline that is not reached."""
    return time.monotonic() + PATIENCE_S


def test_a_slot_is_read_out_of_another_process() -> None:
    with peer() as (_process, description, address), reader() as (memory, buffer):
        memory.know(description)
        memory.read(SlotPart(buffer, 1, 1000), address, until(), threading.Event())
        assert buffer.view(1)[:1001].tolist() == [7] * 1000 + [0]
        memory.know(description)  # as after another buffer was registered there
        memory.read(SlotPart(buffer, 0, SLOT_BYTES), address + SLOT_BYTES, until(), threading.Event())
        assert bytes(buffer.view(0).numpy()) == b"\x08" * SLOT_BYTES


@pytest.mark.parametrize(("number", "error"), [(signal.SIGKILL, ConnectionEnded), (signal.SIGSTOP, ConnectionStalled)])
def test_a_read_from_a_process_that_is_lost(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, error: type[Exception]
) -> None:
    """It ends within its deadline, and nothing writes into the slot later, when the process goes on."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # the kernel would read in a stopped process, too
    with peer() as (process, description, address), reader() as (memory, buffer):
        memory.know(description)
        memory.read(SlotPart(buffer, 0, SLOT_BYTES), address, until(), threading.Event())
        process.send_signal(number)
        with pytest.raises(error, match="the peer"):
            memory.read(SlotPart(buffer, 1, SLOT_BYTES), address, time.monotonic() + 1.0, threading.Event())
        before = bytes(buffer.view(1).numpy())
        process.send_signal(signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.close()  # it goes on to its end
        process.wait(PATIENCE_S)
        assert bytes(buffer.view(1).numpy()) == before


def test_a_link_that_is_lost_ends_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    lost = threading.Event()
    with peer() as (process, description, address), reader() as (memory, buffer):
        memory.know(description)
        process.send_signal(signal.SIGSTOP)
        threading.Timer(0.2, lost.set).start()
        with pytest.raises(ConnectionEnded, match="the peer was left"):
            memory.read(SlotPart(buffer, 0, SLOT_BYTES), address, until(), lost)


def test_memory_that_is_not_shared_is_not_read() -> None:
    with peer() as (_process, description, address), reader() as (memory, buffer):
        with pytest.raises(RemoteProtocolError, match="describes its memory in another way"):
            memory.know(b"nothing that NIXL wrote")
        memory.know(description)
        with pytest.raises(ConnectionEnded, match="lets no bucket be read"):
            memory.read(SlotPart(buffer, 0, SLOT_BYTES), address + 2 * SLOT_BYTES, until(), threading.Event())


@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="there may be RDMA")
def test_without_rdma_it_has_to_be_told_what_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself UCX opens no TCP port."""
    monkeypatch.delenv("UCX_TLS")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with pytest.raises(ConfigurationError, match=r"finds no network that it can use .* UCX_TLS"):
        Links(transport=NIXL)


def test_memory_is_given_back(tmp_path: Path) -> None:
    """When the link ends, and before the memory goes."""
    with reader() as (memory, buffer):
        assert memory.register(buffer)
        assert not memory.register(buffer)
        memory.close()
        assert buffer.at_close == []
    with closing(RegisteredMemory("the peer", is_read_by_others=True)) as memory:
        buffer = SlotBuffer.create(1, SLOT_BYTES)
        empty = len(memory.description())
        memory.register(buffer)
        assert len(memory.description()) > empty
        buffer.close()
        assert len(memory.description()) == empty


def test_a_publisher_with_buckets_of_another_size(tmp_path: Path) -> None:
    """The nodes take another buffer then, which is registered in place of the former."""
    held = weights()
    with nodes(tmp_path, transport=NIXL) as made:
        made.receive("n1")
        into = zeros(held)
        with consumer(tmp_path / "n1", into, "e") as engine:
            for version, bucket_bytes in ((1, 1 << 16), (2, 1 << 17)):
                buffers = keepstep.Buffers(bucket_bytes=bucket_bytes)
                held["a"].add_(1)
                with keepstep.Publisher(tmp_path / "job", held, buffers=buffers, deadline_s=PATIENCE_S) as source:
                    source.wait_for_consumers(1, PATIENCE_S)
                    assert source.publish(version).failures == ()
                    assert engine.version == version
                    assert equal(into, held)
