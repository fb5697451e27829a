"""A spare gets ready: it has memory for what it will hold, and has computed what it will compute."""

import pytest
import torch
from tests.worker.state.parts import content, small

from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.step import warm_up as module
from keepstep.worker.step.warm_up import multiply, warm_up


def test_a_spare_has_optimizer_state_and_no_gradients() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    state = ProtectedState({"model": model, "optimizer": optimizer})
    called: list[bool] = []
    warm_up(state, lambda: called.append(bool(optimizer.state)))
    assert called == [False], "the script's function comes first"
    assert len(optimizer.state) == len(list(model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


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
