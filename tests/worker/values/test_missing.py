"""Values that a cut-off collective has left: what a script may do with them, and what makes its copy unfit."""

import contextlib
import copy
import io
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import Watcher, join, run_ranks
from torch import distributed as dist
from torch.optim.swa_utils import AveragedModel
from torch.utils.flop_counter import FlopCounterMode

from keepstep.worker.values.missing import Harm, MissingValues


class Job:
    """What a script has after its update: a model, what follows its weights, and host state."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.average = AveragedModel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer)
        self.host: dict[str, Any] = {"best": math.inf}
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        self.values = MissingValues()
        self.values.protected = self.tensors

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.model.parameters()
        yield from self.average.parameters()
        for state in self.optimizer.state.values():
            yield from state.values()

    def lose(self, tensor: torch.Tensor) -> torch.Tensor:
        """A collective on the tensor is cut off."""
        self.values.announce()
        self.values.adopt([tensor])
        return tensor

    def state_of_host(self) -> Any:
        return [self.host, self.scheduler.state_dict(), self.plateau.state_dict(), self.optimizer.param_groups[0]["lr"]]

    def conclude(self) -> Harm | None:
        return self.values.conclude(self.state_of_host)


def certain(job: Job) -> str:
    """Where there is harm that no comparison with other ranks takes back."""
    harm = job.conclude()
    assert harm is not None
    assert not harm.is_doubt
    return harm.where


def loss() -> torch.Tensor:
    return torch.tensor([1.5])


# ---- harmless -------------------------------------------------------------------------------------------------------


def prints_it(job: Job, lost: torch.Tensor) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print(
            f"loss {lost.item() / 3:.4f}", lost, lost.mean(), f"{lost.sum():8.2f}", lost.tolist(), round(lost.item(), 2)
        )
    text = out.getvalue()
    assert text == "loss missing tensor(missing) tensor(missing)  missing [missing] missing\n"


def formats_it(job: Job, lost: torch.Tensor) -> None:
    number = lost.item()
    assert f"{number:.3e}|{number!r}|{-number}" == "missing|missing|missing"
    assert math.exp(number) != math.exp(number)  # C reads a NaN: no plausible value
    assert json.dumps({"loss": number}) == '{"loss": NaN}'


def keeps_a_list(job: Job, lost: torch.Tensor) -> None:
    losses = [1.0, lost.item()]
    total = sum(losses) / len(losses)
    assert f"{total:.1f}" == "missing"


def reduces_a_count(job: Job, lost: torch.Tensor) -> None:
    correct = job.lose(torch.tensor([7, 9]))
    assert f"{correct[0].item() / 16:.3f} {correct}" == "missing tensor(missing)"


def goes_on_with_its_update(job: Job, lost: torch.Tensor) -> None:
    lost.item()
    job.scheduler.step()
    job.average.update_parameters(job.model)
    job.optimizer.zero_grad()
    job.model(torch.ones(1, 2)).sum().backward()
    job.optimizer.step()


def has_a_mode_of_its_own(job: Job, lost: torch.Tensor) -> None:
    assert torch.zeros(1).dtype is torch.float32


@pytest.mark.parametrize(
    "does", [prints_it, formats_it, keeps_a_list, reduces_a_count, goes_on_with_its_update, has_a_mode_of_its_own]
)
def test_harmless(does: Callable[[Job, torch.Tensor], None]) -> None:
    job = Job()
    does(job, job.lose(loss()))
    assert job.conclude() is None


def test_a_mode_of_the_script_that_ends_in_between() -> None:
    """The followers stand below it, so its end does not take them for itself."""
    job = Job()
    with torch.device("cpu"), FlopCounterMode(display=False):
        lost = job.lose(loss())
    assert f"{lost.item()}" == "missing"
    with torch.device("meta"):
        assert job.conclude() is None
        assert torch.zeros(1).is_meta
    assert not torch.zeros(1).is_meta
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0


def test_nothing_is_followed_afterwards() -> None:
    job = Job()
    lost = job.lose(loss())
    assert job.conclude() is None
    assert math.isnan(lost.item())
    assert str(lost) == "tensor([nan])"
    job.host["best"] = 1.0
    assert job.conclude() is None


# ---- harm -----------------------------------------------------------------------------------------------------------


def into_a_parameter(job: Job, lost: torch.Tensor) -> None:
    with torch.no_grad():
        job.model.weight.add_(lost * 0.0 + 1.0)


def through_data(job: Job, lost: torch.Tensor) -> None:
    job.model.bias.data.clamp_(max=lost.abs().cpu()[0])


def through_a_view(job: Job, lost: torch.Tensor) -> None:
    torch._foreach_mul_(list(job.model.weight.detach()), [lost[0], lost[0]])


def into_the_average(job: Job, lost: torch.Tensor) -> None:
    scratch = torch.empty(2, 2)
    scratch.copy_(lost.expand(2, 2))
    next(job.average.parameters()).data.lerp_(scratch, 0.5)


def by_a_gradient(job: Job, lost: torch.Tensor) -> None:
    job.optimizer.zero_grad()
    (job.model(torch.ones(1, 2)) * lost).sum().backward()
    job.optimizer.step()


def by_a_compiled_function(job: Job, lost: torch.Tensor) -> None:
    @torch.compile(backend="eager")
    def double(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    job.model.bias.data.copy_(double(lost).expand(2))


@pytest.mark.parametrize(
    "does",
    [into_a_parameter, through_data, through_a_view, into_the_average, by_a_gradient, by_a_compiled_function],
)
def test_into_a_protected_tensor(does: Callable[[Job, torch.Tensor], None]) -> None:
    job = Job()
    does(job, job.lose(loss()))
    where = certain(job)
    assert where.startswith("a protected tensor, at ")
    assert __file__ in where


def test_a_protected_tensor_is_left_alone() -> None:
    job = Job()
    before = job.model.weight.detach().clone()
    job.lose(job.model.weight.detach())
    assert torch.equal(job.model.weight, before)
    assert job.conclude() is not None


def gives_it_to_a_scheduler(job: Job, lost: torch.Tensor) -> None:
    job.plateau.step(lost.item())


def gives_the_tensor_to_a_scheduler(job: Job, lost: torch.Tensor) -> None:
    job.plateau.step(lost)


def keeps_the_best(job: Job, lost: torch.Tensor) -> None:
    if lost.item() < job.host["best"]:
        job.host["best"] = 1.0


def compares_tensors(job: Job, lost: torch.Tensor) -> None:
    if (lost < 2.0).all():
        job.scheduler.step()


def counts_by_it(job: Job, lost: torch.Tensor) -> None:
    for _ in range(int(job.lose(torch.tensor(2)))):
        job.scheduler.step()


def reads_it_by_numpy(job: Job, lost: torch.Tensor) -> None:
    lost.numpy()


def reads_its_memory(job: Job, lost: torch.Tensor) -> None:
    lost.untyped_storage()


def asks_whether_it_is_equal(job: Job, lost: torch.Tensor) -> None:
    torch.equal(lost, torch.ones(1))


def selects_by_it(job: Job, lost: torch.Tensor) -> None:
    assert len(torch.arange(1)[lost > 1.0]) < 2


def makes_it_a_number(job: Job, lost: torch.Tensor) -> None:
    assert math.isnan(float(lost.item()))


@pytest.mark.parametrize(
    "does",
    [
        gives_it_to_a_scheduler,
        gives_the_tensor_to_a_scheduler,
        keeps_the_best,
        compares_tensors,
        counts_by_it,
        reads_it_by_numpy,
        reads_its_memory,
        asks_whether_it_is_equal,
        selects_by_it,
        makes_it_a_number,
    ],
)
def test_a_decision(does: Callable[[Job, torch.Tensor], None]) -> None:
    job = Job()
    does(job, job.lose(loss()))
    harm = job.conclude()
    assert harm is not None
    assert harm.where.startswith("what the script has decided by it, at ")
    assert __file__ in harm.where
    assert harm.is_doubt


@pytest.mark.parametrize("given", [lambda host: host, copy.deepcopy], ids=["live", "copied"])
def test_a_tensor_in_host_state(given: Callable[[Any], Any]) -> None:
    """A running sum that a script keeps there."""
    job = Job()
    job.host["total"] = torch.zeros(())
    job.lose(loss())
    assert job.values.conclude(lambda: given(job.state_of_host())) is None
    job.host["total"] += job.lose(loss()).sum()
    assert job.values.conclude(lambda: given(job.state_of_host())) is not None


def test_into_host_state() -> None:
    job = Job()
    job.host["best"] = {"loss": [job.lose(loss()).item() * 2]}
    copied = copy.deepcopy(job.host)
    assert str(copied) == "{'best': {'loss': [missing]}}"
    assert certain(job).startswith("protected host state")


def test_a_collective_that_was_not_waited_for() -> None:
    job = Job()
    job.values.announce()
    assert certain(job).startswith("a collective that the script has not waited for")


def test_a_collective_inside_a_backward() -> None:
    job = Job()
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda gradient: job.lose(torch.ones(1)) and None)
    weight.sum().backward()
    assert certain(job).startswith("a backward")


def test_a_collective_inside_an_update() -> None:
    job = Job()
    job.values.announce()
    job.values.adopt([loss()], in_update=True)
    assert certain(job).startswith("an update")


class Follower(Watcher):
    """A group's observer that tells what a session would tell."""

    def __init__(self, values: MissingValues) -> None:
        super().__init__()
        self.values = values

    def echoed(self, group: str) -> None:
        self.values.announce()

    def missing(self, group: str, received: Any, *, is_decided: bool = False) -> None:
        self.values.adopt(received, is_decided=is_decided)


