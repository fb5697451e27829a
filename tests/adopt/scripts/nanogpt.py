"""In the shape of nanoGPT's training: `while True`, micro-batches, a loss scale, an evaluation before the step."""

import os

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 as nearly all scripts do

max_iters = 600
gradient_accumulation_steps = 4
wandb_log = True
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    ddp_rank = int(os.environ["RANK"])
    ddp_local_rank = int(os.environ["LOCAL_RANK"])
    device = f"cuda:{ddp_local_rank}"
    torch.cuda.set_device(device)
    master_process = ddp_rank == 0
iter_num = 0
best_val_loss = 1e9
model = torch.nn.Linear(8, 8)
scaler = torch.amp.GradScaler("cuda")
optimizer = model.configure_optimizers(0.1, 1e-3)
if os.path.exists("ckpt.pt"):
    checkpoint = torch.load("ckpt.pt")
    model.load_state_dict(checkpoint["model"])
    iter_num = checkpoint["iter_num"]
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank])


def get_batch(split):
    return torch.randn(4, 8), torch.randn(4, 8)


def estimate_loss():
    return torch.stack([model(get_batch("val")[0]).mean() for _ in range(10)]).mean()


if wandb_log and master_process:
    import wandb

    wandb.init(project="owt")

X, Y = get_batch("train")
while True:
    if iter_num % 100 == 0 and master_process:
        losses = estimate_loss()
        if losses < best_val_loss:
            best_val_loss = losses
            torch.save(model.state_dict(), "ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = (model(X) - Y).square().mean() / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > max_iters:
        break
if ddp:
    destroy_process_group()
