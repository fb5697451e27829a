"""A host that waits for its device, with a device that the test moves."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import DEADLINE_S, run_ranks
from tests.worker.single import NUM_STEPS, Training

from keepstep.errors import StepInterrupted
from keepstep.protocol.phases import Phase
from keepstep.worker.step.device_completion import HostCompletion, StreamCompletion, completion_on


class Twin:
    """A device with one stream."""

    def __init__(self) -> None:
        self.is_done = False
        self.num_recorded = self.num_drained = self.num_looks = 0
        self.completion = StreamCompletion(self.record, self.synchronize)

    def record(self) -> Any:
        self.num_recorded += 1
        return lambda: self.is_done

    def synchronize(self) -> None:
        self.num_drained += 1

    def look(self) -> None:
        self.num_looks += 1

    def finish(self) -> None:
        self.is_done = True


def test_without_a_gpu_nothing_is_asked() -> None:
    completion = completion_on(torch.device("cpu"))
    assert isinstance(completion, HostCompletion)
    completion.wait(lambda: pytest.fail("no process looks"), lambda: pytest.fail("no process asks"))
    completion.drain()


def test_the_host_waits_until_the_device_has_come() -> None:
    twin = Twin()
    threading.Timer(0.05, twin.finish).start()
    twin.completion.wait(twin.look, lambda: False)
    assert twin.is_done
    assert twin.num_recorded == 1
    assert twin.num_looks > 1


def test_what_has_ended_is_looked_at_once_more() -> None:
    """An aborted collective completes: whether it was one is asked after the end."""
    twin = Twin()
    twin.finish()
    twin.completion.wait(twin.look, lambda: False)
    assert twin.num_looks == 1


def test_an_interruption_ends_the_wait() -> None:
    twin, interrupted = Twin(), threading.Event()
    threading.Timer(0.05, interrupted.set).start()
    waiting = threading.Thread(target=twin.completion.wait, args=[twin.look, interrupted.is_set], daemon=True)
    waiting.start()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    assert not twin.is_done


def test_an_error_of_an_operation_is_raised_out_of_the_wait() -> None:
    def fail() -> None:
        raise RuntimeError("all_reduce did not end within 60 s")

    with pytest.raises(RuntimeError, match="did not end within 60 s"):
        Twin().completion.wait(fail, lambda: False)


def step_with(_rank: int, _size: int, _path: Path, how: str) -> Any:
    """A step on a device that is not through when the script comes to ``optimizer.step()``."""
    training, twin = Training(), Twin()
    attempt: Any = training.controller._undoing
    attempt._device = twin.completion
    training.controller.next_step(NUM_STEPS)
    training.controller.begin()
    training.model(torch.ones(8, 4)).mean().backward()
    drained = twin.num_drained
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    phases: list[Phase] = []

    def come() -> None:
        phases.append(training.phase())
        if how == "fails":
            training.link.stop(2)
        twin.finish()

    threading.Timer(0.05, come).start()
    try:
        training.optimizer.step()
        outcome = "updated"
    except StepInterrupted:
        training.controller.undo()
        outcome = "undone"
    same = all(map(torch.equal, before, training.model.parameters()))
    return outcome, list(map(str, phases)), same, twin.num_recorded, twin.num_drained - drained


def test_a_rank_is_not_synced_before_its_device_is(tmp_path: Path) -> None:
    answers = run_ranks(1, step_with, tmp_path, "comes")
    assert answers == [("updated", [str(Phase.BACKWARD)], False, 1, 0)]


def test_a_step_that_is_interrupted_while_the_host_waits_is_undone_on_a_quiet_device(tmp_path: Path) -> None:
    answers = run_ranks(1, step_with, tmp_path, "fails")
    assert answers == [("undone", [str(Phase.BACKWARD)], True, 1, 1)]
