"""Trains one row of table.md for a few steps, and writes down what keepstep carries of it."""

import argparse
from pathlib import Path

import rows
import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep
from keepstep.worker.state.protected import ProtectedState

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", choices=rows.OPTIMIZERS)
parser.add_argument("--module", choices=rows.MODULES)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--carried", type=Path, help="a file for what is carried")
arguments = parser.parse_args()


def carried(state: ProtectedState) -> str:
    """What is carried beyond parameters and the optimizer's groups, by its kinds."""
    host = state.host_state()
    own = host["optimizers"].get("optimizer", {})
    values = [value for each in host["scalars"].get("optimizer", {}).values() for value in each.values()]
    kinds = {
        "tensors": state.optimizer_tensors(),
        "numbers": [value for value in values if isinstance(value, int | float)],
        "lists": [value for value in values if isinstance(value, list | tuple)],
        "dicts": [value for value in values if isinstance(value, dict)],
        "texts": [value for value in values if isinstance(value, str)],
        "text keys": own.get("state"),
        "own state_dict": own.get("own"),
        "buffers": state.buffers(),
        "module's own": [value for value in host["modules"].values() if value],
    }
    return ", ".join([kind for kind, found in kinds.items() if found] + sorted(host["others"]))


def main() -> None:
    """Trains."""
    session = keepstep.init(seed=0)
    training = rows.ROWS[arguments.optimizer or arguments.module].make()
    model, optimizer = DistributedDataParallel(training.model), training.optimizer
    session.protect(model=model, optimizer=optimizer, **training.others)
    for step in session.steps(arguments.steps):
        with step:
            loss = training.loss(model, torch.randn(8, rows.WIDTH))
            if training.scaler is None:
                loss.backward()
                optimizer.step()
            else:
                training.scaler.scale(loss).backward()
                training.scaler.step(optimizer)
                training.scaler.update()
            optimizer.zero_grad()
            training.after()
    if arguments.carried and session.is_main:
        arguments.carried.write_text(
            carried(ProtectedState({"model": model, "optimizer": optimizer, **training.others}))
        )


if __name__ == "__main__":
    main()
