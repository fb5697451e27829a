"""A shard on its way between GPUs of one machine, with a twin of their memory, over real gloo."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import meet, plain_gloo, run_ranks
from tests.worker.state.parts import content, train
from tests.worker.state.test_restore import ROUTES, SMALL_BUCKET_BYTES, make
from tests.worker.state.twin_gpu import DEVICE, TwinGpu

from keepstep.cancel import CancelToken
from keepstep.protocol.messages import Transfer
from keepstep.protocol.transfer.boxes import Box
from keepstep.weights.memory import gpu_buffers
from keepstep.weights.memory.pieces import Held
from keepstep.worker.state import neighbour
from keepstep.worker.state.image import describe
from keepstep.worker.state.restore import Landing, Source, StateTransport, device_of, receive_state, send_state

UUIDS = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")


def one_transfer(state: Any, rank: int, route: Transfer, group: Any, landing: Landing) -> None:
    way = StateTransport(group, CancelToken())
    if rank in route.sources:
        header, blocks = describe(state, 3)
        source = Source(SMALL_BUCKET_BYTES)
        send_state(header, [block.held for block in blocks], rank, route, way, source, lambda: None)
    else:
        receive_state(state, 3, rank, route, way, lambda: None, landing)


def transfer(rank: int, size: int, path: Path, route: Transfer, how: str, seed: int) -> tuple[Any, int, int]:
    """Each rank on a GPU of its own. Returns its state, and how many handles it gave away and took."""
    gpu = TwinGpu(UUIDS[rank])
    gpu.sees = UUIDS
    is_source = rank in route.sources
    match how:
        case "full" if is_source:
            gpu.is_full = True
        case "hidden" if rank == route.receivers[-1]:
            gpu.sees = (UUIDS[rank],)
        case "another machine" if rank == route.receivers[-1]:
            neighbour.boot = lambda: "another"
    gpu.install()
    state, module, optimizer, _scheduler = make("mixed", "adamw", seed if is_source else seed + 1)
    train(module, [optimizer], 3 if is_source else 1, seed if is_source else seed + 50)
    if is_source:
        optimizer.zero_grad()
    landing = Landing(DEVICE)
    one_transfer(state, rank, route, plain_gloo(path, rank, size), landing)
    meet(path, size, "through")
    return content(state), gpu.num_shared, gpu.num_mapped


@pytest.mark.parametrize("name", ["1 to 1", "2 to 2", "3 to 1"])
def test_every_receiver_reads_in_the_memory_of_all_holders_gpus(name: str, tmp_path: Path, seed: int) -> None:
    route = ROUTES[name]
    num_sources, num_receivers = len(route.sources), len(route.receivers)
    answers = run_ranks(num_sources + num_receivers, transfer, tmp_path, route, "", seed)
    assert len({str(state) for state, _shared, _mapped in answers}) == 1
    assert [answers[rank][1:] for rank in route.sources] == [(num_receivers, 0)] * num_sources
    assert [answers[rank][1:] for rank in route.receivers] == [(0, num_sources)] * num_receivers


@pytest.mark.parametrize("how", ["full", "hidden", "another machine"])
def test_where_one_receiver_cannot_all_goes_through_host_memory(how: str, tmp_path: Path, seed: int) -> None:
    """No memory for a buffer; a GPU that the receiver does not see; a receiver on another node."""
    answers = run_ranks(3, transfer, tmp_path, Transfer((0,), (1, 2)), how, seed)
    assert len({str(state) for state, _shared, _mapped in answers}) == 1
    assert [answer[1:] for answer in answers] == [(0, 0)] * 3


def refused(rank: int, size: int, path: Path, seed: int) -> Any:
    gpu = TwinGpu()
    gpu.refuses = rank == 1
    gpu.install()
    state, module, optimizer, _scheduler = make("small", "adamw", seed + rank)
    train(module, [optimizer], 1, seed)
    route, landing = Transfer((0,), (1,)), Landing(DEVICE)
    group = plain_gloo(path, rank, size)
    try:
        one_transfer(state, rank, route, group, landing)
        outcome = "went"
    except RuntimeError as error:
        outcome = f"{type(error).__name__}: {error}" if rank else "broke off"
        group.abort()
    except Exception:
        outcome = "broke off"
    meet(path, size, "first")
    one_transfer(state, rank, route, plain_gloo(path, rank, size, generation=2), landing)
    meet(path, size, "through")
    return outcome, content(state)


def test_a_handle_that_cuda_refuses_breaks_off_one_transfer_and_the_next_goes_through_the_host(
    tmp_path: Path, seed: int
) -> None:
    (first, source), (second, receiver) = run_ranks(2, refused, tmp_path, seed)
    assert first == "broke off"
    assert second == "MemoryNotMapped: invalid resource handle"
    assert receiver == source


def test_what_cuda_says_is_reported_with_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = TwinGpu()
    buffer = gpu.make_buffer(DEVICE, 2, 256)
    place = gpu.share(buffer.view(0))
    monkeypatch.setattr(gpu_buffers, "visible_gpus", lambda: ("GPU-0",))

    def refuse(*arguments: object) -> None:
        raise RuntimeError("peer access is not supported")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refuse)
    with pytest.raises(gpu_buffers.MemoryNotMapped, match="GPU-0 of another process: peer access is not supported"):
        gpu_buffers.map_memory(place)


def test_a_state_on_the_host_is_sent_from_there() -> None:
    assert device_of([Held(torch.zeros(2), Box((0,), (2,)))]) == torch.device("cpu")
    assert Landing(torch.device("cpu")).gpus == ()
    assert Source().limits(torch.device("cpu")) != Source().limits(DEVICE)
