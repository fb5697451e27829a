"""Undoing what a script writes to parameters by itself, where no ``optimizer.step()`` does it."""

from collections.abc import Callable

import pytest
import torch
from tests.worker.state.parts import content, small, train
from torch.optim.swa_utils import AveragedModel

from keepstep.errors import UsageError
from keepstep.worker.state import rollback
from keepstep.worker.state.protected import Modes, ProtectedState
from keepstep.worker.state.rollback import LEARNING_STEPS, StepSnapshot

Write = Callable[[torch.Tensor, torch.Tensor], None]
INPUTS = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))


def in_place(own: torch.Tensor, other: torch.Tensor) -> None:
    own.mul_(0.9).add_(other, alpha=0.1)


def assigned(own: torch.Tensor, other: torch.Tensor) -> None:
    own.data = own.data * 0.9 + other.data * 0.1


def uncounted(own: torch.Tensor, other: torch.Tensor) -> None:
    """Torch counts no write that goes through ``.data``."""
    own.data.mul_(0.9).add_(other.data, alpha=0.1)


class Momentum(torch.nn.Module):
    """Has an encoder that follows another one in each forward, and is equal to it at first."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.query, self.key = small(), small()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self._write = write

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                self._write(key, query)
        return (self.query(inputs) - self.key(inputs) + 1).square().mean()


class Trained:
    """A model with its optimizer, and a snapshot of its steps."""

    def __init__(self, model: torch.nn.Module, **others: torch.nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
        self.state = ProtectedState({"model": model, "optimizer": self.optimizer, **others})
        self.snapshot = StepSnapshot(self.state)

    def forward_and_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(INPUTS).square().mean().backward()

    def step(self) -> None:
        self.snapshot.take()
        self.forward_and_backward()
        self.snapshot.before_barrier()
        self.optimizer.step()


@pytest.mark.parametrize("write", [in_place, assigned, uncounted])
@pytest.mark.parametrize("num_before", [0, 1, LEARNING_STEPS, LEARNING_STEPS + 2])
@pytest.mark.parametrize("reaches_barrier", [False, True])
def test_a_momentum_encoder_does_not_follow_twice(write: Write, num_before: int, reaches_barrier: bool) -> None:
    trained = Trained(Momentum(write))
    for _ in range(num_before):
        trained.step()
    trained.optimizer.zero_grad()
    before = content(trained.state)
    for _ in range(2):  # the same step may be interrupted again
        trained.snapshot.take()
        trained.forward_and_backward()
        if reaches_barrier:
            trained.snapshot.before_barrier()
        assert num_before == 0 or content(trained.state) != before
        trained.snapshot.put_back()
        assert content(trained.state) == before


def test_only_what_is_written_to_is_copied_from_then_on() -> None:
    trained = Trained(Momentum(uncounted))
    for _ in range(LEARNING_STEPS):
        assert trained.state.may_write("model.query.0.weight"), "nothing is known yet"
        trained.step()
    assert trained.state.written == {f"model.key.{name}" for name, _p in small().named_parameters()}
    trained.snapshot.take()
    written = trained.snapshot._written
    assert len(written._copies) == len(trained.state.written)
    assert not written._others
    copies = [copy.data_ptr() for copy in written._copies.values()]
    trained.step()
    assert [copy.data_ptr() for copy in written._copies.values()] == copies, "they are allocated once"


def test_a_replacement_knows_what_is_written_to() -> None:
    trained, replacement = Trained(Momentum(uncounted)), Trained(Momentum(uncounted))
    for _ in range(LEARNING_STEPS - 1):
        trained.step()
    replacement.state.place_modes(trained.state.modes())
    assert not replacement.state.knows_written, "its source does not know all either"
    trained.step()
    replacement.state.place_modes(trained.state.modes())
    assert replacement.state.written == trained.state.written
    before = content(replacement.state)
    replacement.snapshot.take()
    replacement.forward_and_backward()
    replacement.snapshot.put_back()
    assert content(replacement.state) == before
    replacement.state.place_modes(Modes(frozenset(), frozenset(), None, frozenset(), frozenset()))
    assert replacement.state.knows_written, "it has learned that meanwhile"


def test_a_step_uphill_and_back_in_front_of_the_update() -> None:
    """As sharpness-aware minimisation does: parameters that the optimizer trains are moved between two backwards."""
    trained = Trained(small())
    for _ in range(LEARNING_STEPS):
        trained.step()
    parameters = list(trained.model.parameters())
    for attempt in range(3):
        before = content(trained.state)
        trained.snapshot.take()
        trained.forward_and_backward()
        kept = [parameter.data.clone() for parameter in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(parameter.grad)
        if attempt == 1:  # the first one is that in which it is learned
            assert content(trained.state) != before
            trained.snapshot.put_back()
            assert content(trained.state) == before
            continue
        trained.forward_and_backward()
        for parameter, data in zip(parameters, kept, strict=True):
            parameter.data = data
        trained.snapshot.before_barrier()
        trained.optimizer.step()


def test_what_is_written_to_for_the_first_time_in_a_step_that_comes_again_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained = Trained(small())
    for _ in range(LEARNING_STEPS):
        trained.step()
    trained.snapshot.take()
    with torch.no_grad():
        trained.model[0].weight.add_(1)
        trained.model[3].weight.add_(1)
    trained.snapshot.put_back()
    told = capsys.readouterr().err
    assert told.startswith("keepstep: the script has written to model.0.weight and 1 more parameters in front of")
    trained.snapshot.put_back()
    assert not capsys.readouterr().err, "once"
    before = content(trained.state)
    trained.snapshot.take()
    with torch.no_grad():
        trained.model[0].weight.add_(1)
    trained.snapshot.put_back()
    assert content(trained.state) == before


@pytest.mark.parametrize("write", [in_place, assigned, uncounted])
@pytest.mark.parametrize("num_before", [0, LEARNING_STEPS + 2])
def test_an_average_that_is_taken_behind_an_interrupted_attempt(write: Write, num_before: int) -> None:
    model = small()
    average = AveragedModel(model)
    trained = Trained(model, average=average)

    def take_average() -> None:
        with torch.no_grad():
            for own, other in zip(average.parameters(), model.parameters(), strict=True):
                write(own, other + 1)

    for _ in range(num_before):
        trained.step()
        take_average()
    trained.optimizer.zero_grad()
    trained.snapshot.take()
    before = content(trained.state)
    trained.snapshot.put_back()
    trained.snapshot.guard()
    take_average()
    assert content(trained.state) != before
    trained.snapshot.put_back()
    assert content(trained.state) == before


# ---- gradients that an update has used ------------------------------------------------------------------------------


def test_gradients_that_add_up_over_steps_are_refused() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = StepSnapshot(ProtectedState({"model": model, "optimizer": optimizer}))
    snapshot.take()
    snapshot.check_gradients()
    train(model, [optimizer], 1, 0)
    snapshot.take()
    with pytest.raises(UsageError, match=r"gradient of model\.0\.weight .* Call optimizer\.zero_grad\(\) in each step"):
        snapshot.check_gradients()


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_dropped_in_the_step_are_not(to_none: bool) -> None:
    """Also where the backward has begun to write new ones before anybody looks."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = StepSnapshot(ProtectedState({"model": model, "optimizer": optimizer}))
    train(model, [optimizer], 1, 0)
    snapshot.take()
    optimizer.zero_grad(set_to_none=to_none)
    snapshot.check_gradients()
    model(INPUTS).square().mean().backward()
    snapshot.check_gradients()


