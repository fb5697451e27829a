"""What the tests of this folder need of a machine, and what they say where it is missing."""

import pytest
import torch
from torch import distributed as dist

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def needs_gpus(number: int) -> pytest.MarkDecorator:
    """Skips a test on a machine with fewer GPUs."""
    what = "a GPU" if number == 1 else f"{number} GPUs"
    return pytest.mark.skipif(number > NUM_GPUS, reason=f"needs {what}: torch finds {NUM_GPUS or 'none'}")


needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL: torch was built without it")
