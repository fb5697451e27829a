"""In the shape of the ImageNet example of PyTorch: own processes, a function for each epoch, a best accuracy."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

best_acc1 = 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=90, type=int)
    parser.add_argument("--start-epoch", default=0, type=int)
    parser.add_argument("--resume", default="")
    parser.add_argument("--evaluate", action="store_true")
    args = parser.parse_args()
    mp.spawn(main_worker, nprocs=2, args=(2, args))


def main_worker(gpu, ngpus_per_node, args):
    global best_acc1
    args.rank = int(os.environ["RANK"]) * ngpus_per_node + gpu
    dist.init_process_group(
        backend="gloo",
        rank=args.rank,
    )
    torch.manual_seed(7)
    model = torch.nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    if args.resume:
        checkpoint = torch.load(args.resume)
        args.start_epoch = checkpoint["epoch"]
        best_acc1 = checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    data = TensorDataset(torch.randn(64, 8), torch.zeros(64).long())
    train_sampler = torch.utils.data.distributed.DistributedSampler(data)
    train_loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=train_sampler)
    val_loader = torch.utils.data.DataLoader(data, batch_size=8)
    if args.evaluate:
        validate(val_loader, model)
        return
    for epoch in range(args.start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch)
        acc1 = validate(val_loader, model)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if args.rank == 0:
            torch.save({"epoch": epoch + 1, "state_dict": model.state_dict()}, "best.pt" if is_best else "last.pt")


def train(train_loader, model, criterion, optimizer, epoch):
    losses = AverageMeter()
    model.train()
    for i, (images, target) in enumerate(train_loader):
        loss = criterion(model(images), target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 10 == 0:
            print(epoch, i, losses.avg)


def validate(val_loader, model):
    top1 = AverageMeter()
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            top1.update((model(images).argmax(1) == target).float().mean().item(), images.size(0))
    top1.all_reduce()
    return top1.avg


class AverageMeter:
    def __init__(self):
        self.sum = 0
        self.count = 0
        self.avg = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count])
        dist.all_reduce(total)
        self.sum, self.count = total.tolist()
        self.avg = self.sum / self.count


if __name__ == "__main__":
    main()
