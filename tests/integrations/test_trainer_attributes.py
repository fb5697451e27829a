"""What a user's callbacks keep as attributes, from one process to another."""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from keepstep.integrations.transformers.attributes import MAX_RANK_BYTES, KeptAttributes


class Counts(TrainerCallback):
    def __init__(self) -> None:
        self.seen = 0
        self.path = "given"
        self.by_kind: Any = defaultdict(list)
        self.open: Any = None


class Hears(Counts):
    def on_step_end(self, *_arguments: Any, **_keywords: Any) -> None:
        self.seen += 1


def kept_of(*callbacks: TrainerCallback) -> KeptAttributes:
    trainer: Any = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=list(callbacks)), is_in_train=False)
    return KeptAttributes(trainer, (), [each for each in callbacks if hasattr(each, "state_dict")])


def test_a_replacement_gets_what_has_changed() -> None:
    lost, new = Counts(), Counts()
    kept, other = kept_of(lost, EarlyStoppingCallback(3)), kept_of(new, EarlyStoppingCallback(3))
    lost.seen, lost.best = 15, np.float64(0.5)  # type: ignore[attr-defined]  # training sets it
    lost.by_kind["a"].append((1, None))
    kept.share(2)
    new.path, new.seen, new.open = "its own", 1, object()
    opened, by_kind = new.open, new.by_kind
    other.load_state_dict(kept.state_dict())
    assert not other.put(3)
    assert (new.seen, vars(new)["best"], new.by_kind, new.open) == (15, 0.5, {"a": [(1, None)]}, opened)
    assert new.by_kind is by_kind


def test_a_unit_that_comes_again_finds_them_as_at_its_beginning() -> None:
    callback = Counts()
    kept = kept_of(callback)
    callback.by_kind["a"].append(1)
    kept.take(4)
    kept.share(2)
    callback.seen = 7
    callback.by_kind["a"].append(2)
    callback.by_kind["b"].append(3)
    assert kept.put(4)
    assert (callback.seen, callback.by_kind) == (0, {"a": [1]})


def test_what_a_call_has_changed_is_set_elsewhere() -> None:
    callback, other = Hears(), Hears()
    kept = kept_of(callback)
    assert kept.changes_by(lambda: None) == b""
    kept_of(other).put_changes(kept.changes_by(callback.on_step_end))
    assert other.seen == 1
    assert kept.change_behind_update
    assert not kept_of(Counts()).change_behind_update


@pytest.mark.parametrize("value", [torch.ones(2), "x" * MAX_RANK_BYTES])
def test_a_warning_names_what_is_not_carried_once(value: object) -> None:
    callback, other = Counts(), Counts()
    kept = kept_of(callback)
    callback.seen = 2
    callback.by_kind["a"].append(value)
    with pytest.warns(RuntimeWarning, match=r"Counts\.by_kind .* session\.state\(\)") as warned:
        kept.share(2)
    assert len(warned) == 1
    with warnings.catch_warnings(action="error"):
        kept.share(2)
    another = kept_of(other)
    another.load_state_dict(kept.state_dict())
    another.put(1)
    assert (other.seen, other.by_kind) == (2, {})
