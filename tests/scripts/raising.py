"""An optimizer whose step() raises halfway in step 3; the script catches that, logs, and goes on.

With ``--kill``, in step 3, rank 0 alone is half updated, and rank 1 dies after its whole update.
"""

import os
import signal
import sys

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import keepstep

kills = "--kill" in sys.argv
session = keepstep.init(seed=3)
model = DistributedDataParallel(torch.nn.Linear(4, 2))


class Fragile(torch.optim.SGD):
    """Raises after the update of its first parameter."""

    def step(self, closure=None):
        if index == 3 and (not kills or (session.rank == 0 and session.generation == 1)):
            model.module.weight.data.add_(1.0)
            raise ArithmeticError("halfway")
        return super().step(closure)


optimizer = Fragile(model.parameters(), lr=0.1)
session.protect(model=model, optimizer=optimizer)
raised, index = 0, -1
for step in session.steps(6):
    with step:
        index = step.index
        data = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * index + session.rank))
        model(data).pow(2).mean().backward()
        try:
            optimizer.step()
        except ArithmeticError:
            raised += 1
        if kills and index == 3 and session.generation == 1:
            if session.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            session._coordination.wait_until_interrupted(60.0)
        elif not kills:
            dist.all_reduce(torch.ones(1))
        optimizer.zero_grad()
total = sum(parameter.double().sum().item() for parameter in model.parameters())
print(f"raised {raised}, sum {total!r}", flush=True)
