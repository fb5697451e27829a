"""The pairs of docs/porting.md: a script runs under torchrun as it is, and its port loses ranks without a trace."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.jobs import DEADLINE_S, EXAMPLES, SCRIPTS, drill, run

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
PLACES = {
    "fsdp2": [(8, "forward"), (9, "forward")],
    "gan": [(11, "forward"), (13, "forward")],
    "hf_trainer": [(9, "updated"), (14, "forward")],
    "hydra": [(12, "updated"), (23, "updated")],
    "images": [(7, "forward"), (9, "forward")],
    "lightning": [(8, "forward"), (10, "forward")],
    "publish": [(4, "updated"), (9, "forward")],
    "sft": [(10, "forward"), (13, "forward")],
}
"""Pair -> steps and phases: the end of an epoch, if there is one, or a checkpoint, and what comes after a file."""


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


@pytest.mark.parametrize("name", PLACES)
def test_rank_0_is_lost_at_an_end_and_after_a_file(tmp_path: Path, name: str) -> None:
    compared = [word for pattern in FILES[name] for word in ("--compare", pattern)]
    faults = ";".join(f"kill@step={step},phase={phase},rank=0" for step, phase in PLACES[name])
    options = ("--nproc-per-node", 2, "--spares", 1, "--faults", faults)
    code, result, output = drill(tmp_path, *options, *compared, *as_started(f"{name}_after"))
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []


@pytest.mark.parametrize("place", ["before", "in", "after"])
def test_rank_0_is_lost_at_agree(tmp_path: Path, place: str) -> None:
    wrote = []
    for striking in ([], [SCRIPTS / "at_agree.py", place, tmp_path / "struck"]):
        folder = tmp_path / f"run-{len(wrote)}"
        folder.mkdir()
        script = FOLDER / "hydra_after.py"
        code, _, err = run("run", "--nproc-per-node", 2, "--spares", 1, *striking, script, cwd=folder)
        assert code == 0, err
        assert len(list((folder / "out").iterdir())) == 2, "a folder and the link to it"
        wrote.append({path.name: path.read_bytes() for path in (folder / "out" / "latest").iterdir()})
    assert (tmp_path / "struck").exists()
    assert wrote[0] == wrote[1]


def test_all_ranks_are_lost_behind_a_checkpoint_of_the_script(tmp_path: Path) -> None:
    faults = ";".join(f"kill@step=9,phase=forward,rank={rank}" for rank in (0, 1))
    options = ("--nproc-per-node", 2, "--spares", 1, "--compare", "out", "--faults", faults)
    code, result, output = drill(tmp_path, *options, FOLDER / "fsdp2_after.py")
    assert code == 0, output
    assert result["identical"]
