"""Back again: a trainer that was restarted takes its weights from engines that hold a whole version of them."""

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
    """Gives the version that an engine holds to trainers, under the names and in the blocks in which it was published.

    The engine goes on with its version meanwhile, and takes no other one. Of an engine of several tensor-parallel
    ranks each calls it, and together they hold all.

    Args:
        subscriber: of this engine, which took the version.
        folder: where trainers find the engine; another one than that in which it takes its weights.
        rank, world_size: of this engine among those that give back together.
        num_trainers: how many call `take_back`.
        timeout_s: how long it waits for them, and then for a sign of each.

    Returns:
        the version.

    Raises:
        WeightsNotReady: there is no whole version here.
        DtypeMismatch: a tensor was cast or quantized on its way here: what it was cannot be told from it any more.
        PeerLost: the trainers did not come in time, or another rank is gone.
        KeepstepError: a trainer did not get it, and why.
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
    """Takes a version from engines that `give_back`. Every bit is that which was published, or nothing is written.

    It brings weights alone: no optimizer state, and no position in the data.

    Args:
        folder: as the engines say it.
        into: the trainer's weights: a module, or its shards by name.
        version: the one that is wanted; no other is taken.
        timeout_s: how long to wait for the engines.

    Raises:
        BaseMismatch: they hold another version.
        StateMismatch: they do not hold everything, or in another form; its kind and its message say which tensor.
        PublisherLost: they did not come, or have gone.
    """
    with Subscriber(folder, into=into, deadline_s=timeout_s) as subscriber:
        subscriber.only_version = version
        subscriber.receive(timeout_s)
