"""Which versions one rank publishes, and when: behind steps, and at the start where it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.worker.ranks import DEADLINE_S

from keepstep.errors import WeightsNotReady
from keepstep.protocol.messages import PublicationStage, WeightsObserved
from keepstep.weights.subscriber import Subscriber
from keepstep.worker.publication import StepPublication, Voice


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(8)}


@pytest.fixture
def subscriber(tmp_path: Path) -> Iterator[tuple[Subscriber, dict[str, torch.Tensor]]]:
    into = {"w": torch.full((8,), -1.0)}
    with Subscriber(tmp_path / "w", into=into, deadline_s=DEADLINE_S) as made:
        made.start()
        yield made, into


def publication(folder: Path, weights: dict[str, torch.Tensor], at_start: bool) -> StepPublication:
    return StepPublication(folder / "w", weights, every=1, deadline_s=DEADLINE_S, at_start=at_start)


def wait_for_a_consumer(publishing: StepPublication) -> None:
    assert publishing._publisher is not None
    publishing._publisher.wait_for_consumers(1, DEADLINE_S)


def test_the_start_and_each_recovery_are_published_too(tmp_path: Path, weights, subscriber) -> None:
    """A job goes back from step 5 to step 3: consumers follow it."""
    consumer, into = subscriber
    publishing = publication(tmp_path, weights, at_start=True)
    for generation, steps in ((1, (0, 4, 5)), (2, (3, 4))):
        for num_steps in steps:
            weights["w"].fill_(num_steps)
            publishing.stand_ready(0, 1, generation, num_steps)
            if num_steps != steps[0]:
                publishing.after_step(num_steps)
            with consumer.using(DEADLINE_S, version=num_steps) as version:
                assert into["w"].tolist() == [float(version)] * 8
    publishing.close()


def test_without_asking_for_it_the_start_is_no_version(tmp_path: Path, weights, subscriber) -> None:
    consumer, _into = subscriber
    publishing = publication(tmp_path, weights, at_start=False)
    publishing.stand_ready(0, 1, 1, 0)
    consumer.attach(DEADLINE_S)
    publishing.flush()
    with (
        pytest.raises(WeightsNotReady, match=r"version 0 did not come within 0\.1 s: there is none yet"),
        consumer.using(0.1, version=0),
    ):
        pass
    publishing.after_step(1)
    assert consumer.wait_for(1, DEADLINE_S) == 1
    publishing.close()


def test_an_update_is_told_of_when_it_begins_and_ends(tmp_path: Path, weights, subscriber) -> None:
    """With the consumers and the version of each, what was sent, and when each stage was busy."""
    consumer, _into = subscriber
    told: list[WeightsObserved] = []
    publishing = StepPublication(tmp_path / "w", weights, every=2, deadline_s=DEADLINE_S, voice=Voice(7, told.append))
    publishing.stand_ready(0, 1, 3, 0)
    wait_for_a_consumer(publishing)
    publishing.after_step(1)  # nothing is due, but a consumer has come
    publishing.after_step(2)
    assert consumer.wait_for(2, DEADLINE_S) == 2
    publishing.flush()
    publishing.after_step(3)
    publishing.close()
    stages = PublicationStage
    assert [(each.stage, each.version) for each in told] == [
        (stages.ATTACHED, None),
        (stages.UNDER_WAY, 2),
        (stages.COMMITTED, 2),
    ]
    assert {(each.worker, each.rank, each.generation, each.folder) for each in told} == {(7, 0, 3, str(tmp_path / "w"))}
    assert [each.consumers for each in told] == [((consumer.name, version),) for version in (None, None, 2)]
    last = told[-1]
    assert (last.sent_bytes, last.unchanged_bytes, last.failures) == (weights["w"].nbytes, 0, ())
    assert [(each.stage, each.bucket) for each in last.spans] == [("h2d", 0), ("broadcast", 0), ("reload", 0)]
    ends = [time for each in last.spans for time in (each.begin_s, each.end_s)]
    assert 0 <= ends[0] <= ends[1] <= last.at_s - last.begun_s
    assert ends[1] <= ends[5] <= last.at_s - last.begun_s


def test_an_update_that_broke_off_is_reported_with_its_reason(tmp_path: Path, weights) -> None:
    """The second of two ranks never comes."""
    told: list[WeightsObserved] = []
    publishing = StepPublication(tmp_path / "w", weights, every=1, deadline_s=0.5, voice=Voice(0, told.append))
    publishing.stand_ready(0, 2, 1, 0)
    publishing.after_step(1)
    publishing.flush()
    publishing.close()
    assert [each.stage for each in told] == [PublicationStage.UNDER_WAY, PublicationStage.BROKEN_OFF]
    (why,) = told[-1].failures
    assert why.startswith("version 1 was not published: ")


def test_a_consumer_that_fails_is_named(tmp_path: Path, weights) -> None:
    told: list[WeightsObserved] = []
    publishing = StepPublication(tmp_path / "w", weights, every=1, deadline_s=DEADLINE_S, voice=Voice(0, told.append))
    publishing.stand_ready(0, 1, 1, 0)

    def load(_name: str, _tensor: torch.Tensor) -> None:
        raise RuntimeError("no room")

    with Subscriber(tmp_path / "w", load=load, name="engine", deadline_s=DEADLINE_S) as consumer:
        consumer.start()
        wait_for_a_consumer(publishing)
        publishing.after_step(1)
        publishing.flush()
    publishing.close()
    assert told[-1].stage is PublicationStage.COMMITTED
    (why,) = told[-1].failures
    assert why.startswith("engine: load() raised RuntimeError('no room')")
    assert told[-1].consumers == (("engine", None),)


def test_a_version_that_is_due_when_training_is_interrupted_is_reported_as_not_published(
    tmp_path: Path, weights, capfd
) -> None:
    told: list[WeightsObserved] = []
    publishing = StepPublication(tmp_path / "w", weights, every=2, deadline_s=DEADLINE_S, voice=Voice(7, told.append))
    publishing.stand_ready(0, 2, 3, 0)
    publishing.after_step(1, is_interrupted=True)
    assert told == []
    publishing.after_step(2, is_interrupted=True)
    publishing.close()
    ((stage, version, failures),) = [(each.stage, each.version, each.failures) for each in told]
    why = "version 2 was not published: rank 0: it was interrupted"
    assert (stage, version, failures) == (PublicationStage.BROKEN_OFF, 2, (why,))
    assert capfd.readouterr().err == f"keepstep: publishing weights: {why}\n"
