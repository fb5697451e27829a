"""torchtitan's Trainer loses ranks: weights, checkpoints and logs come out as without a loss."""

import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.jobs import EXAMPLES, drill, run, without_keepstep

from keepstep.drill.faults import IN_A_STEP

pytest.importorskip("torchtitan", reason="torchtitan needs the newest torch")

SCRIPT = EXAMPLES / "integrations" / "torchtitan_llama.py"
RANKS = 2
STEPS = 40
VALIDATING, SAVING = 6, 12
"""The units after the fifth step and after the tenth."""
WEIGHTS = "out/checkpoint/*/*.safetensors"


def unit_of(step: int) -> int:
    """The number of a training step's unit: the trainer validates after the first one and every fifth, in its own."""
    return step - 1 + (step > 1) + (step - 1) // 5


def in_every_phase() -> str:
    """A kill in each phase, and a hang, in training steps."""
    faults = [
        f"kill@step={unit_of(4 + 5 * number)},phase={phase},rank={number % RANKS}"
        for number, phase in enumerate(IN_A_STEP)
    ]
    return ";".join([*faults, f"hang@step={unit_of(4 + 5 * len(faults))},phase=backward,rank=1"])


def check(tmp_path: Path, faults: str, spares: int, *options: object, ranks: int = RANKS) -> None:
    arguments = ("--nproc-per-node", ranks, "--spares", spares, "--compare", WEIGHTS, "--faults", faults)
    code, result, output = drill(tmp_path, *arguments, SCRIPT, "--steps", STEPS, *options)
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []
    assert len(result["files"]) == 1, "the trainer's own weights, in safetensors"
    assert len(result["recoveries"]) <= faults.count("@"), "a survivor was lost, too"
    assert re.search(r"keepstep: step \d+ comes after torchtitan's step \d+", output), output


@pytest.mark.parametrize(
    ("spares", "options"),
    [(1, ()), (0, ()), (1, ("--global-batch", 8, "--workers", 1))],
    ids=["a spare", "no spare", "accumulation, and a loader with workers"],
)
def test_a_kill_in_every_phase_and_a_hang(tmp_path: Path, spares: int, options: tuple[object, ...]) -> None:
    check(tmp_path, in_every_phase(), spares, *options)


def test_both_ranks_at_once(tmp_path: Path) -> None:
    check(tmp_path, "kill@step=5,phase=backward,rank=1;kill@step=5,phase=backward,rank=0", 2)


@pytest.mark.parametrize("option", ["--replicas", "--tensor", "--pipeline"])
def test_in_two_dimensions(tmp_path: Path, option: str) -> None:
    faults = [f"kill@step={unit_of(4 + 5 * n)},phase={phase},rank={n}" for n, phase in enumerate(IN_A_STEP[:4])]
    check(tmp_path, ";".join(faults), 1, option, 2, ranks=4)


@pytest.mark.parametrize("phase", ["synced", "updated"])
@pytest.mark.parametrize("unit", [VALIDATING, SAVING])
def test_the_rank_that_logs_is_lost_after_a_step(tmp_path: Path, unit: int, phase: str) -> None:
    check(tmp_path, f"kill@step={unit},phase={phase},rank=0", 1)


def test_weights_are_those_of_the_same_training_without_keepstep(tmp_path: Path) -> None:
    options = ("--steps", "12", "--out")
    script = without_keepstep(SCRIPT.stem, tmp_path)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), str(script))
    plain = subprocess.run([*launcher, *options, str(tmp_path / "plain")], capture_output=True, text=True, check=False)
    assert plain.returncode == 0, plain.stderr
    code, _out, err = run("run", "--nproc-per-node", RANKS, SCRIPT, *options, tmp_path / "protected")
    assert code == 0, err
    assert weights(tmp_path / "protected") == weights(tmp_path / "plain")


def test_a_training_that_is_resumed_is_the_same_as_one_that_was_not(tmp_path: Path) -> None:
    """It is resumed from what a run has saved after its tenth step that lost a rank there."""
    for folder in runs_of_drill(tmp_path, f"kill@step={SAVING},phase=synced,rank=1", 12):
        (folder / "again/checkpoint").mkdir(parents=True)
        os.rename(folder / "out/checkpoint/step-10", folder / "again/checkpoint/step-10")
        code, out, err = run("run", "--nproc-per-node", RANKS, SCRIPT, "--steps", 12, "--out", folder / "again")
        assert code == 0, err
        assert "Training starts at step 11" in out + err
        assert weights(folder / "again") == weights(folder / "out")


def test_each_line_of_the_log_is_written_once(tmp_path: Path) -> None:
    faults = f"kill@step={unit_of(8)},phase=updated,rank=0;kill@step={unit_of(14)},phase=backward,rank=0"
    first, second = (logged(folder) for folder in runs_of_drill(tmp_path, faults, 20))
    assert first == second
    assert set(first.values()) == {1}


