"""Train a small GPT on the source of the Python standard library, and lose a rank on the way.

Three ranks and a warm spare on this machine. Kill one of the workers while it runs; the status shows their process ids:

    keepstep run --nproc-per-node 3 --spares 1 --run-dir run examples/train_gpt.py --steps 2000
    keepstep status run

Kill ranks in every phase of a step, and compare the final weights with those of a run without failure:

    keepstep drill --nproc-per-node 3 --spares 1 examples/train_gpt.py

The same with FSDP2 on four ranks, each with a shard of its own; with tensor parallelism; with a pipeline of two stages.
The code for these is in parallel_gpt.py:

    keepstep drill --nproc-per-node 4 --spares 1 examples/train_gpt.py --parallel fsdp2
    keepstep drill --nproc-per-node 4 --spares 1 examples/train_gpt.py --parallel tp
    keepstep drill --nproc-per-node 4 --spares 1 examples/train_gpt.py --parallel pp

Run the script by itself, without a launcher:

    python examples/train_gpt.py

Train about ten million parameters, or any other shape:

    keepstep run --nproc-per-node 3 --spares 1 examples/train_gpt.py --size 10m
    python examples/train_gpt.py --layers 4 --width 192 --heads 6 --context 128

Publish the weights while it trains, to a server that generates text with them (examples/serve_gpt.py):

    keepstep run --nproc-per-node 3 --spares 1 examples/train_gpt.py --steps 500 --publish /tmp/gpt

The script reads only the .py files of Python's standard library, and needs only torch and keepstep. The lines for
keepstep are in `main`: init, protect, and the two lines of the step loop.

Shapes: B batch, T time (bytes), H heads, D features of a head, W width (H * D), V values of a byte.
"""

import argparse
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from parallel_gpt import WAYS, parallelize
from torch import nn

import keepstep
from keepstep.data import StepSampler

VOCABULARY = 256  # a token is a byte
TEXT_BYTES = 2**20  # of the standard library's 10 MB: enough to learn from, read in a few milliseconds


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    context: int = 64
    dropout: float = 0.1


SIZES = {
    "small": GPTConfig(),
    "10m": GPTConfig(layers=8, width=320, heads=5, context=128),
}


