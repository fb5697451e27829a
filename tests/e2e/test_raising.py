"""Scripts that catch an exception of their optimizer's ``step()`` and go on."""

from __future__ import annotations

import subprocess
import sys

from tests.support.jobs import SCRIPTS, run

SCRIPT = SCRIPTS / "raising.py"


def test_what_a_script_exchanges_after_a_step_that_raised_is_no_collective_of_the_optimizer() -> None:
    ended = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("raised 1, ")


def test_a_half_updated_copy_is_restored_after_a_kill_in_the_same_step() -> None:
    """Rank 2 alone has completed the step, and all have its weights."""
    code, out, err = run("run", "--nproc-per-node", 3, "--spares", 1, SCRIPT, "--kill")
    assert code == 0, err
    lines = out.splitlines()
    assert len(lines) == 3
    assert sum("raised 1, " in line for line in lines) == 1
    assert len({line.partition("sum ")[2] for line in lines}) == 1, out
    assert "rank 0, step 3: optimizer.step() has raised, and a rank was lost in the same step" in err
