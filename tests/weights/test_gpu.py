"""Buffers and weights on a GPU: real kernels, real handles between processes, where there is one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.weights.cast import SMALL_BUCKET_BYTES, bits, publish, subscribe
from tests.weights.test_delivery import DTYPES, random_bits
from tests.worker.ranks import DEADLINE_S, meet, run_ranks

from keepstep.errors import ConfigurationError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU (CUDA) on this machine")
NUM_DEVICES = 2


def weights_on(device: str, seed: int) -> dict[str, torch.Tensor]:
    """Every dtype, in one piece, transposed, and larger than a bucket."""
    g = torch.Generator().manual_seed(seed)
    found = {}
    for dtype in DTYPES:
        found[f"{dtype}.matrix"] = random_bits((7, 5), dtype, g)
        found[f"{dtype}.turned"] = random_bits((9, 4), dtype, g).t()
        found[f"{dtype}.large"] = random_bits((3, SMALL_BUCKET_BYTES), dtype, g)
    return {name: tensor.to(device) for name, tensor in found.items()}


def delivery(rank: int, size: int, path: Path, source: str, copies: bool, how: str, seed: int) -> Any:
    """Two devices on one GPU with a consumer each; the consumer of the second one comes late, where it can."""
    expected = bits({name: tensor.cpu() for name, tensor in weights_on("cpu", seed + 1).items()})
    if rank < NUM_DEVICES:
        live = weights_on(source, seed)
        with publish(path, live, rank, NUM_DEVICES, copies=copies, buffers_device="cuda:0") as publisher:
            publisher.wait_for_consumers(0 if copies and rank else 1, DEADLINE_S)
            for version in (0, 1):
                for name, tensor in weights_on(source, seed + version).items():
                    live[name].copy_(tensor)
                assert publisher.publish(version).failures == ()
            meet(path, size, "published")
            meet(path, size, "through")
        return None
    device = rank - NUM_DEVICES
    if copies and device:
        meet(path, size, "published")
    own = {name: torch.zeros_like(tensor) for name, tensor in weights_on("cuda", seed).items()}
    taken: dict[str, torch.Tensor] = {}
    target = {"load": lambda name, tensor: taken.update({name: tensor.clone()})} if how == "function" else {"into": own}
    with subscribe(path, device=device, atomic=how == "atomic", **target) as consumer:
        while consumer.version != 1:
            consumer.receive(DEADLINE_S)
        if not (copies and device):
            meet(path, size, "published")
        meet(path, size, "through")
    here = taken if how == "function" else own
    return bits({name: tensor.cpu() for name, tensor in here.items()}) == expected, {
        str(t.device) for t in here.values()
    }


@needs_gpu
@pytest.mark.parametrize("how", ["atomic", "in place", "function"])
@pytest.mark.parametrize("copies", [False, True], ids=["live", "copies"])
@pytest.mark.parametrize("source", ["cpu", "cuda"])
def test_every_bit_arrives_on_the_gpu(source: str, copies: bool, how: str, tmp_path: Path, seed: int) -> None:
    answers = run_ranks(2 * NUM_DEVICES, delivery, tmp_path, source, copies, how, seed)
    assert answers == [None, None, (True, {"cuda:0"}), (True, {"cuda:0"})]


def staged(rank: int, size: int, path: Path, seed: int) -> Any:
    """Weights on a GPU on both sides, and buffers in host memory."""
    if rank == 0:
        with publish(path, weights_on("cuda", seed), 0, 1) as publisher:
            publisher.wait_for_consumers(1, DEADLINE_S)
            publisher.publish(1)
            meet(path, size, "through")
        return None
    own = {name: torch.zeros_like(tensor) for name, tensor in weights_on("cuda", seed).items()}
    with subscribe(path, into=own) as consumer:
        consumer.receive(DEADLINE_S)
        meet(path, size, "through")
    return bits({name: tensor.cpu() for name, tensor in own.items()}) == bits(weights_on("cpu", seed))


@needs_gpu
def test_weights_on_gpus_go_through_host_memory_too(tmp_path: Path, seed: int) -> None:
    assert run_ranks(2, staged, tmp_path, seed) == [None, True]


@pytest.mark.parametrize(
    "device", ["meta", pytest.param("cuda", marks=pytest.mark.skipif("torch.cuda.is_available()"))]
)
def test_a_device_that_is_not_there_is_refused(device: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"device '{device}' for buffers: this process has no such"):
        publish(tmp_path, {}, 0, 1, buffers_device=device)
