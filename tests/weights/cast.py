"""Publishers and consumers for tests, each in a process of its own: the first ranks publish, the others consume."""

from pathlib import Path
from typing import Any

import torch
from tests.worker.ranks import DEADLINE_S

from keepstep.weights.memory.blocks import Weights
from keepstep.weights.memory.bytes_of import byte_view
from keepstep.weights.publisher import Buffers, Publisher
from keepstep.weights.subscriber import Subscriber

SMALL_BUCKET_BYTES = 1024
"""Small enough that a test's weights take many buckets, and that some of its tensors are larger."""


def publish(
    path: Path,
    weights: Weights,
    rank: int,
    world_size: int,
    bucket_bytes: int = SMALL_BUCKET_BYTES,
    buffers_device: str = "cpu",
    **settings: Any,
) -> Publisher:
    """A publisher with small buckets."""
    settings = {"buffers": Buffers(bucket_bytes, buffers_device), "deadline_s": DEADLINE_S} | settings
    return Publisher(path, weights, rank=rank, world_size=world_size, **settings)


def subscribe(path: Path, **settings: Any) -> Subscriber:
    """A consumer that waits as long as a test may."""
    return Subscriber(path, **({"device": 0, "deadline_s": DEADLINE_S} | settings))


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every bit of some tensors, in row-major order, with dtype and shape."""
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), byte_view(tensor.detach().contiguous()).numpy().tobytes())
        for name, tensor in tensors.items()
    }
