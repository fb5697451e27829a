"""A spare on a GPU: what it has loaded and taken before it is needed."""

import torch
from tests.gpu.needs import needs_gpus
from tests.worker.ranks import run_ranks

from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.step.warm_up import warm_up

pytestmark = needs_gpus(1)
WIDTH = 2048


def first_step_behind(_rank: int, _size: int) -> list[bool]:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    warm_up(ProtectedState({"model": model, "optimizer": optimizer}), lambda: None)
    is_quiet = torch.cuda.current_stream().query()
    free = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    has_room = free >= sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    before = torch.cuda.memory_reserved()
    model(torch.ones(8, WIDTH, device="cuda")).mean().backward()
    optimizer.step()
    torch.cuda.synchronize()
    grew = torch.cuda.memory_reserved() - before
    return [is_quiet, has_room, bool(optimizer.state), grew <= 32 << 20]


def test_the_first_step_finds_the_memory_of_gradients_and_optimizer_state() -> None:
    assert run_ranks(1, first_step_behind) == [[True, True, True, True]]
