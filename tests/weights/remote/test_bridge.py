"""Publishers on several nodes: their devices reach each other, and consumers of every node get whole versions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.weights.remote.nodes import (
    PATIENCE_S,
    SECRET,
    Tensors,
    consumer,
    credentials,
    equal,
    wait_for,
    weights,
    zeros,
)

import keepstep
from keepstep.errors import KeepstepError, PublisherLost
from keepstep.weights.memory.blocks import Block
from keepstep.weights.publisher import Published
from keepstep.weights.remote.node import Links, WeightReceiver, WeightServer

NUM_RANKS = 4
"""Two on each of two nodes."""


def shard(of: Tensors, rank: int) -> dict[str, Block]:
    """Rows of each tensor, cut as FSDP2 does it; the memory is shared with ``of``."""
    found = {}
    for name, tensor in of.items():
        per_rank = -(-len(tensor) // NUM_RANKS)
        start = min(rank * per_rank, len(tensor))
        part = tensor[start : start + per_rank]
        found[name] = Block(part, (start, *(0,) * (tensor.dim() - 1)), tuple(tensor.shape))
    return found


class Trainers:
    """Two nodes with two ranks each, of which no node holds everything."""

    def __init__(self, folder: Path, held: Tensors, deadline_s: float, is_encrypted: bool) -> None:
        self.folder, self.held, self.deadline_s = folder, held, deadline_s
        self.links = Links(deadline_s=deadline_s, is_encrypted=is_encrypted)
        self.notes: list[str] = []
        self.servers = [self.serve(node) for node in range(2)]
        self.join()
        self.publishers: dict[int, keepstep.Publisher] = {}
        for rank in range(NUM_RANKS):
            self.start(rank)

    def serve(self, node: int, listen: str = "127.0.0.1:0") -> WeightServer:
        """Starts the server of a node."""
        return WeightServer(
            self.folder / f"t{node}", listen, SECRET, node=f"t{node}", links=self.links, note=self.notes.append
        )

    def join(self) -> None:
        """Tells the servers of each other."""
        for server, other in zip(self.servers, reversed(self.servers), strict=True):
            server.reach([other.address])

    def start(self, rank: int, *, node: int | None = None, generation: int = 0) -> None:
        """Starts a rank's publisher."""
        self.publishers[rank] = keepstep.Publisher(
            self.folder / f"t{rank // 2 if node is None else node}", shard(self.held, rank), rank=rank,
            world_size=NUM_RANKS, copies=True, buffers=keepstep.Buffers(bucket_bytes=1 << 16),
            deadline_s=self.deadline_s, generation=generation,
        )  # fmt: skip

    def publish(self, version: int) -> dict[int, Published | KeepstepError]:
        """All ranks publish; what came of it on each."""
        found: dict[int, Published | KeepstepError] = {}

        def run(rank: int) -> None:
            try:
                found[rank] = self.publishers[rank].publish(version)
            except KeepstepError as error:
                found[rank] = error

        threads = [threading.Thread(target=run, args=[rank]) for rank in self.publishers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def publish_well(self, version: int) -> None:
        """All ranks publish, and nothing fails."""
        found = self.publish(version)
        assert [(rank, each) for rank, each in found.items() if not isinstance(each, Published) or each.failures] == []

    def close(self) -> None:
        """Ends everything."""
        for publisher in self.publishers.values():
            publisher.close()
        for server in self.servers:
            server.close()


@contextlib.contextmanager
def trainers(
    folder: Path, held: Tensors, deadline_s: float = PATIENCE_S, *, is_encrypted: bool = False
) -> Iterator[Trainers]:
    """For the duration of a test."""
    with contextlib.closing(Trainers(folder, held, deadline_s, is_encrypted)) as made:
        yield made


@contextlib.contextmanager
def receiver(made: Trainers, name: str, root: WeightServer) -> Iterator[WeightReceiver]:
    """A node with engines."""
    found = WeightReceiver(made.folder / name, root.address, credentials(name), links=made.links)
    thread = threading.Thread(target=found.run)
    thread.start()
    try:
        wait_for(lambda: found.fed_by is not None)
        yield found
    finally:
        found.close()
        thread.join()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_consumers_of_all_nodes_get_whole_versions(tmp_path: Path, is_encrypted: bool) -> None:
    held = weights()
    with trainers(tmp_path, held, is_encrypted=is_encrypted) as made, ExitStack() as stack:
        stack.enter_context(receiver(made, "e", made.servers[1]))
        engines = [(node, zeros(held)) for node in ("t0", "t1", "t1", "e")]
        consumers = [
            stack.enter_context(consumer(tmp_path / node, into, f"c{number}"))
            for number, (node, into) in enumerate(engines)
        ]
        wait_for(lambda: sum(len(each.consumers) for each in made.publishers.values()) == 4)
        for version in (1, 2, 3):
            for tensor in held.values():
                tensor.add_(1)
            made.publish_well(version)
            for each, (_node, into) in zip(consumers, engines, strict=True):
                with each.using() as used:
                    assert used == version
                    assert equal(into, held)
