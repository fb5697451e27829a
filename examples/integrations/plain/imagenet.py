"""A classifier of pictures in the usual shape: epochs, running means, validation, the best weights in a file.

    torchrun --nproc-per-node 2 imagenet.py

The pictures are random numbers, augmented in loader workers.
"""

import argparse
from types import SimpleNamespace

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

NUM_CLASSES = 5


class Pictures(Dataset):
    def __init__(self, size, first=0, augment=False):
        self.size, self.first, self.augment = size, first, augment
        self.patterns = torch.rand(NUM_CLASSES, 3, 16, 16, generator=torch.Generator().manual_seed(7))

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        number = self.first + index
        noise = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(number))
        picture = self.patterns[number % NUM_CLASSES] + 0.5 * noise
        if self.augment and torch.rand(()) < 0.5:
            picture = picture.flip(-1)
        return picture, number % NUM_CLASSES


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(392, NUM_CLASSES),
        )
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)

    train_dataset, val_dataset = Pictures(120, augment=True), Pictures(60, first=120)
    train_sampler = DistributedSampler(train_dataset)
    val_sampler = DistributedSampler(val_dataset, shuffle=False)
    train_loader = DataLoader(train_dataset, args.batch_size, num_workers=args.workers, sampler=train_sampler)
    val_loader = DataLoader(val_dataset, args.batch_size, sampler=val_sampler)

    losses = SimpleNamespace(sum=0.0, count=0)
    best = SimpleNamespace(accuracy=0.0)
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, losses, args)
        accuracy = validate(val_loader, model)
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {100 * accuracy:.2f}", flush=True)
            state = {"epoch": epoch + 1, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, "checkpoint.pt")
            if accuracy > best.accuracy:
                torch.save(state, "best.pt")
        best.accuracy = max(best.accuracy, accuracy)


def train(loader, model, criterion, optimizer, epoch, losses, args):
    model.train()
    for i, (images, target) in enumerate(loader):
        loss = criterion(model(images), target)
        losses.sum, losses.count = losses.sum + loss.item() * len(images), losses.count + len(images)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.print_freq == 0 and dist.get_rank() == 0:
            print(f"epoch {epoch}, step {i}: mean loss {losses.sum / losses.count:.4f}", flush=True)


@torch.no_grad()
def validate(loader, model):
    model.eval()
    counts = torch.zeros(2)
    for images, target in loader:
        right = (model(images).argmax(dim=1) == target).sum().item()
        counts += torch.tensor([right, len(images)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--print-freq", type=int, default=5)
    main(parser.parse_args())
