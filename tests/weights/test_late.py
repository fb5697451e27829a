"""Consumers that come and go, and publishing copies while the weights change."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.weights.cast import bits, publish, subscribe
from tests.weights.test_delivery import sharded, shards
from tests.worker.ranks import DEADLINE_S, meet, run_ranks

from keepstep.errors import PublisherLost, UsageError
from keepstep.weights.device import late_subscribers
from keepstep.weights.memory.blocks import Block
from keepstep.weights.subscriber import Subscriber

SOURCES = 3


def late(rank: int, size: int, path: Path, seed: int) -> Any:
    """Three devices with a shard each publish to no process; two consumers come after that, to different devices."""
    whole = sharded(seed)
    if rank < SOURCES:
        live = shards(whole, rank, SOURCES)
        with publish(path, live, rank, SOURCES, copies=True) as publisher:
            publisher.publish(4)
            for value in live.values():
                (value.tensor if isinstance(value, Block) else value).fill_(0)  # training has gone on
            meet(path, size, "published")
            meet(path, size, "caught up")
            return publisher.buffer_bytes
    own = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    meet(path, size, "published")
    with subscribe(path, into=own, device=rank - SOURCES) as consumer:
        version = consumer.receive(DEADLINE_S)
        meet(path, size, "caught up")
    return version, bits(own) == bits(whole)


def test_a_consumer_that_comes_late_gets_what_was_published_last(tmp_path: Path, seed: int) -> None:
    *sources, first, second = run_ranks(SOURCES + 2, late, tmp_path, seed)
    assert first == second == (4, True)
    slot_bytes = 1024 + 64
    assert sources == [8 * slot_bytes] * SOURCES, "consumers map the buffers of all sources"


def test_who_has_the_newest_version_is_not_served_again(tmp_path: Path) -> None:
    weights, own = {"x": torch.ones(4)}, {"x": torch.zeros(4)}
    with publish(tmp_path, weights, 0, 1, copies=True) as publisher, subscribe(tmp_path, into=own) as consumer:
        consumer.attach(DEADLINE_S)
        publish_to(publisher, consumer, 1)
        consumer._leave("the connection broke")
        consumer.attach(DEADLINE_S)
        publish_to(publisher, consumer, 2)
        assert publisher.buffer_bytes == 4 * (1024 + 64), "no consumer was served separately"


def test_a_consumer_of_a_former_job_gets_what_the_new_one_published_last(tmp_path: Path) -> None:
    """Its version is higher; it comes when version 0 has been published already."""
    own = {"x": torch.zeros(4)}
    with subscribe(tmp_path, into=own) as consumer:
        with publish(tmp_path, {"x": torch.full((4,), 40.0)}, 0, 1, copies=True) as former:
            consumer.attach(DEADLINE_S)
            publish_to(former, consumer, 40)
        with pytest.raises(PublisherLost):
            consumer.receive(DEADLINE_S)
        with publish(tmp_path, {"x": torch.full((4,), 7.0)}, 0, 1, copies=True) as publisher:
            publisher.publish(0)
            assert consumer.receive(DEADLINE_S) == 0
            assert own["x"].tolist() == [7.0] * 4


def test_a_publisher_knows_which_version_each_consumer_has(tmp_path: Path) -> None:
    """Also of one that comes late, and of one that comes again with what it has; who has gone is not named."""
    own = {"x": torch.zeros(4)}
    with publish(tmp_path, {"x": torch.ones(4)}, 0, 1, copies=True) as publisher:
        publisher.publish(3)
        with subscribe(tmp_path, into=own, name="late") as consumer:
            consumer.attach(DEADLINE_S)
            assert publisher.consumer_versions == (("late", None),)
            assert consumer.receive(DEADLINE_S) == 3
            late = publisher._late_subscribers
            with late._changed:
                assert late._changed.wait_for(lambda: not late._num_running, DEADLINE_S)
            assert publisher.consumer_versions == (("late", 3),)
            publish_to(publisher, consumer, 4)
            assert publisher.consumer_versions == (("late", 4),)
            consumer._leave("the connection broke")
            assert publisher.consumer_versions == ()
            consumer.attach(DEADLINE_S)
            assert publisher.consumer_versions == (("late", 4),)


def publish_to(publisher: Any, consumer: Subscriber, version: int) -> None:
    """One version to a consumer in this process."""
    received: list[int] = []
    thread = threading.Thread(target=lambda: received.append(consumer.receive(DEADLINE_S)))
    thread.start()
    assert publisher.publish(version).failures == ()
    thread.join()
    assert received == [version]


def overtaken(rank: int, size: int, path: Path) -> Any:
    """Version 2 comes while a late consumer is being served version 1."""
    if rank == 0:
        live = {f"t{index}": torch.full((100,), 1.0) for index in range(40)}
        with publish(path, live, 0, 1, copies=True) as publisher:
            publisher.publish(1)
            meet(path, size, "published")
            meet(path, size, "half of it is there")
            for tensor in live.values():
                tensor.fill_(2.0)
            thread = threading.Thread(target=publisher.publish, args=[2])
            thread.start()
            late = publisher._late_subscribers
            while late._kept is not None:
                pass
            with late._changed:  # held until what is under way has been told to break off
                pass
            meet(path, size, "it has been overtaken")
            thread.join()
            meet(path, size, "through")
            return None
    own = {f"t{index}": torch.zeros(100) for index in range(40)}
    meet(path, size, "published")
    with subscribe(path, load=lambda name, tensor: load(own, path, size, name, tensor)) as consumer:
        with pytest.raises(PublisherLost, match="a newer version is about to come") as caught:
            consumer.receive(DEADLINE_S)
        version = consumer.receive(DEADLINE_S)
        meet(path, size, "through")
    return str(caught.value), version, {float(value) for tensor in own.values() for value in tensor}


def load(own: dict[str, torch.Tensor], path: Path, size: int, name: str, tensor: torch.Tensor) -> None:
    own[name].copy_(tensor)
    if name == "t9" and float(tensor[0]) == 1.0:
        meet(path, size, "half of it is there")
        meet(path, size, "it has been overtaken")


def test_a_newer_version_overtakes_a_late_consumers_own(tmp_path: Path) -> None:
    _none, (_message, version, values) = run_ranks(2, overtaken, tmp_path)
    assert version == 2
    assert values == {2.0}


def gone_in_mid_catch_up(rank: int, size: int, path: Path) -> Any:
    """A holder goes while a late consumer reads from it; the consumer is told, and the next version comes."""
    if rank == 0:
        with publish(path, {"x": torch.ones(5000)}, 0, 1, copies=True, deadline_s=1.0) as publisher:
            publisher.publish(1)
            refuse()
            meet(path, size, "published")
            meet(path, size, "it did not come")
            publisher.publish(2)
            meet(path, size, "through")
            return None
    own = {"x": torch.zeros(5000)}
    meet(path, size, "published")
    with subscribe(path, into=own) as consumer:
        with pytest.raises(PublisherLost) as caught:
            consumer.receive(DEADLINE_S)
        meet(path, size, "it did not come")
        version = consumer.receive(DEADLINE_S)
        meet(path, size, "through")
    return str(caught.value), version


def refuse() -> None:
    """From here on no process who comes late is served."""

    def fail(self: Any, *arguments: Any) -> None:
        raise late_subscribers.CannotGoOn("rank 0", "this is a test")

    late_subscribers.LateSubscribers._serve_now = fail


def test_a_late_consumer_whose_holder_fails_is_reported(tmp_path: Path) -> None:
    _none, (message, version) = run_ranks(2, gone_in_mid_catch_up, tmp_path)
    assert "rank 0" in message
    assert version == 2


def in_background(rank: int, size: int, path: Path) -> Any:
    """The weights change while their copies are on the way."""
    live = {"x": torch.zeros(3000)}
    if rank == 0:
        with publish(path, live, 0, 1, copies=True) as publisher:
            publisher.wait_for_consumers(1, DEADLINE_S)
            future = publisher.publish_in_background(1)
            live["x"].fill_(7.0)
            with pytest.raises(UsageError, match="version 2 cannot be published while another version is"):
                publisher.publish_in_background(2)
            meet(path, size, "the weights have changed")
            assert future.result(DEADLINE_S).failures == ()
            return future.result().version
    taken: list[float] = []

    def load(name: str, tensor: torch.Tensor) -> None:
        meet(path, size, "the weights have changed")
        taken.extend(tensor.tolist())

    with subscribe(path, load=load) as consumer:
        return consumer.receive(DEADLINE_S), set(taken)


def test_copies_are_published_while_the_weights_change(tmp_path: Path) -> None:
    assert run_ranks(2, in_background, tmp_path) == [1, (1, {0.0})]


def test_live_weights_are_not_published_in_the_background(tmp_path: Path) -> None:
    with publish(tmp_path, {"x": torch.zeros(3)}, 0, 1) as publisher:
        with pytest.raises(UsageError, match="copies=True"):
            publisher.publish_in_background(1)
        assert not publisher._is_publishing


def interrupted(rank: int, size: int, path: Path) -> Any:
    """A publication that waits for a device that never comes is broken off."""
    with publish(path, {"x": torch.zeros(3)}, 0, 2) as publisher:
        caught: list[str] = []

        def run() -> None:
            with pytest.raises(PublisherLost) as error:
                publisher.publish(1)
            caught.append(str(error.value))

        thread = threading.Thread(target=run)
        thread.start()
        while not publisher._is_publishing:
            pass
        publisher.interrupt()
        thread.join()
        return caught


def test_a_publication_can_be_interrupted(tmp_path: Path) -> None:
    assert run_ranks(1, interrupted, tmp_path) == [["version 1 was not published: rank 0: it was interrupted"]]
