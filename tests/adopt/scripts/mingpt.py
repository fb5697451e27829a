"""In the shape of minGPT's trainer: a class in a file that others import, and an iterator that begins again."""

import torch
from torch.utils.data import DataLoader, RandomSampler


class Trainer:
    def __init__(self, config, model, train_dataset):
        self.config, self.model, self.train_dataset = config, model, train_dataset
        self.callbacks = []
        self.iter_num = 0

    def run(self):
        model, config = self.model, self.config
        self.optimizer = model.configure_optimizers(config)
        train_loader = DataLoader(
            self.train_dataset, sampler=RandomSampler(self.train_dataset), batch_size=config.batch_size
        )
        model.train()
        self.iter_num = 0
        data_iter = iter(train_loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            x, y = batch
            _logits, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
            self.optimizer.step()
            self.iter_num += 1
            if config.max_iters is not None and self.iter_num >= config.max_iters:
                break
