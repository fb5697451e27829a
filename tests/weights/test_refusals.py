"""What does not fit is refused with an error that names it, and nothing that works is disturbed by it."""

import gc
import resource
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.weights.cast import publish, subscribe
from tests.worker.ranks import DEADLINE_S, meet, run_ranks

from keepstep.errors import (
    BufferUnavailable,
    ChecksumMismatch,
    ConfigurationError,
    KeepstepError,
    PublisherLost,
    RemoteProtocolError,
    StaleGeneration,
    StateMismatch,
    UsageError,
    WeightsNotReady,
    WeightsPartiallyUpdated,
)
from keepstep.protocol.transfer.consumer import Condition
from keepstep.protocol.transfer.messages import DeviceCalled, MovementSeen, UpdateOffered
from keepstep.weights.channels.listener import dial, listener_path
from keepstep.weights.device import stages
from keepstep.weights.memory.blocks import Block

Weights = dict[str, Any]


def plain() -> Weights:
    """What is published here."""
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


# ---- forms that do not fit ------------------------------------------------------------------------------------------

MISFITS: dict[str, tuple[Weights, str]] = {
    "shape": ({"a": torch.zeros(3, 2)}, "takes 'a' as float32[3, 2], published is float32[2, 3]"),
    "dtype": ({"b": torch.zeros(4)}, "takes 'b' as float32[4], published is bfloat16[4]"),
    "name": ({"a": torch.zeros(2, 3), "c": torch.zeros(1)}, "wants 'c', which is not published"),
    "block": (
        {"a": Block(torch.zeros(2, 2), (1, 0), (3, 3))},
        "takes 'a' as float32[2, 2] from [1, 0] on, published is float32[2, 3]",
    ),
}

KINDS = {"shape": "ShapeMismatch", "dtype": "DtypeMismatch", "name": "UnknownTensor", "block": "ShapeMismatch"}


def misfit(rank: int, size: int, path: Path, what: str) -> Any:
    """Rank 0 publishes, rank 1 fits, rank 2 does not."""
    if rank == 0:
        with publish(path, plain(), 0, 1) as publisher:
            publisher.wait_for_consumers(2, DEADLINE_S)
            failures = publisher.publish(7).failures
            meet(path, size, "through")
            return [f"{type(each).__name__}: {each}" for each in failures]
    own = plain() if rank == 1 else MISFITS[what][0]
    with subscribe(path, into=own, name=f"engine {rank}") as consumer:
        try:
            return consumer.receive(DEADLINE_S)
        except StateMismatch as error:
            return str(error), consumer.condition
        finally:
            meet(path, size, "through")


@pytest.mark.parametrize("what", MISFITS)
def test_a_consumer_that_wants_another_form_gets_nothing(what: str, tmp_path: Path) -> None:
    (failure,), fitting, (message, condition) = run_ranks(3, misfit, tmp_path, what)
    assert failure == f"{KINDS[what]}: engine 2 {MISFITS[what][1]}"
    assert fitting == 7
    assert message.endswith(MISFITS[what][1])
    assert condition is Condition.EMPTY


def at_odds(rank: int, size: int, path: Path, what: str) -> str:
    """Two devices that do not hold parts of the same thing."""
    weights: Weights = {"a": torch.zeros(2, 3)}
    if what == "a hole":
        weights = {"a": Block(torch.zeros(1, 3), (2 * rank, 0), (3, 3))}
    elif rank == 1:
        weights = {"a": torch.zeros(2, 3, dtype=torch.float64) if what == "dtype" else torch.zeros(3, 2)}
    with publish(path, weights, rank, 2) as publisher, subscribe(path, load=print, device=rank) as consumer:
        consumer.attach(DEADLINE_S)
        try:
            return "".join(f"{type(each).__name__}: {each}" for each in publisher.publish(1).failures)
        except KeepstepError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            meet(path, size, "through")


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("dtype", "StateMismatch: version 1 was not published: the layout: 'a' is float64[2, 3] on rank 1 and float32"),
        ("shape", "StateMismatch: version 1 was not published: the layout: 'a' is float32[3, 2] on rank 1 and float32"),
        ("a hole", "MissingPart: no source holds 'a' at [1, 0] with shape [1, 3], which is wanted"),
    ],
)
def test_devices_that_are_at_odds_publish_nothing(what: str, text: str, tmp_path: Path) -> None:
    answers = run_ranks(2, at_odds, tmp_path, what)
    assert [answer for answer in answers if text not in answer] == []


