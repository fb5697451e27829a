"""Versions as files, against a server that stands in for SGLang's: the same route, request and answers."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.worker.ranks import DEADLINE_S

from keepstep.errors import KeepstepError, LoadError
from keepstep.integrations.sglang import ServerUpdates
from keepstep.weights.publisher import Buffers, Publisher

KEY = "a key"


class StandIn(http.server.ThreadingHTTPServer):
    """Loads what it is told to, and keeps a note of it; refuses the versions that it was told to refuse."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.loaded: list[tuple[str, dict[str, torch.Tensor]]] = []
        self.refused: set[str] = set()
        self.wait = threading.Event()
        self.wait.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answering(http.server.BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/update_weights_from_disk" or self.headers["Authorization"] != f"Bearer {KEY}":
            return self.answer(401, {"error": "Unauthorized"})
        assert request["load_format"] == "safetensors"
        self.server.wait.wait(DEADLINE_S)
        version = request["weight_version"]
        if version in self.server.refused:
            return self.answer(400, {"success": False, "message": "Rolling back to original weights."})
        (path,) = Path(request["model_path"]).glob("*.safetensors")
        self.server.loaded.append((version, load_file(path)))
        return self.answer(200, {"success": True, "message": "Succeeded to update model weights."})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn() as made:
        threading.Thread(target=made.serve_forever, args=(0.05,)).start()
        yield made
        made.shutdown()


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.zeros(300, 7, dtype=torch.bfloat16), "a.bias": torch.zeros(()), "none": torch.zeros(0, 3)}


def fill(weights: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    for tensor in weights.values():
        tensor.fill_(version)
    return {name: tensor.clone() for name, tensor in weights.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_each_version_is_loaded_whole(tmp_path: Path, server: StandIn, weights: dict[str, torch.Tensor]) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    with (
        Publisher(tmp_path / "w", weights, buffers=Buffers(1024)) as publisher,
        ServerUpdates(tmp_path / "w", server.url, api_key=KEY, memory=memory) as updates,
    ):
        publisher.wait_for_consumers(1, DEADLINE_S)
        expected = []
        for version in (1, 2, 7, 3):  # also back, where a job has gone back
            expected.append((str(version), fill(weights, version)))
            assert not publisher.publish(version).failures
            assert updates.update(DEADLINE_S) == version == updates.version
            assert [path.name for path in memory.glob("*/*")] == [f"version-{version}"], "the former one is gone"
    assert [version for version, _loaded in server.loaded] == ["1", "2", "7", "3"]
    assert all(same(loaded, told) for (_v, loaded), (_w, told) in zip(server.loaded, expected, strict=True))
    assert not list(memory.iterdir())


def test_a_refusal_takes_the_server_back_to_the_former_version(
    tmp_path: Path, server: StandIn, weights: dict[str, torch.Tensor]
) -> None:
    with (
        Publisher(tmp_path / "w", weights) as publisher,
        ServerUpdates(tmp_path / "w", server.url, api_key=KEY, memory=tmp_path) as updates,
    ):
        publisher.wait_for_consumers(1, DEADLINE_S)
        first = fill(weights, 1)
        publisher.publish(1)
        updates.update(DEADLINE_S)
        server.refused = {"2"}
        fill(weights, 2)
        publisher.publish(2)
        with pytest.raises(LoadError, match=r"SGLang refused version 2: 400: .*Rolling back"):
            updates.update(DEADLINE_S)
        assert updates.version == 1
        assert server.loaded[-1][0] == "1"
        assert same(server.loaded[-1][1], first)
        fill(weights, 3)
        publisher.publish(3)
        assert updates.update(DEADLINE_S) == 3


def test_a_slow_server_holds_up_no_training(tmp_path: Path, server: StandIn, weights: dict[str, torch.Tensor]) -> None:
    """Versions arrive while it loads one; those that a newer one overtakes are left out."""
    server.wait.clear()
    with (
        Publisher(tmp_path / "w", weights, deadline_s=DEADLINE_S) as publisher,
        ServerUpdates(tmp_path / "w", server.url, api_key=KEY, memory=tmp_path) as updates,
    ):
        publisher.wait_for_consumers(1, DEADLINE_S)
        loading = threading.Thread(target=updates.update, args=(DEADLINE_S,))
        loading.start()
        for version in (1, 2, 3, 4):
            fill(weights, version)
            assert not publisher.publish(version).failures
        server.wait.set()
        loading.join(DEADLINE_S)
        while updates.version != 4:
            updates.update(DEADLINE_S)
    # At most the first, the newest, and the one before: the newest may be an instant from being handed out.
    assert len(server.loaded) <= 3, [version for version, _loaded in server.loaded]


def test_what_cannot_be_is_an_error_in_time(tmp_path: Path, server: StandIn, weights: dict[str, torch.Tensor]) -> None:
    """No version; no key; no server."""
    with ServerUpdates(tmp_path / "w", server.url, memory=tmp_path) as updates:
        with pytest.raises(KeepstepError):
            updates.update(0.0)
        with Publisher(tmp_path / "w", weights) as publisher:
            publisher.wait_for_consumers(1, DEADLINE_S)
            publisher.publish(1)
            with pytest.raises(LoadError, match="SGLang refused version 1: 401"):
                updates.update(DEADLINE_S)
            server.shutdown()
            server.server_close()
            publisher.publish(2)
            with pytest.raises(LoadError, match="SGLang did not answer for version 2"):
                updates.update(DEADLINE_S)
    assert not server.loaded
