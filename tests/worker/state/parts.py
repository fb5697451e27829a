"""Small models, optimizers and schedulers, in the states in which a job may have them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import lr_scheduler

from keepstep.protocol.transfer.boxes import Box
from keepstep.weights.memory.blocks import NamedBlock
from keepstep.weights.memory.bytes_of import byte_view
from keepstep.weights.memory.pieces import Held
from keepstep.worker.parallel.layout import Replicated
from keepstep.worker.state.checkpoint import Checkpoints
from keepstep.worker.state.dcp.content import Share
from keepstep.worker.state.protected import ProtectedState

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "multi-step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 7], gamma=0.5),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.1)],
        milestones=[3],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
}


class Keeps:
    """An object of the script's own with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def small(inputs: int = 4) -> torch.nn.Sequential:
    """A model with a buffer of floats and one of int64."""
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU(), torch.nn.Linear(5, 3)
    )


def train(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], num_steps: int, seed: int) -> None:
    """Some steps on numbers of its own."""
    for step in range(num_steps):
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(1000 * seed + step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def advance(scheduler: Any, metric: float) -> None:
    """One step of any scheduler."""
    scheduler.step(metric) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()


def content(state: ProtectedState) -> tuple[dict[str, bytes], bytes]:
    """Every bit of the protected state: named tensors, and the host state."""
    host, tensors = state.host_bytes()
    named = [*state.live_tensors(), *((f"host/{index}", tensor) for index, tensor in enumerate(tensors))]
    return {name: byte_view(tensor.cpu()).numpy().tobytes() for name, tensor in named}, host


class Job:
    """A job of one rank, and what it protects."""

    def __init__(self, seed: int, optimizer: str = "adamw", scheduler: str = "multi-step") -> None:
        torch.manual_seed(seed)
        self.model = small()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.state = ProtectedState({"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler})

    def train(self, num_steps: int, seed: int) -> None:
        for step in range(num_steps):
            train(self.model, [self.optimizer], 1, seed + step)
            advance(self.scheduler, 0.0)
        self.optimizer.zero_grad()

    def everything(self) -> tuple[Any, ...]:
        gradients = [parameter.grad is None for parameter in self.model.parameters()]
        return content(self.state), self.state.digest(), gradients


def written(tmp_path: Path, objects: dict[str, Any]) -> None:
    """A checkpoint of step 1."""
    checkpoints = Checkpoints(ProtectedState(objects), tmp_path, every=1)
    checkpoints.after_step(1, 1)
    checkpoints.flush()


class Rows(Replicated):
    """A layout without process groups: this rank holds some rows of each tensor, and all of what has no dimensions."""

    def __init__(self, start: int, num_rows: int) -> None:
        self.start, self.num_rows = start, num_rows

    @property
    def is_sharded(self) -> bool:
        return True

    def blocks(self, named: Iterable[tuple[str, torch.Tensor]]) -> list[NamedBlock]:
        found = []
        for block in super().blocks(named):
            shape, rest = block.whole, (0,) * (len(block.whole) - 1)
            if shape:
                held = Held(block.held.tensor, Box((self.start, *rest), shape))
                block = dataclasses.replace(block, held=held, whole=(self.num_rows, *shape[1:]))
            found.append(block)
        return found


class Part:
    """A rank that holds the rows from ``start`` to ``stop`` of a weight of 7 rows and of its bias."""

    num_rows = 7

    def __init__(self, start: int, stop: int, **objects: Any) -> None:
        self.start, self.stop = start, stop
        self.model = torch.nn.Linear(3, self.num_rows)
        for name, parameter in list(self.model.named_parameters()):
            setattr(self.model, name, torch.nn.Parameter(torch.zeros_like(parameter[start:stop])))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        objects = {"model": self.model, "optimizer": self.optimizer, **objects}
        self.state = ProtectedState(objects, Rows(start, self.num_rows))

    def train(self, seed: int) -> None:
        """A step by which each element depends on its place in the whole alone."""
        whole = torch.randn(self.num_rows, 3, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            self.model.weight.copy_(whole[self.start : self.stop])
            self.model.bias.copy_(whole[self.start : self.stop, 0])
        self.model.weight.grad = whole[self.start : self.stop].clone()
        self.model.bias.grad = whole[self.start : self.stop, 1].clone()
        self.optimizer.step()

    def rows(self) -> list[torch.Tensor]:
        """Weight, bias and their moments."""
        moments = [self.optimizer.state[p][key] for p in self.model.parameters() for key in ("exp_avg", "exp_avg_sq")]
        return [parameter.detach() for parameter in self.model.parameters()] + moments


def cut(*bounds: int) -> list[Part]:
    """Ranks that hold the rows between two bounds each."""
    return [Part(start, stop) for start, stop in itertools.pairwise(bounds)]


def rows_of(parts: Sequence[Part]) -> list[torch.Tensor]:
    """What the parts hold together."""
    return [torch.cat(rows) for rows in zip(*(part.rows() for part in parts), strict=True)]


def save_together(parts: Sequence[Any], folder: Path, step: int = 1, generation: int = 1) -> None:
    """All write their parts of a checkpoint, one after the other."""
    shards = tuple(part.state.shard() for part in parts)
    for rank, part in enumerate(parts):
        checkpoints = Checkpoints(part.state, folder, every=1)
        checkpoints.after_step(step, generation, Share(rank, shards))
        checkpoints.flush()
