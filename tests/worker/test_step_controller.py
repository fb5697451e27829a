"""The steps of one rank without a job: begin, commit, undo, as another framework's loop would call them.

The rank is alone, and the test plays the controller: it stops the rank at a moment of its choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.worker.ranks import run_ranks
from tests.worker.single import NUM_STEPS, Training
from torch.distributed.checkpoint.api import CheckpointException

from keepstep.errors import StepInterrupted, UsageError
from keepstep.protocol.phases import Phase

AT = 2
"""The step in which the rank is stopped."""


def undisturbed(_rank: int, _size: int) -> Any:
    training = Training()
    training.run(training.step)
    return training.phases, training.digest()


def interrupted(_rank: int, _size: int, where: str) -> Any:
    """Stops the rank once, in a place of step `AT`."""
    training = Training()

    def stop(place: str) -> None:
        if where == place and training.phases[-1] == (AT, 0, False):
            training.link.stop(2)

    training.model[0].register_forward_hook(lambda _module, _inputs, _output: stop("forward"))
    training.model[1].weight.register_post_accumulate_grad_hook(lambda _parameter: stop("backward"))

    def body(index: int) -> None:
        if index == AT:
            stop("begun")
        training.step(index)
        if index == AT:
            stop("updated")

    training.run(body)
    return training.phases, training.digest()


@pytest.mark.parametrize("where", ["begun", "forward", "backward", "updated"])
def test_a_step_that_is_interrupted_is_repeated_and_one_whose_update_has_begun_does_not(where: str) -> None:
    ((phases, digest),) = run_ranks(1, undisturbed)
    assert phases == [(index, 0, False) for index in range(NUM_STEPS)]
    ((attempts, again),) = run_ranks(1, interrupted, where)
    expected = list(phases)
    if where == "updated":
        expected[AT + 1] = (AT + 1, 0, True)
    else:
        expected.insert(AT + 1, (AT, 1, True))
    assert attempts == expected
    assert again == digest, "the bits are those of a run without an interruption"


def misused(_rank: int, _size: int) -> list[str]:
    training = Training()
    controller, answers = training.controller, []

    def said(call: Callable[[], object]) -> None:
        with pytest.raises(UsageError) as error:
            call()
        answers.append(str(error.value))

    said(training.optimizer.step)
    assert controller.next_step(NUM_STEPS) == 0
    said(lambda: controller.next_step(NUM_STEPS))
    controller.begin()
    said(controller.begin)
    said(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step)
    training.model(torch.ones(8, 4)).mean().backward()
    assert training.phase() is Phase.BACKWARD
    said(controller.commit)
    said(lambda: training.optimizer.step(lambda: 1.0))
    training.optimizer.step()
    assert training.phase() is Phase.OPTIMIZER
    controller.commit()
    assert training.phase() is Phase.UPDATED
    assert controller.next_step(1) is None
    return answers


def test_misuse_is_refused_with_what_to_do() -> None:
    (answers,) = run_ranks(1, misused)
    expected = (
        "optimizer.step() outside of a step",
        "step 0 was handed out but not entered",
        "step 0 was entered inside itself",
        "step 0: SGD.step() of an optimizer that is not protected",
        "step 0 ends with gradients but without optimizer.step()",
        "optimizer.step(closure): the closure computes gradients in mid-update",
    )
    for answer, words in zip(answers, expected, strict=True):
        assert answer.startswith(words)


def whose_error(_rank: int, _size: int) -> list[bool]:
    """An error is the script's own, until a collective of the step was answered by echo."""
    training = Training()
    controller, error = training.controller, ValueError("shapes differ")
    controller.next_step(NUM_STEPS)
    controller.begin()
    answers = [controller.is_interruption(StepInterrupted()), controller.is_interruption(error)]
    training.link.stop(2)
    answers.append(controller.is_interruption(error))
    torch.distributed.all_reduce(torch.ones(1))
    answers += [controller.is_interruption(error), controller.is_interruption(KeyboardInterrupt())]
    answers.append(controller.is_interruption(CheckpointException("save", {})))  # it is no Exception
    return answers


def test_an_error_is_the_scripts_own_unless_the_step_went_on_in_echo() -> None:
    assert run_ranks(1, whose_error) == [[True, False, False, True, False, True]]
