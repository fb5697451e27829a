"""A GAN in Lightning that updates its judge in even batches and its maker in odd ones, by manual optimization.

Usage: keepstep run --nproc-per-node 2 tests/scripts/lightning_gan.py [--epochs N] [--both]
"""

import argparse

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from keepstep.integrations.lightning import KeepstepStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--both", action="store_true", help="update both in each batch, which is refused")
arguments = parser.parse_args()

torch.set_num_threads(1)
loss_of = nn.functional.binary_cross_entropy_with_logits


class Gan(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
        self.maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.maker[3].bias.requires_grad = False  # stays so, however often the other ones are switched

    def made(self, real):
        return self.maker(torch.randn(len(real), 4))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        of_judge, of_maker = self.optimizers()
        if batch_idx % 2 == 0 or arguments.both:
            self.toggle_optimizer(of_judge)
            says, says_of_made = self.judge(real), self.judge(self.made(real).detach())
            loss = loss_of(says, torch.ones_like(says)) + loss_of(says_of_made, torch.zeros_like(says))
            self.log("judge", loss)
            self.manual_backward(loss)
            of_judge.step()
            of_judge.zero_grad()
            self.untoggle_optimizer(of_judge)
        if batch_idx % 2 == 1 or arguments.both:
            self.toggle_optimizer(of_maker)
            says = self.judge(self.made(real))
            loss = loss_of(says, torch.ones_like(says))
            self.log("maker", loss)
            self.manual_backward(loss)
            of_maker.step()
            of_maker.zero_grad()
            self.untoggle_optimizer(of_maker)

    def configure_optimizers(self):
        return [torch.optim.Adam(each.parameters(), lr=2e-3) for each in (self.judge, self.maker)]


L.seed_everything(1)
trainer = L.Trainer(
    strategy=KeepstepStrategy(find_unused_parameters=True),
    accelerator="cpu",
    max_epochs=arguments.epochs,
    log_every_n_steps=1000,
    logger=CSVLogger("out"),
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
gan = Gan()
trainer.fit(gan, DataLoader(TensorDataset(torch.randn(120, 8) + 1), batch_size=4, shuffle=True))
grads = {name: parameter.requires_grad for name, parameter in gan.named_parameters()}
assert [name for name, needed in grads.items() if not needed] == ["maker.3.bias"], grads
