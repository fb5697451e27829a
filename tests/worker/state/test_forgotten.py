"""What follows a protected object and was not given to protect() is named."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.worker.state.parts import Keeps
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel

from keepstep.worker.state.forgotten import forgotten
from keepstep.worker.state.protected import ProtectedState


class Ema:
    """As torch_ema's: weak references to the parameters, and averages of them."""

    def __init__(self, parameters: Any) -> None:
        self._refs = [weakref.ref(each) for each in parameters]
        self.shadow = [each().detach().clone() for each in self._refs]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


class Copied(nn.Module):
    """As timm's: a module with a copy of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)


class Slow(torch.optim.Optimizer):
    """As Lookahead: an optimizer around another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


class Trainer(Keeps):
    """Holds a script's objects, and gives their state."""

    def __init__(self, **objects: Any) -> None:
        super().__init__({})
        self.schedulers = {"all": [objects["scheduler"]]}


FOLLOWERS: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "scheduler": (lambda _model, optimizer: lr_scheduler.StepLR(optimizer, 5), "StepLR of 'optimizer'"),
    "plateau": (lambda _m, optimizer: lr_scheduler.ReduceLROnPlateau(optimizer), "ReduceLROnPlateau of 'optimizer'"),
    "swa's": (lambda _model, optimizer: SWALR(optimizer, 0.1), "SWALR of 'optimizer'"),
    "scaler": (lambda _model, _optimizer: torch.amp.GradScaler("cpu"), "GradScaler of 'optimizer'"),
    "average": (lambda model, _optimizer: AveragedModel(model), "AveragedModel of 'model'"),
    "average of parameters": (lambda model, _optimizer: Ema(model.parameters()), "Ema of 'model'"),
    "copied": (lambda model, _optimizer: Copied(model), "Copied of 'model'"),
    "around the optimizer": (lambda _model, optimizer: Slow(optimizer), "Slow of 'optimizer'"),
}


def objects() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}


@pytest.mark.parametrize("name", FOLLOWERS)
def test_it_is_named_and_not_if_it_is_protected(name: str) -> None:
    make, text = FOLLOWERS[name]
    mine = objects()
    follower = make(mine["model"], mine["optimizer"])
    assert forgotten(ProtectedState(mine)) == [text]
    if name != "around the optimizer":
        assert forgotten(ProtectedState({**mine, "follower": follower})) == []


def test_what_follows_other_objects_is_nobodys() -> None:
    mine, others = objects(), objects()
    kept = [
        lr_scheduler.StepLR(others["optimizer"], 5),
        torch.amp.GradScaler("cpu", enabled=False),
        AveragedModel(nn.Linear(5, 5)),
        Ema(others["model"].parameters()),
        Keeps({}),
    ]
    assert forgotten(ProtectedState(mine)) == []
    assert len(kept) == 5


def test_the_parts_of_a_protected_object_are_protected() -> None:
    mine = objects()
    parts = [lr_scheduler.LinearLR(mine["optimizer"]), lr_scheduler.StepLR(mine["optimizer"], 2)]
    both = lr_scheduler.SequentialLR(mine["optimizer"], parts, [3])
    assert forgotten(ProtectedState({**mine, "scheduler": both})) == []
    assert forgotten(ProtectedState({**mine, "trainer": Trainer(scheduler=both)})) == []
