"""An engine of `test_weights.py`: looks at its weights all the time, and notes each version that it has seen whole.

Arguments: the folder of its node, its name, the deadline, and the file to write to. A line is ``VERSION SECONDS``: the
version, and how long `using` took to say so; or ``torn ...``, which must never come.
"""

import sys
import threading
import time
from pathlib import Path

import torch
from train_counting import Counting  # in the same folder

import keepstep

folder, name, deadline_s, out = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), Path(sys.argv[4])
model = Counting()
last = None
with (
    torch.no_grad(),
    out.open("a", buffering=1) as file,
    keepstep.Subscriber(folder, into=model, name=name, deadline_s=deadline_s) as subscriber,
):
    subscriber.start()
    print("ready", file=file)
    while True:
        began_s = time.monotonic()
        try:
            with subscriber.using() as version:
                took_s = time.monotonic() - began_s
                seen = {value for each in model.parameters() for value in each.unique().tolist()}
        except keepstep.WeightsNotReady as error:
            print(f"none {time.monotonic() - began_s:.3f} {error}", file=file)
            seen, version, took_s = set(), last, 0.0
        if seen and seen != {float(version)}:
            print(f"torn {version} {sorted(seen)}", file=file)
        elif version != last:
            last = version
            print(f"{version} {took_s:.3f}", file=file)
        threading.Event().wait(0.02)  # between two answers
