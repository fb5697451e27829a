"""A compiled model in the loop of a framework, as that one is told to compile it, or by torch.compile.

Usage: keepstep run --nproc-per-node 2 tests/scripts/compiled_frameworks.py transformers [--backend inductor]
"""

import argparse

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, Dataset

BATCHES = 20
WIDTH = 16


class Rows(Dataset):
    def __len__(self):
        return 2 * 4 * BATCHES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(WIDTH, generator=generator), "labels": torch.randn(1, generator=generator)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
        self.layers = nn.Sequential(*layers, nn.Linear(WIDTH, 1))

    def forward(self, x, labels=None):
        output = self.layers(x)
        return {"loss": nn.functional.mse_loss(output, labels), "output": output}


def transformers(backend):
    from transformers import TrainingArguments

    import keepstep
    from keepstep.integrations.transformers import KeepstepTrainer

    keepstep.init(seed=1)
    args = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        torch_compile=True,
        torch_compile_backend=backend,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    KeepstepTrainer(model=Net(), args=args, train_dataset=Rows()).train()


def accelerate(backend, by_hand=False):
    from keepstep.integrations.accelerate import KeepstepAccelerator

    accelerator = KeepstepAccelerator(cpu=True, dynamo_backend=None if by_hand else backend.upper())
    model = torch.compile(Net(), backend=backend) if by_hand else Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(), batch_size=4, shuffle=True))
    for epoch in accelerator.epochs(loader, 1):

        def train_step(_step, batch):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()

        epoch.run(train_step)


def accelerate_by_hand(backend):
    accelerate(backend, by_hand=True)


def lightning(backend, whole=True):
    import lightning as L

    from keepstep.integrations.lightning import KeepstepStrategy

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net() if whole else torch.compile(Net(), backend=backend)

        def training_step(self, batch, batch_idx):
            return self.net(**batch)["loss"]  # with self.log() Lightning 2.6.6 cannot be compiled in whole

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    L.seed_everything(1)
    trainer = L.Trainer(
        strategy=KeepstepStrategy(),
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = torch.compile(Module(), backend=backend) if whole else Module()
    trainer.fit(module, DataLoader(Rows(), batch_size=4, shuffle=True))


def lightning_submodule(backend):
    lightning(backend, whole=False)


def fabric(backend):
    from lightning.fabric import Fabric

    from keepstep.integrations.lightning import KeepstepFabricStrategy

    fabric = Fabric(accelerator="cpu", strategy=KeepstepFabricStrategy())
    fabric.launch()
    fabric.seed_everything(1)
    model = torch.compile(Net(), backend=backend)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(DataLoader(Rows(), batch_size=4, shuffle=True))
    for epoch in fabric.strategy.epochs(loader, 1):

        def train_step(_step, batch):
            fabric.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()

        epoch.run(train_step)


LOOPS = {
    loop.__name__: loop
    for loop in (transformers, accelerate, accelerate_by_hand, lightning, lightning_submodule, fabric)
}

parser = argparse.ArgumentParser()
parser.add_argument("loop", choices=LOOPS)
parser.add_argument("--backend", default="aot_eager")
arguments = parser.parse_args()

torch.set_num_threads(1)
LOOPS[arguments.loop](arguments.backend)
assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
