"""Whatever fails in the middle of an update: who is to blame is named, the others go on, and the next update works."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.weights.cast import publish, subscribe
from tests.worker.ranks import DEADLINE_S, meet, run_ranks

from keepstep.errors import KeepstepError
from keepstep.protocol.transfer.consumer import Condition
from keepstep.weights.device import stages
from keepstep.weights.device.device import NUM_SLOTS
from keepstep.weights.publisher import Publisher
from keepstep.weights.subscriber import Subscriber

PATIENCE_S = 2.0
"""The deadline of these tests: as short as a busy machine allows, for those who are stopped cost each test as much."""
NUM_TENSORS = 64
DEVICES = 2


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Each version has its own number everywhere."""
    return {f"t{index}": torch.full((100,), float(version)) for index in range(NUM_TENSORS)}


def fail(how: str) -> None:
    """What happens to this process."""
    if how == "raises":
        raise ValueError("this consumer does not like what it is given")
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)


def try_to_publish(publisher: Publisher, version: int) -> tuple[str, ...]:
    """What came of it: the failures of consumers, or the error of the whole."""
    try:
        published = publisher.publish(version)
    except KeepstepError as error:
        return (f"{type(error).__name__}: {error}",)
    return tuple(f"{type(each).__name__}: {each}" for each in published.failures)


# ---- a consumer fails -----------------------------------------------------------------------------------------------


def with_a_failing_consumer(rank: int, size: int, path: Path, how: str) -> Any:
    """Two devices; one consumer on the first, two on the second, of which the last fails in version 1."""
    if rank < DEVICES:
        live = weights_of(0)
        with publish(path, live, rank, DEVICES, deadline_s=PATIENCE_S) as publisher:
            publisher.wait_for_consumers(1 + rank, DEADLINE_S)
            outcome = []
            for version in range(3):
                for tensor in live.values():
                    tensor.fill_(version)
                outcome.append(try_to_publish(publisher, version))
            meet(path, size - (how != "raises"), "through")
            return outcome
    own = weights_of(-1)
    fails = rank == size - 1
    with subscribe(
        path,
        device=min(rank - DEVICES, 1),
        name=f"engine {rank - DEVICES}",
        deadline_s=PATIENCE_S,
        **({"load": failing_load(own, how)} if fails else {"into": own}),
    ) as consumer:
        story = follow(consumer, 2)
        meet(path, size - (how != "raises"), "through")
    return story, sorted({float(value) for tensor in own.values() for value in tensor})


def failing_load(own: dict[str, torch.Tensor], how: str) -> Callable[[str, torch.Tensor], None]:
    def load(name: str, tensor: torch.Tensor) -> None:
        if name == "t20" and float(tensor[0]) == 1.0:
            fail(how)
        own[name].copy_(tensor)

    return load


def follow(consumer: Subscriber, last: int) -> list[Any]:
    """Receives until a version has come: versions and errors in their order, with what could be used after each."""
    story: list[Any] = []
    while not story or story[-1] != (last, Condition.READY):
        try:
            came: Any = consumer.receive(DEADLINE_S)
        except KeepstepError as error:
            came = type(error).__name__
        story.append((came, consumer.condition))
    return story


@pytest.mark.parametrize("how", ["killed", "stopped", "raises"])
def test_a_consumer_that_fails_is_named_and_left_out(how: str, tmp_path: Path) -> None:
    gone = frozenset({4}) if how != "raises" else frozenset()
    first, second, *consumers = run_ranks(5, with_a_failing_consumer, tmp_path, how, silent=gone)
    assert first == [(), (), ()]
    assert second[0] == second[2] == ()
    (failure,) = second[1]
    kind, text = {
        "killed": ("SubscriberLost", "engine 2: has closed the connection"),
        "stopped": ("SubscriberLost", "engine 2: has shown nothing for 2 s"),
        "raises": ("LoadError", "ValueError('this consumer does not like what it is given')"),
    }[how]
    assert failure.startswith(f"{kind}: engine 2: ")
    assert text in failure
    whole = [(version, Condition.READY) for version in range(3)]
    assert consumers[:2] == [(whole, [2.0]), (whole, [2.0])]
    if how == "raises":
        assert consumers[2] == ([whole[0], ("LoadError", Condition.PARTIALLY_UPDATED), whole[2]], [2.0])


# ---- a device fails -------------------------------------------------------------------------------------------------


def with_a_failing_device(rank: int, size: int, path: Path, how: str, lost: int, atomic: bool) -> Any:
    """Two devices, a consumer on each; device ``lost`` fails in version 1, and the last process takes its place."""
    others = size - 1
    if rank in (0, 1, size - 1):
        me = lost if rank == size - 1 else rank
        if rank == size - 1:
            meet(path, others, "the failure is known")
        elif rank == lost:
            fail_in_the_middle(how)
        live = weights_of(0)
        with publish(path, live, me, DEVICES, deadline_s=PATIENCE_S) as publisher:
            publisher.wait_for_consumers(1, DEADLINE_S)
            outcome = []
            for version in range(2 if rank == size - 1 else 0, 3):
                if version == 2:
                    meet(path, others, "replaced")
                for tensor in live.values():
                    tensor.fill_(version)
                outcome.append(try_to_publish(publisher, version))
                if version == 1:
                    meet(path, others, "the failure is known")
            meet(path, others, "through")
            return outcome
    own = weights_of(-1)
    with subscribe(path, into=own, device=rank - DEVICES, deadline_s=PATIENCE_S, atomic=atomic) as consumer:
        story: list[Any] = [consumer.receive(DEADLINE_S)]
        with pytest.raises(KeepstepError) as caught:
            consumer.receive(DEADLINE_S)
        story += [type(caught.value).__name__, str(consumer.condition), consumer.version]
        meet(path, others, "the failure is known")
        consumer.attach(DEADLINE_S)
        meet(path, others, "replaced")
        story += [follow(consumer, 2)[-1][0], {float(value) for tensor in own.values() for value in tensor}]
        meet(path, others, "through")
    return story


def fail_in_the_middle(how: str) -> None:
    """From here on this process fails in its second update, when others have read in all of its slots."""
    number = iter(range(1 << 30))
    seal = stages.seal

    def seal_or_fail(slot: torch.Tensor, bucket: Any, checksum: bytes) -> None:
        seal(slot, bucket, checksum)
        if float(slot[:4].view(torch.float32)[0]) == 1.0 and next(number) == NUM_SLOTS:
            fail(how)

    stages.seal = seal_or_fail


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "in place"])
@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("lost", [0, 1], ids=["coordinator", "other"])
def test_a_device_that_fails_is_named_and_can_be_replaced(lost: int, how: str, atomic: bool, tmp_path: Path) -> None:
    answers = run_ranks(5, with_a_failing_device, tmp_path, how, lost, atomic, silent=frozenset({lost}))
    survivor, replacement = answers[1 - lost], answers[4]
    assert survivor[0] == survivor[2] == ()
    assert survivor[1][0].startswith(f"PublisherLost: version 1 was not published: rank {lost}: ")
    assert replacement == [()]
    condition = "ready" if atomic else "partially updated"
    assert answers[2:4] == [[0, "PublisherLost", condition, 0, 2, {2.0}]] * 2
