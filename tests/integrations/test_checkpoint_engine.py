"""The sender, against checkpoint-engine's own consumer in a process of its own.

``make test-engines`` runs it. The consumer's code knows CUDA and NPUs only; here its device is one that has nothing to
synchronize, and the buffer is a file that both map.
"""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.worker.ranks import DEADLINE_S

pytest.importorskip("checkpoint_engine", reason="checkpoint-engine is not installed: make test-engines")

import checkpoint_engine.worker
import zmq

from keepstep.engines.vllm import VLLMServer
from keepstep.errors import ConfigurationError, LoadError, SubscriberLost
from keepstep.integrations.checkpoint_engine import CheckpointEngineSender, Handle
from keepstep.weights.memory.bytes_of import byte_view
from keepstep.weights.publisher import Publisher

DEVICES = ("GPU-a", "GPU-b")
PATIENCE_S = 2.0
BUCKET_BYTES = 4096


def digests_of(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Of every bit; what a pipe holds although nobody reads it yet."""
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(byte_view(tensor).numpy().tobytes()).hexdigest()}"
        for name, tensor in tensors.items()
    }


def consume(address: str, refuses: str | None, told: Any) -> None:
    """One consumer, as an engine runs it; reports what it has loaded, and that its hook was called."""
    nothing = SimpleNamespace(synchronize=lambda: None, ipc_collect=lambda: None, empty_cache=lambda: None)
    checkpoint_engine.worker.DeviceManager = lambda: SimpleNamespace(device_module=nothing)
    loaded: dict[str, torch.Tensor] = {}

    def run(weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == refuses:
                raise ValueError(f"no {name} here")
            loaded[name] = tensor.clone()

    checkpoint_engine.worker.update_weights_from_ipc(
        zmq.Context(), address, None, run=run, post_hook=lambda: told.put(digests_of(loaded))
    )


class Engine:
    """Starts a consumer for each device when it is asked to update, and waits for them."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("fork")
        self.told = self.context.Queue()
        self.refuses: str | None = None
        self.is_dead = False

    def __call__(self, handles: dict[str, str]) -> None:
        assert tuple(handles) == DEVICES
        if self.is_dead:
            return
        processes = [
            self.context.Process(target=consume, args=(address, self.refuses, self.told), daemon=True)
            for address in handles.values()
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(PATIENCE_S)
            if process.is_alive():
                process.kill()
                raise TimeoutError("a consumer waits")


class Paused(VLLMServer):
    """A server that notes when it is paused; what was told in between."""

    def __init__(self, told: Any) -> None:
        super().__init__("http://127.0.0.1:1")
        self.told, self.states = told, list[str]()
        self.refuses = False

    def pause(self) -> None:
        if self.refuses:
            raise LoadError("requests run on and on")
        assert self.told.empty(), "a consumer was asked before"
        self.states.append("paused")

    def resume(self) -> None:
        self.states.append("resumed")


@pytest.fixture
def buffers(tmp_path: Path) -> Callable[[int], tuple[torch.Tensor, Handle]]:
    def make(size: int) -> tuple[torch.Tensor, Handle]:
        function = functools.partial(torch.from_file, dtype=torch.uint8)
        arguments = (str(tmp_path / "buffer"), True, size)
        return function(*arguments), (function, arguments)

    return make


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """Some in one bucket together, and one that is larger than a bucket."""
    return {
        "a": torch.zeros(10, 3, dtype=torch.bfloat16),
        "b": torch.zeros(7),
        "large": torch.zeros(3000),
        "c": torch.zeros(900, dtype=torch.float64),
        "scalar": torch.zeros((), dtype=torch.int64),
    }


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.told.close()


@pytest.fixture
def server(engine: Engine) -> Paused:
    return Paused(engine.told)


def fill(weights: dict[str, torch.Tensor], version: int) -> dict[str, Any]:
    for tensor in weights.values():
        tensor.fill_(version)
    return digests_of(weights)


def test_every_consumer_gets_each_version_whole(tmp_path, weights, engine, buffers, server) -> None:
    """While the server computes nothing."""
    with (
        Publisher(tmp_path / "w", weights) as publisher,
        CheckpointEngineSender(tmp_path / "w", DEVICES, engine, server=server, buffers=buffers, pickled=True) as sender,
    ):
        publisher.wait_for_consumers(1, DEADLINE_S)
        for version in (1, 2):
            expected = fill(weights, version)
            publisher.publish(version)
            assert sender.update(DEADLINE_S, BUCKET_BYTES) == version
            assert [engine.told.get(timeout=DEADLINE_S) for _ in DEVICES] == [expected, expected]
    assert server.states == ["paused", "resumed"] * 2


def test_a_consumer_that_fails_is_an_error_in_time_and_the_next_version_comes(
    tmp_path, weights, engine, buffers, server
) -> None:
    """The server stays paused in between: its consumers hold parts of a version."""
    settings = {"server": server, "buffers": buffers, "pickled": True, "answer_s": PATIENCE_S}
    with (
        Publisher(tmp_path / "w", weights) as publisher,
        CheckpointEngineSender(tmp_path / "w", DEVICES, engine, **settings) as sender,
    ):
        publisher.wait_for_consumers(1, DEADLINE_S)
        publisher.publish(1)
        engine.refuses = "large"
        with pytest.raises(LoadError, match=r"no large here; vllm at .* is out of service until the next"):
            sender.update(DEADLINE_S, BUCKET_BYTES)
        publisher.publish(2)
        engine.refuses, engine.is_dead = None, True
        with pytest.raises(SubscriberLost, match="has not answered in time"):
            sender.update(DEADLINE_S, BUCKET_BYTES)
        assert sender.version is None
        assert engine.told.empty()
        publisher.publish(2)
        server.refuses = True
        with pytest.raises(LoadError, match="requests run on and on"):
            sender.update(DEADLINE_S, BUCKET_BYTES)
        engine.is_dead, server.refuses = False, False
        expected = fill(weights, 3)
        publisher.publish(3)
        assert sender.update(DEADLINE_S, BUCKET_BYTES) == 3
        assert engine.told.get(timeout=DEADLINE_S) == expected
    assert server.states == ["paused", "paused", "paused", "resumed"]


def test_pickle_has_to_be_asked_for(tmp_path, buffers, server) -> None:
    with pytest.raises(ConfigurationError, match="pass pickled=True"):
        CheckpointEngineSender(tmp_path / "w", DEVICES, print, server=server, buffers=buffers)
