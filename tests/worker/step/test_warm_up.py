"""A spare gets ready: it has memory for what it will hold, and has computed what it will compute."""

from typing import Any

import pytest
import torch
from tests.worker.state.parts import content, small
from torch.optim.optimizer import register_optimizer_step_post_hook

from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.step import warm_up as module
from keepstep.worker.step.warm_up import multiply, num_moments, warm_up


class Unwilling(torch.optim.SGD):
    """An optimizer whose ``step()`` the script never calls, as of SAM and of schedule-free ones in ``eval()``."""

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError


def test_nothing_of_the_script_is_called_but_its_function(recwarn: pytest.WarningsRecorder) -> None:
    model = small()
    optimizer, called = Unwilling(model.parameters(), momentum=0.9, lr=0.1), list[str]()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model.register_forward_hook(lambda *_arguments: called.append("forward"))
    handle = register_optimizer_step_post_hook(lambda *_arguments: called.append("step"))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _parameter: called.append("gradient"))
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state = ProtectedState(objects)
    before, drawn = content(state), torch.get_rng_state()
    try:
        warm_up(state, lambda: called.append("function"))
    finally:
        handle.remove()
    assert called == ["function"]
    assert content(state) == before
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize(
    ("optimizer", "num"),
    [
        (torch.optim.AdamW([torch.zeros(1)]), 2),
        (torch.optim.Adam([torch.zeros(1)], amsgrad=True), 3),
        (torch.optim.SGD([torch.zeros(1)]), 0),
        (torch.optim.SGD([torch.zeros(1)], momentum=0.9), 1),
        (torch.optim.RMSprop([torch.zeros(1)], momentum=0.9, centered=True), 3),
    ],
)
def test_an_optimizer_keeps_as_much_as_its_settings_say(optimizer: torch.optim.Optimizer, num: int) -> None:
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert (
        sum(value.numel() for key, value in optimizer.state[parameter].items() if key != "step" and value is not None)
        == num
    )
    assert num_moments(optimizer.param_groups[0]) == num


def test_matrices_are_multiplied_without_a_trace() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    multiply(torch.device("cpu"), [torch.float32, torch.bfloat16, torch.float64])
    assert torch.equal(torch.rand(2), expected)


def test_a_spare_on_the_cpu_opens_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "multiply", lambda *arguments: pytest.fail("there is no GPU"))
    state = ProtectedState({"model": small()})
    before = content(state)
    warm_up(state, lambda: None)
    assert content(state) == before
