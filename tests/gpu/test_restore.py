"""A state on GPUs that comes from all its live holders, by CUDA's handles between processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.needs import needs_gpus
from tests.worker.ranks import meet, plain_gloo, run_ranks

from keepstep.cancel import CancelToken
from keepstep.protocol.messages import Transfer
from keepstep.weights.memory.gpu_buffers import GpuBuffer
from keepstep.worker.state import neighbour
from keepstep.worker.state.image import describe
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.state.restore import GPU_PEAK_BYTES, Landing, Source, StateTransport, receive_state, send_state

pytestmark = needs_gpus(1)
ROWS = 8192
"""Of a square matrix of 256 MiB: with Adam's state 768 MiB, several times the bound on what a transfer takes."""
ROUTE = Transfer((0, 2), (1,))


def prepared(device: torch.device, seed: int, num_steps: int, warm: bool) -> ProtectedState:
    torch.manual_seed(seed)
    convolution = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), convolution).to(device)
    model.register_parameter("large", torch.nn.Parameter(torch.randn(ROWS, ROWS, device=device)))
    model.register_parameter("turned", torch.nn.Parameter(torch.randn(9, 5, device=device).t()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _step in range(1 if warm else num_steps):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if warm else torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return ProtectedState({"model": model, "optimizer": optimizer})


def restored(rank: int, size: int, path: Path, num_gpus: int, how: str) -> dict[str, Any]:
    device = torch.device("cuda", rank % num_gpus)
    torch.cuda.set_device(device)
    is_source = rank in ROUTE.sources
    state = prepared(device, 5 if is_source else 6, 2 if is_source else 0, warm=how == "warm" and not is_source)
    places = [tensor.data_ptr() for _name, tensor in state.parameters()]
    mapped = []
    attach = GpuBuffer.attach

    def counted(place: Any) -> GpuBuffer:
        mapped.append(place.gpu.gpu)
        return attach(place)

    GpuBuffer.attach = staticmethod(counted)  # type: ignore[assignment,method-assign]  # for this process only
    if how == "messages":
        neighbour.reach = lambda place: None
    group, way = plain_gloo(path, rank, size), CancelToken()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if is_source:
        header, blocks = describe(state, 3)
        held = [block.held for block in blocks]
        send_state(header, held, rank, ROUTE, StateTransport(group, way), Source(), lambda: None)
    else:
        receive_state(state, 3, rank, ROUTE, StateTransport(group, way), lambda: None, Landing(device))
    peak = torch.cuda.max_memory_allocated() - before
    meet(path, size, "through")
    return {
        "digest": state.digest(),
        "in place": places == [tensor.data_ptr() for _name, tensor in state.parameters()],
        "on gpu": all(tensor.is_cuda for _name, tensor in state.optimizer_tensors()),
        "mapped": len(mapped),
        "peak": peak,
    }


def check(answers: list[dict[str, Any]], num_mapped: int, bound: int) -> None:
    assert len({answer["digest"] for answer in answers}) == 1
    assert all(answer["in place"] and answer["on gpu"] for answer in answers)
    assert [answer["mapped"] for answer in answers] == [0, num_mapped, 0]
    assert max(answer["peak"] for answer in answers) <= bound


@pytest.mark.parametrize("num_gpus", [1, pytest.param(2, marks=needs_gpus(2)), pytest.param(3, marks=needs_gpus(3))])
def test_from_two_holders_at_once_in_place_and_without_a_second_copy(num_gpus: int, tmp_path: Path) -> None:
    """The spare has taken the memory of its optimizer state: whatever is taken besides is the transfer's."""
    check(run_ranks(3, restored, tmp_path, num_gpus, "warm"), 2, GPU_PEAK_BYTES)


def test_a_replacement_without_optimizer_state_has_it_made_on_its_gpu(tmp_path: Path) -> None:
    optimizer_bytes = 2 * ROWS * ROWS * 4 + (1 << 20)
    check(run_ranks(3, restored, tmp_path, 1, "cold"), 2, GPU_PEAK_BYTES + optimizer_bytes)


def test_from_another_node_over_the_group(tmp_path: Path) -> None:
    check(run_ranks(3, restored, tmp_path, 1, "messages"), 0, GPU_PEAK_BYTES)
