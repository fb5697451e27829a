"""Copies of the script's modules have nothing of keepstep's, and after the last step neither have the modules."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from keepstep.protocol.phases import Phase
from keepstep.worker.hooks import remove_hooks
from keepstep.worker.step.stop_points import StopPoints


def double(_module: torch.nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (2 * arguments[0],)


def half(_module: torch.nn.Module, _arguments: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    return output / 2


def by_pickle(model: torch.nn.Module) -> torch.nn.Module:
    content = pickle.dumps(model)
    assert b"keepstep" not in content
    return pickle.loads(content)


def by_script(model: torch.nn.Module) -> torch.nn.Module:
    return torch.jit.script(model)


@pytest.mark.parametrize("has_hooks", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_script])
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is:FutureWarning", "ignore:`torch.jit.script` is:DeprecationWarning"
)
def test_a_copy_has_no_stop_points(copied: Callable[[torch.nn.Module], torch.nn.Module], has_hooks: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    if has_hooks and copied is not by_script:
        model.register_forward_pre_hook(double)
        model[0].register_forward_hook(half)
    plain = model(torch.ones(1, 2))
    phases: list[Phase] = []
    StopPoints({"model": model}, lambda: None, phases.append)
    made = copied(model)
    output = made(torch.ones(1, 2))
    if copied is not by_script:  # which holds the same parameters
        output.sum().backward()
    assert phases == []
    assert torch.equal(output, plain)
    assert torch.equal(model(torch.ones(1, 2)), plain)
    assert phases == [Phase.FORWARD]


def test_hooks_of_the_script_come_and_go() -> None:
    """Whether they were registered before or after keepstep's."""
    model, phases = torch.nn.Linear(2, 2), list[Phase]()
    plain, doubled = model(torch.ones(1, 2)), model(2 * torch.ones(1, 2))
    before = model.register_forward_pre_hook(double)
    StopPoints({"model": model}, lambda: None, phases.append)
    after = model.register_forward_hook(half)
    assert torch.equal(model(torch.ones(1, 2)), doubled / 2)
    before.remove()
    assert torch.equal(model(torch.ones(1, 2)), plain / 2)
    remove_hooks()
    assert torch.equal(model(torch.ones(1, 2)), plain / 2)
    after.remove()
    assert torch.equal(model(torch.ones(1, 2)), plain)
    assert phases == [Phase.FORWARD] * 2
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_compiled_module_is_not_broken_up() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    phases: list[Phase] = []
    StopPoints({"model": model}, lambda: None, phases.append)
    explained = torch._dynamo.explain(model)(torch.ones(1, 2))
    assert explained.graph_break_count == 0
