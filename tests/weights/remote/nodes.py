"""Nodes of a test: threads of one process, whose links go over loopback."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import keepstep
from keepstep.errors import KeepstepError
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret
from keepstep.weights.remote.node import Links, WeightReceiver, WeightServer

SECRET = Secret(bytes(range(32)))
PATIENCE_S = 20.0
Tensors = dict[str, torch.Tensor]


def credentials(name: str, secret: Secret = SECRET) -> Credentials:
    """Of a node."""
    return Credentials.of(secret, Claim(Role.RECEIVER, name))


def weights(seed: int = 0) -> Tensors:
    """Some, of which each takes several buckets of 64 KiB, or a part of one."""
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=g) for name, size in [("a", (200, 300)), ("b", (7,)), ("c", (90_000,))]}


def zeros(like: Tensors) -> Tensors:
    """What an engine has before anything has come."""
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}


def equal(some: Tensors, others: Tensors) -> bool:
    """Bit for bit."""
    return all(torch.equal(some[name], others[name]) for name in others)


def wait_for(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Waits for something that other threads or processes bring about."""
    until_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < until_s, "it did not come about"
        threading.Event().wait(0.01)


class Nodes:
    """The publishers' node, and as many others as are asked for."""

    def __init__(self, folder: Path, deadline_s: float, **settings: Any) -> None:
        """``settings`` are those of the links, and whether nodes keep versions."""
        self.folder = folder
        self._keeps = settings.pop("keeps", False)
        self._links = Links(deadline_s=deadline_s, **settings)
        self.notes: list[str] = []
        self.receivers: dict[str, WeightReceiver] = {}
        self.errors: list[KeepstepError] = []
        self._threads: list[threading.Thread] = []
        self.server = self.serve("127.0.0.1:0")

    def serve(self, address: str) -> WeightServer:
        """Starts the publishers' side."""
        folder = self.folder / "job"
        return WeightServer(folder, address, SECRET, fanout=1, links=self._links, note=self.notes.append)

    def receive(self, name: str, *, feeds: bool = True, secret: Secret = SECRET) -> WeightReceiver:
        """Starts a node of consumers, and waits until it is fed."""
        receiver = self.begin(name, feeds=feeds, secret=secret)
        wait_for(lambda: receiver.fed_by is not None)
        return receiver

    def begin(self, name: str, *, feeds: bool = True, secret: Secret = SECRET) -> WeightReceiver:
        """Starts a node of consumers."""
        receiver = self.receivers[name] = WeightReceiver(
            self.folder / name, self.server.address, credentials(name, secret), secret=secret,
            listen="127.0.0.1:0" if feeds else None, links=self._links, keeps=self._keeps, note=self.notes.append,
        )  # fmt: skip

        def run() -> None:
            try:
                receiver.run()
            except KeepstepError as error:
                self.errors.append(error)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()
        return receiver

    def close(self) -> None:
        """Ends everything."""
        for receiver in self.receivers.values():
            receiver.close()
        for thread in self._threads:
            thread.join()
        self.server.close()


@contextlib.contextmanager
def nodes(folder: Path, deadline_s: float = PATIENCE_S, **settings: Any) -> Iterator[Nodes]:
    """For the duration of a test."""
    with contextlib.closing(Nodes(folder, deadline_s, **settings)) as made:
        yield made


@contextlib.contextmanager
def consumer(folder: Path, into: Tensors, name: str, deadline_s: float = PATIENCE_S) -> Iterator[keepstep.Subscriber]:
    """One that attends in a thread."""
    with keepstep.Subscriber(folder, into=into, name=name, deadline_s=deadline_s) as subscriber:
        subscriber.start()
        yield subscriber


def publisher(folder: Path, of: Tensors, deadline_s: float = PATIENCE_S, **settings: Any) -> keepstep.Publisher:
    """With small buckets."""
    buffers = keepstep.Buffers(bucket_bytes=1 << 16)
    return keepstep.Publisher(folder / "job", of, buffers=buffers, deadline_s=deadline_s, **settings)


def check_late_consumer(folder: Path, held: Tensors, version: int) -> None:
    """A consumer that attaches after the version was published gets every bit of it."""
    into = zeros(held)
    with consumer(folder, into, "late") as late:
        assert late.wait_for(version, PATIENCE_S) == version
        assert equal(into, held)


def check_versions_on_two_nodes(folder: Path, made: Nodes, source: keepstep.Publisher, held: Tensors) -> None:
    """Publishes three versions to consumers on n1 and n2; every bit arrives, and each bucket once on each node."""
    engines = [(node, zeros(held)) for node in ("n1", "n2", "n2")]
    with contextlib.ExitStack() as stack:
        consumers = [
            stack.enter_context(consumer(folder / node, into, f"e{number}"))
            for number, (node, into) in enumerate(engines)
        ]
        source.wait_for_consumers(3, PATIENCE_S)
        assert sorted(source.consumers) == ["n1/e0", "n1/n2/e1", "n1/n2/e2"]
        for version in (1, 2, 3):
            for tensor in held.values():
                tensor.add_(1)
            assert source.publish(version).failures == ()
            for each, (_node, into) in zip(consumers, engines, strict=True):
                with each.using() as used:
                    assert used == version
                    assert equal(into, held)
        num_bytes = sum(tensor.nbytes for tensor in held.values())
        for receiver in made.receivers.values():  # each bucket once, though two consumers of n2 want it
            assert 3 * num_bytes <= receiver.switch.num_bytes < 3 * num_bytes + 4096
