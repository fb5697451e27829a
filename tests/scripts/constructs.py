"""Trains one of the constructs that docs/upstream.md lists, in a protected job.

Usage: keepstep run --nproc-per-node 4 tests/scripts/constructs.py NAME [--steps N] [--snapshot-every N]
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import keepstep

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.worker.constructs import pipelines, training
from tests.worker.constructs.construct import Ranks, Result, default_optimizer


@dataclass(frozen=True)
class Protected(Ranks):
    """Trains in the session's steps."""

    session: keepstep.Session
    num_steps: int
    snapshot_every: int | str

    def trained(
        self,
        modules: nn.Module,
        forward_backward: Callable[[int], Any],
        optimizer: torch.optim.Optimizer | None = None,
        **protect: Any,
    ) -> Result:
        optimizer = optimizer or default_optimizer(modules)
        self.session.protect(model=modules, optimizer=optimizer, snapshot_every=self.snapshot_every, **protect)
        for step in self.session.steps(self.num_steps):
            with step:
                optimizer.zero_grad()
                forward_backward(step.index)
                optimizer.step()
        return {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--snapshot-every", default="auto")
    arguments = parser.parse_args()
    every = int(arguments.snapshot_every) if arguments.snapshot_every.isdecimal() else arguments.snapshot_every
    warnings.simplefilter("ignore")  # torch's own, on import and about names to come
    torch.set_num_threads(1)
    session = keepstep.init(seed=3)
    constructs = training.CONSTRUCTS | pipelines.CONSTRUCTS
    constructs[arguments.name](Protected(session.rank, Path(), session, arguments.steps, every))
    if session.is_main:
        print("done", flush=True)


if __name__ == "__main__":
    main()
