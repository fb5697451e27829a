"""An image classifier under DDP: epochs, a mean loss, EMA, cosine schedule, evaluation, a best file and a log file."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, CLASSES = 3, 4
OUT = Path("out")


def make_pictures(size, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % CLASSES
    pictures = 0.8 * torch.randn(size, 1, 8, 8, generator=generator)
    pictures[torch.arange(size), 0, labels] += 1.0
    return TensorDataset(pictures, labels)


def mean(total):
    """Returns the mean over all ranks of what each has summed up: [sum, number]."""
    total = total.clone()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = torch.zeros(2)
    for images, labels in loader:
        right += torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
    return mean(right)


def log(line):
    with (OUT / "log.txt").open("a") as file:
        file.write(line + "\n")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    OUT.mkdir(exist_ok=True)
    train_set, test_set = make_pictures(96, seed=1), make_pictures(32, seed=2)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=8, sampler=DistributedSampler(test_set, shuffle=False))
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, CLASSES))
    model = DistributedDataParallel(net)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * len(train_loader))
    best = 0.0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(2)
        for batch in train_loader:
            images, labels = batch
            loss = F.cross_entropy(model(images), labels)
            total += torch.tensor([loss.item() * len(labels), len(labels)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ema.update_parameters(net)
        train_loss, accuracy = mean(total), evaluate(ema, test_loader)
        if accuracy > best:
            best = accuracy
            if dist.get_rank() == 0:
                torch.save(ema.state_dict(), OUT / "best.pt")
        if dist.get_rank() == 0:
            log(f"epoch {epoch}: loss {train_loss:.6f}, accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
