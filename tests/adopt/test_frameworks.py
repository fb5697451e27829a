"""Scripts whose loop belongs to a framework."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.adopt.shapes import PLAIN, findings, said

from keepstep.adopt import frameworks

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "text",
    [
        "import lightning as L\nL.Trainer(max_epochs=3).fit(model)\n",
        "from lightning.fabric import Fabric\nfabric = Fabric()\n",
        "import pytorch_lightning as pl\ntrainer = pl.Trainer()\n",
        "from torchtitan.train import Trainer\nTrainer(config).train()\n",
    ],
)
@pytest.mark.parametrize("is_there", [True, False])
def test_the_integration_is_named_if_there_is_one(text: str, is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "is_there", lambda module: is_there)
    (finding,) = findings(text)
    module = "torchtitan" if "torchtitan" in text else "lightning"
    if is_there:
        assert finding.instead == f"see docs/integrations/{module}.md"
    else:
        assert "unprotected" in finding.why


def test_each_integration_that_is_named_has_its_page() -> None:
    for module in ("transformers", "accelerate", "lightning", "torchtitan"):
        page = ROOT / "docs" / "integrations" / f"{module}.md"
        assert page.exists() == frameworks.is_there(module)


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
    ],
)
def test_what_is_adopted_is_fine(text: str) -> None:
    assert said(text) == []


def test_an_accelerator_by_its_full_name() -> None:
    assert said("import accelerate\na = accelerate.Accelerator()\n") == [
        ("a = accelerate.Accelerator()", "replace", "a = KeepstepAccelerator()")
    ]
