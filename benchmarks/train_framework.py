"""The worker of `frameworks.py`: one model in the loop of a framework, under torchrun or, with --keepstep, keepstep.

The two variants differ only in the lines that a user would change. `train_timed.py` records the steps, and begins the
blocks of steps.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from train_timed import Times, build_model

import keepstep


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The rows of a training. All are equal, so that reading them takes no time."""

    def __init__(self, width: int) -> None:
        self._row = torch.randn(width)

    def __len__(self) -> int:
        return 100_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self._row}


class Model(nn.Module):
    """A model that returns a loss, as models of Transformers do."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = build_model(width, depth)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().mean()}


def with_transformers(args: argparse.Namespace) -> None:
    """Trains with Hugging Face's Trainer."""
    if args.keepstep:
        keepstep.init(seed=0)
    from transformers import Trainer, TrainerCallback, TrainingArguments

    if args.keepstep:
        from keepstep.integrations.transformers import KeepstepTrainer as Trainer

    class Watch(TrainerCallback):
        times: Times

        def on_step_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 0:
                self.times = Times(args.folder, dist.get_rank(), args.block)
            self.times.before(state.global_step)

        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            self.times.after()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=1e-4,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )
        model = Model(args.width, args.depth)
        Trainer(model=model, args=arguments, train_dataset=_Few(args.width), callbacks=[Watch()]).train()


class _Few(Rows):
    """Fewer rows, for frameworks that list all indices of an epoch at its begin."""

    def __len__(self) -> int:
        return 2_000_000


def with_accelerate(args: argparse.Namespace) -> None:
    """Trains with Accelerate, in the user's own loop."""
    from accelerate import Accelerator

    if args.keepstep:
        from keepstep.integrations.accelerate import KeepstepAccelerator as Accelerator
    accelerator = Accelerator(cpu=True)
    model = Model(args.width, args.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + step * 1e-6))
    loader = DataLoader(Rows(args.width), batch_size=args.batch)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    times = Times(args.folder, dist.get_rank(), args.block)

    def train_step(step: int, batch: Any) -> None:
        times.before(step)
        loss = model(batch["x"])["loss"]
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        times.after()

    if args.keepstep:
        for epoch in accelerator.epochs(loader, 1):
            epoch.run(train_step)
    else:
        for step, batch in enumerate(loader):
            train_step(step, batch)


def with_lightning(args: argparse.Namespace) -> None:
    """Trains with Lightning's Trainer."""
    import lightning

    strategy: Any = "ddp"
    if args.keepstep:
        from keepstep.integrations.lightning import KeepstepStrategy

        strategy = KeepstepStrategy()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(args.width, args.depth)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.model(batch["x"])["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + step * 1e-6))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Watch(lightning.Callback):
        times: Times

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            # Not at the end of a batch: a callback there is a step of its own, which not every script has.
            if batch_idx == 0:
                self.times = Times(args.folder, trainer.global_rank, args.block)
            else:
                self.times.after()
            self.times.before(batch_idx)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),  # environ: both launchers set it
        strategy=strategy,
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Watch()],
    )
    trainer.fit(Module(), DataLoader(_Few(args.width), batch_size=args.batch))


def with_fabric(args: argparse.Namespace) -> None:
    """Trains with Lightning Fabric, in the user's own loop."""
    from lightning.fabric import Fabric

    strategy: Any = "ddp"
    if args.keepstep:
        from keepstep.integrations.lightning import KeepstepFabricStrategy

        strategy = KeepstepFabricStrategy()
    devices = int(os.environ["LOCAL_WORLD_SIZE"])  # environ: both launchers set it
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    bare = Model(args.width, args.depth)
    model, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), lr=1e-4))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + step * 1e-6))
    loader = fabric.setup_dataloaders(DataLoader(_Few(args.width), batch_size=args.batch))
    times = Times(args.folder, fabric.global_rank, args.block)

    def train_step(step: Any, batch: Any) -> None:
        times.before(step.index if args.keepstep else step)
        fabric.backward(model(batch["x"])["loss"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        times.after()

    if args.keepstep:
        for epoch in fabric.strategy.epochs(loader, 1, scheduler=scheduler):
            epoch.run(train_step)
    else:
        for step, batch in enumerate(loader):
            train_step(step, batch)


FRAMEWORKS = {
    "transformers": with_transformers,
    "accelerate": with_accelerate,
    "lightning": with_lightning,
    "fabric": with_fabric,
}


def main() -> None:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--keepstep", action="store_true", help="under keepstep in place of torchrun")
    parser.add_argument("--folder", type=Path, required=True, help="for the records and the pipes of the gate")
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="rows per rank")
    parser.add_argument("--block", type=int, required=True, help="steps in a turn")
    parser.add_argument("--steps", type=int, default=1_000_000)
    args = parser.parse_args()
    FRAMEWORKS[args.framework](args)


if __name__ == "__main__":
    main()
