"""What docs/ARCHITECTURE.md says of updates that wait for a flag: the half of run-ahead on a device that would be safe.

keepstep does not use it; the page says why.
"""

import functools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import DEADLINE_S, Watcher, file_store, meet, run_ranks

from keepstep.protocol.waiting.operations import Operation
from keepstep.worker.backends.gloo.communicator import GlooCommunicator

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, fused=True),
}
DEADLINE = timedelta(seconds=DEADLINE_S)
NONCE = 0x5DEECE66D
"""Of a generation and a step, the same on all ranks."""


def flag_after(total: torch.Tensor, size: int) -> torch.Tensor:
    """1.0 unless all ranks have added their nonce."""
    return (total != NONCE * size).to(torch.float32).squeeze()


def update_behind(rank: int, size: int, path: Path, name: str, is_aborted: bool) -> list[bool]:
    """One whole step, and a second whose barrier is aborted before the update, or is not."""
    torch.manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(9))
    optimizer: Any = OPTIMIZERS[name]([parameter])
    parameter.grad = torch.randn(9)
    optimizer.step()
    state = optimizer.state[parameter]
    before = [parameter.detach().clone(), *(value.clone() for value in state.values())]
    group = GlooCommunicator("world", Watcher(), "127.0.0.1")
    group.connect(file_store(path), rank, size, DEADLINE, DEADLINE)
    total = torch.tensor([NONCE])
    barrier = functools.partial(
        group.begin, Operation.ALL_REDUCE, lambda backend: backend.allreduce([total]), [total], lambda error: None
    )
    parameter.grad = torch.full((9,), float("nan") if is_aborted else 0.5)
    if is_aborted:
        work = barrier() if rank == 0 else None
        meet(path, size, "begun")
        group.abort()
        if work is not None:
            with pytest.raises(RuntimeError):
                work.wait()
        assert group.wait_until_quiet(DEADLINE.total_seconds())  # from here on nothing writes to the sum
    else:
        barrier().wait()
    optimizer.found_inf, optimizer.grad_scale = flag_after(total, size), None
    optimizer.step()
    meet(path, size, "through")
    return [torch.equal(was, now) for was, now in zip(before, [parameter, *state.values()], strict=True)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_aborted_barrier_leaves_parameters_and_optimizer_state(name: str, tmp_path: Path) -> None:
    for same in run_ranks(2, update_behind, tmp_path, name, True):
        assert all(same)


def test_a_barrier_that_all_have_passed_lets_the_update_be(tmp_path: Path) -> None:
    for same in run_ranks(2, update_behind, tmp_path, "adamw", False):
        assert not any(same)


def test_the_first_step_of_fused_sgd_leaves_momentum_that_nobody_has_written() -> None:
    """Adam's is zeroed when it is made, SGD's is written by the update that does nothing."""
    parameter = torch.nn.Parameter(torch.ones(4))
    for name, is_zero in (("adam", True), ("sgd", False)):
        optimizer: Any = OPTIMIZERS[name]([parameter])
        parameter.grad = torch.ones(4)
        optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None
        optimizer.step()
        tensors = [value for key, value in optimizer.state[parameter].items() if key != "step"]
        assert tensors
        assert not is_zero or not any(map(torch.any, tensors))
        assert torch.equal(parameter, torch.ones(4))
