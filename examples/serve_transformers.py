"""Generate text with a model of Hugging Face Transformers while it is trained. Each answer names its version.

One command starts a job of two ranks, and has the model continue a prompt while it trains:

    python examples/serve_transformers.py

Kill one of the ranks while it runs (`pgrep -f "serve_transformers.py train"` shows them). The engine continues with the
last version, and gets new versions when the rank has been replaced. Or start the two parts by hand, in any order:

    keepstep run --nproc-per-node 2 --spares 1 examples/serve_transformers.py train /tmp/llama
    python examples/serve_transformers.py ask /tmp/llama

The model is a small Llama over bytes, the text is the source of Python's standard library; nothing is downloaded. The
training calls keepstep's `publish_weights`. The engine is a `GenerationEngine`, whose `generate` takes the arguments of
the model's.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

import keepstep
from keepstep.integrations.generation import GenerationEngine

CONTEXT, BATCH_SIZE, EVERY = 64, 8, 5
PROMPT = "def "


def build_model() -> LlamaForCausalLM:
    """Returns a model. Training and engine use the same shape."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
    )


def text() -> torch.Tensor:
    """Returns bytes of the standard library: uint8, one dimension."""
    files = sorted(Path(argparse.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)[: 2**19]), dtype=torch.uint8)


def train(folder: Path, num_steps: int) -> None:
    """Trains one rank, and publishes the weights in the folder."""
    session = keepstep.init(seed=0)
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session.protect(model=model, optimizer=optimizer)
    session.publish_weights(folder, model.module, every=EVERY)
    rows = text().unfold(0, CONTEXT, CONTEXT).long()
    loader = DataLoader(rows, batch_size=BATCH_SIZE, sampler=DistributedSampler(rows))
    for step, batch in session.batches(loader, steps=num_steps):
        with step:
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def ask(folder: Path, num_steps: int, is_over: Callable[[], bool] = lambda: False) -> None:
    """Continues the prompt with each new version of the weights, until the last version or the end of the training."""
    torch.set_num_threads(1)  # the training needs cores, too
    prompt = torch.tensor([list(PROMPT.encode())])
    last = -1
    with GenerationEngine(build_model(), folder, name="serve_transformers.py") as engine:
        while last < num_steps and not (is_over() and engine.subscriber.version in (None, last)):
            try:
                engine.subscriber.wait_for(last + 1, timeout_s=1.0)
                generated = engine.generate(prompt, max_new_tokens=32, do_sample=False, pad_token_id=0)
            except keepstep.KeepstepError:
                continue  # no version yet, or no newer one
            last = generated.version
            print(f"version {last:4}: {bytes(generated.output[0].tolist())!r}", flush=True)


def orchestrate(num_steps: int) -> int:
    """Runs the job and the engine until the training ends. Returns the job's exit code."""
    with tempfile.TemporaryDirectory(prefix="llama-") as folder:
        part = ["train", folder, "--steps", str(num_steps)]
        command = [sys.executable, "-m", "keepstep.cli.main", "run", "--nproc-per-node", "2", "--spares", "1"]
        job = subprocess.Popen([*command, __file__, *part])
        try:
            ask(Path(folder), num_steps, lambda: job.poll() is not None)
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(60)
            job.terminate()
        return job.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small Llama, and have it write text meanwhile.")
    parser.add_argument("part", nargs="?", choices=["all", "train", "ask"], default="all")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("/tmp/llama"), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    match args.part:
        case "train":
            train(args.folder, args.steps)
        case "ask":
            ask(args.folder, args.steps)
        case _:
            return orchestrate(args.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
