"""A job under FSDP2 whose weights say which version they are: every element is the number of steps that it has seen.

Arguments: number of steps, how long a step takes, the folder of this node's publishers, and their deadline.
"""

import sys
import threading

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import keepstep


class Counting(torch.nn.Module):
    """Its loss is minus its sum, so plain gradient descent with a rate of 1 adds 1 to each element."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (60_000, 55_000, 7, 1000, 1)  # the last one leaves nothing for the second rank
        self.parts = torch.nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self) -> torch.Tensor:
        """Minus the sum of everything."""
        return -torch.stack([part.sum() for part in self.parts]).sum()


if __name__ == "__main__":
    num_steps, step_s, folder, deadline_s = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    torch.set_num_threads(1)
    session = keepstep.init(seed=0)
    model = Counting()
    fully_shard(model, mesh=init_device_mesh("cpu", (session.world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    session.protect(model=model, optimizer=optimizer, snapshot_every=1)
    session.publish_weights(folder, model, every=1, deadline_s=deadline_s)
    for step in session.steps(num_steps):
        with step:
            model().backward()
            threading.Event().wait(step_s)
            optimizer.step()
            optimizer.zero_grad()
