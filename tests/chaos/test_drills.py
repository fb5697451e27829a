"""Real faults in real jobs: whatever fails, every bit of the protected state is that of a run without failures."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.jobs import EXAMPLES, SCRIPTS, drill

from keepstep.drill.faults import IN_A_STEP, KINDS

BY_THE_RANK = [kind for kind in KINDS if kind != "spare-kill"]
PAIRS = [(kind, phase) for kind in BY_THE_RANK for phase in IN_A_STEP]
SPACING = 5
SMALL = ("--width", 32, "--layers", 2, "--context", 32, "--batch-size", 4)
"""A shape of the GPT with short steps, where there are many of them."""


CASES = [(example, world_size) for example in ("train_gpt.py", "train_digits.py") for world_size in (2, 3, 4)]


def specification(pairs: list[tuple[str, str]], world_size: int) -> tuple[str, int]:
    """One fault for each (kind, phase), ranks in turn, and the steps that they need."""
    parts = [
        f"{kind}@step={3 + number * SPACING},phase={phase},rank={number % world_size}"
        for number, (kind, phase) in enumerate(pairs)
    ]
    return ";".join(parts), 3 + len(pairs) * SPACING


def check_all(tmp_path: Path, example: str, world_size: int, pairs: list[tuple[str, str]]) -> None:
    faults, steps = specification(pairs, world_size)
    code, result, output = drill(
        tmp_path, "--nproc-per-node", world_size, "--faults", faults, EXAMPLES / example, "--steps", steps
    )
    assert code == 0, output
    assert result["identical"]
    assert result["digest"] == result["reference_digest"]
    assert len(result["faults"]) == len(pairs)
    for row in result["faults"]:
        again = 1 if row["phase"] in ("forward", "backward") else 0
        assert row["steps_recomputed"] == again, row


@pytest.mark.parametrize(("example", "world_size"), CASES)
def test_kinds_and_phases(tmp_path: Path, example: str, world_size: int) -> None:
    """A third of all pairs of kind and phase for each job, a different third for the next one."""
    which = CASES.index((example, world_size)) % 3
    pairs = [pair for number, pair in enumerate(PAIRS) if (number + number // 3) % 3 == which]
    check_all(tmp_path, example, world_size, pairs)


@pytest.mark.full
@pytest.mark.parametrize(("example", "world_size"), CASES)
def test_every_kind_in_every_phase(tmp_path: Path, example: str, world_size: int) -> None:
    check_all(tmp_path, example, world_size, PAIRS)


def test_random_instants(tmp_path: Path, seed: int) -> None:
    faults = f"kill@phase=random,count=50,seed={seed}"
    code, result, output = drill(
        tmp_path, "--nproc-per-node", 3, "--faults", faults, EXAMPLES / "train_gpt.py", *SMALL, "--steps", 500
    )
    assert code == 0, output
    assert len(result["faults"]) == 50
    assert all(row["steps_recomputed"] <= 1 for row in result["faults"])


@pytest.mark.parametrize(
    ("kind", "moment", "rank"),
    [
        ("kill", "stop", 0),
        ("hang", "stop", 2),
        ("kill", "reset", 0),
        ("hang", "reset", 1),
        ("kill", "restore", 0),
        ("kill", "restore", 1),
        ("hang", "restore", 2),
    ],
)
def test_failure_during_a_recovery(tmp_path: Path, kind: str, moment: str, rank: int) -> None:
    """Of a survivor, and (rank 1) of the replacement itself."""
    faults = f"kill@step=5,phase=backward,rank=1; {kind}@during={moment},rank={rank}"
    code, result, output = drill(
        tmp_path, "--nproc-per-node", 3, "--spares", 2, "--faults", faults, SCRIPTS / "everything.py", "--steps", 15
    )
    assert code == 0, output
    assert sum(len(recovery["failed_ranks"]) for recovery in result["recoveries"]) == 2


def test_awkward_moments(tmp_path: Path) -> None:
    """The first step and the last, two at once, a spare, and a hang while another rank dies."""
    faults = [
        "kill@step=0,phase=backward,rank=0",
        "kill@step=6,phase=forward,rank=0",
        "kill@step=6,phase=backward,rank=2",
        "kill@step=12,phase=synced,rank=0",
        "kill@step=12,phase=optimizer,rank=1",
        "hang@step=18,phase=backward,rank=0",
        "kill@step=18,phase=backward,rank=1",
        "spare-kill@step=24",
        "kill@step=26,phase=forward,rank=1",
        "kill@step=39,phase=updated,rank=2",
    ]
    code, result, output = drill(
        tmp_path, "--nproc-per-node", 3, "--faults", ";".join(faults), SCRIPTS / "everything.py", "--steps", 40
    )
    assert code == 0, output
    assert len(result["faults"]) == len(faults)


@pytest.mark.parametrize(
    "flags",
    [
        ["--bucket-view", "--zero-to-none", "0"],
        ["--find-unused"],
    ],
)
def test_ways_to_write_a_step(tmp_path: Path, flags: list[str]) -> None:
    code, result, output = drill(tmp_path, "--nproc-per-node", 3, SCRIPTS / "everything.py", "--steps", 50, *flags)
    assert code == 0, output
    assert len(result["faults"]) == len(IN_A_STEP)


def test_a_difference_is_noticed(tmp_path: Path) -> None:
    """The drill itself must be able to say no: this script keeps state that it does not protect."""
    script = tmp_path / "forgetful.py"
    text = (SCRIPTS / "tiny.py").read_text()
    hidden = text.replace("first = None\n", "first = None\nhidden = 0\n").replace(
        "model(data).pow(2)", "hidden += 1\n        (model(data) * hidden).pow(2)"
    )
    assert hidden != text
    script.write_text(hidden)
    code, result, _output = drill(tmp_path, "--nproc-per-node", 2, script, "--steps", 50)
    assert code == 1
    assert result["identical"] is False


@pytest.mark.parametrize("flag", ["--in-front", "--behind"])
def test_protected_host_state_that_changes_around_a_step(tmp_path: Path, flag: str) -> None:
    """An attempt that is interrupted takes along what the script changed in front of its ``with``, and behind it."""
    code, _result, output = drill(tmp_path, "--nproc-per-node", 3, SCRIPTS / "habits.py", flag)
    assert code == 0, output
