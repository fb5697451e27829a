"""Stop points: evenly spread, in both directions, and no more than are needed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepstep.protocol.phases import Phase
from keepstep.worker.step.stop_points import LEARNING_STEPS, NUM_STOP_POINTS, SPACING_S, StopPoints, spread


@given(st.integers(0, 300), st.integers(1, 100))
def test_items_are_spread_evenly(num_items: int, count: int) -> None:
    found = spread(range(num_items), count)
    assert len(found) == min(num_items, count)
    assert found == sorted(set(found))
    if num_items > count:
        gaps = [later - earlier for earlier, later in zip(found, [*found[1:], num_items], strict=True)]
        assert max(gaps) - min(gaps) <= 1


class Watched:
    """A model with stop points, and what they told in the order in which they did."""

    def __init__(self, num_layers: int) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(num_layers)))
        self.phases: list[Phase] = []
        self.num_checks: Counter[Phase | None] = Counter()
        self.stops_in: Phase | None = None
        self.points = StopPoints({"model": self.model, "empty": torch.nn.ReLU()}, self._check, self.phases.append)

    def _check(self) -> None:
        phase = self.phases[-1] if self.phases else None
        self.num_checks[phase] += 1
        if self.stops_in is phase:
            raise InterruptedError

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.ones(1, 2)).sum()
        return loss


@pytest.mark.parametrize("num_layers", [1, 10, 200])
def test_each_direction_has_as_many_as_there_are_parts_up_to_a_bound(num_layers: int) -> None:
    watched = Watched(num_layers)
    watched.stops_in = Phase.SYNCED  # in none of them
    watched.forward().backward()
    assert watched.num_checks[Phase.FORWARD] == 1 + min(num_layers, NUM_STOP_POINTS)
    assert watched.num_checks[Phase.BACKWARD] == min(2 * num_layers, NUM_STOP_POINTS)
    assert watched.phases[0] is Phase.FORWARD
    assert set(watched.phases[1:]) == {Phase.BACKWARD}


def test_of_modules_that_are_only_held_each_pass_is_marked() -> None:
    """As a pipeline's schedule runs its stages, which may not even accumulate gradients in the backward."""
    stages = torch.nn.ModuleDict({"first": torch.nn.Linear(2, 2), "more": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
    phases: list[Phase] = []
    StopPoints({"stages": stages}, lambda: None, phases.append)
    for stage in (stages["first"], stages["more"][0]):
        output = stage(torch.ones(1, 2))
        torch.autograd.grad(output.sum(), list(stage.parameters()))
    assert phases == [Phase.FORWARD, Phase.BACKWARD] * 2


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_a_pass_is_left_where_a_check_raises(phase: Phase) -> None:
    watched = Watched(3)
    watched.stops_in = phase
    with pytest.raises(InterruptedError):
        watched.forward().backward()
    assert watched.num_checks[phase] == 1


def test_an_evaluation_is_no_forward_of_a_step() -> None:
    watched = Watched(3)
    watched.stops_in = Phase.SYNCED
    with torch.no_grad():
        watched.forward()
    assert watched.phases == []


@pytest.mark.parametrize(("step_s", "per_direction"), [(SPACING_S / 2, 0), (3.5 * SPACING_S, 3), (1.0, 10)])
def test_short_steps_keep_few(step_s: float, per_direction: int) -> None:
    """The phases are marked all the same."""
    watched = Watched(10)
    watched.stops_in = Phase.SYNCED
    for _ in range(LEARNING_STEPS):
        watched.points.step_took(step_s)
    watched.points.step_took(100.0)  # it is known by now
    watched.forward().backward()
    assert watched.num_checks[Phase.FORWARD] == 1 + per_direction
    assert watched.num_checks[Phase.BACKWARD] == (
        20 if per_direction == 10 else per_direction
    )  # two parameters a layer
    assert set(watched.phases) == {Phase.FORWARD, Phase.BACKWARD}
