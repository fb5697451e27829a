"""FSDP2 by Accelerate's plugin, which Accelerate leaves aside on CPUs; here it is talked into it.

Usage: keepstep run --nproc-per-node 2 tests/scripts/accelerate_fsdp2.py [--snapshot-every N] [--epochs]
"""

import argparse

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

from keepstep.integrations.accelerate import KeepstepAccelerator

parser = argparse.ArgumentParser()
parser.add_argument("--snapshot-every", default="auto")
parser.add_argument("--epochs", action="store_true", help="a loop over epochs with one over steps in it")
arguments = parser.parse_args()

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))

    def forward(self, x):
        return x + self.layers(x)


plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
)
accelerator = KeepstepAccelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
torch.manual_seed(1)
model = nn.Sequential(Block(), Block(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = DataLoader(TensorDataset(torch.randn(384, 16), torch.randn(384, 1)), batch_size=4, shuffle=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
assert isinstance(model, FSDPModule), "Accelerate has not sharded the model"
options = {} if arguments.snapshot_every == "auto" else {"snapshot_every": int(arguments.snapshot_every)}


def train_step(batch):
    with accelerator.accumulate(model):
        x, y = batch
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


if arguments.epochs:
    for epoch in accelerator.epochs(loader, 2, **options):
        epoch.run(lambda _step, batch: train_step(batch))
else:
    session = accelerator.session
    session.protect(model=model, optimizer=optimizer, scheduler=scheduler, **options)
    for step, batches in session.batches(loader, epochs=2, accumulate=2):
        with step:
            accelerator.step = 0  # it counts batches, to know with which one gradients are complete
            for batch in batches:
                train_step(batch)
accelerator.print("trained")
