"""Versions of which only what has changed travels: nothing else moves, and every bit is right all the same."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.weights.cast import bits, publish, subscribe
from tests.worker.ranks import DEADLINE_S, meet, run_ranks

from keepstep.errors import BaseMismatch, ChecksumMismatch, ConfigurationError, LoadError, PublisherLost
from keepstep.protocol.transfer.consumer import Condition
from keepstep.protocol.transfer.names import NameMap, NameRule, Quantize
from keepstep.weights import subscriber as subscriber_module
from keepstep.weights.device import stages
from keepstep.weights.memory.blocks import Block
from keepstep.weights.memory.mapping.mapped import Mapped
from keepstep.weights.publisher import Published, Publisher
from keepstep.weights.subscriber import Subscriber

BUCKET_BYTES = 1024


class Adapted(torch.nn.Module):
    """Frozen layers, each of a bucket or more, and a small adapter, as with LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.ModuleList(torch.nn.Linear(16, 16, bias=False) for _ in range(4))
        self.adapter = torch.nn.Linear(16, 2, bias=False)


FROZEN_BYTES, ADAPTER_BYTES = 4 * 16 * 16 * 4, 16 * 2 * 4


class Pair:
    """A publisher and consumers of it, each in a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._threads = ThreadPoolExecutor(8)

    def publisher(self, weights: Any, **settings: Any) -> Publisher:
        return self._stack.enter_context(publish(self.path, weights, 0, 1, bucket_bytes=BUCKET_BYTES, **settings))

    def subscriber(self, into: Any, **settings: Any) -> Subscriber:
        return self._stack.enter_context(subscribe(self.path, into=into, delta=True, **settings))

    def publish(self, publisher: Publisher, version: int, *consumers: Subscriber) -> tuple[Published, list[Any]]:
        """One version; what came of it, and what each consumer's `receive` returned or raised."""
        for consumer in consumers:
            consumer.attach(DEADLINE_S)
        publisher.wait_for_consumers(len(consumers), DEADLINE_S)
        self._received = [self._threads.submit(consumer.receive, DEADLINE_S) for consumer in consumers]
        return publisher.publish(version), self.received()

    def received(self) -> list[Any]:
        """What each `receive` of the latest version returned or raised."""
        return [each.exception(DEADLINE_S) or each.result() for each in self._received]

    def close(self) -> None:
        self._stack.close()
        self._threads.shutdown()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def tensors_of(weights: Any) -> dict[str, torch.Tensor]:
    return dict(weights.state_dict()) if isinstance(weights, torch.nn.Module) else weights


INTO: dict[str, tuple[Callable[[], Any], bool]] = {
    "a module, atomic": (Adapted, True),
    "a module, in place": (Adapted, False),
    "tensors, atomic": (lambda: {name: tensor.clone() for name, tensor in Adapted().state_dict().items()}, True),
}


@pytest.mark.parametrize("into", INTO)
def test_frozen_layers_move_no_bytes(into: str, pair: Pair) -> None:
    model, (make, atomic) = Adapted(), INTO[into]
    own = make()
    publisher, consumer = pair.publisher(model), pair.subscriber(own, atomic=atomic)
    for version in range(5):
        published, received = pair.publish(publisher, version, consumer)
        assert (published.failures, received) == ((), [version])
        assert bits(tensors_of(own)) == bits(tensors_of(model))
        everything = FROZEN_BYTES + ADAPTER_BYTES
        expected = (everything, 0) if not version else (ADAPTER_BYTES, FROZEN_BYTES)
        assert (published.sent_bytes, published.unchanged_bytes) == expected
        moved = [span.stage for span in published.spans.spans if span.stage == "broadcast"]
        assert len(moved) == (5 if not version else 1)
        assert len([span for span in consumer.spans.spans if span.stage == "reload"]) == len(moved)
        with torch.no_grad():
            model.adapter.weight.add_(1)


@pytest.mark.parametrize("into", INTO)
def test_any_sparse_updates_arrive(into: str, pair: Pair, seed: int) -> None:
    """Also those that take a value back, which the set that is filled may have, or the one in use, or none."""
    rng, model, (make, atomic) = random.Random(seed), Adapted(), INTO[into]
    own, total = make(), 0
    publisher, consumer = pair.publisher(model, copies=True), pair.subscriber(own, atomic=atomic)
    for version in range(12):
        for parameter in rng.sample(list(model.parameters()), rng.randrange(4)):
            parameter.data[rng.randrange(len(parameter)), 0] = rng.randrange(2)
        published, received = pair.publish(publisher, version, consumer)
        assert (published.failures, received) == ((), [version])
        assert bits(tensors_of(own)) == bits(tensors_of(model))
        total += published.unchanged_bytes
    assert total > 0


