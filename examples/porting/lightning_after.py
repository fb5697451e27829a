"""A classifier trained by Lightning, with checkpoints of the best weights, early stopping and a log as CSV."""

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from keepstep.integrations.lightning import KeepstepStrategy

CLASSES = 4


def make_points(size, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % CLASSES
    points = 0.7 * torch.randn(size, 8, generator=generator)
    points[torch.arange(size), labels] += 1.5
    return TensorDataset(points, labels)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, CLASSES))

    def training_step(self, batch, batch_idx):
        points, labels = batch
        loss = nn.functional.cross_entropy(self.net(points), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        points, labels = batch
        output = self.net(points)
        self.log("val_loss", nn.functional.cross_entropy(output, labels), sync_dist=True)
        self.log("val_accuracy", (output.argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)]


def main():
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=KeepstepStrategy(),
        max_epochs=4,
        logger=CSVLogger("out"),
        log_every_n_steps=2,
        callbacks=[
            ModelCheckpoint("out/best", monitor="val_loss", save_last=True),
            EarlyStopping("val_loss", patience=3),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train_loader = DataLoader(make_points(96, seed=1), batch_size=8, shuffle=True)
    trainer.fit(Classifier(), train_loader, DataLoader(make_points(32, seed=2), batch_size=8))


if __name__ == "__main__":
    main()