def decided_by_a_dtensor(rank: int, size: int, path: Path, is_first: bool) -> Harm | None:
    """The collective is one that an operation on DTensors has inside it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    values = MissingValues()
    registry, _world = join(path, rank, size, Follower(values))
    summands = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (size,)), [Partial()])
    assert not values.is_missing(summands.exp())
    registry.take_down()
    registry.drain()
    if not is_first:
        values.announce()
        values.adopt([loss()])
    result = summands.exp() + 1.0
    assert values.is_missing(result)
    assert not values.is_missing(summands)
    assert f"{result.sum().to_local().item()}" == "missing"
    assert values.conclude(lambda: None) is None
    if summands.exp().sum() > 1.0:
        pass
    return values.conclude(lambda: None)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_collective_of_a_dtensor(is_first: bool, tmp_path: Path) -> None:
    for harm in run_ranks(2, decided_by_a_dtensor, tmp_path, is_first):
        assert harm is not None
        assert harm.where.startswith("what the script has decided by it, at ")
        assert harm.is_doubt


def gathered_objects(rank: int, size: int, path: Path, name: str) -> Harm | None:
    values = MissingValues()
    registry, _world = join(path, rank, size, Follower(values))
    registry.take_down()
    registry.drain()
    found: list[Any] = [None] * size
    if name == "all_gather_object":
        dist.all_gather_object(found, {"rank": rank})
    else:
        dist.gather_object({"rank": rank}, found if rank == 1 else None, dst=1)
    return values.conclude(lambda: None)


def test_objects_that_a_failure_cut_off_are_a_decision_of_who_gets_them(tmp_path: Path) -> None:
    """They cannot be tracked. The sizes, which torch's own code reads, are none of the script's."""
    for name, receivers in (("all_gather_object", {0, 1}), ("gather_object", {1})):
        (tmp_path / name).mkdir()
        for rank, harm in enumerate(run_ranks(2, gathered_objects, tmp_path / name, name)):
            assert (harm is not None) == (rank in receivers)
            assert harm is None or harm.where.startswith("what the script has decided by it")
            assert harm is None or harm.is_doubt


def test_whatever_a_script_calculates_stays_missing(seed: int) -> None:
    """Operations on tensors and numbers in any order: none of them makes a plausible number of a missing one."""
    rng = random.Random(seed)
    job = Job()
    value: Any = job.lose(torch.rand(3, 3))
    for _ in range(50):
        value = rng.choice(
            (
                lambda v: v * 2.0,
                lambda v: torch.ones(3, 3) @ v,
                lambda v: torch.cat([v, v])[:3],
                lambda v: torch.where(torch.rand(3, 3) > 0.5, v, v.T),
                lambda v: v.clone().index_fill_(0, torch.tensor([0]), 1.0),
                lambda v: v.to(torch.float64).float(),
                lambda v: torch.zeros(3, 3).copy_(v),
                lambda v: v.unbind()[0].expand(3, 3).contiguous(),
            )
        )(value)
    number = value.sum().item()
    for _ in range(10):
        number = rng.choice((lambda n: n + 1, lambda n: 2.0 - n, lambda n: n**2, lambda n: abs(n) / 3))(number)
    assert f"{number}" == "missing"
    assert job.conclude() is None
