"""The examples of docs/integrations lose ranks: weights, and the files that they write, come out as without a loss."""

from pathlib import Path

import pytest
from tests.support.jobs import EXAMPLES, SCRIPTS, drill, run
from tests.support.layouts import SPACING, in_every_phase

from keepstep.drill.faults import IN_A_STEP

RANKS = 3
FILES = {
    "imagenet": ("*.pt",),
    "mingpt": ("model.pt",),
    "nanogpt": ("ckpt.pt",),
    "cv_accelerate": ("out",),
    "hf_trainer": ("out/lines.jsonl", "out/best.pt"),
    "sft": ("out/last.pt",),
    "lightning_auto": ("out/lightning_logs",),  # its checkpoints have absolute paths in them
    "lightning_manual": ("out/lightning_logs",),
    "fabric": ("out/last.pt",),
}
"""What each writes, without files that hold times."""
MORE = {
    "imagenet": ("--epochs", 5),
    "mingpt": ("--epochs", 4),
    "cv_accelerate": ("--epochs", 4),
    "hf_trainer": ("--epochs", 6),
    "sft": ("--epochs", 6),
    "lightning_auto": ("--devices", RANKS),
    "lightning_manual": ("--devices", RANKS),
    "fabric": ("--devices", RANKS),
}
"""Options that make it long enough for all faults."""


UNITS_BEHIND = {
    "hf_trainer": lambda step: step % 2 == 0 or step % 5 == 0,
    "sft": lambda step: (step % 3 == 0) + (step % 8 == 0),
    "lightning_auto": lambda step: (step % 4 == 0 or step % 10 == 0) + (step % 10 == 0),
    "lightning_manual": lambda step: (step % 4 == 0 or step % 10 == 0) + (step % 10 == 0),
}
"""How many units follow a training step, in which the framework logs, evaluates and saves: there is no backward."""


def steps_that_train(name: str) -> list[int]:
    """The numbers of the units that have a backward."""
    behind = UNITS_BEHIND.get(name, lambda _step: 0)
    trains, index = [], 0
    for step in range(1, 60):
        trains.append(index)
        index += 1 + behind(step)
    return trains


def faults_of(name: str) -> str:
    """A kill in each phase, and a hang, each in a step that trains."""
    faults = []
    for number, phase in enumerate((*IN_A_STEP, "hang")):
        at = next(each for each in steps_that_train(name) if each >= 3 + SPACING * number)
        kind = f"hang@step={at},phase=backward" if phase == "hang" else f"kill@step={at},phase={phase}"
        faults.append(f"{kind},rank={number % RANKS}")
    return ";".join(faults)


def check(tmp_path: Path, name: str, faults: str, spares: int) -> None:
    compared = [option for pattern in FILES[name] for option in ("--compare", pattern)]
    arguments = ("--nproc-per-node", RANKS, "--spares", spares, *compared, "--faults", faults)
    script = EXAMPLES / "integrations" / f"{name}.py"
    code, result, output = drill(tmp_path, *arguments, script, *MORE.get(name, ()))
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []
    assert all(row["steps_recomputed"] <= 1 for row in result["faults"])


@pytest.mark.parametrize("spares", [1, 0])
@pytest.mark.parametrize("name", FILES)
def test_a_kill_in_every_phase_and_a_hang(tmp_path: Path, name: str, spares: int) -> None:
    check(tmp_path, name, faults_of(name), spares)


@pytest.mark.parametrize("name", FILES)
def test_two_ranks_at_once(tmp_path: Path, name: str) -> None:
    at = next(each for each in steps_that_train(name) if each >= 4)
    check(tmp_path, name, f"kill@step={at},phase=backward,rank=1;kill@step={at},phase=backward,rank=2", 2)


@pytest.mark.parametrize("spares", [1, 0])
def test_fsdp2_by_the_plugin_of_accelerate(tmp_path: Path, spares: int) -> None:
    faults, _num_steps = in_every_phase(RANKS)
    arguments = ("--nproc-per-node", RANKS, "--spares", spares, "--faults", faults)
    script = SCRIPTS / "accelerate_fsdp2.py"
    code, result, output = drill(tmp_path, *arguments, script, "--snapshot-every", 2)
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []


def test_fsdp2_in_a_loop_over_epochs_is_refused(tmp_path: Path) -> None:
    code, _out, err = run("run", "--nproc-per-node", 2, SCRIPTS / "accelerate_fsdp2.py", "--epochs", cwd=tmp_path)
    assert code != 0
    assert "a part of the state has no replica" in err
