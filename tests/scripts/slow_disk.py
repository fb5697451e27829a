"""Each rank holds a part of its own, and rank 1 is slow to write its part of the first checkpoint, and of the last but
one: until the last step has ended.

Usage: keepstep run --nproc-per-node 2 tests/scripts/slow_disk.py FOLDER
"""

import sys
import threading
from pathlib import Path
from typing import Any

import torch

import keepstep
from keepstep.worker.state import checkpoint

NUM_STEPS, WRITTEN_IN = 8, 5
folder = Path(sys.argv[1])
session = keepstep.init(seed=3)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
session.protect(
    model=model,
    optimizer=optimizer,
    checkpoint_dir=folder,
    checkpoint_every=1,
    snapshot_every="off",
    shard=f"part {session.rank}",
)
is_fast = threading.Event()
write = checkpoint._write


def write_slowly(*arguments: Any) -> Any:
    if session.rank == 1:
        is_fast.wait()
    return write(*arguments)


checkpoint._write = write_slowly
seen = set()
for step in session.steps(NUM_STEPS):
    with step:
        seen |= {path.name for path in folder.glob("draft_*")}
        if WRITTEN_IN <= step.index < NUM_STEPS - 1:
            is_fast.set()
            session._recovery.flush()  # type: ignore[union-attr]  # waits for this rank's part
        if step.index == NUM_STEPS - 2:
            is_fast.clear()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if step.index == NUM_STEPS - 1:
        is_fast.set()
if session.is_main:
    print("drafts", *sorted(seen), flush=True)
    print("checkpoints", *sorted(path.name for path in folder.iterdir()), flush=True)
