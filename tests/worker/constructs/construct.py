"""A construct: a small deterministic program on four ranks whose tensors are compared between two systems."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keepstep.worker.parallel.pipeline import Pipelined

SIZE, STEPS, WIDTH = 4, 3, 8
Result = dict[str, torch.Tensor]
"""By a name, what must be the same."""


@dataclass(frozen=True)
class Ranks:
    """Which rank this is, and a folder that all of them see."""

    rank: int
    path: Path

    def batch(self, step: int, data_rank: int | None = None) -> torch.Tensor:
        """Of shape (4, 8, WIDTH): of this rank, or of one data-parallel coordinate."""
        number = self.rank if data_rank is None else data_rank
        return torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(100 * step + number))

    def trained(
        self,
        modules: nn.Module,
        forward_backward: Callable[[int], Any],
        optimizer: torch.optim.Optimizer | None = None,
        **protect: Any,
    ) -> Result:
        """What a rank holds after some steps: parameters, gradients, buffers, and the state of its optimizer.

        Args:
            modules: what is trained.
            forward_backward: of one step, by its number.
            optimizer: None: AdamW.
            protect: what else `protect()` is given, where the job is protected; a pipeline's ``schedule`` is among it.
        """
        optimizer = optimizer or default_optimizer(modules)
        if "schedule" in protect:
            Pipelined({"schedule": protect["schedule"]}).new_generation()  # else DDP reduces in metadata inference
        before = [local(parameter).clone() for parameter in modules.parameters()]
        for number in range(STEPS):
            optimizer.zero_grad()
            forward_backward(number)
            optimizer.step()
        after = [local(parameter) for parameter in modules.parameters()]
        assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True) if old.numel()), (
            "a comparison of what was not trained shows nothing"
        )
        return held(modules, optimizer)


def default_optimizer(modules: nn.Module) -> torch.optim.Optimizer:
    """AdamW for all parameters."""
    return torch.optim.AdamW(modules.parameters(), lr=0.05)


def held(modules: nn.Module, optimizer: torch.optim.Optimizer) -> Result:
    """What a rank holds of a model and its optimizer."""
    found = {f"parameter {name}": local(parameter) for name, parameter in modules.named_parameters()}
    found |= {f"buffer {name}": local(buffer) for name, buffer in modules.named_buffers()}
    found |= {
        f"gradient {name}": local(each.grad) for name, each in modules.named_parameters() if each.grad is not None
    }
    for number, state in enumerate(optimizer.state.values()):
        found |= {f"{name} {number}": local(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    return found


Constructs = dict[str, Callable[[Ranks], Result]]
"""By the name that docs/upstream.md has."""


def adds_to(constructs: Constructs) -> Callable[[str], Callable[[Callable[[Ranks], Result]], None]]:
    """A decorator that puts a function there under a name."""
    return lambda name: lambda function: constructs.update({name: function})


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def digests(result: Result) -> dict[str, str]:
    """Of the bits of each tensor."""
    return {name: digest(tensor) for name, tensor in result.items()}


def digest(tensor: torch.Tensor) -> str:
    """Of dtype, shape and bits."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + raw, digest_size=16).hexdigest()
