"""Updates of FSDP2's parameters: which optimizers communicate in them, and the same one after an undone step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.parallel.test_fsdp2 import Rank
from tests.worker.ranks import run_ranks

FORMS: list[dict[str, Any]] = [{}, {"foreach": False}, {"foreach": True}]
ALONE: list[tuple[str, dict[str, Any]]] = [
    *(("SGD", {"momentum": 0.9, **form}) for form in FORMS),
    *((kind, form) for kind in ("Adam", "AdamW") for form in (*FORMS, {"fused": True})),
    ("Adam", {"amsgrad": True}),
    *((kind, {}) for kind in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop")),
]
if torch.__version__ >= (2, 15):
    ALONE.append(("Rprop", {}))
COMMUNICATE = {"Muon"}
NOT_ON_DTENSORS = {"Adafactor", "Rprop", "LBFGS", "SparseAdam"}
"""Torch itself refuses them there (and a fused SGD; Rprop before 2.15), or they need a closure or sparse gradients."""


def updated_after_an_undone_step(rank: int, size: int, path: Path, optimizer: tuple[str, Any], seed: int) -> int:
    """Computes a step twice from the same state, before it an attempt that is interrupted: the second one."""
    me = Rank(rank, size, path, {"optimizer": optimizer}, seed)
    me.hand_out()
    me.forward_backward(0)
    me.update()
    before = {name: tensor.clone() for name, tensor in me.state.live_tensors()}
    me.hand_out()
    me.forward_backward(1)
    me.breaker.num_entered = 0
    me.update()
    num_collectives = me.breaker.num_entered
    expected = me.contents()
    for name, tensor in me.state.live_tensors():
        tensor.copy_(before[name])
    assert me.contents() != expected
    me.hand_out()
    me.interrupted(1, 5, stops=True)
    me.state.layout.begin_step()
    me.forward_backward(1)
    me.update()
    assert me.contents() == expected
    return num_collectives


@pytest.mark.parametrize("optimizer", ALONE, ids=str)
def test_updates_without_collectives(optimizer: tuple[str, dict[str, Any]], tmp_path: Path, seed: int) -> None:
    assert run_ranks(2, updated_after_an_undone_step, tmp_path, optimizer, seed) == [0, 0]


@pytest.mark.parametrize("kind", COMMUNICATE)
def test_updates_with_collectives(kind: str, tmp_path: Path, seed: int) -> None:
    assert min(run_ranks(2, updated_after_an_undone_step, tmp_path, (kind, {}), seed)) > 0


def test_no_optimizer_of_torch_is_forgotten() -> None:
    kinds = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)}
    known = {kind for kind, _options in ALONE} | COMMUNICATE | NOT_ON_DTENSORS
    assert kinds - {"Optimizer"} == known
