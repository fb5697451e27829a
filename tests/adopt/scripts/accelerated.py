"""In the shape of the examples of Accelerate."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def training_function(num_epochs):
    accelerator = Accelerator(mixed_precision="no")
    train_dataloader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8, shuffle=True)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            loss = model(batch[0]).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            print(step, loss.item())
        accelerator.print(f"epoch {epoch}")


if __name__ == "__main__":
    training_function(3)
