"""What one GPU is enough for: groups that carry its tensors by gloo, several ranks on it; NCCL with one rank."""

import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from tests.gpu.needs import needs_gpus, needs_nccl
from tests.worker.ranks import DEADLINE_S, Watcher, file_store, meet, run_ranks
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from keepstep.errors import UsageError
from keepstep.worker.backends.by_device import backends_of
from keepstep.worker.backends.gloo.communicator import GlooCommunicator
from keepstep.worker.groups import communicators, registry
from keepstep.worker.groups.registry import GroupRegistry
from keepstep.worker.step.device_completion import completion_on

pytestmark = needs_gpus(1)
LONG_CYCLES = 1_000_000_000
"""Of a kernel that takes about half a second."""


def on_gpu(path: Path, rank: int, size: int, *, by_gloo: bool) -> GroupRegistry:
    """Groups of a process whose device is the first GPU, connected in generation 1."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    if by_gloo:
        both = {"cpu": GlooCommunicator, "cuda": GlooCommunicator}
        for module in (communicators, registry):
            mock.patch.object(module, "backends_of", return_value=both).start()
    groups = GroupRegistry(
        lambda generation, name: file_store(path, generation, name), Watcher(), device=torch.device("cuda", 0)
    )
    groups.join_world(rank, size, lambda: rank)
    groups.connect(1, rank)
    return groups


def reduce_and_move(rank: int, size: int, path: Path) -> list[list[float]]:
    on_gpu(path, rank, size, by_gloo=True)
    tensor = torch.full((3,), float(rank + 1), device="cuda")
    dist.all_reduce(tensor)
    rows = [torch.zeros(2, device="cuda") for _ in range(size)]
    dist.all_gather(rows, torch.full((2,), float(rank), device="cuda"))
    got = torch.zeros(4, device="cuda")
    works = [
        dist.isend(torch.full((4,), float(rank), device="cuda"), (rank + 1) % size),
        dist.irecv(got, (rank - 1) % size),
    ]
    for work in works:
        assert work is not None
        work.wait()
    dist.barrier()
    return [tensor.tolist(), torch.cat(rows).tolist(), got.tolist()]


def test_gloo_carries_tensors_of_a_gpu_that_ranks_share(tmp_path: Path) -> None:
    answers = run_ranks(2, reduce_and_move, tmp_path)
    rows = [0.0, 0.0, 1.0, 1.0]
    assert answers == [[[3.0] * 3, rows, [1.0] * 4], [[3.0] * 3, rows, [0.0] * 4]]


def break_and_go_on(rank: int, size: int, path: Path) -> list[float]:
    groups = on_gpu(path, rank, size, by_gloo=True)
    work = dist.all_reduce(torch.ones(8, device="cuda"), async_op=True) if rank == 0 else None
    meet(path, size, "begun")
    groups.take_down()
    if work is not None:
        work.wait()
    groups.drain()
    torch.cuda.synchronize()
    groups.connect(2, rank)
    tensor = torch.ones(2, device="cuda")
    dist.all_reduce(tensor)
    found: list[float] = tensor.tolist()
    return found


def test_a_group_on_a_gpu_is_broken_and_connected_again(tmp_path: Path) -> None:
    assert run_ranks(2, break_and_go_on, tmp_path) == [[2.0, 2.0]] * 2


def alone_by_nccl(rank: int, size: int, path: Path) -> list[object]:
    groups = on_gpu(path, rank, size, by_gloo=False)
    model = DistributedDataParallel(torch.nn.Linear(4, 4).cuda(), device_ids=[0])
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    bits = [parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None]
    graph = torch.cuda.CUDAGraph()
    inputs = torch.ones(1, device="cuda")
    with torch.cuda.graph(graph), pytest.raises(UsageError, match="a CUDA graph captures a collective"):
        dist.all_reduce(inputs)
    groups.take_down()
    groups.drain()
    groups.connect(2, rank)
    tensor = torch.ones(1, device="cuda")
    dist.all_reduce(tensor)
    return [len(bits), tensor.item()]


@needs_nccl
def test_one_rank_by_nccl(tmp_path: Path) -> None:
    assert "cuda" in backends_of(torch.device("cuda", 0))
    assert run_ranks(1, alone_by_nccl, tmp_path) == [[2, 1.0]]


def wait_for_a_kernel(_rank: int, _size: int) -> list[bool]:
    completion = completion_on(torch.device("cuda", 0))
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    event = torch.cuda.Event()
    torch.cuda._sleep(LONG_CYCLES)
    event.record()
    was_ahead = not event.query()
    completion.wait(lambda: None, lambda: False)
    is_through = event.query()
    torch.cuda._sleep(LONG_CYCLES)
    begun_s = time.monotonic()
    completion.wait(lambda: None, lambda: True)
    was_left = time.monotonic() - begun_s < DEADLINE_S
    completion.drain()
    return [was_ahead, is_through, was_left, torch.cuda.current_stream().query()]


def test_the_host_waits_for_the_device_and_no_longer_than_it_has_to() -> None:
    assert run_ranks(1, wait_for_a_kernel) == [[True, True, True, True]]
