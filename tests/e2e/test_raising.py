"""Scripts that catch an exception of their optimizer's ``step()`` and go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


REPLACEMENT = """
import logging, os, signal, torch, keepstep

session = keepstep.init(seed=0)
logging.getLogger("torch._dynamo").warning("built")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model=model, optimizer=optimizer)
for step in session.steps(12):
    with step:
        if session.rank == 1 and session.generation == 2:
            raise ValueError("on the replacement")
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if step.index == 5 and session.rank == 1 and session.generation == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_traceback_of_a_replacement_has_its_rank_in_front(tmp_path: Path) -> None:
    """torch puts there the rank that a process had in `init_process_group`, which was a spare's. A line of torch's logs
    does not make a spare wait for its rank, and has no other one's."""
    (tmp_path / "train.py").write_text(REPLACEMENT)
    code, _out, err = run("run", "--nproc-per-node", 2, "--spares", 1, tmp_path / "train.py")
    assert code == 0, err
    assert "[rank1]: ValueError: on the replacement" in err
    assert "[rank0]: " not in err
    assert {line[: line.index("]")] for line in err.splitlines() if line.endswith("] built")} == {
        "[rank0",
        "[rank1",
        "[rank-1",
    }
