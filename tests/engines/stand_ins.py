"""Servers that stand in for those of vLLM and SGLang: the same routes, answers and rules, and no model.

What a real server does with a change is tested with real ones, by ``make test-engines``.
"""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file
from tests.worker.ranks import DEADLINE_S


class StandIn(http.server.ThreadingHTTPServer):
    """A server whose answers are the version that computed them. A prompt's prefix keeps the version that read it."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Answering)
        self.calls: list[str] = []
        self.label = "default"
        self.weights = 0
        self.cached: int | None = None
        self.is_paused = False
        self.refuses: dict[str, str] = {}
        """Route -> the reason for which it fails."""
        self.refuses_once: dict[str, str] = {}
        self.waits: dict[str, threading.Event] = {}
        """Route -> what its calls wait for, before they do anything."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self) -> tuple[int, int]:
        """Computes an answer, whose prefix may have been read before: the versions of its keys and of its tokens."""
        assert not self.is_paused
        if self.cached is None:
            self.cached = self.weights
        return self.cached, self.weights

    def close(self) -> None:
        """Is gone, as after a kill."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def act(self, path: str, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        route = urlsplit(path).path
        if route in self.waits:
            self.waits[route].wait()
        with self._lock:
            self.calls.append(path.removeprefix("/"))
            if route in self.refuses_once:
                self.fail()
                return failed(self.refuses_once.pop(route))
            if route in self.refuses:
                return failed(self.refuses[route])
            return getattr(self, "on_" + route[1:], self.on_nothing)(content)

    def fail(self) -> None:
        """What a call leaves behind that fails."""

    def on_nothing(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 404, {"detail": "Not Found"}


class VLLM(StandIn):
    """The routes of vLLM."""

    def __init__(self, port: int = 0) -> None:
        self.has: set[int] = set()
        """Versions that its workers have received."""
        self.session: int | None = None
        """None: no session is open. 0: one is. Else the selected version."""
        self.is_initialized = self.is_torn = False
        self.is_half_ready = False
        """Whether only one of its workers selects a version, and another one says that it has not got it."""
        self.unflushed = 0
        """How often the cache cannot be reset yet."""
        super().__init__(port)

    def fail(self) -> None:
        self.session = self.session and 0  # a worker that fails to load a version has none selected

    def on_weight_info(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, {"weight_version": self.label}

    def on_init_weight_transfer_engine(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.is_initialized = True
        return 200, {}

    def on_start_weight_update(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.session is not None:
            return failed("start_weight_update called while a weight update is already active")
        self.session = 0
        return 200, {}

    def on_update_weights(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        told = content["update_info"]
        if self.session is None:
            return failed("start_weight_update must be called before update_weights")
        reason = None
        if self.is_half_ready and told.get("use"):
            self.session = told["version"]
            return failed("another version is there")
        if told.get("version") is None:
            reason = "the model holds parts of a version" if self.is_torn else None
        elif not self.is_initialized:
            reason = "update_weights before init_weight_transfer_engine"
        elif told["version"] not in self.has:
            reason = f"version {told['version']} did not come"
        if reason is not None:
            self.session = None
            return failed(reason)
        self.session = told["version"] if told.get("use") else 0
        return 200, {}

    def on_finish_weight_update(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.session is None:
            return failed("finish_weight_update called without a matching start_weight_update")
        if self.session:
            assert self.is_paused, "weights change while requests run"
            self.weights, self.is_torn = self.session, False
        self.session = None
        self.label = content.get("weight_version", self.label)
        return 200, {}

    def on_pause(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.is_paused = True
        return 200, {}

    def on_resume(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.is_paused = False
        return 200, {}

    def on_reset_prefix_cache(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.unflushed -= 1
        if self.unflushed >= 0:
            return 200, {"success": False}
        self.cached = None
        return 200, {"success": True}

    def on_reset_mm_cache(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, {}

    on_reset_encoder_cache = on_reset_mm_cache


class SGLang(StandIn):
    """The routes of SGLang."""

    def __init__(self, checkpoint: str, port: int = 0) -> None:
        self.checkpoint, self.settings, self.model = checkpoint, dict[str, Any](), dict[str, Any]()
        self.loaded: dict[str, torch.Tensor] = {}
        self.num_running = 0
        """How many requests run. They end only where a test says so."""
        self.num_lingering = 0
        """How often the cache cannot be flushed, since the scheduler has not removed completed requests yet."""
        self.never_flushes = False
        """Whether the load always answers that it has not flushed the cache."""
        super().__init__(port)

    def act(self, path: str, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        while path == "/end_weight_update" and self.num_running and not self.is_paused:  # the lock for writers
            threading.Event().wait(0.01)
        return super().act(path, content)

    def on_model_info(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, {"weight_version": self.label, **self.model}

    def on_server_info(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, {"model_path": self.checkpoint, "pp_size": 1, "dp_size": 1, **self.settings}

    def on_end_weight_update(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 400, {"success": False, "message": "no weight-update session is open; call begin_weight_update first"}

    def on_pause_generation(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.is_paused = True
        if content["mode"] == "retract":
            self.num_running = 0
        return 200, {}

    def on_continue_generation(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.is_paused = False
        return 200, {}

    def on_flush_cache(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.num_running or self.num_lingering:
            self.num_lingering = max(0, self.num_lingering - 1)
            return 400, {"message": "Flush cache failed"}
        self.cached = None
        return 200, {}

    def on_update_weights_from_disk(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert self.is_paused, "weights change while requests run"
        self.loaded = load_file(Path(content["model_path"]) / "model.safetensors")
        self.weights = int(content["weight_version"])
        if self.never_flushes or self.num_running or self.num_lingering:
            message = "Weights were updated, but the cache was not flushed because requests are still running or queued"
            return 400, {"success": False, "message": message}
        self.cached, self.label = None, content["weight_version"]
        return 200, {"success": True}

    def on_update_weight_version(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert content["abort_all_requests"] is False
        self.label = content["new_version"]
        return 200, {"success": True}


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Waits until something is so, and fails the test if it is not in time."""
    until_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < until_s, what
        threading.Event().wait(0.01)


def failed(reason: str) -> tuple[int, dict[str, Any]]:
    """What vLLM answers when a worker has raised."""
    message = f"Call to collective_rpc method failed: Worker failed with error '{reason}'"
    return 500, {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}


class Answering(http.server.BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, content = self.server.act(self.path, json.loads(data) if data else {})
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST  # noqa: N815  # the library's name

    def log_message(self, *_: object) -> None:
        """Nothing."""
