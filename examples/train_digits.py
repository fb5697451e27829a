"""Train a small convolutional net on handwritten digits, with many kinds of state besides the weights.

That is BatchNorm's statistics, momentum, a learning rate schedule, an averaged copy of the weights and, with --amp, a
loss scale. keepstep protects all of it: after a failure it has the same values as without one.

Three ranks and a warm spare on this machine. Kill one of the workers while it runs; the status shows their process ids:

    keepstep run --nproc-per-node 3 --spares 1 --run-dir run examples/train_digits.py --steps 2000
    keepstep status run

Kill ranks in every phase of a step, and compare the final weights with those of a run without failure:

    keepstep drill --nproc-per-node 3 --spares 1 examples/train_digits.py

Run the script by itself, and with half precision:

    python examples/train_digits.py
    python examples/train_digits.py --amp bfloat16

The data set is part of scikit-learn (pip install scikit-learn): 1797 images of 8×8 pixels, no download.

Shapes: B batch, C channels, H height, W width.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import keepstep
from keepstep.data import StepSampler

NUM_TRAINING = 1500  # the other 297 images are the test set


def build_model(width: int = 16, dropout: float = 0.2, seed: int = 0) -> nn.Sequential:
    """Returns two convolutions with BatchNorm and a linear head, with the same weights on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * width * 4 * 4, 10),
    )


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Returns training and test set: images, float32 in [0, 1] of shape (1, H, W), and their digits."""
    digits = load_digits()
    images_BCHW = torch.from_numpy(digits.images).float()[:, None] / 16
    labels_B = torch.from_numpy(digits.target).long()
    training = TensorDataset(images_BCHW[:NUM_TRAINING], labels_B[:NUM_TRAINING])
    return training, TensorDataset(images_BCHW[NUM_TRAINING:], labels_B[NUM_TRAINING:])


def share_statistics(model: nn.Module) -> None:
    """Gives every rank the mean of all ranks' BatchNorm statistics.

    Each rank's statistics have seen its own batches only. DDP replaces all but rank 0's at the next forward. Until then
    only rank 0 would hold them, and they would be lost with it.
    """
    if torch.distributed.is_initialized():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                torch.distributed.all_reduce(buffer)
                buffer /= torch.distributed.get_world_size()


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Returns the fraction of images that the model classifies correctly."""
    images_BCHW, labels_B = data.tensors
    model.eval()
    return (model(images_BCHW).argmax(1) == labels_B).float().mean().item()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small convolutional net on scikit-learn's digits.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=16, help="channels of the first convolution")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10, help="steps")
    parser.add_argument("--num-workers", type=int, default=0, help="processes per rank that read ahead")
    parser.add_argument("--amp", choices=("bfloat16", "float16"), help="compute in half precision, with a loss scale")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    session = keepstep.init(seed=args.seed)

    training, test = read_digits()
    net = build_model(args.width, args.dropout, args.seed)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model: nn.Module = net
    if torch.distributed.is_initialized():
        model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=max(1, args.steps // 3), gamma=0.3)
    scaler = torch.amp.GradScaler("cpu", enabled=args.amp is not None)
    session.protect(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, ema=ema)
    sampler = StepSampler(len(training), args.batch_size, session.world_size, seed=args.seed)
    loader = DataLoader(training, batch_sampler=sampler, num_workers=args.num_workers)
    dtype = getattr(torch, args.amp or "bfloat16")

    for step, (images_BCHW, labels_B) in session.batches(loader, steps=args.steps):
        with step:
            with torch.autocast("cpu", dtype=dtype, enabled=args.amp is not None):
                loss = F.cross_entropy(model(images_BCHW), labels_B)
            scaler.scale(loss).backward()
            share_statistics(net)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            ema.update_parameters(net)
            if session.rank == 0 and (step.index % args.log_every == 0 or step.index == args.steps - 1):
                print(f"step {step.index:4d}  loss {loss.item():.4f}", flush=True)

    if session.rank == 0:
        print(f"accuracy {accuracy(net, test):.4f}, of the averaged weights {accuracy(ema, test):.4f}", flush=True)


if __name__ == "__main__":
    main()
