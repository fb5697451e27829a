"""Undoing a step that was interrupted: every bit as before."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.worker.state.parts import OPTIMIZERS, SCHEDULERS, advance, content, small, train

from keepstep.errors import UsageError
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.state.rollback import StepSnapshot


def gradients(state: ProtectedState) -> list[bytes | None]:
    return [None if p.grad is None else p.grad.numpy().tobytes() for _name, p in state.parameters()]


def everything(state: ProtectedState) -> tuple[Any, ...]:
    return content(state), gradients(state), state.digest()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_forward_and_backward_leave_no_trace(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = small()
    optimizer = OPTIMIZERS[name](model.parameters())
    state = ProtectedState({"model": model, "optimizer": optimizer})
    snapshot = StepSnapshot(state)
    train(model, [optimizer], 2, seed)
    optimizer.zero_grad()
    before = everything(state)
    for _ in range(2):  # the same step may be interrupted again
        snapshot.take()
        model(torch.randn(6, 4)).square().mean().backward()
        assert everything(state) != before
        snapshot.put_back()
        assert everything(state) == before


def test_every_step_has_its_own_snapshot(seed: int) -> None:
    torch.manual_seed(seed)
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = ProtectedState({"model": model, "optimizer": optimizer})
    snapshot = StepSnapshot(state)
    for step in range(3):
        optimizer.zero_grad()
        before = everything(state)
        snapshot.take()
        model(torch.randn(6, 4)).square().mean().backward()
        snapshot.put_back()
        assert everything(state) == before
        snapshot.take()
        train(model, [optimizer], 1, seed + step)


def test_batch_norm_counts_back_too() -> None:
    model = small()
    snapshot = StepSnapshot(ProtectedState({"model": model}))
    model(torch.randn(6, 4))
    norm = model[1]
    mean, variance, count = norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.clone()
    addresses = [buffer.data_ptr() for buffer in model.buffers()]
    snapshot.take()
    for _ in range(3):
        model(torch.randn(6, 4))
    assert int(norm.num_batches_tracked) == 4
    snapshot.put_back()
    assert int(norm.num_batches_tracked) == int(count) == 1
    assert torch.equal(norm.running_mean, mean)
    assert torch.equal(norm.running_var, variance)
    assert [buffer.data_ptr() for buffer in model.buffers()] == addresses, "others may hold these buffers: DDP does"


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_moved_before_the_update(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    state = ProtectedState({"model": model, "optimizer": optimizer, "scheduler": scheduler})
    snapshot = StepSnapshot(state)
    train(model, [optimizer], 1, seed)
    advance(scheduler, 1.0)
    optimizer.zero_grad()
    before = everything(state)
    snapshot.take()
    for _ in range(3):
        advance(scheduler, 2.0)
    model(torch.randn(6, 4)).sum().backward()
    assert everything(state) != before
    snapshot.put_back()
    assert everything(state) == before


def test_a_scaler_that_had_unscaled(seed: int) -> None:
    torch.manual_seed(seed)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    state = ProtectedState({"model": model, "optimizer": optimizer, "scaler": scaler})
    snapshot = StepSnapshot(state)
    inputs = torch.randn(6, 4)

    def forward_and_backward() -> None:
        scaler.scale(model(inputs).square().mean()).backward()
        scaler.unscale_(optimizer)

    snapshot.take()
    first = everything(state)
    forward_and_backward()
    snapshot.put_back()
    assert everything(state) == first
    forward_and_backward()  # raises if the scaler still thinks that it has unscaled
    once = gradients(state)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    optimizer.zero_grad()
    before = everything(state)
    snapshot.take()
    forward_and_backward()
    snapshot.put_back()
    assert everything(state) == before
    assert scaler.get_scale() == 8.0
    assert any(once)


def test_a_gradient_that_was_none_is_none_again_and_a_zero_one_is_zero(seed: int) -> None:
    torch.manual_seed(seed)
    model = small()
    snapshot = StepSnapshot(ProtectedState({"model": model}))
    zeroed = model[0].weight
    zeroed.grad = torch.zeros_like(zeroed)
    held = zeroed.grad
    snapshot.take()
    model(torch.randn(6, 4)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    snapshot.put_back()
    assert zeroed.grad is held, "a view into a gradient bucket stays one"
    assert not held.any()
    assert [parameter.grad is None for parameter in model.parameters()] == [False, *[True] * 5]


def test_a_gradient_that_an_update_had_used_stays_dropped(seed: int) -> None:
    """`zero_grad()` at the start of each step, torch's usual loop: nothing is copied for it."""
    torch.manual_seed(seed)
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    snapshot = StepSnapshot(ProtectedState({"model": model, "optimizer": optimizer}))
    for step in range(3):
        snapshot.take()
        assert snapshot._gradients == {}
        train(model, [optimizer], 1, seed + step)
    snapshot.take()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert snapshot._gradients == {}
    optimizer.zero_grad()
    snapshot.put_back()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_optimizer_skips_what_it_would_have_skipped(seed: int) -> None:
    """With momentum a zero gradient moves a parameter, and none at all does not."""
    torch.manual_seed(seed)
    model = small()
    other = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other)]
    states = [ProtectedState({"model": m, "o": o}) for m, o in zip((model, other), optimizers, strict=True)]
    snapshot = StepSnapshot(states[0])
    inputs = torch.randn(6, 4)
    for m, o in zip((model, other), optimizers, strict=True):
        train(m, [o], 2, seed)
        o.zero_grad()
    snapshot.take()
    model(inputs).sum().backward()
    snapshot.put_back()
    for m, o in zip((model, other), optimizers, strict=True):
        m[3](inputs[:, :1].expand(6, 5)).sum().backward()  # only the last layer takes part
        o.step()
    assert content(states[0]) == content(states[1])


