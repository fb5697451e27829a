"""Which versions one rank publishes, and when: behind steps, and at the start where it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.worker.ranks import DEADLINE_S

from keepstep.errors import WeightsNotReady
from keepstep.weights.subscriber import Subscriber
from keepstep.worker.publication import StepPublication


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
