"""Real inference servers for tests: a small model, and a vLLM or SGLang server of it, on a CPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

START_S = 300.0
"""In this time a server must answer; it usually takes 40 s, and three minutes while other tests take both cores."""
ANSWER_S = 60.0
"""Timeout of a request for tokens, which may wait for a change of weights."""
VOCABULARY = 512
STUB = Path(__file__).parent / "stub"


def write_model(folder: Path, *, tied: bool = False) -> Path:
    """Writes a small Llama as a checkpoint, and returns its folder.

    Its weights are large, so that its answers depend on all tokens, and change with the weights.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=tied, dtype="float32",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    model.save_pretrained(folder)
    return folder


class RealServer:
    """A server as a process group of its own."""

    def __init__(self, kind: str, model: Path, port: int, command: list[str], environment: dict[str, str]) -> None:
        self.kind, self.model, self.port = kind, model, port
        self.url = f"http://127.0.0.1:{port}"
        self.log = model.parent / f"{kind}-{port}.log"
        self._command, self._environment = command, environment
        self.start()

    def start(self) -> None:
        """Starts it, also once more after `kill`."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                cwd=self.model.parent, env={**os.environ, **self._environment},
            )  # fmt: skip

    def wait_until_healthy(self) -> None:
        """Waits until the server answers."""
        until_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/health", timeout=5.0):
                return
            assert self.process.poll() is None, f"{self.kind} ended with {self.process.returncode}:\n{self.tail()}"
            assert time.monotonic() < until_s, f"{self.kind} does not answer after {START_S:g} s:\n{self.tail()}"
            threading.Event().wait(0.2)

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-4000:]

    def get(self, route: str, timeout_s: float = 10.0) -> Any:
        """The JSON of a route."""
        with urllib.request.urlopen(f"{self.url}/{route}", timeout=timeout_s) as response:
            return json.load(response)

    def ask(self, prompt: list[int], num_tokens: int, timeout_s: float = ANSWER_S) -> list[int]:
        """The tokens with which it continues a prompt, each the likeliest one."""
        with urllib.request.urlopen(self.request(prompt, num_tokens), timeout=timeout_s) as response:
            answer = json.load(response)
        return answer["choices"][0]["token_ids"] if self.kind == "vllm" else answer["output_ids"]

    def request(self, prompt: list[int], num_tokens: int, *, streams: bool = False) -> urllib.request.Request:
        """A request for tokens."""
        if self.kind == "vllm":
            route = "/v1/completions"
            content: dict[str, Any] = {
                "model": "m", "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
                "detokenize": False, "max_tokens": num_tokens, "stream": streams,
            }  # fmt: skip
        else:
            route = "/generate"
            sampling = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
            content = {"input_ids": prompt, "sampling_params": sampling, "stream": streams}
        headers = {"Content-Type": "application/json"}
        return urllib.request.Request(self.url + route, json.dumps(content).encode(), headers)

    def kill(self) -> None:
        """Kills it with all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Ends it, and kills what has not ended after a while."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15.0)
        self.kill()


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def vllm_server(
    model: Path, *arguments: str, port: int | None = None, python: str = sys.executable
) -> Iterator[RealServer]:
    """A vLLM server with keepstep's backend."""
    port = port or free_port()
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m",
        "--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4",
        "--enforce-eager", "--port", str(port), "--weight-transfer-config", '{"backend":"keepstep"}', *arguments,
    ]  # fmt: skip
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with _running(RealServer("vllm", model, port, command, environment)) as server:
        yield server


@contextlib.contextmanager
def sglang_server(
    model: Path, *arguments: str, port: int | None = None, python: str = sys.executable
) -> Iterator[RealServer]:
    """An SGLang server, in which torch computes what SGLang's kernels compute on a GPU."""
    port = port or free_port()
    command = [
        python, "-m", "sglang.launch_server", "--model-path", str(model), "--skip-tokenizer-init",
        "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
        "--dtype", "float32", "--mem-fraction-static", "0.3", "--disable-overlap-schedule", "--disable-cuda-graph",
        "--max-total-tokens", "4096", "--sleep-on-idle", "--port", str(port), *arguments,
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, (str(STUB), os.environ.get("PYTHONPATH"))))
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with _running(RealServer("sglang", model, port, command, environment)) as server:
        yield server


@contextlib.contextmanager
def _running(server: RealServer) -> Iterator[RealServer]:
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()
