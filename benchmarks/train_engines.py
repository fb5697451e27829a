"""The worker of `engines.py`: a small Llama under DDP, whose weights are published after each step.

Without ``--weights`` it publishes nothing and does not wait, and rank 0 writes down what each version answers. So the
answers are known before a server gives them, and from a run in which nothing failed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - the prompts are those of the tests
import torch
from tests.engines.real.asking import answers_of
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

import keepstep

NUM_RANKS = 3
BATCH, LENGTH = 4, 32
CHANGE = 0.06
"""By how much a step changes a weight, as a part of its mean size."""


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="the model's folder")
    parser.add_argument("out", type=Path, help="folder for what the ranks write")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=float, default=0.0, help="seconds from one step to the next")
    parser.add_argument("--weights", help="publish here")
    return parser.parse_args()


def loss_of(wrapped: torch.nn.Module, model: Any, seed: int) -> torch.Tensor:
    """Returns a loss whose gradient is random, and which depends on the seed only.

    So the model learns nothing, and its answers change with each version for as long as one likes.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (BATCH, LENGTH), generator=generator)
    loss = 0.0 * wrapped(input_ids=tokens).logits.mean()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            direction = torch.randn(parameter.shape, generator=generator)
            loss = loss + (parameter * direction).sum() * parameter.detach().abs().mean()
    return loss


def main() -> None:
    """Trains."""
    args = parse_arguments()
    torch.set_num_threads(1)
    session = keepstep.init(seed=0)
    model: Any = LlamaForCausalLM.from_pretrained(args.checkpoint).float()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=CHANGE * NUM_RANKS**0.5)
    session.protect(model=wrapped, optimizer=optimizer)
    if args.weights is not None:
        session.publish_weights(args.weights, model, every=1, at_start=True)
    expected = None
    if args.weights is None and session.rank == 0:
        expected = (args.out / "expected.jsonl").open("w", encoding="ascii")
        print(json.dumps([0, answers_of(model)]), file=expected, flush=True)
    due_s = time.monotonic()
    for step in session.steps(args.steps):
        with step:
            (args.out / f"rank-{session.rank}").write_text(str(os.getpid()), encoding="ascii")
            if args.every:
                time.sleep(max(0.0, due_s - time.monotonic()))
                due_s = max(due_s, time.monotonic() - args.every) + args.every
            optimizer.zero_grad()
            loss_of(wrapped, model, step.index * 1000 + session.data_rank).backward()
            optimizer.step()
        if expected is not None:
            print(json.dumps([step.index + 1, answers_of(model)]), file=expected, flush=True)
        elif session.rank == 0:
            with (args.out / "versions.jsonl").open("a", encoding="ascii") as file:
                print(json.dumps([step.index + 1, time.monotonic()]), file=file, flush=True)
    if session.rank == 0:
        torch.save(model.state_dict(), args.out / "final.pt")


if __name__ == "__main__":
    main()
