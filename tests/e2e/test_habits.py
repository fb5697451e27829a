"""The habits of scripts that were written for torchrun: environment, start-up code, no `keepstep.init()` at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs import SCRIPTS, drill, run

from keepstep.protocol.recovery.end.verdicts import NOT_PROTECTED


def lines_of(out: str) -> dict[int, dict[str, Any]]:
    """By rank: what it printed as JSON."""
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {int(line["RANK"]): line for line in found}


def test_a_replacement_has_the_environment_of_the_lost_rank_and_begins_nothing_again(tmp_path: Path) -> None:
    code, out, err = run("run", "--nproc-per-node", 3, SCRIPTS / "environment.py", 1, cwd=tmp_path)
    assert code == 0, err
    found = lines_of(out)
    for rank in range(3):
        expected = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "ROLE_RANK": rank}
        expected |= {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
        assert {name: found[rank][name] for name in expected} == {name: str(each) for name, each in expected.items()}
        assert found[rank]["session"] == [rank, rank, "cpu"]
        assert found[rank]["has_port"]
        assert found[rank]["is_main_at_start"] == (rank == 0)
        assert found[rank]["at_start"] == (None if rank == 1 else str(rank))  # a spare has no rank's number
    assert len({each[name] for each in found.values() for name in ("run", "run_again")}) == 1
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert log[0] == "begun"
    assert set(log[1:]) == {f"step {step}" for step in range(8)}
    assert (tmp_path / "data.txt").read_text() == "fetched\n"


def test_an_unmodified_script_trains_and_is_told_that_it_is_not_protected() -> None:
    code, out, err = run("run", "--nproc-per-node", 2, "--spares", 2, SCRIPTS / "unmodified.py")
    assert code == 0, err
    assert sorted(out.splitlines()) == ["rank 0 of 2 through", "rank 1 of 2 through"]
    # A slow script is told of before its end, too. No spare has run it.
    assert err.splitlines()[-1] == f"keepstep: all scripts have ended; {NOT_PROTECTED}"


@pytest.mark.parametrize(("ending", "detail"), [("kill", "killed by SIGKILL"), ("exit", "exit code 3")])
def test_a_lost_rank_ends_an_unmodified_script_as_under_torchrun(ending: str, detail: str) -> None:
    """The other rank would wait for ever."""
    code, out, err = run("run", "--nproc-per-node", 2, SCRIPTS / "unmodified.py", ending)
    assert code == 1
    assert out == ""
    assert err.splitlines()[-1] == f"keepstep: rank 1 ended: {detail}; {NOT_PROTECTED}"


def test_a_parked_spare_takes_over_a_script_that_reads_its_rank_at_import(tmp_path: Path) -> None:
    faults = "kill@step=4,phase=backward,rank=1; kill@step=9,phase=synced,rank=0"
    arguments = ["--nproc-per-node", 2, "--park-spares", "--preload", "colorsys"]
    code, result, output = drill(tmp_path, *arguments, "--faults", faults, SCRIPTS / "parked.py", 14)
    assert code == 0, output
    assert result["identical"]
    assert [each["failed_ranks"] for each in result["recoveries"]] == [[1], [0]]
    assert "Traceback" not in output
