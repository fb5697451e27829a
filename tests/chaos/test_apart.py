"""Replicas that differ: found before they train on, and said."""

import re
from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, run

APART = SCRIPTS / "apart.py"
JOB = ("--nproc-per-node", 3, "--spares", 1)


def sums(out: str) -> list[str]:
    """What each rank has printed at the end."""
    return [line.partition(": ")[2] for line in sorted(out.splitlines()) if line.startswith("rank ")]


@pytest.fixture(scope="module")
def whole() -> str:
    """The weights of a job that loses no rank, and whose ranks do not part."""
    code, out, err = run("run", *JOB, APART, "--kill-at", -1)
    assert code == 0, err
    (weights,) = set(sums(out))
    return weights


def test_a_replacement_that_is_wrong_once_is_restored_once_more(whole: str) -> None:
    """No rank keeps a step that it has computed with."""
    code, out, err = run("run", *JOB, APART, "--wrong-load", 1)
    assert code == 0, err
    assert sums(out) == [whole] * 3


@pytest.mark.parametrize("flags", [("--wrong-load", 2), ("--hidden",)], ids=["what it holds", "in no state_dict()"])
def test_a_replacement_that_differs_again_ends_the_job(flags: tuple[object, ...], tmp_path: Path) -> None:
    code, _out, err = run("run", *JOB, APART, *flags, cwd=tmp_path)
    assert code == 76, err
    assert "the state was loaded 2 times and is not what was loaded: rank 1: 'model.module.weight' differs" in err
    saved = sorted(re.sub(r"-[^-]*$", "", path.name) for path in tmp_path.glob("keepstep-rescue-*"))
    step = 20 if "--wrong-load" in flags else 22
    assert saved == [f"keepstep-rescue-step{step}-rank{rank}" for rank in (0, 2)]


def test_ranks_that_had_trained_apart_go_on_or_end_the_job(tmp_path: Path) -> None:
    code, out, err = run("run", *JOB, APART, "--apart-at", 18)
    assert code == 0, err
    assert len(sums(out)) == 3
    warning = "WARNING: step 20: ranks [2] had trained apart from their replicas before the failure"
    assert err.count(warning) == 1
    assert "'model.module.bias' differs between rank 2 and rank 0 in step 20" in err

    code, _out, err = run("run", "--compare", "strict", *JOB, APART, "--apart-at", 18, cwd=tmp_path)
    assert code == 76, err
    assert "replicas have trained apart, and the job has --compare strict: rank 2: step 20: 'model.module.bias'" in err
    assert len(list(tmp_path.glob("keepstep-rescue-*"))) == 3


def test_an_update_on_some_replicas_only_ends_the_job() -> None:
    code, _out, err = run("run", *JOB, APART, "--kill-at", -1, "--skip-at", 23)
    assert code == 1
    assert "UsageError: step 23: ranks [0, 2] call optimizer.step(), and ranks [1] end the step without it" in err