class Block(nn.Module):
    """Attention and a two-layer perceptron. Each normalises its input and adds its output to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp_in = nn.Linear(config.width, 4 * config.width)
        self.mlp_out = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BTW: torch.Tensor) -> torch.Tensor:
        x_BTW = x_BTW + self.drop(self.attention(self.attention_norm(x_BTW)))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x_BTW)))
        return x_BTW + self.drop(self.mlp_out(hidden))

    def attention(self, x_BTW: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x_BTW).unflatten(-1, (3, self.heads, -1))
        q_BHTD, k_BHTD, v_BHTD = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, dropout_p=dropout, is_causal=True)
        return self.attention_out(y_BHTD.transpose(1, 2).flatten(2))

    def drop(self, x_BTW: torch.Tensor) -> torch.Tensor:
        return F.dropout(x_BTW, self.dropout, self.training)


class GPT(nn.Module):
    """A decoder over bytes. Head and embedding share their weights."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(initialise)
        for block in self.blocks:
            # GPT-2: each block adds to the residual stream twice, and the sum should not grow with the depth.
            for layer in (block.attention_out, block.mlp_out):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy per byte, in nats."""
        return self.loss(self.logits(tokens_BT), targets_BT)

    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the next byte at each position: shape (B, T, V)."""
        return self.read_out(self.blocks(self.embed(tokens_BT)))

    def embed(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Returns the input of the first block: shape (B, T, W)."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return F.dropout(self.embedding(tokens_BT) + self.position(positions_T), self.dropout, self.training)

    def read_out(self, x_BTW: torch.Tensor) -> torch.Tensor:
        """Returns the logits for the output of the last block."""
        return self.head(self.norm(x_BTW))

    @staticmethod
    def loss(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy per byte, in nats."""
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def initialise(module: nn.Module) -> None:
    """Initialises weights with GPT-2's normal distribution, and biases with zero."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build_model(size: str | GPTConfig = "small", seed: int = 0) -> GPT:
    """Returns a model of one of `SIZES`, or of any shape, with the same weights on every rank."""
    torch.manual_seed(seed)
    return GPT(SIZES[size] if isinstance(size, str) else size)


def build_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Returns AdamW, with weight decay on the matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def build_scheduler(optimizer: torch.optim.Optimizer, num_steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Returns a scheduler that warms up in a tenth of the steps, then decays as a cosine to a tenth of the rate."""
    warmup = max(1, num_steps // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        return 0.55 + 0.45 * math.cos(math.pi * done)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def read_text(num_bytes: int = TEXT_BYTES) -> torch.Tensor:
    """Returns the first bytes of the standard library's files, sorted by name: uint8, shape (num_bytes,)."""
    text = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            break
    return torch.frombuffer(text[:num_bytes], dtype=torch.uint8)


class Windows:
    """Batches of windows: `context` bytes and the bytes that follow them. An epoch reads every byte once."""

    def __init__(self, text: torch.Tensor, context: int, batch_size: int, world_size: int, seed: int) -> None:
        self.text = text
        self.context = context
        self.sampler = StepSampler((len(text) - 1) // context, batch_size, world_size, seed=seed)

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns tokens and targets, each int64 of shape (B, T)."""
        starts_B = torch.from_numpy(self.sampler.indices(step, rank)) * self.context
        windows = self.text[starts_B[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on the source of the Python standard library.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--size", choices=SIZES, default="small", help="a shape; the next flags change it")
    for name, kind in (("layers", int), ("width", int), ("heads", int), ("context", int), ("dropout", float)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--batch-size", type=int, default=8, help="windows per data-parallel rank")
    parser.add_argument("--parallel", choices=WAYS, default="ddp", help="see parallel_gpt.py")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10, help="steps")
    parser.add_argument("--publish", metavar="FOLDER", help="where serve_gpt.py gets the weights from")
    parser.add_argument("--publish-every", type=int, default=5, help="steps")
    args = parser.parse_args()
    shape = {name: getattr(args, name) for name in GPTConfig.__dataclass_fields__ if getattr(args, name) is not None}
    args.config = replace(SIZES[args.size], **shape)
    if args.config.width % args.config.heads:
        parser.error(f"--width {args.config.width} must be a multiple of --heads {args.config.heads}")
    if args.publish and args.parallel in ("tp", "pp"):
        parser.error("--publish: serve_gpt.py cannot use the qkv of --parallel tp and the head of --parallel pp")
    return args


def main() -> None:
    args = parse_arguments()
    session = keepstep.init(seed=args.seed)

    gpt = build_model(args.config, args.seed)
    part = parallelize(gpt, args.parallel, session.world_size, args.batch_size)
    optimizer = build_optimizer(part.model, args.lr)
    scheduler = build_scheduler(optimizer, args.steps)
    session.protect(model=part.model, optimizer=optimizer, scheduler=scheduler, **part.protect)
    if args.publish:
        session.publish_weights(args.publish, gpt, every=args.publish_every)
    data = Windows(read_text(), args.config.context, args.batch_size, session.data_world_size, args.seed)

    for step in session.steps(args.steps):
        with step:
            # A spare waits here for a rank. If the ranks share a model, it has already waited at the mesh.
            loss = part.forward_backward(*data.batch(step.index, session.data_rank))
            nn.utils.clip_grad_norm_(part.model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            # A line after optimizer.step() runs only in an attempt that completes the step, so once for each step.
            if session.rank == 0 and (step.index % args.log_every == 0 or step.index == args.steps - 1):
                print(f"step {step.index:4d}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
