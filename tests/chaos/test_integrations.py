"""The examples of docs/integrations lose ranks: weights, and the files that they write, come out as without a loss."""

from pathlib import Path

import pytest
from tests.support.jobs import EXAMPLES, drill
from tests.support.layouts import in_every_phase

RANKS = 3
FILES = {
    "imagenet": ("*.pt",),
    "mingpt": ("model.pt",),
    "nanogpt": ("ckpt.pt",),
    "cv_accelerate": ("out",),
    "hf_trainer": ("out/lines.jsonl", "out/best.pt"),
    "sft": ("out/last.pt",),
}
"""What each writes, without files that hold times."""
MORE = {
    "imagenet": ("--epochs", 5),
    "mingpt": ("--epochs", 4),
    "cv_accelerate": ("--epochs", 4),
    "hf_trainer": ("--epochs", 6),
    "sft": ("--epochs", 6),
}
"""Options that make it long enough for all faults."""


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
    faults, _num_steps = in_every_phase(RANKS)
    check(tmp_path, name, faults, spares)


@pytest.mark.parametrize("name", FILES)
def test_two_ranks_at_once(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, "kill@step=5,phase=backward,rank=1;kill@step=5,phase=backward,rank=2", 2)
