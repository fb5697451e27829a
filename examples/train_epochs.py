"""A common kind of script, with epochs: DataLoader, DistributedSampler, evaluation, and a file of the best weights.

The lines for keepstep are marked with a number; the others are the same as under torchrun.

    keepstep run --nproc-per-node 3 --spares 1 examples/train_epochs.py

Kill ranks in every phase, and compare the weights and the file with those of a run without failures:

    keepstep drill --nproc-per-node 3 --spares 1 --compare 'best.pt' examples/train_epochs.py

The data set is part of scikit-learn (pip install scikit-learn): 1797 images of 8×8 pixels, no download.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import keepstep

NUM_TRAINING = 1500  # the other 297 images are the test set


@torch.no_grad()
def evaluate(model: nn.Module, test: TensorDataset, rank: int, world_size: int) -> float:
    """Returns the fraction of test images that the model classifies correctly. Each rank evaluates its share."""
    images, labels = (tensor[rank::world_size] for tensor in test.tensors)
    num_right = (model(images).argmax(1) == labels).sum()
    dist.all_reduce(num_right)
    return num_right.item() / len(test)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on scikit-learn's digits, epoch by epoch.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank")
    args = parser.parse_args()

    session = keepstep.init(seed=0)  # 1  instead of init_process_group()

    digits = load_digits()
    data = TensorDataset(
        torch.from_numpy(digits.images).float().flatten(1) / 16, torch.from_numpy(digits.target).long()
    )
    training = Subset(data, range(NUM_TRAINING))
    test = TensorDataset(*data[NUM_TRAINING:])
    loader = DataLoader(training, args.batch_size, sampler=DistributedSampler(training), drop_last=True)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)
    state = session.state(best=0.0)  # 2  a value that a replacement must get, too
    session.protect(model=model, optimizer=optimizer, scheduler=scheduler)  # 3

    for epoch in session.epochs(loader, args.epochs):  # 4  instead of range(args.epochs), and calls set_epoch()
        for step, (images, labels) in epoch:  # 5  instead of enumerate(loader)
            with step:  # 6
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        accuracy = evaluate(model.module, test, session.rank, session.world_size)
        if session.rank == 0:
            # 7  deferred until all ranks have finished the epoch: if one is lost before, all repeat its end
            session.defer(print, f"epoch {epoch:2d}  accuracy {accuracy:.4f}", flush=True)
            if accuracy > state.best:
                session.defer(torch.save, model.module.state_dict(), "best.pt")  # 8
        state.best = max(state.best, accuracy)


if __name__ == "__main__":
    main()
