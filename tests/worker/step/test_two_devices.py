"""A process that trains on two GPUs, with a twin of CUDA."""

import types
from typing import Any

import pytest
import torch

from keepstep.worker.step.device_completion import completion_on

NUM_GPUS = 4


class TwinCuda:
    """What `completion_on` asks of ``torch.cuda``: four GPUs, each with one stream.

    Attributes:
        is_done: by number of the GPU, whether it is through.
        reserved: bytes that torch's allocator has taken on each.
        drained: the numbers of those that were waited for, in order.
    """

    def __init__(self) -> None:
        self.is_done = [True] * NUM_GPUS
        self.reserved = [0] * NUM_GPUS
        self.drained: list[int] = []

    def Event(self) -> Any:  # noqa: N802  # as torch calls it
        event = types.SimpleNamespace()
        event.record = lambda stream: setattr(event, "query", lambda: self.is_done[stream])
        return event

    def current_stream(self, device: torch.device) -> int:
        assert device.index is not None
        return device.index

    def device_count(self) -> int:
        return NUM_GPUS

    def memory_reserved(self, index: int) -> int:
        return self.reserved[index]

    def synchronize(self, index: int) -> None:
        self.drained.append(index)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> TwinCuda:
    twin = TwinCuda()
    for name in ("Event", "current_stream", "device_count", "memory_reserved", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(twin, name))
    return twin


def test_gradients_are_complete_when_they_are_on_all_gpus_of_the_model(cuda: TwinCuda) -> None:
    completion = completion_on(torch.device("cuda", 1), {torch.device("cuda", 2), torch.device("cpu")})
    cuda.is_done[2] = False
    looks: list[int] = []

    def look() -> None:
        looks.append(len(looks))
        cuda.is_done[2] = len(looks) > 2

    completion.wait(look, lambda: False)
    assert len(looks) == 4, "until the second GPU was through, and once more"


def test_gpus_that_the_script_has_opened_are_drained_and_no_other_is_opened(cuda: TwinCuda) -> None:
    cuda.reserved[3] = 1 << 20
    completion_on(torch.device("cuda", 1), {torch.device("cuda", 2)}).drain()
    assert cuda.drained == [1, 2, 3]
