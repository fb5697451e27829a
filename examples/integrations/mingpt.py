"""A small language model and the script's own trainer: a class with a loop over steps, and callbacks.

    keepstep run --nproc-per-node 2 mingpt.py

The task is to sort digits: a row holds six digits, and then the same digits in order.
"""

import argparse
from collections import defaultdict

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import keepstep

LENGTH, NUM_DIGITS = 6, 4
session = keepstep.init()


class Sorting(Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        digits = torch.randint(NUM_DIGITS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        row = torch.cat((digits, digits.sort().values))
        return row[:-1], row[1:]


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(NUM_DIGITS, width), nn.Embedding(2 * LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, NUM_DIGITS)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


class Trainer:
    def __init__(self, config, model, dataset):
        self.config, self.model, self.dataset = config, model, dataset
        self.callbacks = defaultdict(list)
        self.iter_num = 0

    def add_callback(self, event, callback):
        self.callbacks[event].append(callback)

    def trigger_callbacks(self, event):
        for callback in self.callbacks[event]:
            callback(self)

    def run(self):
        model, config = self.model, self.config
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))
        sampler = DistributedSampler(self.dataset)
        loader = DataLoader(self.dataset, batch_size=config.batch_size, sampler=sampler, num_workers=config.workers)
        model.train()
        session.protect(model=model, optimizer=self.optimizer)
        for epoch in session.epochs(loader, config.epochs):
            sampler.set_epoch(epoch)

            def train_step(step, batch):
                x, y = batch
                logits = model(x)
                self.loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
                model.zero_grad(set_to_none=True)
                self.loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
                self.optimizer.step()
                self.iter_num = step.epoch * len(loader) + step.position + 1
                self.trigger_callbacks("on_batch_end")

            epoch.run(train_step)


def report(trainer):
    if trainer.iter_num % 10 == 0 and dist.get_rank() == 0:
        print(f"step {trainer.iter_num}: loss {trainer.loss.item():.5f}", flush=True)


def main(config):
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    trainer = Trainer(config, model, Sorting())
    trainer.add_callback("on_batch_end", report)
    trainer.run()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--grad-norm-clip", type=float, default=1.0)
    main(parser.parse_args())