class Averages(torch.nn.Module):
    """Keeps a moving average in a buffer, in the way that ``update`` says."""

    def __init__(self, update: Callable[["Averages", torch.Tensor], None]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self._update = update

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self._update(self, y.detach().mean(0))
        return y


def in_place(module: Averages, value: torch.Tensor) -> None:
    module.average.mul_(0.9).add_(value)
    module.hidden += value


def by_copy(module: Averages, value: torch.Tensor) -> None:
    module.average.copy_(0.9 * module.average + value)


def by_data(module: Averages, value: torch.Tensor) -> None:
    module.average.data = 0.9 * module.average + value


def by_assignment(module: Averages, value: torch.Tensor) -> None:
    module.average = 0.9 * module.average + value


@pytest.mark.parametrize(
    "update",
    [
        in_place,
        by_copy,
        by_data,
        by_assignment,
    ],
)
def test_a_buffer_is_put_back_however_it_was_changed(update: Callable[[Averages, torch.Tensor], None]) -> None:
    model = Averages(update)
    snapshot = StepSnapshot(ProtectedState({"model": model}))
    for _ in range(2):
        model(torch.ones(2, 4))
        average, hidden = model.average.clone(), model.hidden.clone()
        snapshot.take()
        model(torch.ones(2, 4))
        assert not torch.equal(model.average, average)
        snapshot.put_back()
        assert torch.equal(model.average, average)
        assert torch.equal(model.hidden, hidden)


def accumulated(seed: int, sparse: bool = False) -> tuple[torch.nn.Module, Any, StepSnapshot, Callable[[], None]]:
    """A model with gradients that no update has used, and a backward of it."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4, sparse=sparse), torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = StepSnapshot(ProtectedState({"model": model, "optimizer": optimizer}))

    def backward() -> None:
        model(torch.randint(7, (5,))).sum().backward()

    return model, optimizer, snapshot, backward


def dense_gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]


def same_gradients(model: torch.nn.Module, expected: list[torch.Tensor | None]) -> bool:
    pairs = zip(dense_gradients(model), expected, strict=True)
    return all(a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("meanwhile", ["added to", "dropped", "zeroed"])
def test_gradients_that_no_update_has_used_are_put_back(meanwhile: str, sparse: bool, seed: int) -> None:
    """From before the first step, or from a step whose update a scaler has skipped."""
    model, optimizer, snapshot, backward = accumulated(seed, sparse)
    backward()
    before = dense_gradients(model)
    for _ in range(2):  # the same step may be interrupted again
        snapshot.take()
        if meanwhile != "added to":
            optimizer.zero_grad(set_to_none=meanwhile == "dropped")
        else:
            backward()
        assert not same_gradients(model, before)
        snapshot.put_back()
        assert same_gradients(model, before)


def test_a_gradient_is_put_back_in_its_place(seed: int) -> None:
    """With gradient_as_bucket_view it is a view of a bucket, and must remain one."""
    model, _optimizer, snapshot, backward = accumulated(seed)
    backward()
    places = [parameter.grad for parameter in model.parameters()]
    snapshot.take()
    backward()
    snapshot.put_back()
    assert all(p.grad is place for p, place in zip(model.parameters(), places, strict=True))


def test_gradients_are_copied_only_while_they_are_unused_and_not_zero(seed: int) -> None:
    _model, optimizer, snapshot, backward = accumulated(seed)
    found = []

    def take() -> None:
        snapshot.take()
        found.append(len(snapshot._gradients))

    take()  # there are none
    backward()
    take()  # a step without an update
    backward()
    take()  # another one
    optimizer.step()
    take()  # used, and still there
    optimizer.zero_grad(set_to_none=False)
    take()  # no update since, but zero
    backward()
    take()  # again a step without an update
    assert found == [0, 3, 3, 0, 0, 3]


def test_gradients_of_parameters_that_no_optimizer_has_are_put_back(seed: int) -> None:
    """Clipping by the norm of all gradients would feel them."""
    torch.manual_seed(seed)
    model = small()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    snapshot = StepSnapshot(ProtectedState({"model": model, "optimizer": optimizer}))
    snapshot.take()
    train(model, [optimizer], 1, seed)
    before = model[3].weight.grad.clone()
    snapshot.take()
    train(model, [], 1, seed + 1)
    snapshot.put_back()
    assert torch.equal(model[3].weight.grad, before)
    assert not model[0].weight.grad.any()


def test_a_buffer_that_was_removed_comes_back() -> None:
    model = small()
    model.register_buffer("cache", torch.ones(2))
    state = ProtectedState({"model": model})
    snapshot = StepSnapshot(state)
    snapshot.take()
    model.cache = None
    snapshot.put_back()
    assert model.cache is not None


def test_taking_a_snapshot_allocates_once() -> None:
    model = small()
    snapshot = StepSnapshot(ProtectedState({"model": model}))
    snapshot.take()
    copies = [copied.data_ptr() for buffers in snapshot._buffers for copied in buffers._copies.values()]
    assert copies
    model(torch.randn(6, 4))
    snapshot.take()
    after = [copied.data_ptr() for buffers in snapshot._buffers for copied in buffers._copies.values()]
    assert after == copies


def test_what_was_switched_off_is_on_again() -> None:
    """An evaluation in the middle of a step that is interrupted in it would leave the rank without dropout."""
    model = small()
    state = ProtectedState({"model": model})
    snapshot = StepSnapshot(state)
    model[1].eval()
    model[0].weight.requires_grad_(False)
    before = state.modes()
    snapshot.take()
    model.eval()
    model.requires_grad_(False)
    model[0].weight.requires_grad_(True)
    snapshot.put_back()
    assert state.modes() == before
    assert [part.training for part in model] == [True, False, True, True]


def test_a_parameter_group_that_came_later_is_refused() -> None:
    model = small()
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
    snapshot = StepSnapshot(ProtectedState({"model": model, "optimizer": optimizer}))
    snapshot.take()
    optimizer.add_param_group({"params": model[0].parameters()})
    for call in (snapshot.put_back, snapshot.take):
        with pytest.raises(UsageError, match=r"optimizer 'optimizer' has 4 parameters, and had 2 at protect\(\)"):
            call()
