"""Whether two ranks begin as replicas of each other: equal in names, shapes, dtypes and contents."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from tests.worker.state.parts import small, train

from keepstep.errors import StateMismatch
from keepstep.worker.state.layout import (
    Start,
    check_same_start,
    compare_replicas,
    start_of,
)
from keepstep.worker.state.protected import ProtectedState


class Best:
    """An object of the user's own."""

    def __init__(self, best: float) -> None:
        self.best = best

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "seen": torch.tensor([1, 2])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


def parts(seed: int) -> dict[str, Any]:
    """A model that was trained for a while, with all that belongs to it."""
    torch.manual_seed(seed)
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    train(model, [optimizer], 2, seed)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "mine": Best(0.5)}


def travelled(start: Start) -> Start:
    """A start as another rank gets it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(start), type=Start)


def other_weight(made: dict[str, Any]) -> None:
    with torch.no_grad():
        next(made["model"].parameters()).view(-1)[0] += 1e-7


def other_buffer(made: dict[str, Any]) -> None:
    made["model"].get_buffer("1.running_mean")[0] += 1.0


def other_moment(made: dict[str, Any]) -> None:
    made["optimizer"].state[next(made["model"].parameters())]["exp_avg"][0] += 1.0


def other_rate(made: dict[str, Any]) -> None:
    made["optimizer"].param_groups[0]["lr"] = 0.2


def other_position(made: dict[str, Any]) -> None:
    made["scheduler"].last_epoch += 1


def other_best(made: dict[str, Any]) -> None:
    made["mine"].best = 0.25


def no_moments(made: dict[str, Any]) -> None:
    made["optimizer"].state.clear()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (other_weight, "'model.0.weight' differs between rank 3 and rank 0"),
        (other_buffer, "'model.1.running_mean' differs between rank 3 and rank 0"),
        (other_moment, "'optimizer/0/exp_avg' differs between rank 3 and rank 0"),
        (other_rate, "the host value optimizer.param_groups[0]['lr'] differs between rank 3 and rank 0"),
        (other_position, "the host value scheduler['last_epoch'] differs between rank 3 and rank 0"),
        (other_best, "the host value mine['best'] differs between rank 3 and rank 0"),
        (no_moments, "rank 0 has 'optimizer/0/exp_avg', which this rank's model lacks"),
    ],
)
def test_other_contents_are_named(change: Callable[[dict[str, Any]], None], named: str, seed: int) -> None:
    own, theirs = parts(seed), parts(seed)
    check_same_start(start_of(ProtectedState(own)), travelled(start_of(ProtectedState(theirs))), 3)
    change(own)
    with pytest.raises(StateMismatch) as caught:
        check_same_start(start_of(ProtectedState(own)), travelled(start_of(ProtectedState(theirs))), 3)
    assert str(caught.value).startswith(named)


def test_an_object_of_one_rank_only_is_named(seed: int) -> None:
    own, theirs = parts(seed), parts(seed)
    del own["mine"]
    with pytest.raises(StateMismatch, match=r"only one of rank 1 and rank 0 has mine\['best'\]"):
        check_same_start(start_of(ProtectedState(own)), start_of(ProtectedState(theirs)), 1)


class FirstStore:
    """The part of a store that the comparison uses; nothing in it is waited for."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def add(self, key: str, amount: int) -> int:
        number = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(number).encode()
        return number

    def set(self, key: str, value: bytes | str) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self._values[key]


def compare(store: Any, rank: int, seed: int, shard: str) -> None:
    compare_replicas(ProtectedState(parts(seed), shard=shard), 0, rank, store)


def test_ranks_that_name_their_parts_are_compared_within_each_part(seed: int) -> None:
    store = FirstStore()
    compare(store, 1, seed, "expert 1")  # any rank of a part may come first
    compare(store, 0, seed + 1, "expert 0")
    compare(store, 3, seed, "expert 1")
    with pytest.raises(StateMismatch) as caught:
        compare(store, 2, seed, "expert 0")
    said = str(caught.value)
    assert said.startswith("'model.0.weight' differs between rank 2 and rank 0 before the first step")
    assert 'protect(shard="...")' in said


def test_without_parts_all_ranks_are_compared_with_rank_0(seed: int) -> None:
    store = FirstStore()
    compare(store, 0, seed, "")
    with pytest.raises(StateMismatch, match=r"differs between rank 1 and rank 0"):
        compare(store, 1, seed + 1, "")


def test_a_replica_on_another_type_of_device_is_named() -> None:
    own = start_of(ProtectedState({"model": torch.nn.Linear(2, 2)}))
    tensors = (own.tensors[0], msgspec.structs.replace(own.tensors[1], device="cuda"))
    theirs = msgspec.structs.replace(own, tensors=tensors)
    with pytest.raises(StateMismatch, match=r"'model\.bias' is on cpu on rank 1 and on cuda on rank 0"):
        check_same_start(own, theirs, 1)
