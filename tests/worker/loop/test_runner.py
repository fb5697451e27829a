"""Functions as steps, what is deferred until a step counts, on one rank that is stopped now and then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.worker.ranks import run_ranks
from tests.worker.single import NUM_STEPS, Training

from keepstep.errors import UsageError

AT = 2


def steps_of(training: Training, stops: bool) -> dict[str, Any]:
    """Runs each step as a function that takes what it is given apart; ``stops`` once in step `AT`."""
    session, lines, results, attempts = training.session, [], [], []

    def body(batch: dict[str, Any], *, index: int) -> float:
        attempts.append(index)
        session.defer(lines.append, index)
        x = batch.pop("x")
        loss = training.model(x).square().mean()
        if stops and index == AT and attempts.count(AT) == 1:
            training.link.stop(2)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return loss.item()

    run = session.step(body)
    for step in session.steps(NUM_STEPS):
        generator = torch.Generator().manual_seed(step.index)
        results.append(run({"x": torch.randn(8, 4, generator=generator)}, index=step.index))
        assert step.committed
    return {"lines": lines, "results": results, "attempts": attempts, "digest": training.digest()}


def trained(_rank: int, _size: int, stops: bool) -> dict[str, Any]:
    return steps_of(Training(), stops)


def test_a_function_is_called_again_with_what_it_was_given_and_its_result_is_that_of_the_step_that_counts() -> None:
    ((undisturbed,), (interrupted,)) = run_ranks(1, trained, False), run_ranks(1, trained, True)
    assert interrupted["attempts"] == [0, 1, AT, AT, 3, 4]
    for name in ("lines", "results", "digest"):
        assert interrupted[name] == undisturbed[name]
    assert undisturbed["lines"] == list(range(NUM_STEPS))


def changes_its_input(_rank: int, _size: int) -> str:
    training = Training()

    def body(x: torch.Tensor) -> None:
        x.mul_(2.0)
        training.model(x).square().mean().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()

    next(training.session.steps(NUM_STEPS))
    with pytest.raises(UsageError) as caught:
        training.session.run_step(body, torch.randn(8, 4))
    return str(caught.value)


def test_a_tensor_that_is_changed_in_place_is_refused() -> None:
    (message,) = run_ranks(1, changes_its_input)
    assert "body has changed a tensor in place" in message


def outside(_rank: int, _size: int) -> list[str]:
    training, called = Training(), []
    with pytest.raises(UsageError) as caught:
        training.session.run_step(print)
    training.session.defer(called.append, "at once")
    return [str(caught.value), *called]


def test_outside_of_a_loop_a_step_is_refused_and_what_is_deferred_happens_at_once() -> None:
    ((message, called),) = run_ranks(1, outside)
    assert "run_step() outside of a loop" in message
    assert called == "at once"