def runs_of_drill(tmp_path: Path, faults: str, steps: int) -> list[Path]:
    """The working directories of a run without faults and of one with them."""
    arguments = ("--nproc-per-node", RANKS, "--spares", 1, "--run-dir", tmp_path / "runs", "--faults", faults)
    code, result, output = drill(tmp_path, *arguments, "--compare", WEIGHTS, SCRIPT, "--steps", steps)
    assert code == 0, output
    assert result["missed"] == []
    return [tmp_path / "runs" / name / "work" for name in ("reference", "with-faults")]


class Numbers:
    """A dataloader whose position takes more bytes than may travel, where it says so."""

    def __init__(self, is_large: Callable[[int], bool]) -> None:
        self.next, self.is_large = 0, is_large

    def __iter__(self) -> Iterator[tuple[dict[str, int], float]]:
        while True:
            self.next += 1
            yield {"input": self.next}, random.random()

    def state_dict(self) -> dict[str, object]:
        return {"next": self.next, "buffer": random.randbytes(1 << 17) if self.is_large(self.next) else b""}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


@pytest.mark.filterwarnings("ignore")  # of torchtitan's packages, when they are imported
def test_a_replacement_reads_what_the_former_rank_would_have_read() -> None:
    from keepstep.integrations.torchtitan import _Batches

    own = SimpleNamespace()

    def batches(loader: Numbers) -> Any:
        return _Batches(
            SimpleNamespace(
                dataloader=loader,
                parallel_dims=SimpleNamespace(dp_enabled=False),
                config=SimpleNamespace(debug=SimpleNamespace(seed=3)),
                gradient_accumulation_steps=2,
                num_pipeline_parallel_microbatches=1,
                batch_generator=iter,
                session=SimpleNamespace(state=lambda *_, **values: vars(own).update(values, **vars(own)) or own),
            )
        )

    def train(present: Any, first: int, last: int) -> list[Any]:
        read = []
        for step in range(first, last):
            present.go_to(step)
            read.append([next(present), next(present)])
            present.share()
        return read

    loader = Numbers(lambda position: position > 4)
    one = batches(loader)
    whole = train(one, 1, 6)
    assert own.ahead == 6, "the position after the second step is the last that could travel"
    before = dict(vars(own))
    further = train(one, 6, 8)
    vars(own).update(before)  # as if the job went back
    again = train(one, 6, 8)
    vars(own).update(before)
    assert train(batches(Numbers(lambda _position: False)), 6, 8) == again == further
    assert [batch["input"] for step in whole + further for batch, _label in step] == list(range(1, 15))
    vars(own).update(before)
    one.go_to(6)
    assert (loader.next, next(one)) == (10, further[0][0])
    one.stand_before(6)
    assert loader.next == 10, "what a checkpoint before the step has to have"


REFUSING = """
from dataclasses import dataclass
from keepstep.errors import ConfigurationError
from keepstep.integrations.torchtitan import TitanTrainer, protected
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

class Own(Trainer):
    def train(self):
        pass

class OtherManager(BaseCheckpointManager):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        pass

def saved(kind, **options):
    return lambda config: setattr(config, "checkpoint", kind.Config(enable=True, **options))

for kind, change in (
    (protected(Own), lambda config: None),
    (TitanTrainer, lambda config: setattr(config.comm, "mode", "local_tensor")),
    (TitanTrainer, lambda config: setattr(config.parallelism, "enable_fsdp_symm_mem", True)),
    (TitanTrainer, saved(Trainer.Config().checkpoint._owner, async_mode="async")),
    (TitanTrainer, saved(OtherManager)),
):
    config = llama3_debugmodel()
    change(config)
    try:
        kind(config)
    except ConfigurationError as error:
        print(error)
"""


def test_what_cannot_be_protected_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", REFUSING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    refused = [line.split(" is not supported: ")[0] for line in done.stdout.splitlines()]
    assert refused == [
        "KeepstepOwn: a train() of its own",
        "TitanTrainer: comm.mode='local_tensor'",
        "TitanTrainer: parallelism.enable_fsdp_symm_mem",
        "TitanTrainer: checkpoint.async_mode='async'",
        "TitanTrainer: OtherManager.Config",
    ]


def weights(out: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(out.glob("checkpoint/*/*.safetensors"))]


def logged(folder: Path) -> Counter[tuple[str, int, float]]:
    """How often each loss was logged for each step, in all files of a run."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return Counter(
        (value.tag, event.step, value.tensor.float_val[0])
        for path in folder.rglob("events*")
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if "loss" in value.tag
    )
