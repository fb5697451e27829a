"""The pairs of docs/porting.md: a script runs under torchrun as it is, and its port loses ranks without a trace."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.jobs import DEADLINE_S, EXAMPLES, drill

FOLDER = EXAMPLES / "porting"
FILES = {
    "fsdp2": ["out"],
    "gan": ["out"],
    "hf_trainer": ["out/best.pt", "out/lines.jsonl", "out/checkpoint-*/model.safetensors"],
    "hydra": ["out/latest/*"],
    "images": ["out"],
    "lightning": ["out"],
    "publish": ["out/last.pt"],
    "sft": ["out/last.pt", "out/checkpoint-*/model.safetensors"],
}
"""Pair -> the files that failures must not change: all but those in which a trainer notes how long it took."""


def as_started(name: str) -> list[str]:
    """The script as a launcher is given it: that in Hydra's style as a module."""
    return ["-m", name, "lr=0.05"] if name.startswith("hydra") else [str(FOLDER / f"{name}.py")]


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize("name", FILES)
def test_before(tmp_path: Path, name: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    result = subprocess.run(
        [*launcher, *as_started(f"{name}_before")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(any(tmp_path.glob(pattern)) for pattern in FILES[name])


@pytest.mark.parametrize("name", FILES)
def test_after(tmp_path: Path, name: str) -> None:
    compared = [word for pattern in FILES[name] for word in ("--compare", pattern)]
    code, result, output = drill(
        tmp_path, "--nproc-per-node", 2, "--spares", 1, *compared, *as_started(f"{name}_after")
    )
    assert code == 0, output
    assert result["identical"]
    assert len(result["faults"]) >= 2, output
