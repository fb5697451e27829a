"""torch's own asynchronous checkpoints, in jobs that lose a rank between two of them or none."""

from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, run


@pytest.mark.parametrize("kill_at", [-1, 10], ids=["undisturbed", "a rank is lost in between"])
def test_a_save_over_a_group_of_its_own_is_whole(kill_at: int, tmp_path: Path) -> None:
    code, out, err = run("run", "--nproc-per-node", 2, SCRIPTS / "async_save.py", tmp_path, kill_at)
    assert code == 0, err
    assert out == "both are whole\n"
    assert ("training continues from step" in err) == (kill_at > 0)
