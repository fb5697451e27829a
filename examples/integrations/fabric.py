"""A small language model in a loop of the script's own, set up by Lightning Fabric.

    keepstep run --nproc-per-node 2 fabric.py

The task is to continue counting: each row is a sequence of numbers with a constant difference.
"""

import argparse

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Dataset

from keepstep.integrations.lightning import KeepstepFabricStrategy

NUM_WORDS, LENGTH = 32, 12


class Counting(Dataset):
    def __init__(self, size, first=0):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        number = self.first + index
        words = (number + torch.arange(LENGTH + 1) * (1 + number % 5)) % NUM_WORDS
        return words[:-1], words[1:]


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, NUM_WORDS)

    def forward(self, x):
        return self.head(self.drop(self.memory(self.words(x))[0]))


def loss_of(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def main(args):
    fabric = Fabric(accelerator="cpu", devices=args.devices, strategy=KeepstepFabricStrategy())
    fabric.launch()
    fabric.seed_everything(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    train_loader, val_loader = fabric.setup_dataloaders(
        DataLoader(Counting(120), batch_size=4, shuffle=True), DataLoader(Counting(24, first=120), batch_size=4)
    )
    for epoch in fabric.strategy.epochs(train_loader, args.epochs):
        model.train()

        def train_step(_step, batch):
            loss = loss_of(model, batch)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()

        epoch.run(train_step)
        model.eval()
        with torch.no_grad():
            val_loss = torch.stack([loss_of(model, batch) for batch in val_loader]).mean()
        val_loss = fabric.all_reduce(val_loss)
        fabric.print(f"epoch {epoch}: val loss {val_loss.item():.4f}")
        fabric.save("out/last.pt", {"model": model, "optimizer": optimizer, "epoch": int(epoch)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2, help="as many as torchrun starts on this node")
    parser.add_argument("--epochs", type=int, default=4)
    main(parser.parse_args())
