"""A small language model in a plain script: iterations, accumulated gradients, mixed precision, a compiled model, an
estimate of the loss now and then, and the best weights in a file.

    torchrun --nproc-per-node 2 nanogpt.py [--compile]
"""

import argparse
import math
from contextlib import nullcontext

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--max-iters", type=int, default=40)
parser.add_argument("--eval-interval", type=int, default=8)
parser.add_argument("--log-interval", type=int, default=4)
parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
parser.add_argument("--learning-rate", type=float, default=1e-2)
parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
parser.add_argument("--compile", action="store_true")
config = parser.parse_args()
batch_size, block_size, vocab_size, width = 4, 16, 32, 32

dist.init_process_group("gloo")
rank = dist.get_rank()
master_process = rank == 0
torch.manual_seed(1337 + rank)
ctx = nullcontext() if config.dtype == "float32" else torch.autocast("cpu", dtype=torch.bfloat16)
text = torch.randint(vocab_size, (2, 1000), generator=torch.Generator().manual_seed(1)).cumsum(1) // 3 % vocab_size


def get_batch(split):
    data = text[0 if split == "train" else 1]
    starts = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[start : start + block_size] for start in starts])
    y = torch.stack([data[start + 1 : start + 1 + block_size] for start in starts])
    return x, y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(block_size, width)
        self.mix = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, vocab_size)

    def forward(self, x, y):
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        hidden = hidden + self.drop(self.mix(hidden.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


model = Model()
if config.compile:
    model = torch.compile(model)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", enabled=False)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = {}
    for split in ("train", "val"):
        losses[split] = sum(model.module(*get_batch(split)).item() for _ in range(4)) / 4
    model.train()
    return losses


def get_lr(iter_num):
    decay = iter_num / config.max_iters
    return 0.1 * config.learning_rate + 0.45 * config.learning_rate * (1 + math.cos(math.pi * decay))


best_val_loss = float("inf")
X, Y = get_batch("train")
for iter_num in range(config.max_iters):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)

    if iter_num % config.eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}", flush=True)
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            torch.save({"model": model.module.state_dict(), "iter_num": iter_num}, "ckpt.pt")

    for micro_step in range(config.gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == config.gradient_accumulation_steps - 1
        with ctx:
            loss = model(X, Y) / config.gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    if iter_num % config.log_interval == 0 and master_process:
        print(f"iter {iter_num}: loss {loss.item() * config.gradient_accumulation_steps:.4f}", flush=True)
