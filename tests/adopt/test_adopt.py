"""Whole scripts: in the shape of well-known ones, and this project's own, in which there is nothing to change."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.adopt.shapes import ADOPTED, PLAIN, findings, said

from keepstep.adopt import RULES, read

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

FOUND = {
    "imagenet": [
        (11, "insert after", "import keepstep"),
        (13, "move", "after keepstep.init(): state = session.state(best_acc1=0)"),
        (23, "replace", "main_worker(0, 2, args)"),
        (28, "replace", "session.rank, inside of the loop"),
        (29, "replace", "session = keepstep.init(seed=7)"),
        (40, "replace", "session.protect(..., checkpoint_dir=...) in place of loading by the script"),
        (51, "insert before", "session.protect(model=model, optimizer=optimizer, scheduler=scheduler)"),
        (51, "replace", "for epoch in session.epochs(train_loader, args.epochs):"),
        (52, "remove", ""),
        (65, "replace", "for step, (images, target) in epoch:\n    with step:"),
    ],
    "nanogpt": [
        (7, "insert after", "import keepstep"),
        (12, "replace", "ddp = session.world_size > 1"),
        (14, "replace", "session = keepstep.init(seed=0)"),
        (15, "replace", "ddp_rank = session.rank, inside of the loop"),
        (16, "replace", "ddp_local_rank = session.device"),
        (17, "replace", "device = session.device"),
        (21, "replace", "state = session.state(best_val_loss=1e9)"),
        (28, "replace", "session.steps(..., start=iter_num) in line 47"),
        (30, "replace", "model = DDP(model, device_ids=[session.device])"),
        (44, "move", "into the loop, after the update: `if session.rank == 0 and wandb.run is None:`"),
        (47, "insert before", "session.protect(model=model, optimizer=optimizer, scaler=scaler)"),
        (47, "replace", "for step in session.steps(max_iters + 1):\n    with step:"),
        (56, "move", "to the beginning of the step, and into each of its micro-batches"),
        (63, "remove", ""),
    ],
    "mingpt": [
        (4, "insert after", "import keepstep"),
        (15, "insert before", "session = keepstep.init(seed=0)"),
        (22, "insert before", "session.protect(model=model, optimizer=self.optimizer)"),
        (22, "replace", "for step, batch in session.batches(train_loader, epochs=num_epochs):\n    with step:"),
        (34, "remove", ""),
    ],
    "accelerated": [
        (4, "replace", "from keepstep.integrations.accelerate import KeepstepAccelerator as Accelerator"),
        (14, "replace", "for epoch in accelerator.epochs(train_dataloader, num_epochs):"),
        (16, "replace", "def train_step(step, batch):"),
    ],
    "trainer": [
        (3, "replace", "from keepstep.integrations.transformers import KeepstepTrainer as Trainer"),
        (13, "insert before", "keepstep.init(seed=0)"),
        (18, "replace", "protected(SFTTrainer)(model=model, args=args, train_dataset=dataset).train()"),
    ],
}


@pytest.mark.parametrize("name", FOUND)
def test_shapes_of_well_known_scripts(name: str) -> None:
    found = findings((HERE / "scripts" / f"{name}.py").read_text("utf-8"))
    assert [(each.line, str(each.edit), each.instead) for each in found] == FOUND[name]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_adopted(path: Path) -> None:
    """A generator of the RL loop, which is no rank, removes the socket of a former one."""
    expected = ["path.unlink(missing_ok=True)  # of a generator that was killed"] if path.stem == "rl_loop" else []
    assert [source for source, _edit, _instead in said(path.read_text("utf-8"))] == expected


ADOPTED_LOOPS = sorted((ROOT / "examples" / "integrations").glob("*.py"))


@pytest.mark.parametrize("path", ADOPTED_LOOPS, ids=lambda path: path.stem)
def test_examples_in_other_loops_are_adopted(path: Path) -> None:
    """That of nanoGPT asks for the rank while it starts, to read samples of its own, and its spare waits there."""
    expected = ["rank = dist.get_rank()"] if path.stem == "nanogpt" else []
    assert [source for source, _edit, _instead in said(path.read_text("utf-8"))] == expected


@pytest.mark.parametrize("path", ADOPTED_LOOPS, ids=lambda path: path.stem)
def test_what_they_were_before_is_not(path: Path) -> None:
    assert said((path.parent / "plain" / path.name).read_text("utf-8"))


def test_their_loops_are_seen() -> None:
    """Else nothing would be found in them for another reason."""
    names = ("train_gpt", "train_digits", "train_epochs", "train_logged")
    assert [len(read((ROOT / "examples" / f"{name}.py").read_text("utf-8")).loops) for name in names] == [1] * 4


@pytest.mark.parametrize("name", FOUND)
def test_lines_of_findings_are_the_scripts_own(name: str) -> None:
    text = (HERE / "scripts" / f"{name}.py").read_text("utf-8")
    for finding in findings(text):
        assert text.splitlines()[finding.line - 1].strip() == finding.source
        assert finding.why.endswith(".")
        assert "  " not in finding.why


def test_what_is_to_be_written_is_python() -> None:
    """Whole statements, where no words stand around them."""
    for name in FOUND:
        for finding in findings((HERE / "scripts" / f"{name}.py").read_text("utf-8")):
            if (
                finding.edit == "replace"
                and finding.instead.endswith((")", "]", "device"))
                and " in " not in finding.instead
            ):
                ast.parse(finding.instead)


def test_a_script_that_is_fine() -> None:
    assert said(ADOPTED) == []
    assert len(read(ADOPTED).loops) == 1


def test_a_plain_script() -> None:
    assert said(PLAIN) == [
        ("from torch.utils.data import DataLoader, DistributedSampler", "insert after", "import keepstep"),
        ('dist.init_process_group("gloo")', "replace", "session = keepstep.init(seed=0)"),
        (
            "for i, (x, y) in enumerate(loader):",
            "insert before",
            "session.protect(model=model, optimizer=optimizer, scheduler=scheduler)",
        ),
        (
            "for i, (x, y) in enumerate(loader):",
            "replace",
            "for step, (x, y) in session.batches(loader):\n    with step:",
        ),
    ]


def test_a_script_that_does_not_train() -> None:
    assert read("print('hello')\n").findings == []
    assert read("print('hello')\n").loops == []


def test_rules_are_all_named() -> None:
    assert len(set(RULES)) == len(RULES) > 8
