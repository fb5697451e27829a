"""Writes to parameters where no optimizer does: an encoder that follows another one in its forward, a step uphill and
back in front of the update, weights that are normalised, and an average behind the step.

Draws random numbers in front of its steps, too.
"""

import torch
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import keepstep

STEPS = 45


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained, self.following, self.head = (torch.nn.Linear(8, 8) for _ in range(3))
        self.following.requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for own, other in zip(self.following.parameters(), self.trained.parameters(), strict=True):
            own.data.mul_(0.9).add_(other.data, alpha=0.1)
        self.head.weight.copy_(normalize(self.head.weight))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.follow()
        return self.head(self.trained(inputs) - self.following(inputs)).square().mean()


session = keepstep.init(seed=4)
model = DistributedDataParallel(Net())
average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
session.protect(model=model, average=average, optimizer=optimizer)

for step in session.steps(STEPS):
    inputs = torch.randn(4, 8)
    with step:
        model(inputs).backward()
        kept = [parameter.data.clone() for parameter in model.module.trained.parameters()]
        with torch.no_grad():
            for parameter in model.module.trained.parameters():
                parameter.add_(parameter.grad, alpha=0.1)
        optimizer.zero_grad()
        model(inputs).backward()
        for parameter, data in zip(model.module.trained.parameters(), kept, strict=True):
            parameter.data = data
        optimizer.step()
        optimizer.zero_grad()
    average.update_parameters(model.module)
