"""A restarted trainer takes its weights back from engines that hold a complete version of them."""

from __future__ import annotations

from pathlib import Path

from keepstep.weights.memory.blocks import Weights
from keepstep.weights.memory.mapping.mapped import Mapped
from keepstep.weights.publisher import DEFAULT_DEADLINE_S, Publisher
from keepstep.weights.subscriber import Subscriber


def give_back(
    subscriber: Subscriber,
    folder: str | Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    num_trainers: int = 1,
    timeout_s: float = DEFAULT_DEADLINE_S,
) -> int:
    """Sends an engine's version to trainers, under the names and in the blocks in which it was published.

    Meanwhile the engine continues with its version, and receives no other one. Each tensor-parallel rank of an engine
    calls it; together they hold all weights.

    Args:
        subscriber: this engine's, with the version.
        folder: where trainers find the engine; not the folder from which it receives weights.
        rank, world_size: rank of this engine, and number of engines that give back together.
        num_trainers: number of processes that call `take_back`.
        timeout_s: how long it waits for them to connect, and then for progress of each.

    Returns:
        the version.

    Raises:
        WeightsNotReady: the subscriber has no complete version.
        DtypeMismatch: a tensor was cast or quantized when it was received, so its original bits are lost.
        PeerLost: the trainers did not connect in time, or another rank is gone.
        KeepstepError: a trainer did not get the version; with the reason.
    """
    with subscriber.using() as version:
        held = subscriber.as_published()
        with Publisher(folder, held, rank=rank, world_size=world_size, deadline_s=timeout_s) as publisher:
            if rank == 0:
                publisher.wait_for_consumers(num_trainers, timeout_s)
            for failure in publisher.publish(version).failures:
                raise failure
        return version


def take_back(
    folder: str | Path, into: Weights | Mapped, version: int, *, timeout_s: float = DEFAULT_DEADLINE_S
) -> None:
    """Takes a version from engines that call `give_back`: bit for bit as published, or nothing is written.

    It transfers only weights: no optimizer state, and no position in the data.

    Args:
        folder: the engines' folder.
        into: the trainer's weights: a module, or its shards by name.
        version: the required version; no other is accepted.
        timeout_s: how long to wait for the engines.

    Raises:
        BaseMismatch: the engines hold another version.
        StateMismatch: the engines lack a part of the weights, or hold it in another form; the message names the tensor.
        PublisherLost: the engines did not connect in time, or are gone.
    """
    # Rank 0 of the engines waits for all trainers.
    with Subscriber(folder, into=into, device=0, deadline_s=timeout_s) as subscriber:
        subscriber.only_version = version
        subscriber.receive(timeout_s)
