"""What a framework's loop is warned of."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keepstep.worker.loop.foreign import warn_of_tensors

MODEL = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    "kept",
    [
        torch.optim.swa_utils.AveragedModel(MODEL),
        torch.zeros(2),
        {name: tensor.clone() for name, tensor in MODEL.state_dict().items()},
        [(1, torch.ones(1))],
    ],
    ids=["module", "tensor", "dict", "list"],
)
def test_tensors_of_a_callbacks_own(kept: Any) -> None:
    callback = SimpleNamespace(number=1, shadow=kept)
    with pytest.warns(
        RuntimeWarning, match=r"SimpleNamespace keeps tensors \(shadow\), .*begin anew.*changes them, name"
    ):
        warn_of_tensors([callback], [MODEL], "name it")


@pytest.mark.parametrize("kept", [MODEL, MODEL[0], MODEL.state_dict(), [MODEL[0].weight], "text", None, object()])
def test_what_is_the_models_or_no_tensor(kept: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_tensors([SimpleNamespace(kept=kept)], [MODEL], "name it")
