"""The drill of each example of docs/integrations: its options, the files to compare, and the faults."""

from __future__ import annotations

from tests.support.jobs import EXAMPLES
from tests.support.layouts import SPACING

from keepstep.drill.faults import IN_A_STEP

RANKS = 3
FILES = {
    "imagenet": ("*.pt",),
    "mingpt": ("model.pt",),
    "nanogpt": ("ckpt.pt",),
    "cv_accelerate": ("out",),
    "hf_trainer": ("out/lines.jsonl", "out/best.pt"),
    "sft": ("out/last.pt",),
    "lightning_auto": ("out",),
    "lightning_manual": ("out",),
    "fabric": ("out/last.pt",),
}
"""The files that each example writes, except files with times."""
MORE = {
    "imagenet": ("--epochs", 5),
    "mingpt": ("--epochs", 4),
    "cv_accelerate": ("--epochs", 4),
    "hf_trainer": ("--epochs", 6),
    "sft": ("--epochs", 6),
    "lightning_auto": ("--devices", RANKS),
    "lightning_manual": ("--devices", RANKS),
    "fabric": ("--devices", RANKS),
}
"""Options that make the training long enough for all faults."""


UNITS_BEHIND = {
    "hf_trainer": lambda step: step % 2 == 0 or step % 5 == 0,
    "sft": lambda step: (step % 3 == 0) + (step % 8 == 0),
    "lightning_auto": lambda step: (step % 4 == 0 or step % 10 == 0) + (step % 10 == 0),
    "lightning_manual": lambda step: (step % 4 == 0 or step % 10 == 0) + (step % 10 == 0),
}
"""Number of steps without a backward after a training step: in these the framework logs, evaluates and saves."""


def steps_that_train(name: str) -> list[int]:
    """Returns the numbers of the steps with a backward."""
    behind = UNITS_BEHIND.get(name, lambda _step: 0)
    trains, index = [], 0
    for step in range(1, 60):
        trains.append(index)
        index += 1 + behind(step)
    return trains


def in_every_phase(name: str) -> str:
    """Returns a kill in each phase and a hang, each in a step with a backward."""
    faults = []
    for number, phase in enumerate((*IN_A_STEP, "hang")):
        at = next(each for each in steps_that_train(name) if each >= 3 + SPACING * number)
        kind = f"hang@step={at},phase=backward" if phase == "hang" else f"kill@step={at},phase={phase}"
        faults.append(f"{kind},rank={number % RANKS}")
    return ";".join(faults)


def two_at_once(name: str) -> str:
    """Returns the kills of two of three ranks in one step with a backward."""
    at = next(each for each in steps_that_train(name) if each >= 4)
    return f"kill@step={at},phase=backward,rank=1;kill@step={at},phase=backward,rank=2"


def arguments(name: str, spares: int, faults: str) -> list[str]:
    """Returns the arguments of ``keepstep drill``."""
    compared = [option for pattern in FILES[name] for option in ("--compare", pattern)]
    script = [EXAMPLES / "integrations" / f"{name}.py", *MORE.get(name, ())]
    job = ("--nproc-per-node", RANKS, "--spares", spares, *compared, "--faults", faults)
    return [str(each) for each in (*job, *script)]
