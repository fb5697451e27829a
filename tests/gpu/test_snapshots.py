"""Snapshots of a state on a GPU: real streams, and memory that the driver pins."""

import os
from typing import Any

import pytest
import torch
from tests.gpu.needs import needs_gpus
from tests.worker.ranks import run_ranks
from tests.worker.state.parts import content

from keepstep.protocol.messages import Member, Membership
from keepstep.shared import snapshotfile
from keepstep.shared.snapshotfile import SnapshotFile
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.step.second_copies import SecondCopies
from keepstep.worker.step.side_copies import StreamCopies
from keepstep.worker.step.snapshots import Snapshots

pytestmark = needs_gpus(1)
RANK = 1
LONG_CYCLES = 1_000_000_000
"""Of a kernel that takes about half a second."""
LARGE = 4096
"""Rows and columns of a matrix of 64 MiB: two chunks of a copy."""


class OnGpu:
    """A model with buffers whose optimizer state is on the GPU, and its snapshots."""

    def __init__(self, optimizer: Any, large: bool = False) -> None:
        torch.manual_seed(7)
        parts = [torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)]
        self.model = torch.nn.Sequential(*parts).cuda()
        if large:
            self.model.register_parameter("large", torch.nn.Parameter(torch.randn(LARGE, LARGE, device="cuda")))
        self.optimizer = optimizer(self.model.parameters())
        self.state = ProtectedState({"model": self.model, "optimizer": self.optimizer})
        file = SnapshotFile(snapshotfile.create("gpu"))
        copies = SecondCopies(file, lambda: None, lambda error: None)
        self.side = StreamCopies(torch.device("cuda", torch.cuda.current_device()))
        self.snapshots = Snapshots(self.state, file, 1, copies, side=self.side)
        lone = Membership.of(Member(rank, "n", str(rank)) for rank in range(2))
        self.snapshots.resumed(0, RANK, lone, None)

    def backward(self, step: int) -> None:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).cuda()
        self.model(inputs).square().mean().backward()

    def step(self, step: int) -> None:
        self.snapshots.hand_out(step)
        self.backward(step)
        self.snapshots.complete(step, lambda is_waiting: None)
        self.optimizer.step()
        self.optimizer.zero_grad()


OPTIMIZERS = {
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "capturable": lambda parameters: torch.optim.Adam(parameters, lr=0.1, capturable=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def go_back(_rank: int, _size: int, name: str) -> list[bool]:
    job, contents = OnGpu(OPTIMIZERS[name]), []
    for step in range(4):
        contents.append(content(job.state))
        job.step(step)
    found = [job.snapshots.load(RANK, back) and content(job.state) == contents[back] for back in (3, 2)]
    other = OnGpu(OPTIMIZERS[name])  # as a replacement that has made no optimizer state
    path = f"/proc/{os.getpid()}/fd/{job.snapshots._file._descriptor}"
    other.snapshots.inherit(path, RANK, (2, 3))
    found.append(other.snapshots.load(RANK, 3) and content(other.state) == contents[3])
    found.append(all(tensor.is_cuda for name, tensor in other.state.optimizer_tensors() if not name.endswith("step")))
    job.step(2)
    other.snapshots.load(RANK, 2)
    other.step(2)
    return [*found, content(other.state) == content(job.state)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rank_goes_back_and_so_does_a_replacement(name: str) -> None:
    assert run_ranks(1, go_back, name) == [[True, True, True, True, True]]


def beside_a_kernel(_rank: int, _size: int) -> list[bool]:
    job = OnGpu(OPTIMIZERS["momentum"], large=True)
    job.step(0)  # pins
    job.step(1)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    job.snapshots.hand_out(2)
    torch.cuda._sleep(LONG_CYCLES)  # the forward
    event = torch.cuda.Event()
    event.record()
    job.snapshots.complete(2, lambda is_waiting: None)
    was_beside = not event.query()
    slots = [torch.frombuffer(memory, dtype=torch.uint8) for memory in job.snapshots._file._maps.values()]
    is_pinned = all(slot.is_pinned() for slot in slots)
    return [was_beside, job.snapshots.steps(RANK) == (1, 2), is_pinned, torch.cuda.max_memory_allocated() == before]


def test_the_copy_runs_beside_a_forward_into_pinned_memory_and_takes_none_of_the_gpu() -> None:
    assert run_ranks(1, beside_a_kernel) == [[True, True, True, True]]


def behind_the_update(_rank: int, _size: int) -> bool:
    """The host is ahead: the update of the step before is launched and not through."""
    job = OnGpu(OPTIMIZERS["momentum"])
    torch.cuda._sleep(LONG_CYCLES)
    job.optimizer.zero_grad()
    for parameter in job.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    job.optimizer.step()
    job.snapshots.hand_out(0)
    job.snapshots.complete(0, lambda is_waiting: None)
    expected = content(job.state)
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.zero_()
    return job.snapshots.load(RANK, 0) and content(job.state) == expected


def test_the_copy_begins_when_the_update_before_it_is_through() -> None:
    assert run_ranks(1, behind_the_update) == [True]


def on_the_second_gpu(_rank: int, _size: int) -> list[bool]:
    torch.cuda.set_device(1)
    job = OnGpu(OPTIMIZERS["momentum"])
    job.step(0)
    job.step(1)
    opened = [torch._C._cuda_hasPrimaryContext(index) for index in range(2)]
    return [job.snapshots.load(RANK, 1), *opened]


@needs_gpus(2)
def test_the_thread_of_the_snapshots_opens_no_other_gpu() -> None:
    assert run_ranks(1, on_the_second_gpu) == [[True, False, True]]
