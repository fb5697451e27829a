"""FSDP2 with checkpoints of its own, written by torch's DCP, of which it loads the newest where it starts."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import keepstep

STEPS, SAVE_EVERY = 24, 8
OUT = Path("out")


def content(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def load_newest(model, optimizer):
    """Returns the number of completed steps."""
    saved = sorted(OUT.glob("step-*"))
    if not saved:
        return 0
    found = content(model, optimizer)
    dcp.load(found, checkpoint_id=saved[-1])
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    return int(saved[-1].name.removeprefix("step-"))


def main():
    session = keepstep.init(seed=0)
    torch.manual_seed(0)
    OUT.mkdir(exist_ok=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.protect(model=model, optimizer=optimizer, snapshot_every=4)

    @session.step
    def train_step(step):
        if step and step % SAVE_EVERY == 0:
            dcp.save(content(model, optimizer), checkpoint_id=OUT / f"step-{step:06d}")
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(8, 16, generator=generator)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            session.defer(print, f"step {step}: loss {loss.item():.6f}", flush=True)

    session.resume(lambda: load_newest(model, optimizer))
    for step in session.steps(STEPS):
        train_step(step)
    dcp.save(content(model, optimizer), checkpoint_id=OUT / f"step-{STEPS:06d}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
