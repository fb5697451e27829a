"""The habits of scripts that were written for torchrun: environment, start-up code, no `keepstep.init()` at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.jobs import SCRIPTS, run


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
        assert found[rank]["at_start"] == (None if rank == 1 else str(rank))  # a spare has nobody's number
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert log[0] == "begun"
    assert set(log[1:]) == {f"step {step}" for step in range(8)}
    assert (tmp_path / "data.txt").read_text() == "fetched\n"
