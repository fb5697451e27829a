"""What the tests of `keepstep adopt` read: a script that is fine, one without keepstep, and lines to change in them."""

from __future__ import annotations

from keepstep.adopt import Finding, read

ADOPTED = """\
import os, math, shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter

import keepstep

session = keepstep.init(seed=0)
# start
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
session.protect(model=model, optimizer=optimizer, plateau=plateau)
# before the loop
for step, (x, y) in session.batches(loader, epochs=3):
    # before the step
    with step:
        loss = (model(x) - y).square().mean()
        loss.backward()
        # before the update
        optimizer.step()
        # after the update
        optimizer.zero_grad()
    # after the step
# after the loop
"""

PLAIN = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
# before the loop
for i, (x, y) in enumerate(loader):
    # in the loop
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    # after the update
"""


def changed(script: str, *changes: tuple[str, str]) -> str:
    """A script with other lines; each line that is named has to be there. A `# place` gets lines in its indentation."""
    for old, new in changes:
        assert old in script, old
        line = next(line for line in script.splitlines() if old in line)
        indent = line[: len(line) - len(line.lstrip())]
        script = script.replace(old, new.replace("\n", f"\n{indent}"))
    return script


def findings(script: str) -> list[Finding]:
    """What is found in a script."""
    return read(script).findings


def said(script: str) -> list[tuple[str, str, str]]:
    """What is found in a script: the line, what to do, and what to write instead."""
    return [(finding.source, str(finding.edit), finding.instead) for finding in findings(script)]
