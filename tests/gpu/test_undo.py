"""What a step on a GPU has changed is put back: its random numbers, a scaler, what was launched and is not through."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.needs import needs_gpus
from tests.worker.ranks import run_ranks
from tests.worker.single import NUM_STEPS, Training

pytestmark = needs_gpus(1)
LONG_CYCLES = 500_000_000
"""Of a kernel that takes about a quarter of a second."""


class OnGpu(Training):
    """`Training`, whose model is on the GPU in one memory format or another, with a scaler."""

    def __init__(self, how: str) -> None:
        self.scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=2, enabled=how == "float16")
        self.how = how
        moved = torch.nn.Sequential.to
        with pytest.MonkeyPatch.context() as patched:
            build = torch.nn.Sequential.__init__

            def on_gpu(model: Any, *parts: Any) -> None:
                build(model, *parts)
                if parts:
                    moved(model, "cuda")

            patched.setattr(torch.nn.Sequential, "__init__", on_gpu)
            super().__init__(scaler=self.scaler)
        self.forward = torch.compile(self.model) if how == "compiled" else self.model

    def body(self, index: int) -> None:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(index)).cuda()
        kind = torch.float16 if self.how == "float16" else torch.bfloat16
        with torch.autocast("cuda", dtype=kind, enabled=self.how in ("float16", "bfloat16")):
            loss = (self.forward(inputs) * torch.rand(1, device="cuda")).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def trained(_rank: int, _size: int, _path: Path, how: str, is_interrupted: bool) -> tuple[str, float, int]:
    """In step 2 the rank is stopped after the backward, with much on the stream that is not through."""
    training = OnGpu(how)
    num_attempts = 0

    def body(index: int) -> None:
        nonlocal num_attempts
        num_attempts += 1
        if is_interrupted and index == 2 and training.controller.attempt == 0:
            torch.rand(7, device="cuda")
            training.forward(torch.ones(8, 4, device="cuda")).mean().backward()
            torch.cuda._sleep(LONG_CYCLES)
            for parameter in training.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(float("nan"))
            training.link.stop(2)
        training.body(index)

    training.run(body)
    return training.digest(), training.scaler.get_scale(), num_attempts


@pytest.mark.parametrize("how", ["float32", "bfloat16", "float16", "compiled"])
def test_a_step_that_is_repeated_computes_the_same_bits(how: str, tmp_path: Path) -> None:
    [(expected, scale, num_attempts)] = run_ranks(1, trained, tmp_path, how, False)
    assert num_attempts == NUM_STEPS
    assert run_ranks(1, trained, tmp_path, how, True) == [(expected, scale, NUM_STEPS + 1)]
