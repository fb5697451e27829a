"""Trainers and generators of ``rl_loop.py`` are killed: each sample has one version, and all come out the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.support.jobs import DEADLINE_S, EXAMPLES

STEPS = 40


def run_loop(folder: Path, *flags: str) -> str:
    """The example as a user runs it; what it prints."""
    folder.mkdir()
    command = [sys.executable, EXAMPLES / "rl_loop.py", "all", folder, "--steps", str(STEPS), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def samples(folder: Path) -> list[dict[str, Any]]:
    """All that generators have drawn. A line that a kill cut off was never answered."""
    lines = [line for path in folder.glob("samples-*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def check_samples(found: list[dict[str, Any]], num_steps: int) -> None:
    """Each version has the same weights wherever samples of it were drawn, and each request the same samples."""
    digests, answers = defaultdict(set), defaultdict(set)
    for sample in found:
        digests[sample["version"]].add(sample["digest"])
        answers[sample["version"], sample["seed"]].add(json.dumps(sample["answers"]))
    assert {version: len(each) for version, each in digests.items()} == dict.fromkeys(range(num_steps), 1)
    assert len(set.union(*digests.values())) == num_steps, "two versions have the same weights"
    assert {asked: len(each) for asked, each in answers.items()} == {(n // 2, n): 1 for n in range(2 * num_steps)}


def test_samples_and_weights_are_the_same_whichever_process_is_killed(tmp_path: Path) -> None:
    """As where nothing is killed: each version has the same weights, and each request the same samples."""
    run_loop(tmp_path / "quiet")
    printed = run_loop(tmp_path / "killed", "--kill")
    assert "weights identical: yes" in printed
    killed = re.search(r"generators killed: (\d+)", printed)
    assert killed is not None
    assert int(killed[1]) >= 2, printed

    quiet, disturbed = samples(tmp_path / "quiet"), samples(tmp_path / "killed")
    assert len(quiet) == 2 * STEPS, "a generator drew twice although nothing was lost"
    assert len(disturbed) > 4 * STEPS, "the drill runs twice, and what was lost is drawn again"
    check_samples(quiet + disturbed, STEPS)
