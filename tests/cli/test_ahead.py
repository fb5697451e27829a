"""What is guessed of a command line before it is parsed."""

from __future__ import annotations

import pytest

from keepstep.cli.ahead import guessed
from keepstep.launcher.flags import job_options, make_parser, parse_flags

SCRIPT = "examples/train_digits.py"


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--nproc-per-node", "1"],
        ["--nproc-per-node", "3", "--spares", "2"],
        ["--nproc_per_node=4"],
    ],
)
def test_the_guess_is_what_the_flags_say(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the process that was started ahead is ended unused."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    agent = job_options(parse_flags(make_parser("keepstep run"), [*flags, SCRIPT, "--steps", "3"])).agent
    assert guessed([*flags, SCRIPT, "--steps", "3"]) == agent.spawner


@pytest.mark.parametrize("flag", ["--help", "--start-method=spawn", "--preload=numpy", "--nnodes=2", "--engine"])
def test_nothing_is_started_ahead_where_it_would_not_be_used(flag: str) -> None:
    assert guessed([flag, SCRIPT]) is None
