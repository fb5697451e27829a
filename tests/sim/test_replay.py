"""A seed tells the same story wherever it is run, and a failing one is told as one command."""

import os
import subprocess
import sys

import pytest

from keepstep.cli import simulate
from keepstep.cli.main import main
from keepstep.protocol import resume
from keepstep.protocol.phases import Phase
from keepstep.sim.run import case_of, run
from keepstep.sim.shrink import shrink

SEEDS = (0, 7, 105, 1804)
"""The last is a large one: 96 ranks on 25 nodes, when this was written."""


def story_of(seed: int, hash_seed: str) -> bytes:
    command = [sys.executable, "-m", "keepstep.cli.main", "simulate", "--seed", str(seed)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, env=environment, capture_output=True, check=True, timeout=120).stdout


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_seed_gives_the_same_story_byte_for_byte(seed: int) -> None:
    first, second = story_of(seed, "1"), story_of(seed, "4242")
    assert first == second
    assert first.count(b"\n") > 20


def test_telling_the_story_changes_nothing() -> None:
    for seed in range(20):
        quiet, told = run(case_of(seed)), run(case_of(seed), tell=True)
        assert (quiet.check, quiet.num_events, quiet.virtual_s) == (told.check, told.num_events, told.virtual_s)


def plant(patch: pytest.MonkeyPatch) -> None:
    """A rank that has completed step i says that it can be at i, where it is not any more."""
    reach = resume.reach
    patch.setattr(
        resume,
        "reach",
        lambda step, phase: frozenset({step}) if phase is Phase.UPDATED and step > 0 else reach(step, phase),
    )


def test_a_failing_seed_is_shrunk_and_replayed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch)
    failing = (outcome for seed in range(500) if (outcome := run(case_of(seed))).check and len(outcome.case.plan) > 2)
    outcome = next(failing)
    case, kept = shrink(outcome)
    assert run(case).check is outcome.check
    assert len(kept) < len(outcome.case.plan)
    assert main(["simulate", "--seed", str(outcome.case.seed), "--shrink"]) == 1
    told = capsys.readouterr().out
    faults = ",".join(map(str, kept))
    assert f"replay: keepstep simulate --seed {outcome.case.seed} --faults {faults}" in told
    assert main(["simulate", "--seed", str(outcome.case.seed), "--faults", faults]) == 1
    assert str(outcome.check) in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    "flags",
    [
        *(["--seed", "1", "--faults", "99"], ["--seed", "1", "--faults", "x"], ["--seeds", "0"], ["--jobs", "0"]),
        ["--exhaustive", "1"],
    ],
)
def test_what_cannot_be_run_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags]) == 2
    assert flags[-2] in capsys.readouterr().err


def test_a_batch_says_what_it_did(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    page = tmp_path / "track-record.md"
    page.write_text("| date |\n| --- |\n")
    flags = ["--seeds", "5", "--from", "3", "--jobs", "2", "--track-record", str(page), "--json", str(tmp_path / "out")]
    assert simulate.main(flags) == 0
    assert "5 seeds" in capsys.readouterr().out
    assert "| 5 |" in page.read_text().splitlines()[-1]
    assert '"num_seeds": 5' in (tmp_path / "out").read_text()


def test_one_seed_is_one_on_any_number_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--seeds", "1", "--jobs", "2"]) == 0
    assert "\n1 seeds, " in capsys.readouterr().out


def test_a_page_without_a_table_is_refused(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Nothing\n")
    assert main(["simulate", "--seeds", "1", "--jobs", "1", "--track-record", str(page)]) == 2
    assert "does not end in a table" in capsys.readouterr().err
