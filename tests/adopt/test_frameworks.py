"""Scripts whose loop belongs to a framework."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.adopt.shapes import PLAIN, findings, said

ROOT = Path(__file__).resolve().parents[2]


LIGHTNING = "import lightning as L\nL.Trainer(max_epochs=3, strategy='ddp').fit(model)\n"
FABRIC = """\
from lightning.fabric import Fabric
fabric = Fabric(devices=8)
loader = fabric.setup_dataloaders(loader)
for epoch in range(3):
    for batch in loader:
        fabric.backward(model(batch))
        optimizer.step()
"""
TITAN = "from torchtitan.train import Trainer\nTrainer(config).train()\n"


def test_lightning() -> None:
    assert [to for _source, _edit, to in said(LIGHTNING)] == [
        "L.Trainer(max_epochs=3, strategy=KeepstepStrategy()).fit(model)"
    ]
    adopted = "from keepstep.integrations.lightning import KeepstepStrategy\n"
    assert said(adopted + LIGHTNING.replace("'ddp'", "KeepstepStrategy()")) == []


def test_fabric() -> None:
    assert [to for _source, _edit, to in said(FABRIC)] == [
        "fabric = Fabric(devices=8, strategy=KeepstepFabricStrategy())",
        "for epoch in fabric.strategy.epochs(loader, 3):",
        "def train_step(step, batch):",
    ]


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        (TITAN, ["from keepstep.integrations.torchtitan import TitanTrainer as Trainer"]),
        ("import torchtitan.train\n", ["see docs/integrations/torchtitan.md"]),
        (f"from keepstep.integrations.torchtitan import protected\n{TITAN}", []),
    ],
)
def test_torchtitan(text: str, instead: list[str]) -> None:
    assert [finding.instead for finding in findings(text)] == instead


TRAINER = "from transformers import Trainer\nTrainer(model).train()\n"


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        (TRAINER, ["from keepstep.integrations.transformers import KeepstepTrainer as Trainer"]),
        ("import transformers\ntransformers.Trainer(model)\n", ["protected(transformers.Trainer)(model)"]),
        ("import trl\nclass Mine(trl.SFTTrainer):\n    pass\n", ["class Mine(protected(trl.SFTTrainer)):"]),
        (
            "from trl import SFTConfig, SFTTrainer\nSFTTrainer(args=SFTConfig())\n",
            ["keepstep.init(seed=0)", "protected(SFTTrainer)(args=SFTConfig())"],
        ),
    ],
)
def test_trainers(text: str, instead: list[str]) -> None:
    assert [to for _source, _edit, to in said(text)] == instead


def test_each_integration_that_is_named_has_its_page() -> None:
    for module in ("transformers", "accelerate", "lightning", "torchtitan"):
        assert (ROOT / "docs" / "integrations" / f"{module}.md").exists()


@pytest.mark.parametrize(
    "line",
    [
        "from transformers import AutoTokenizer",
        "import lightning",
        "from accelerate.utils import set_seed",
    ],
)
def test_an_import_alone_is_no_framework(line: str) -> None:
    assert len(said(f"{line}\n{PLAIN}")) == len(said(PLAIN))


@pytest.mark.parametrize(
    "text",
    [
        "import keepstep\nfrom keepstep.integrations.transformers import KeepstepTrainer\nkeepstep.init()\n"
        "KeepstepTrainer(model=model).train()\n",
        "from keepstep.integrations.accelerate import KeepstepAccelerator as Accelerator\n"
        "accelerator = Accelerator()\nfor epoch in accelerator.epochs(loader, 3):\n    epoch.run(train_step)\n",
        "from keepstep.integrations.lightning import KeepstepFabricStrategy\n"
        + FABRIC.replace("range(3)", "fabric.strategy.epochs(loader, 3)").replace(
            "devices=8", "strategy=KeepstepFabricStrategy()"
        ),
    ],
)
def test_what_is_adopted_is_fine(text: str) -> None:
    assert said(text) == []


def test_an_accelerator_by_its_full_name() -> None:
    assert said("import accelerate\na = accelerate.Accelerator()\n") == [
        ("a = accelerate.Accelerator()", "replace", "a = KeepstepAccelerator()")
    ]
