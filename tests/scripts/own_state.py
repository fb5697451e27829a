"""Objects that keep state which is no parameter, buffer or moment, in all the places where scripts have it."""

import argparse
import os
import random
import signal
import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--sharded", action="store_true", help="FSDP2 in place of DDP")
parser.add_argument("--forgets", type=int, help="the optimizer's load_state_dict() drops a number so often, on rank 1")
parser.add_argument("--kill-at", type=int, help="rank 1 is killed in its backward of this step")
parser.add_argument("--hides", action="store_true", help="an object says other things in state_dict() at other times")
arguments = parser.parse_args()


class Noisy(nn.Module):
    """Its noise depends on a counter, which is extra state, and on buffers that its first forwards create and grow."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count = nn.Linear(8, 8), 0
        self.register_buffer("largest", torch.empty(0))
        self.register_buffer("unset", None)

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        with torch.no_grad():
            if self.unset is None:
                self.unset = torch.zeros(1)
            self.unset += 1 / self.count
            if self.count % 7 == 0 or not self.largest.numel():
                self.largest = torch.cat([self.largest, torch.ones(1) / self.count])
        result: torch.Tensor = self.inner(x + self.largest.sum() + self.unset / self.count)
        return result


class Scaled(nn.Linear):
    """Saves a tensor and a text that are no buffers, as quantised layers do."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.scale, self.kind = torch.ones(1), "fresh"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"], destination[f"{prefix}kind"] = self.scale, self.kind

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        self.scale, self.kind = state.pop(f"{prefix}scale"), state.pop(f"{prefix}kind")
        super()._load_from_state_dict(state, prefix, *others)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale, self.kind = self.scale * 1.01, "used"
        return super().forward(x) * self.scale


class Masters(torch.optim.Optimizer):
    """Keeps its own copies of the parameters, a number for all of them under a text, and a list for each."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.masters = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.losses = arguments.forgets or 0

    def state_dict(self) -> Any:
        return {**super().state_dict(), "masters": self.masters}

    def load_state_dict(self, state: Any) -> None:
        for own, other in zip(self.masters, state["masters"], strict=True):
            own.copy_(other)
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})
        if self.losses and session.rank == 1:
            self.losses -= 1
            self.state["all"]["t"] += 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        shared = self.state["all"]
        shared["t"] = shared.get("t", 0) + 1
        for parameter, master in zip(self.param_groups[0]["params"], self.masters, strict=True):
            own = self.state[parameter]
            own["rates"] = [*own.get("rates", [])[-2:], 1 / shared["t"]]
            moment = own.setdefault("moment", torch.zeros_like(parameter))
            moment.lerp_(parameter.grad, 0.1)
            master.sub_(moment, alpha=self.param_groups[0]["lr"] * (1 + sum(own["rates"])))
            parameter.copy_(master)


class Hidden:
    """Says something else when it is not keepstep that wants to restore it."""

    def state_dict(self) -> dict[str, int]:
        frame, names = sys._getframe(), []
        while frame.f_back is not None:
            frame = frame.f_back
            names.append(frame.f_code.co_name)
        return {"n": os.getpid() if "state_dicts" in names else 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


session = keepstep.init(seed=3)
network: nn.Module = nn.Sequential(Noisy(), nn.Tanh(), Scaled())
if arguments.sharded:
    model: nn.Module = fully_shard(network, mesh=init_device_mesh("cpu", (session.world_size,)))
else:
    model = DistributedDataParallel(network)
optimizer = Masters(model.parameters())
noise, masks, draws = torch.Generator(), np.random.default_rng(), random.Random()
session.protect(
    model=model,
    optimizer=optimizer,
    noise=noise,
    masks=masks,
    draws=draws,
    **({"hidden": Hidden()} if arguments.hides else {}),
    snapshot_every=3 if arguments.sharded else "off",
)
for step in session.steps(arguments.steps):
    with step:
        inputs = torch.randn(4, 8) + torch.randn(4, 8, generator=noise)
        inputs = inputs * torch.from_numpy(masks.random(8) < 0.9) * draws.uniform(0.9, 1.1)
        loss = model(inputs).pow(2).mean()
        if step.index == arguments.kill_at and session.rank == 1 and not step.resumed:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
