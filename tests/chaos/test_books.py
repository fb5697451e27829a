"""Values of the script in real jobs: the same on all ranks, and each rank's own, whatever fails.

The script checks at its end that every rank holds its own values and no other's; the drill compares all of them with
those of a run without failures.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, drill, run

from keepstep.drill.faults import IN_A_STEP

BOOKS = SCRIPTS / "bookkeeping.py"


@pytest.mark.parametrize(("world_size", "options"), [(2, []), (3, []), (3, ["--fsdp2"])])
def test_a_kill_in_each_phase(tmp_path: Path, world_size: int, options: list[str]) -> None:
    code, result, output = drill(tmp_path, "--nproc-per-node", world_size, BOOKS, *options)
    assert code == 0, output
    assert {row["phase"] for row in result["faults"]} >= set(IN_A_STEP)


def test_awkward_moments(tmp_path: Path) -> None:
    """The first step, two at once, the replacement before its first barrier, and the rank that it replaced again."""
    faults = [
        "kill@step=0,phase=backward,rank=2",
        "kill@step=6,phase=synced,rank=0",
        "kill@step=6,phase=optimizer,rank=1",
        "kill@step=12,phase=backward,rank=1",
        "kill@during=restore,rank=1",
        "hang@step=20,phase=barrier,rank=1",
        "kill@step=21,phase=forward,rank=1",
        "kill@step=29,phase=updated,rank=0",
    ]
    code, result, output = drill(
        tmp_path, "--nproc-per-node", 3, "--spares", 2, "--faults", ";".join(faults), BOOKS, "--steps", 30
    )
    assert code == 0, output
    assert len(result["faults"]) == len(faults)


def test_random_instants(tmp_path: Path, seed: int) -> None:
    faults = f"kill@phase=random,count=12,seed={seed}"
    code, _result, output = drill(tmp_path, "--nproc-per-node", 3, "--faults", faults, BOOKS, "--steps", 300)
    assert code == 0, output


def lines(out: str) -> list[str]:
    """What the ranks have printed at the end."""
    return sorted(line for line in out.splitlines() if line.startswith("rank "))


def test_a_checkpoint_holds_the_values_of_every_rank(tmp_path: Path) -> None:
    """Rank 0 alone writes it, and all ranks are lost."""
    job = ("run", "--nproc-per-node", 3, BOOKS, "--steps", 30)
    whole = lines(run(*job)[1])
    code, out, err = run(*job, "--kill-all-at", 17, "--checkpoint-dir", tmp_path / "saved")
    assert code == 0, err
    assert lines(out) == whole
    assert len(set(whole)) == 3

    code, _out, err = run("run", "--nproc-per-node", 2, BOOKS, "--steps", 40, "--checkpoint-dir", tmp_path / "saved")
    assert code == 1
    assert "the state holds what each of 3 ranks has of its own (per_rank), and this job has 2" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--late"], "session.state('own', per_rank=True).ranks was changed after optimizer.step()"),
        (["--behind"], "session.state('own', per_rank=True).count was changed after optimizer.step()"),
        (["--differ"], "the host value session.state()['best_at'] differs between rank 1 and rank 0 in step "),
        (["--large", "70000"], "bytes, and 65536 are allowed on 2 ranks"),
    ],
)
def test_what_cannot_be_kept_is_refused(flags: list[str], message: str) -> None:
    code, _out, err = run("run", "--nproc-per-node", 2, BOOKS, *flags)
    assert code == 1
    assert message in err