def test_nothing_is_left_out_for_a_consumer_that_does_not_ask(pair: Pair) -> None:
    model, own = Adapted(), Adapted()
    publisher = pair.publisher(model)
    with subscribe(pair.path, into=own) as consumer:
        for version in range(3):
            published, received = pair.publish(publisher, version, consumer)
            assert received == [version]
            assert (published.sent_bytes, published.unchanged_bytes) == (FROZEN_BYTES + ADAPTER_BYTES, 0)


def test_one_that_joins_or_comes_again_gets_all_of_it(pair: Pair) -> None:
    model, first, second = Adapted(), Adapted(), Adapted()
    publisher, one = pair.publisher(model), pair.subscriber(first, name="one")
    pair.publish(publisher, 0, one)
    other = pair.subscriber(second, name="other")
    published, received = pair.publish(publisher, 1, one, other)
    assert (published.failures, received) == ((), [1, 1])
    assert published.sent_bytes == FROZEN_BYTES + ADAPTER_BYTES
    assert bits(tensors_of(first)) == bits(tensors_of(second)) == bits(tensors_of(model))
    published, received = pair.publish(publisher, 2, one, other)
    assert (received, published.sent_bytes) == ([2, 2], 0)
    other.close()
    published, received = pair.publish(publisher, 3, one)
    assert (received, published.sent_bytes) == ([3], 0)  # who leaves changes nothing for the others
    one.close()
    published, received = pair.publish(publisher, 4, pair.subscriber(first, name="one"))
    assert (received, published.sent_bytes) == ([4], FROZEN_BYTES + ADAPTER_BYTES)


def test_plans_may_change_between_versions(pair: Pair, seed: int) -> None:
    """One that wants other blocks comes and goes, so buckets are cut otherwise, and back again."""
    rng = random.Random(seed)
    model, own = (torch.nn.ParameterDict({name: torch.zeros(16, 16) for name in "ab"}) for _ in range(2))
    weights = tensors_of(model)
    publisher, consumer = pair.publisher(model), pair.subscriber(own, name="engine")
    unchanged = 0
    for version in range(40):
        for name in weights:
            weights[name][5, 0] = rng.randrange(2)  # so that a set may have had it before
        if rng.random() < 0.5:
            half = Block(torch.zeros(7, 16), (rng.choice([0, 3]), 0), (16, 16))
            with subscribe(pair.path, into={"a": half}, name="other") as other:
                published, received = pair.publish(publisher, version, consumer, other)
        else:
            published, received = pair.publish(publisher, version, consumer)
        assert (published.failures, set(received)) == ((), {version})
        assert bits(tensors_of(own)) == bits(weights)
        unchanged += published.unchanged_bytes
    assert unchanged > 0


def test_a_base_that_is_not_here_is_refused_and_the_next_version_is_full(pair: Pair) -> None:
    model, own = Adapted(), Adapted()
    publisher, consumer = pair.publisher(model), pair.subscriber(own, name="engine")
    pair.publish(publisher, 0, consumer)
    before = bits(tensors_of(own))
    consumer._target._checksums = [{}, {}]  # as if something else were in the weights than was sent
    with torch.no_grad():
        model.adapter.weight.add_(1)
    published, (error,) = pair.publish(publisher, 1, consumer)
    assert isinstance(error, BaseMismatch)
    assert "version 1 builds on version 0, of which bucket 0 is not what is here" in str(error)
    (failure,) = published.failures
    assert isinstance(failure, LoadError)
    assert "engine: version 1 builds on version 0" in str(failure)
    assert (consumer.version, consumer.condition, bits(tensors_of(own))) == (0, Condition.READY, before)
    published, received = pair.publish(publisher, 2, consumer)
    assert (received, published.unchanged_bytes) == ([2], 0)
    assert bits(tensors_of(own)) == bits(tensors_of(model))


