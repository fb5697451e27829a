"""A digest for each name: one that changes changes alone, and it is called as users know it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.worker.state.parts import small, train

from keepstep.worker.state.digests import DIGEST_CHARACTERS, HOLDS_NAN, MAX_ITEMS, named_digests
from keepstep.worker.state.protected import ProtectedState


class Thing:
    """An object with nested state."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"best": 1.0, "list": [1, {"deep": torch.ones(2)}], "order": list(range(100))}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


class Job:
    """A model that was trained a little, and all that is protected with it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = small()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.thing = Thing()
        train(self.model, [self.optimizer], 2, seed=1)
        self.state = ProtectedState(
            {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "thing": self.thing}
        )


CHANGES: dict[str, Callable[[Job], Any]] = {
    "model.0.weight": lambda job: job.model[0].weight.data[0, 0].add_(1),
    "model.1.running_mean": lambda job: job.model[1].running_mean.add_(1),
    "optimizer/3/exp_avg": lambda job: job.optimizer.state[job.model[1].bias]["exp_avg"].add_(1),
    "host: optimizer.param_groups[0]['lr']": lambda job: job.optimizer.param_groups[0].update(lr=0.5),
    "host: scheduler['last_epoch']": lambda job: setattr(job.scheduler, "last_epoch", 9),
    "host: thing['best']": lambda job: job.thing.values.update(best=0.5),
    "host: thing['list'][1]['deep']": lambda job: job.thing.values["list"][1]["deep"].add_(1),
    "host: thing['order']": lambda job: job.thing.values["order"].reverse(),
    "host: optimizer.state[0]['kept']": lambda job: job.optimizer.state[job.model[0].weight].update(kept=1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_changes_alone(name: str) -> None:
    job = Job()
    before = named_digests(job.state)
    assert named_digests(job.state) == before
    CHANGES[name](job)
    after = named_digests(job.state)
    assert [each for each in before | after if before.get(each) != after.get(each)] == [name]


def test_every_protected_tensor_has_a_digest() -> None:
    job = Job()
    found = named_digests(job.state)
    assert {name for name, _tensor in job.state.live_tensors()} <= set(found)
    assert {len(seen.digest) for seen in found.values()} == {DIGEST_CHARACTERS}


def test_a_tensor_with_nan_has_a_digest_that_says_so() -> None:
    job = Job()
    before = named_digests(job.state)
    assert not any(seen.digest.startswith(HOLDS_NAN) for seen in before.values())
    job.model[0].weight.data[0, 0] = torch.nan
    after = named_digests(job.state)
    assert [name for name, seen in after.items() if seen.digest.startswith(HOLDS_NAN)] == ["model.0.weight"]
    job.model[0].weight.data[0, 1] += 1
    assert named_digests(job.state)["model.0.weight"] != after["model.0.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("by", [1e-9, 1e-4, 1.0])
def test_sketches_tell_by_how_much_tensors_differ(dtype: torch.dtype, by: float, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    job, difference = Job(), torch.randn(50, 300, generator=chance, dtype=torch.float64) * by
    job.model[0].weight = torch.nn.Parameter(torch.randn(50, 300, generator=chance).to(dtype))
    weight, found = job.model[0].weight, []
    for added in (torch.zeros(()), difference.to(dtype)):
        weight.data += added
        sketch = named_digests(ProtectedState({"model": job.model}))["model.0.weight"].sketch
        assert sketch is not None
        assert sketch.resolution == torch.finfo(dtype).eps
        found.append((sketch, weight.detach().double().clone()))
    (one, first), (other, second) = found
    assert one.norm == pytest.approx(float(first.norm()))
    assert abs(one.projection - other.projection) <= 6 * float((first - second).norm()), "six standard deviations"


def test_what_is_no_finite_number_has_no_sketch() -> None:
    job = Job()
    assert named_digests(job.state)["model.1.num_batches_tracked"].sketch is None
    assert named_digests(job.state)["model.1.running_var"].sketch is not None
    job.model[1].running_var[0] = torch.inf
    assert named_digests(job.state)["model.1.running_var"].sketch is None


def test_the_same_bytes_of_another_kind_have_another_digest() -> None:
    job = Job()
    job.thing.values["list"] = torch.zeros(4)
    before = named_digests(job.state)["host: thing['list']"]
    for other in (torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), [0.0] * 4):
        job.thing.values["list"] = other
        assert named_digests(job.state).get("host: thing['list']") != before


def test_a_long_list_has_one_digest() -> None:
    job = Job()
    job.thing.values = {"short": [0] * MAX_ITEMS, "long": [0] * (MAX_ITEMS + 1), "empty": {}}
    names = [name for name in named_digests(job.state) if name.startswith("host: thing")]
    assert len([name for name in names if "short" in name]) == MAX_ITEMS
    assert [name for name in names if "short" not in name] == ["host: thing['long']", "host: thing['empty']"]
