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


TWO_LOOPS = """
import keepstep, torch

session = keepstep.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model=model, optimizer=optimizer)
for num_steps in (2, 2, 3):
    for step in session.steps(num_steps):
        with step:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    print("loop", num_steps, flush=True)
"""


def test_steps_after_the_last_one_are_refused() -> None:
    run = subprocess.run([sys.executable, "-c", TWO_LOOPS], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout == "loop 2\nloop 2\n"
    assert run.returncode == 1
    assert "UsageError: steps(3) after all ranks have completed steps(2)" in run.stderr


EPOCHS_BY_HAND = """
import keepstep, torch

session = keepstep.init()
model = torch.nn.Linear(1, 1)
session.protect(model=model)
loader = torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=2)
for epoch in range(2):
    for step, batch in session.batches(loader):
        with step:
            model(batch)
    print("epoch", epoch, flush=True)
"""


def test_a_second_loop_over_batches_is_refused() -> None:
    """It would have no step, without a word."""
    command = [sys.executable, "-c", EPOCHS_BY_HAND]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout == "epoch 0\n"
    assert run.returncode == 1
    assert "UsageError: session.batches() is iterated a second time: one loop has all epochs" in run.stderr


EVALUATES = """
import keepstep, torch
from torch.nn.parallel import DistributedDataParallel

session = keepstep.init()
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model=model, optimizer=optimizer)
for step in session.steps(3):
    with torch.no_grad():
        model(torch.ones(4, 2))
    print(model.will_sync_module_buffers(), end=" ")
    with step:
        print(model.will_sync_module_buffers())
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_every_step_begins_with_the_same_collective_whatever_the_forward_before_it() -> None:
    """An interrupted step left ranks apart here: some sent their buffers first, others did not, and all waited."""
    run = subprocess.run([sys.executable, "-c", EVALUATES], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "False True\n" * 3


def test_values_of_the_script(tmp_path: Path) -> None:
    """The script checks them itself; in the second run they come from the checkpoint of the first."""
    arguments = [SCRIPTS / "bookkeeping.py", "--checkpoint-dir", tmp_path / "saved", "--steps"]
    for steps in ("7", "12"):
        command = [sys.executable, *map(str, arguments), steps]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert run.returncode == 0, run.stderr


FORGOTTEN = """
import keepstep, torch

session = keepstep.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
session.protect(model=model, optimizer=optimizer)
print(len(list(session.steps(0))))
"""


def test_a_scheduler_that_is_not_protected_is_named_before_the_first_step() -> None:
    run = subprocess.run([sys.executable, "-c", FORGOTTEN], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "0\n"
    assert "keepstep: StepLR of 'optimizer' is not protected: in a process that replaces a rank it begins" in run.stderr