def out_of_step(rank: int, size: int, path: Path, ahead: int) -> list[str | int]:
    """One device has given a version up that the others still publish."""
    came: list[str | int] = []
    with publish(path, plain(), rank, size) as publisher:
        came.append(publisher.publish(1).version)
        for version in range(3 if rank == ahead else 2, 5):
            try:
                came.append(publisher.publish(version).version)
            except StaleGeneration as error:
                came.append(str(error))
        meet(path, size, "through")
    return came


@pytest.mark.parametrize("ahead", [0, 1])
def test_devices_that_are_out_of_step_meet_again(ahead: int, tmp_path: Path) -> None:
    answers = run_ranks(3, out_of_step, tmp_path, ahead)
    assert answers[ahead] == [1, 3, 4]
    reasons = ("rank 1: it publishes version 3, rank 0 publishes 2", ": it publishes version 2, rank 0 publishes 3")
    for rank in {0, 1, 2} - {ahead}:
        one, failure, *others = answers[rank]
        assert failure.startswith("version 2 was not published: rank ")
        assert failure.endswith(reasons)
        assert (one, others) == (1, [3, 4])


# ---- memory ---------------------------------------------------------------------------------------------------------


def too_little_memory(rank: int, size: int, path: Path) -> tuple[str, int, int]:
    """A process that may not have files larger than a mebibyte; memory files are files."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    with pytest.raises(BufferUnavailable) as caught:
        publish(path, plain(), 0, 1, bucket_bytes=1 << 20)
    message = str(caught.value)
    del caught  # it holds all that was made so far
    gc.collect()
    after = len(list(Path("/proc/self/fd").iterdir()))
    with publish(path, plain(), 0, 1, bucket_bytes=1 << 16) as publisher:
        return message, after - before, publisher.publish(0).version


def test_buffers_that_do_not_fit_into_memory_are_an_error_and_not_the_end(tmp_path: Path) -> None:
    ((message, num_leaked, version),) = run_ranks(1, too_little_memory, tmp_path)
    assert message.startswith("4.0 MiB of shared memory for 4 buckets is not available (EFBIG")
    assert (num_leaked, version) == (0, 0)


def test_a_bucket_that_holds_no_element_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="bucket_bytes=8: allowed are sizes of at least 16"):
        publish(tmp_path, plain(), 0, 1, bucket_bytes=8)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2 with world_size=2"),
        ({"deadline_s": 0.0}, "deadline_s=0"),
        ({"weights": {"a": torch.zeros(3, device="meta")}}, "'a' is no dense tensor"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], text: str, tmp_path: Path) -> None:
    arguments = {"weights": plain(), "rank": 0, "world_size": 1} | settings
    with pytest.raises(ConfigurationError, match=text):
        publish(tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


# ---- the wrong moment -----------------------------------------------------------------------------------------------


def second_update(rank: int, size: int, path: Path) -> Any:
    """Rank 1 holds the first update up while rank 0 tries a second one."""
    if rank == 1:
        with subscribe(path, load=lambda name, tensor: meet(path, size, f"loading {name} {tensor[0]}")) as consumer:
            versions = [consumer.receive(DEADLINE_S), consumer.receive(DEADLINE_S)]
            meet(path, size, "through")
            return versions
    weights = {"x": torch.tensor([0.0])}
    with publish(path, weights, 0, 1) as publisher:
        publisher.wait_for_consumers(1, DEADLINE_S)
        first = threading.Thread(target=publisher.publish, args=[1])
        first.start()
        while not publisher._is_publishing:
            pass
        with pytest.raises(UsageError) as caught:
            publisher.publish(2)
        meet(path, size, "loading x 0.0")
        first.join()
        weights["x"].fill_(1.0)
        second = threading.Thread(target=publisher.publish, args=[2])
        second.start()
        meet(path, size, "loading x 1.0")
        second.join()
        meet(path, size, "through")
        return str(caught.value)


def test_a_second_update_while_one_runs_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    message, versions = run_ranks(2, second_update, tmp_path)
    assert message == "version 2 cannot be published while another version is"
    assert versions == [1, 2]


def of_old_generation(rank: int, size: int, path: Path) -> Any:
    """Rank 0 goes on to generation 2, rank 1 stays in 1; the consumer has heard of 2."""
    if rank == 2:
        with subscribe(path, into=plain(), device=0) as consumer:
            versions = [consumer.receive(DEADLINE_S), consumer.receive(DEADLINE_S)]
            meet(path, size, "through")
        with subscribe(path, into=plain(), device=1) as late:
            late._generation = 2
            with pytest.raises(KeepstepError) as caught:
                late.receive(1.0)
        meet(path, size, "closing")
        return versions, str(caught.value)
    devices = path / "devices"  # a store is for a fixed number of processes
    devices.mkdir(exist_ok=True)
    with publish(path, plain(), rank, 2, generation=1) as publisher, ThreadPoolExecutor() as threads:
        if rank == 0:
            publisher.wait_for_consumers(1, DEADLINE_S)
        outcome = [publisher.publish(1).version]
        meet(devices, 2, "published")
        if rank == 0:
            publisher.generation = 2
        meet(devices, 2, "one is of another generation")
        publishing = threads.submit(publisher.publish, 2)
        if rank == 1:
            wait([publishing])
        meet(devices, 2, "the older one has failed")
        publisher.interrupt()  # the other one waits for a device of its own generation
        with pytest.raises(KeepstepError) as failed:
            publishing.result()
        outcome.append(f"{failed.typename}: {failed.value}")
        meet(devices, 2, "both have failed")
        publisher.generation = 2
        meet(devices, 2, "all are of the new one")
        outcome.append(publisher.publish(3).version)
        if rank == 1:
            publisher.generation = 1
        meet(path, size, "through")
        meet(path, size, "closing")
    return outcome


def test_a_publisher_of_an_old_generation_is_refused(tmp_path: Path) -> None:
    first, second, (versions, late) = run_ranks(3, of_old_generation, tmp_path)
    assert (first[0], first[2]) == (second[0], second[2]) == (1, 3)
    assert first[1] == "PublisherLost: version 2 was not published: rank 0: it was interrupted"
    assert second[1].startswith("StaleGeneration: ")
    assert versions == [1, 3]
    assert "it is of generation 1, the caller of 2" in late


def unusable(rank: int, size: int, path: Path) -> Any:
    """What a consumer without a version answers, and how one that comes out of a partial update does."""
    own = {"x": torch.zeros(8)}
    if rank == 0:
        weights = {"x": torch.ones(8)}
        with publish(path, weights, 0, 1) as publisher:
            publisher.wait_for_consumers(1, DEADLINE_S)
            damage_next_bucket()
            failures = [str(each) for each in publisher.publish(1).failures]
            publisher.publish(2)
            meet(path, size, "through")
            return failures
    with subscribe(path, into=own, atomic=False, name="engine") as consumer:
        with pytest.raises(WeightsNotReady, match="no version has arrived yet"), consumer.using():
            pass
        with pytest.raises(ChecksumMismatch):
            consumer.receive(DEADLINE_S)
        with (
            pytest.raises(WeightsPartiallyUpdated, match=r"version 1 broke off halfway .*wrong checksum"),
            consumer.using(),
        ):
            pass
        assert consumer.receive(DEADLINE_S) == 2
        with consumer.using() as version:
            meet(path, size, "through")
            return version, own["x"].tolist()


def damage_next_bucket() -> None:
    """One bit changes after the checksum of the next bucket was taken."""
    seal, damaged = stages.seal, []

    def seal_and_damage(slot: torch.Tensor, bucket: Any, checksum: bytes) -> None:
        seal(slot, bucket, checksum)
        if not damaged:
            damaged.append(bucket)
            slot[0] ^= 1

    stages.seal = seal_and_damage


def test_damaged_weights_are_never_ready(tmp_path: Path) -> None:
    failures, consumer = run_ranks(2, unusable, tmp_path)
    assert failures == ["engine: bucket 0 has a wrong checksum"]
    assert consumer == (2, [1.0] * 8)


# ---- strangers ------------------------------------------------------------------------------------------------------


def test_who_says_something_else_at_the_door_is_sent_away(tmp_path: Path) -> None:
    with publish(tmp_path, plain(), 0, 1) as publisher:
        for stranger in (MovementSeen(0), DeviceCalled(5, 0), UpdateOffered(-1, 0, 1, 0, (), (), ())):
            with pytest.raises(RemoteProtocolError, match=r"opens no connection|there is no rank"):
                dial(listener_path(tmp_path, 0), stranger, "rank 0", 1e9)
        assert publisher.publish(1).failures == ()


def test_a_consumer_without_a_publisher_waits_and_says_so(tmp_path: Path) -> None:
    with subscribe(tmp_path, into=plain()) as consumer, pytest.raises(KeepstepError, match="does not answer"):
        consumer.receive(0.1)


def test_a_publisher_that_is_closed_is_missed(tmp_path: Path) -> None:
    with subscribe(tmp_path, into=plain()) as consumer:
        with publish(tmp_path, plain(), 0, 1):
            consumer.attach(DEADLINE_S)
        with pytest.raises(PublisherLost, match="rank 0 has closed the connection"):
            consumer.receive(DEADLINE_S)
        with publish(tmp_path, plain(), 0, 1) as publisher:
            thread = threading.Thread(target=consumer.receive, args=[DEADLINE_S])
            thread.start()
            publisher.wait_for_consumers(1, DEADLINE_S)
            publisher.publish(3)
            thread.join()
            assert consumer.version == 3


def test_a_consumer_that_cannot_answer_leaves_a_publisher_that_is_gone(tmp_path: Path) -> None:
    """The publisher goes while a bucket is loaded: the consumer finds out when it wants to say that it has it."""
    publishers = [publish(tmp_path, plain(), 0, 1)]

    def load(name: str, tensor: torch.Tensor) -> None:
        if len(publishers) == 1:
            publishers[0].interrupt()
            publishing.exception(DEADLINE_S)
            publishers.append(publish(tmp_path, plain(), 0, 1))
            publishers[0].close()

    with subscribe(tmp_path, load=load) as consumer, ThreadPoolExecutor() as threads:
        consumer.attach(DEADLINE_S)
        publishing = threads.submit(publishers[0].publish, 1)
        with pytest.raises(PublisherLost, match="it was interrupted"):
            consumer.receive(DEADLINE_S)
        with pytest.raises(PublisherLost, match="rank 0 has closed the connection"):
            consumer.receive(DEADLINE_S)
        consumer.attach(DEADLINE_S)
        with publishers[1]:
            publishers[1].wait_for_consumers(1, DEADLINE_S)


def test_a_consumer_that_is_refused_can_still_be_closed(tmp_path: Path) -> None:
    consumer = subscribe(tmp_path, into=plain())
    consumer._generation = 3
    with publish(tmp_path, plain(), 0, 1):
        consumer.start()
        with pytest.raises(RemoteProtocolError, match="it is of generation 0, the caller of 3"):
            consumer.wait_for(0, 1.0)
        consumer.close()


@pytest.mark.parametrize("version", [-1, 1 << 63])
def test_a_version_that_is_no_number_for_one_is_refused(version: int, tmp_path: Path) -> None:
    with publish(tmp_path, plain(), 0, 1) as publisher:
        with pytest.raises(UsageError, match=f"version {version}: allowed are 0 to"):
            publisher.publish(version)
        assert publisher.publish((1 << 63) - 1).failures == ()


def test_a_name_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is no name: it cannot be written in UTF-8"):
        publish(tmp_path, {"\udc80": torch.zeros(1)}, 0, 1)
    with pytest.raises(ConfigurationError, match="is no name"):
        subscribe(tmp_path, into={"a\ud800": torch.zeros(1)})


def test_the_first_version_may_be_number_0(tmp_path: Path) -> None:
    with publish(tmp_path, plain(), 0, 1) as publisher, subscribe(tmp_path, into=plain()) as consumer:
        consumer.start()
        publisher.wait_for_consumers(1, DEADLINE_S)
        publisher.publish(0)
        assert consumer.wait_for(0, DEADLINE_S) == 0


def test_who_keeps_its_weights_in_use_does_not_get_a_version_and_is_named(tmp_path: Path) -> None:
    own = {"a": torch.zeros(2, 3)}
    with publish(tmp_path, plain(), 0, 1) as publisher, subscribe(tmp_path, into=own, name="e", deadline_s=0.2) as busy:
        busy.start()
        publisher.wait_for_consumers(1, DEADLINE_S)
        publisher.publish(1)
        assert busy.version == 1, "it has switched when publish() returns"
        with busy.using():
            (failure,) = publisher.publish(2).failures
            assert str(failure) == "e: its weights were in use all the time"
            assert busy.version == 1
        assert publisher.publish(3).failures == ()
        with busy.using() as version:
            assert version == 3
