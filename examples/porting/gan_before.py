"""A GAN with Hugging Face Accelerate: two models and two optimizers, which each batch updates one after the other."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, NOISE = 3, 4
OUT = Path("out")


def make_points(size):
    angle = torch.linspace(0, 6.28, size)
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1))


def log(line):
    with (OUT / "log.txt").open("a") as file:
        file.write(line + "\n")


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    OUT.mkdir(exist_ok=True)
    loader = DataLoader(make_points(80), batch_size=8, shuffle=True)
    generator = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    generator, discriminator, optimizer_g, optimizer_d, loader = accelerator.prepare(
        generator, discriminator, optimizer_g, optimizer_d, loader
    )

    def judge(points, is_real):
        output = discriminator(points)
        return bce(output, torch.full_like(output, float(is_real)))

    def update_discriminator(real):
        fake = generator(torch.randn(len(real), NOISE)).detach()
        loss = judge(real, True) + judge(fake, False)
        optimizer_d.zero_grad()
        accelerator.backward(loss)
        losses[0] += loss.item()
        optimizer_d.step()

    def update_generator(real):
        loss = judge(generator(torch.randn(len(real), NOISE)), True)
        optimizer_g.zero_grad()
        accelerator.backward(loss)
        losses[1] += loss.item()
        optimizer_g.step()

    for epoch in range(EPOCHS):
        losses = torch.zeros(2)
        for (real,) in loader:
            update_discriminator(real)
            update_generator(real)
        mean = accelerator.reduce(losses.clone(), "mean") / len(loader)
        if accelerator.is_main_process:
            log(f"epoch {epoch}: loss {mean[0]:.6f}, of the generator {mean[1]:.6f}")
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(generator).state_dict(), OUT / "generator.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