def test_one_of_two_optimizers_may_be_left_alone() -> None:
    """The backward of a generator adds to the discriminator's gradients, which are dropped before its next update."""
    model = small()
    optimizers = [torch.optim.SGD(model[index].parameters(), lr=0.1) for index in (0, 3)]
    snapshot = StepSnapshot(ProtectedState({"model": model, "first": optimizers[0], "second": optimizers[1]}))
    train(model, optimizers, 1, 0)
    snapshot.take()
    snapshot.check_gradients()


@pytest.mark.parametrize("write", [in_place, assigned, uncounted])
def test_without_memory_for_a_copy_of_all_parameters_the_written_ones_are_found_by_digests(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = Trained(Momentum(write))
    monkeypatch.setattr(rollback, "free_bytes", lambda: 1000)
    monkeypatch.setattr(rollback, "_on_host", lambda tensor: pytest.fail("a copy was made"))
    for _ in range(LEARNING_STEPS):
        trained.step()
    assert trained.state.knows_written
    assert {name for name, _ in trained.state.parameters() if ".key." in name} == trained.state.written
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("keepstep: this rank does not copy its parameters (")
    trained.optimizer.zero_grad()
    before = content(trained.state)
    trained.snapshot.take()
    trained.forward_and_backward()
    trained.snapshot.put_back()
    assert content(trained.state) == before


def test_a_write_that_only_a_digest_has_shown_is_named_where_its_step_is_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = Trained(Momentum(uncounted))
    trained.optimizer.step()
    with torch.no_grad():
        next(trained.model.query.parameters()).add_(1)
    monkeypatch.setattr(rollback, "free_bytes", lambda: 0)
    trained.snapshot.take()
    trained.forward_and_backward()
    trained.snapshot.put_back()
    assert "for the first time in the step that is repeated" in capsys.readouterr().err
    assert trained.state.written
