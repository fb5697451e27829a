"""A Trainer of Lightning with everything around its steps: dropout, augmentation, accumulation, clipping, validation
within epochs, metrics, a log, checkpoints, early stopping, schedulers.

Usage: keepstep run --nproc-per-node 2 tests/scripts/lightning_trainer.py [--epochs N] [--accumulate N] [...]
"""

import argparse
import os
import signal

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from keepstep.integrations.lightning import KeepstepStrategy
from keepstep.worker.session import current_session

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--validate", type=float, default=0.5)
parser.add_argument("--log-every", type=int, default=3)
parser.add_argument("--save-every", type=int, default=0)
parser.add_argument("--manual", action="store_true")
parser.add_argument("--precision", default="32-true")
parser.add_argument("--keys", type=int, default=0)
parser.add_argument("--loaders", choices=("min_size", "max_size_cycle", "max_size"), help="two of them, and how")
parser.add_argument("--resume")
parser.add_argument("--die-at", type=int, help="ranks that have started together die in this step")
parser.add_argument("--dying", type=int, nargs="*", default=range(99), help="which of them, instead of all")
arguments = parser.parse_args()

torch.set_num_threads(1)


class Pictures(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        picture = torch.full((3, 8, 8), index / 130)
        return picture + 0.1 * torch.rand(3, 8, 8), torch.tensor(index % 5)  # augmentation


def combined(batch):
    """One batch of what two loaders give, of which the shorter one may have come to its end."""
    parts = [part for part in (batch["many"], batch["few"]) if part is not None]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(144, 5)
        )
        self.mean = MeanMetric()
        self.num_seen, self.outputs = 0, []

    def forward(self, pictures):
        return self.net(pictures)

    def training_step(self, batch, batch_idx):
        pictures, labels = combined(batch) if arguments.loaders else batch
        pictures -= pictures.mean()  # in place: the same batch must come again as it was
        loss = nn.functional.cross_entropy(self(pictures + 0.01 * torch.randn_like(pictures)), labels)
        self.mean(loss)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        self.num_seen += len(labels)
        self.log("seen", float(self.num_seen))
        if batch_idx % 4 == 1:
            self.log("now_and_then", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm())
        named = {f"gradients/layer.{number}.weight": torch.rand(()) for number in range(arguments.keys)}
        self.log_dict(named, on_step=True, on_epoch=True)

    def validation_step(self, batch, batch_idx):
        pictures, labels = batch
        loss = nn.functional.cross_entropy(self(pictures), labels)
        self.outputs.append(loss)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_own", pictures.mean())

    def on_validation_epoch_end(self):
        self.log("val_all", torch.stack(self.outputs).sum(), sync_dist=True)
        self.outputs.clear()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), "interval": "step"},
        ]


class ManualModule(Module):
    """Two optimizers, which are called in turns, one of them after two batches."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, pictures):
        return self.net(pictures) + self.bias

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 2)
        if batch_idx % 2 == 1:
            self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            first.step()
            if batch_idx % 4 == 3:
                second.step()
            first.zero_grad()
            second.zero_grad()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def configure_optimizers(self):
        first = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        second = torch.optim.SGD([self.bias], lr=0.1)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.9)]


class Dying(L.Callback):
    def on_train_batch_start(self, trainer, *_other):
        if current_session().generation == 1 and trainer.global_step == arguments.die_at:
            torch.distributed.barrier()
            if trainer.global_rank in arguments.dying:
                os.kill(os.getpid(), signal.SIGKILL)


L.seed_everything(1)
model = ManualModule() if arguments.manual else Module()
in_half = [MixedPrecision("16-mixed", "cpu")] if arguments.precision == "16-mixed" else None
training = DataLoader(Pictures(130), batch_size=4, num_workers=arguments.workers, shuffle=True)
if arguments.loaders:
    few = DataLoader(Pictures(50), batch_size=2, num_workers=arguments.workers, shuffle=True)
    training = CombinedLoader({"many": training, "few": few}, arguments.loaders)
trainer = L.Trainer(
    strategy=KeepstepStrategy(),
    accelerator="cpu",
    max_epochs=arguments.epochs,
    precision=None if in_half else arguments.precision,
    plugins=in_half,
    log_every_n_steps=arguments.log_every,
    val_check_interval=arguments.validate,
    logger=CSVLogger(arguments.out),
    callbacks=[
        Dying(),
        LearningRateMonitor("step"),
        ModelCheckpoint(f"{arguments.out}/best", monitor="val_loss", save_top_k=2, save_last=True),
        ModelCheckpoint(f"{arguments.out}/all", every_n_train_steps=arguments.save_every or None, save_top_k=-1),
        EarlyStopping("val_loss", patience=30),
    ],
    enable_progress_bar=False,
    enable_model_summary=False,
    **({} if arguments.manual else {"accumulate_grad_batches": arguments.accumulate, "gradient_clip_val": 0.5}),
)
trainer.fit(
    model,
    training,
    DataLoader(Pictures(30), batch_size=4),
    ckpt_path=arguments.resume,
)
if trainer.is_global_zero:
    print("best", trainer.checkpoint_callback.best_model_path, flush=True)
