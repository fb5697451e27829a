"""A job whose weights say which version they are: every element is the number of steps that it has seen.

Arguments: number of steps, how long a step takes, the folder of its publishers, and their deadline.
"""

import sys
import threading

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Counting(torch.nn.Module):
    """Its loss is minus its sum, so plain gradient descent with a rate of 1 adds 1 to each element."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (600_000, 550_000, 7, 1000, 100_000, 1)  # two buckets of their own, and one of many
        self.parts = torch.nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self) -> torch.Tensor:
        """Minus the sum of everything."""
        return -torch.stack([part.sum() for part in self.parts]).sum()


if __name__ == "__main__":
    num_steps, step_s, folder, deadline_s = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    session = keepstep.init(seed=0)
    model = DistributedDataParallel(Counting())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    session.protect(model=model, optimizer=optimizer)
    session.publish_weights(folder, model.module, every=1, deadline_s=deadline_s)
    for step in session.steps(num_steps):
        with step:
            model().backward()
            threading.Event().wait(step_s)
            optimizer.step()
            optimizer.zero_grad()