@pytest.mark.parametrize("atomic", [True, False])
def test_after_a_version_that_failed_the_next_one_is_full(
    atomic: bool, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, what has been written before the failure is a version that the others have and this one has not."""
    model, own = Adapted(), Adapted()
    publisher, consumer = pair.publisher(model), pair.subscriber(own, atomic=atomic)
    pair.publish(publisher, 0, consumer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    seal = stages.seal
    damaged = threading.Event()

    def damage_third(slot: torch.Tensor, bucket: Any, checksum: bytes) -> None:
        seal(slot, bucket, checksum)
        if bucket.index == 2 and not damaged.is_set():
            damaged.set()
            slot[0] ^= 1

    monkeypatch.setattr(stages, "seal", damage_third)
    published, (error,) = pair.publish(publisher, 1, consumer)
    assert isinstance(error, ChecksumMismatch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(1)  # version 2 is version 0 again
    published, received = pair.publish(publisher, 2, consumer)
    assert (received, published.unchanged_bytes) == ([2], 0)
    assert bits(tensors_of(own)) == bits(tensors_of(model))


@pytest.mark.parametrize("atomic", [True, False])
def test_after_an_update_that_broke_off_the_next_one_is_full(
    atomic: bool, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source counts from the version before, which this consumer, in place, has no more."""
    model, own = Adapted(), Adapted()
    publisher, consumer = pair.publisher(model), pair.subscriber(own, atomic=atomic)
    pair.publish(publisher, 0, consumer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)

    def fail_third(slot: torch.Tensor, bucket: Any, checksum: bytes) -> None:
        if bucket.index == 2:
            raise RuntimeError("no more")
        seal(slot, bucket, checksum)

    seal = stages.seal
    with monkeypatch.context() as patch:
        patch.setattr(stages, "seal", fail_third)
        with pytest.raises(RuntimeError, match="no more"):
            pair.publish(publisher, 1, consumer)
    (lost,) = pair.received()
    assert isinstance(lost, PublisherLost)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(1)  # version 2 is version 0 again
    published, received = pair.publish(publisher, 2, consumer)
    assert (received, published.failures, published.unchanged_bytes) == ([2], (), 0)
    assert bits(tensors_of(own)) == bits(tensors_of(model))


def test_a_whole_version_has_a_checksum_that_its_device_compares(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = Adapted(), Adapted()
    publisher, consumer = pair.publisher(model), pair.subscriber(own, name="engine")
    pair.publish(publisher, 0, consumer)
    before = bits(tensors_of(own))
    with monkeypatch.context() as patch:
        patch.setattr(subscriber_module, "checksum_of_version", lambda checksums: b"another!")
        published, (error,) = pair.publish(publisher, 1, consumer)
    assert isinstance(error, ChecksumMismatch)
    assert "engine: what it has is not the whole version" in str(error)
    assert [type(each) for each in published.failures] == [ChecksumMismatch]
    assert (consumer.version, bits(tensors_of(own))) == (0, before)
    published, received = pair.publish(publisher, 2, consumer)
    assert (received, published.failures) == ([2], ())


def test_what_keeps_nothing_cannot_ask_for_deltas(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="delta=True needs into="):
        Subscriber(tmp_path, load=lambda name, tensor: None, delta=True)
    own = {"w": torch.zeros(2, 2).to(torch.float8_e4m3fn), "s": torch.zeros(1)}
    with pytest.raises(ConfigurationError, match="delta=True with a quantized tensor"):
        Subscriber(tmp_path, into=Mapped(own, NameMap((NameRule("w", "w", Quantize("s")),))), delta=True)


# ---- Between processes ----------------------------------------------------------------------------------------------

VERSIONS = 6


def step(model: torch.nn.Module, version: int) -> None:
    """The next version, the same in every process."""
    with torch.no_grad():
        model.adapter.weight[version % 2] += version + 1


def sparse_delivery(rank: int, size: int, path: Path, seed: int) -> Any:
    """Two devices that hold replicas, and on each a consumer; on the second one also one that takes all each time."""
    torch.manual_seed(seed)
    model, own = Adapted(), Adapted()
    if rank < 2:
        found = []
        with publish(path, model, rank, 2, bucket_bytes=BUCKET_BYTES) as publisher:
            publisher.wait_for_consumers(rank + 1, DEADLINE_S)
            for version in range(VERSIONS):
                published = publisher.publish(version)
                assert published.failures == ()
                brought = [span for span in published.spans.spans if span.stage == "broadcast"]
                found.append((len(brought), published.sent_bytes, published.unchanged_bytes))
                step(model, version)
            meet(path, size, "through")
        return found
    with subscribe(path, into=own, device=min(rank - 2, 1), delta=rank < 4) as consumer:
        for version in range(VERSIONS):
            assert consumer.receive(DEADLINE_S) == version
            assert bits(tensors_of(own)) == bits(tensors_of(model))
            step(model, version)
        meet(path, size, "through")
    return None


def test_a_bucket_goes_to_the_devices_alone_that_lack_it(tmp_path: Path, seed: int) -> None:
    first, second, *_consumers = run_ranks(5, sparse_delivery, tmp_path, seed)
    assert [brought for brought, *_bytes in first] == [5, *[1] * (VERSIONS - 1)]
    assert [brought for brought, *_bytes in second] == [5] * VERSIONS
    for one, other in zip(first, second, strict=True):
        assert one[1] + other[1] == FROZEN_BYTES + ADAPTER_BYTES  # all of it goes to the second device
        assert one[2] == other[2] == 0
