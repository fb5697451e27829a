"""A classifier of pictures as a LightningModule, trained by Lightning's Trainer.

    torchrun --nproc-per-node 2 lightning_auto.py

The pictures are random numbers.
"""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset

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


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(392, NUM_CLASSES)
        )

    def training_step(self, batch, batch_idx):
        images, target = batch
        loss = nn.functional.cross_entropy(self.net(images), target)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, target = batch
        output = self.net(images)
        self.log("val_loss", nn.functional.cross_entropy(output, target), sync_dist=True)
        self.log("val_accuracy", (output.argmax(dim=1) == target).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)]


def main(args):
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp",
        max_epochs=args.epochs,
        logger=CSVLogger("out"),
        log_every_n_steps=4,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint("out/best", monitor="val_loss"), EarlyStopping("val_loss", patience=5)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train_loader = DataLoader(Pictures(120, augment=True), batch_size=4, shuffle=True, num_workers=args.workers)
    trainer.fit(Classifier(), train_loader, DataLoader(Pictures(60, first=120), batch_size=4))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2, help="as many as torchrun starts on this node")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0)
    main(parser.parse_args())
