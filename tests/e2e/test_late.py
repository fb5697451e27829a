"""A group's own timeout in a real job: the script gets torch's error, though a group could answer by itself."""

import json
from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, run


@pytest.mark.parametrize("where", ["in a step", "outside"])
def test_a_rank_that_is_late_for_a_groups_timeout_is_an_error_of_torchs_and_no_failure(
    where: str, tmp_path: Path
) -> None:
    told, report = tmp_path / "told", tmp_path / "report.json"
    code, out, err = run(
        "run", "--nproc-per-node", 2, "--hang-after", 30, "--report", report, SCRIPTS / "late.py", where, told
    )
    assert code == 0, err
    assert "Timed out waiting 300ms" in told.read_text(encoding="utf-8")
    assert out.count("is through") == 2
    assert json.loads(report.read_text(encoding="utf-8"))["recoveries"] == []
