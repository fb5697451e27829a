"""Published versions in SGLang servers: files, the order of a change, its race, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.engines.stand_ins import VLLM, SGLang, wait_until
from tests.worker.ranks import DEADLINE_S

from keepstep.engines.load import load_versions
from keepstep.engines.server import Running, Server
from keepstep.engines.sglang import SGLangServer
from keepstep.engines.updates import ServerUpdates
from keepstep.engines.vllm import VLLMServer
from keepstep.errors import ConfigurationError
from keepstep.weights.publisher import Publisher

Weights = dict[str, torch.Tensor]


@pytest.fixture
def weights() -> Weights:
    return {"a.weight": torch.zeros(300, 7, dtype=torch.bfloat16), "a.bias": torch.zeros(5)}


@pytest.fixture
def server(tmp_path: Path, weights: Weights) -> Iterator[SGLang]:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save_file(weights, checkpoint / "model.safetensors")
    made = SGLang(str(checkpoint))
    yield made
    made.close()


class Loading:
    """``keepstep weights load`` in a thread, and a publisher for it."""

    def __init__(self, folder: Path, weights: Weights, *servers: Server) -> None:
        self.weights, self.notes, self.memory = weights, list[str](), folder / "memory"
        self.memory.mkdir()
        self.publisher = Publisher(folder / "w", weights, copies=True)
        self._stop = threading.Event()
        self.updates = ServerUpdates(servers, memory=self.memory, note=self.notes.append)
        self._thread = threading.Thread(
            target=load_versions, args=(folder / "w", self.updates, self._stop), kwargs={"note": self.notes.append}
        )
        self._thread.start()
        self.publisher.wait_for_consumers(1, DEADLINE_S)

    def publish(self, version: int) -> None:
        for tensor in self.weights.values():
            tensor.fill_(version)
        assert not self.publisher.publish(version).failures

    def wait_for_note(self, text: str) -> None:
        wait_until(lambda: any(text in note for note in self.notes), f"{text}: {self.notes}")

    def __enter__(self) -> Loading:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.updates.close()
        self.publisher.close()


def test_each_version_is_loaded_whole_and_only_the_newest_is_kept(
    tmp_path: Path, server: SGLang, weights: Weights
) -> None:
    with Loading(tmp_path, weights, SGLangServer(server.url)) as loading:
        for version in (1, 2, 7, 3, 7):  # also back, where a job has gone back
            server.cached = server.weights
            loading.notes.clear()
            loading.publish(version)
            loading.wait_for_note(f"has version {version}")
            assert server.answer() == (version, version)
            assert server.label == str(version)
            assert {name: each.dtype for name, each in server.loaded.items()} == {
                name: each.dtype for name, each in weights.items()
            }
            assert all(bool((each == version).all()) for each in server.loaded.values())
        wait_until(lambda: len(list(loading.memory.glob("*/*"))) == 1, "former versions are gone")
    assert not list(loading.memory.iterdir())


def test_a_folder_that_is_missing_is_named(tmp_path: Path, server: SGLang) -> None:
    with pytest.raises(ConfigurationError, match=f"no folder for versions in {tmp_path}/missing"):
        ServerUpdates([SGLangServer(server.url)], memory=tmp_path / "missing")


def test_requests_that_run_are_completed_first(tmp_path: Path, server: SGLang, weights: Weights) -> None:
    with Loading(tmp_path, weights, SGLangServer(server.url)) as loading:
        loading.publish(1)
        loading.wait_for_note("has version 1")
        server.num_running = 1
        server.calls.clear()
        loading.publish(2)
        assert not threading.Event().wait(0.3)
        assert not any("update_weights" in call for call in server.calls), "it would mix two versions in the answer"
        server.num_running = 0
        loading.wait_for_note("has version 2")
        pauses = server.calls.index("pause_generation"), server.calls.index("update_weights_from_disk")
        assert server.calls[pauses[0] + 1 : pauses[1]].count("flush_cache") == 1


@pytest.mark.parametrize("running", list(Running))
@pytest.mark.parametrize(("lingering", "never"), [(3, False), (0, True), (2, True)])
def test_a_cache_that_is_not_flushed_holds_requests_back(
    tmp_path: Path, server: SGLang, weights: Weights, running: Running, lingering: int, never: bool
) -> None:
    """A completed request that the scheduler still holds; and a server which says so each time."""
    server.never_flushes = never
    with Loading(tmp_path, weights, SGLangServer(server.url, running=running)) as loading:
        loading.publish(1)
        loading.wait_for_note("has version 1")
        server.answer()
        server.num_lingering = lingering
        loading.publish(2)
        loading.wait_for_note("has version 2")
        assert server.answer() == (2, 2)
        assert server.label == "2"
    assert not any("flushed" in note for note in loading.notes)


def test_a_version_that_is_refused_leaves_the_former_one_and_the_next_is_taken(
    tmp_path: Path, server: SGLang, weights: Weights
) -> None:
    with Loading(tmp_path, weights, SGLangServer(server.url)) as loading:
        loading.publish(1)
        loading.wait_for_note("has version 1")
        server.refuses["/update_weights_from_disk"] = "Failed to get weights iterator"
        loading.publish(2)
        loading.wait_for_note("Failed to get weights iterator")
        wait_until(lambda: not server.is_paused, "it answers again")
        assert server.answer() == (1, 1)
        server.refuses.clear()
        loading.publish(3)
        loading.wait_for_note("has version 3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.bias": None}, "'a.bias' of the checkpoint"),
        ({"b.bias": torch.zeros(2)}, "'b.bias' is published, and the checkpoint"),
        ({"a.bias": torch.zeros(6)}, "'a.bias' has shape (6,), and in the checkpoint"),
        ({"a.bias": torch.zeros(5, dtype=torch.int32)}, "'a.bias' has dtype int32"),
    ],
)
def test_tensors_that_are_not_those_of_the_server_are_refused_by_name(
    tmp_path: Path, server: SGLang, weights: Weights, change: dict[str, torch.Tensor | None], message: str
) -> None:
    """The real server ends at a wrong shape, and goes on with a mixture if a tensor is missing."""
    given = {name: tensor for name, tensor in {**weights, **change}.items() if tensor is not None}
    with Loading(tmp_path, given, SGLangServer(server.url)) as loading:
        loading.publish(1)
        loading.wait_for_note(message)
    assert server.weights == 0
    assert not server.is_paused


@pytest.mark.parametrize(
    ("settings", "model", "message"),
    [
        ({"pp_size": 2}, {}, "has pp_size 2"),
        ({"dp_size": 2}, {}, "has dp_size 2"),
        ({"tokenizer_worker_num": 4}, {}, "has tokenizer_worker_num 4"),
        ({"hicache_storage_backend": "file"}, {}, "in a storage"),
        ({}, {"has_image_understanding": True}, "embeddings of images"),
    ],
)
def test_servers_that_cannot_be_stopped_are_refused(
    tmp_path: Path,
    server: SGLang,
    weights: Weights,
    settings: dict[str, object],
    model: dict[str, object],
    message: str,
) -> None:
    server.settings, server.model = settings, model
    with Loading(tmp_path, weights, SGLangServer(server.url)) as loading:
        loading.publish(1)
        loading.wait_for_note(message)
    assert server.weights == 0


def test_servers_of_both_engines_follow_one_job(tmp_path: Path, server: SGLang, weights: Weights) -> None:
    """vLLM's workers receive versions themselves; here they are said to have."""
    other = VLLM()
    other.has = {1, 2}
    with Loading(tmp_path, weights, SGLangServer(server.url), VLLMServer(other.url)) as loading:
        for version in (1, 2):
            loading.publish(version)
            wait_until(lambda number=version: server.weights == other.weights == number, "both have it")
    other.close()
