"""A classifier of pictures, trained with Hugging Face Accelerate: a frozen trunk, augmentation, one-cycle schedule.

    torchrun --nproc-per-node 2 cv_accelerate.py

The pictures are random numbers, with a pattern for each class.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

NUM_CLASSES = 5


class Pictures(Dataset):
    def __init__(self, size, first=0, augment=False):
        self.size, self.first, self.augment = size, first, augment
        self.patterns = torch.rand(NUM_CLASSES, 3, 16, 16, generator=torch.Generator().manual_seed(7))

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        label = (self.first + index) % NUM_CLASSES
        noise = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(self.first + index))
        picture = self.patterns[label] + 0.3 * noise
        if self.augment:
            if torch.rand(()) < 0.5:
                picture = picture.flip(-1)
            picture = picture.roll(int(torch.randint(-1, 2, ())), dims=-2)
        return {"image": picture, "label": label}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(16 * 7 * 7, NUM_CLASSES))

    def forward(self, x):
        return self.classifier(self.trunk(x))


def training_function(args):
    accelerator = Accelerator(cpu=True)
    set_seed(args.seed)
    train_dataloader = DataLoader(
        Pictures(args.size, augment=True), shuffle=True, batch_size=args.batch_size, num_workers=args.workers
    )
    eval_dataloader = DataLoader(Pictures(50, first=args.size), shuffle=False, batch_size=8)

    model = Network()
    for param in model.trunk.parameters():
        param.requires_grad = False
    mean = torch.tensor([0.5, 0.5, 0.5])[None, :, None, None].to(accelerator.device)
    std = torch.tensor([0.4, 0.4, 0.4])[None, :, None, None].to(accelerator.device)
    optimizer = torch.optim.Adam(params=model.classifier.parameters(), lr=args.lr / 25)
    lr_scheduler = OneCycleLR(
        optimizer=optimizer, max_lr=args.lr, epochs=args.epochs, steps_per_epoch=len(train_dataloader)
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(args.epochs):
        model.train()
        for batch in train_dataloader:
            batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            outputs = model((batch["image"] - mean) / std)
            loss = nn.functional.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        model.eval()
        accurate = num_elems = 0
        for batch in eval_dataloader:
            batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            with torch.no_grad():
                outputs = model((batch["image"] - mean) / std)
            predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), batch["label"]))
            accurate += (predictions == references).long().sum().item()
            num_elems += predictions.shape[0]
        accelerator.print(f"epoch {epoch}: {100 * accurate / num_elems:.2f} of {num_elems}")
        accelerator.save_state(f"{args.output_dir}/epoch_{epoch}")

    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-2)
    parser.add_argument("--seed", type=int, default=42)
    training_function(parser.parse_args())
