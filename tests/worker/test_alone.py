"""Under plain python, without launcher: what cannot be recovered ends the script instead of waiting for ever."""

import subprocess
import sys
from pathlib import Path

from tests.support.jobs import SCRIPTS

ROT = """
import pathlib, runpy, sys
from keepstep.worker.state.checkpoint import Checkpoints

inspect = Checkpoints.inspect

def inspect_and_rot(self):
    inspect(self)
    for data in pathlib.Path(sys.argv[-1]).glob("step_*/*.distcp"):
        data.write_bytes(b"rotten")

Checkpoints.inspect = inspect_and_rot
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_checkpoint_that_rots_after_it_was_found_ends_the_script(tmp_path: Path) -> None:
    arguments = [SCRIPTS / "tiny.py", "--steps", "6", "--checkpoint-dir", tmp_path / "saved"]
    subprocess.run([sys.executable, *map(str, arguments)], check=True, timeout=60)
    again = subprocess.run(
        [sys.executable, "-c", ROT, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    assert again.returncode == 1
    assert "NothingToRecoverFrom: " in again.stderr
    assert "step_0000000005" in again.stderr
