"""A loop over epochs with a loop over steps in it, and the end of each epoch, on one rank that is stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.loop.test_stream import Numbers
from tests.worker.ranks import run_ranks
from tests.worker.single import Training
from torch.utils.data import DataLoader, TensorDataset

from keepstep.data import StepSampler
from keepstep.errors import UsageError

NUM_EPOCHS, STEPS = 3, 4
SAMPLES = torch.arange(8 * STEPS * 4, dtype=torch.float32).view(8 * STEPS, 4) / 100


class Epochs:
    """A training in epochs, and what it has seen."""

    def __init__(self, accumulate: int = 1) -> None:
        self.training = Training(stands_ready=False)
        self.seen: list[tuple[str, int]] = []
        self.loader = DataLoader(TensorDataset(SAMPLES), batch_size=8, shuffle=True)
        self.epochs = self.training.session.epochs(self.loader, NUM_EPOCHS, accumulate=accumulate)

    def step(self, batch: Any) -> None:
        self.training.model(batch[0]).square().mean().backward()
        self.training.optimizer.step()
        self.training.optimizer.zero_grad()

    def stop_at(self, place: tuple[str, int]) -> None:
        """The rank is stopped where it comes to this place for the first time."""
        if self.seen[-1] == place and self.seen.count(place) == 1:
            self.training.link.stop(2)

    def digest(self) -> str:
        return self.training.digest()


def all_of_it(_rank: int, _size: int, at: tuple[str, int] | None, form: str) -> Any:
    """Trains; stopped ``at`` a step, ``("step", number)``, or at the end of an epoch, ``("end", number)``."""
    mine = Epochs()
    stop: Callable[[], None] = lambda: mine.stop_at(at) if at else None  # noqa: E731 - shorter than a def

    def body(step: Any, batch: Any) -> None:
        mine.seen.append(("step", step.epoch * STEPS + step.position))
        stop()
        mine.step(batch)

    for epoch in mine.epochs:
        if form == "run":
            epoch.run(body)
        else:
            for step, batch in epoch:
                with step:
                    body(step, batch)
        mine.seen.append(("end", epoch))
        stop()
    return mine.seen, mine.digest()


def whole() -> list[tuple[str, int]]:
    return [
        place
        for epoch in range(NUM_EPOCHS)
        for place in [*(("step", epoch * STEPS + position) for position in range(STEPS)), ("end", epoch)]
    ]


@pytest.mark.parametrize("form", ["run", "with"])
def test_the_steps_and_ends_of_all_epochs_come_in_their_order(form: str) -> None:
    ((seen, _digest),) = run_ranks(1, all_of_it, None, form)
    assert seen == whole()


@pytest.mark.parametrize("form", ["run", "with"])
@pytest.mark.parametrize("at", [("step", 0), ("step", 5), ("step", 7), ("end", 0), ("end", 2)])
def test_an_interrupted_step_is_repeated_and_no_other(at: tuple[str, int], form: str) -> None:
    ((_seen, digest),) = run_ranks(1, all_of_it, None, form)
    ((seen, again),) = run_ranks(1, all_of_it, at, form)
    expected = whole()
    expected.insert(expected.index(at), at)
    assert seen == expected
    assert again == digest


def left_early(_rank: int, _size: int) -> str:
    mine = Epochs()

    def train() -> None:
        for epoch in mine.epochs:
            for step, batch in epoch:
                with step:
                    mine.step(batch)
                if step.position == 1:
                    break

    with pytest.raises(UsageError) as caught:
        train()
    return str(caught.value)


def test_an_epoch_that_is_left_early_is_refused() -> None:
    (message,) = run_ranks(1, left_early)
    assert "epoch 0 was left before step" in message


def accumulated(_rank: int, _size: int) -> list[int]:
    mine = Epochs(accumulate=3)
    sizes = []
    for epoch in mine.epochs:
        for step, batches in epoch:
            with step:
                sizes.append(len(batches))
                mine.step(batches[0])
    return sizes


def test_a_step_has_several_batches_where_gradients_are_accumulated() -> None:
    assert run_ranks(1, accumulated) == [[3, 1] * NUM_EPOCHS]


def begun_in_order(_rank: int, _size: int, at: tuple[str, int] | None) -> Any:
    """Switches the model and counts at the beginning of each epoch, and switches it back at the end."""
    mine = Epochs()
    model, counted = mine.training.model, mine.training.session.state(epochs=0)
    modes = {}

    def body(step: Any, batch: Any) -> None:
        mine.seen.append(("step", step.epoch * STEPS + step.position))
        if at:
            mine.stop_at(at)
        modes[step.epoch, step.position] = model.training, counted.epochs
        mine.step(batch)

    for epoch in mine.epochs:
        model.train()
        counted.epochs += 1
        epoch.run(body)
        model.eval()
    return modes, mine.digest()


@pytest.mark.parametrize("at", [("step", 0), ("step", STEPS), ("step", STEPS + 1)])
def test_what_an_epoch_begins_with_stays_where_its_first_step_comes_again(at: tuple[str, int]) -> None:
    ((_modes, digest),) = run_ranks(1, begun_in_order, None)
    ((modes, again),) = run_ranks(1, begun_in_order, at)
    assert all(seen == (True, epoch + 1) for (epoch, _position), seen in modes.items())
    assert again == digest


def by_steps(_rank: int, _size: int, stop_at: int | None) -> Any:
    """As many steps as are asked for, over the end of an epoch."""
    training, places = Training(stands_ready=False), []
    batches = training.session.batches(DataLoader(TensorDataset(SAMPLES), batch_size=8, shuffle=True), steps=STEPS + 2)
    assert len(batches) == STEPS + 2
    for step, batch in batches:
        places.append((step.epoch, step.position))
        if step.index == stop_at and step.attempt == 0:
            training.link.stop(2)
        with step:
            training.model(batch[0]).square().mean().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
    return places, training.digest()


def test_a_length_in_steps_reads_the_loader_as_often_as_it_takes() -> None:
    ((places, digest),) = run_ranks(1, by_steps, None)
    assert places == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    ((again, digest_again),) = run_ranks(1, by_steps, STEPS + 1)
    assert again == [*places, (1, 1)]
    assert digest_again == digest


def from_a_step(_rank: int, _size: int, start: int) -> Any:
    """As a script that has loaded a checkpoint of its own."""
    training, found = Training(stands_ready=False), []
    loader = DataLoader(TensorDataset(SAMPLES), batch_size=8, shuffle=True)
    for step, batch in training.session.batches(loader, epochs=2, start=start):
        with step:
            found.append((step.index, step.epoch, step.position, batch[0].tolist()))
    return found


def test_a_script_may_begin_in_the_middle_of_an_epoch() -> None:
    (whole_of_it,) = run_ranks(1, from_a_step, 0)
    assert [index for index, *_more in whole_of_it] == [*range(2 * STEPS)]
    for start in (STEPS - 1, STEPS + 2, 2 * STEPS):
        assert run_ranks(1, from_a_step, start) == [whole_of_it[start:]]


def from_a_checkpoint(_rank: int, _size: int, folder: Path | None, steps: int, computed: bool) -> Any:
    training, found = Training(stands_ready=False, checkpoint_dir=folder, checkpoint_every=6), []
    dataset, generator = TensorDataset(SAMPLES), torch.Generator().manual_seed(3)
    order: Any = {"batch_size": 8, "shuffle": True, "generator": generator}
    if computed:
        order = {"batch_sampler": StepSampler(len(dataset), 8, training.session.data_world_size)}
    for step, batch in training.session.batches(DataLoader(dataset, **order), steps=steps):
        found.append((step.index, batch[0].tolist()))
        with step:
            training.model(batch[0]).square().mean().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
    return found, training.digest()


@pytest.mark.parametrize("computed", [False, True])
def test_a_job_that_is_restarted_from_a_checkpoint_reads_on_where_it_was(tmp_path: Path, computed: bool) -> None:
    """In the second epoch: the checkpoint is that of step 6."""
    ((whole_of_it, digest),) = run_ranks(1, from_a_checkpoint, None, 3 * STEPS, computed)
    run_ranks(1, from_a_checkpoint, tmp_path, 2 * STEPS, computed)
    ((found, again),) = run_ranks(1, from_a_checkpoint, tmp_path, 3 * STEPS, computed)
    assert found == whole_of_it[6:]
    assert again == digest


def stream_from_a_step(_rank: int, _size: int) -> Any:
    """The script has set the loader to the position that belongs to the step."""
    training, found = Training(stands_ready=False), []
    dataset = Numbers(10)
    dataset.load_state_dict({"position": 6})
    for step, batch in training.session.batches(DataLoader(dataset, batch_size=2), steps=6, start=3):
        with step:
            found.append((step.index, int(batch[0, 0])))
    return found


def test_a_stream_begins_at_a_step_where_it_stands() -> None:
    assert run_ranks(1, stream_from_a_step) == [[(3, 7), (4, 9), (5, 1)]]


def drawn(_rank: int, _size: int, at: tuple[str, int] | None) -> Any:
    """What is drawn at the beginning of each epoch, in front of each step, in it, and at the end of each epoch."""
    mine = Epochs()
    found: dict[Any, float] = {}

    def note(*place: Any) -> None:
        found[place] = torch.rand(()).item()

    for epoch in mine.epochs:
        note("begin", int(epoch))
        for step, batch in epoch:
            note("front", epoch, step.position)
            with step:
                mine.seen.append(("step", step.epoch * STEPS + step.position))
                if at:
                    mine.stop_at(at)
                note("in", epoch, step.position)
                mine.step(batch)
        note("end", int(epoch))
    return found


@pytest.mark.parametrize("at", [("step", 0), ("step", STEPS), ("step", STEPS + 1)])
def test_what_is_drawn_outside_of_a_step_is_drawn_again(at: tuple[str, int]) -> None:
    (undisturbed,), (again,) = run_ranks(1, drawn, None), run_ranks(1, drawn, at)
    assert again == undisturbed
    assert len(set(undisturbed.values())) == len(undisturbed)


def resumed(_rank: int, _size: int) -> list[tuple[str, int]]:
    """What is left of a training whose checkpoint was saved at the end of its second epoch."""
    mine = Epochs()
    last_step = 2 * (STEPS + 2) - 2
    assert mine.training.session.resume(lambda: last_step + 2) == 2 * (STEPS + 2)
    for epoch in mine.epochs:
        for step, batch in epoch:
            with step:
                mine.seen.append(("step", step.epoch * STEPS + step.position))
                mine.step(batch)
        mine.seen.append(("end", epoch))
    return mine.seen


def test_a_checkpoint_that_was_saved_at_the_end_of_an_epoch_is_resumed_with_the_next_one() -> None:
    [seen] = run_ranks(1, resumed)
    assert seen == whole()[2 * (STEPS + 1) :]


def summed(_rank: int, _size: int, at: tuple[str, int] | None, form: str, per_rank: bool) -> Any:
    """What the sums of each epoch are at its end, where the rank is stopped at a place."""
    mine = Epochs()
    sums = mine.training.session.state(per_rank=per_rank, reset="epoch", seen=0, numbers=[])
    found = {}

    def body(step: Any, batch: Any) -> None:
        mine.seen.append(("step", step.epoch * STEPS + step.position))
        sums.seen += len(batch[0])
        sums.numbers.append(int(step) if form == "nested" else step.position)
        if at:
            mine.stop_at(at)
        mine.step(batch)

    if form == "nested":
        for epoch in mine.epochs:
            epoch.run(body)
            found[int(epoch)] = (sums.seen, list(sums.numbers))
            mine.seen.append(("end", epoch))
            if at:
                mine.stop_at(at)
        return found
    for step, batch in mine.training.session.batches(mine.loader, epochs=NUM_EPOCHS):
        if form == "with":
            with step:
                body(step, batch)
        else:
            mine.training.session.run_step(body, step, batch)
        if step.is_epoch_end and (step.committed or form == "run_step"):
            found[step.epoch] = (sums.seen, list(sums.numbers))
    return found


@pytest.mark.parametrize("per_rank", [False, True])
@pytest.mark.parametrize("form", ["nested", "with", "run_step"])
@pytest.mark.parametrize("at", [None, ("step", 0), ("step", STEPS), ("step", 2 * STEPS - 1), ("end", 1)])
def test_sums_of_an_epoch_begin_anew_with_it(at: tuple[str, int] | None, form: str, per_rank: bool) -> None:
    [found] = run_ranks(1, summed, at, form, per_rank)
    assert found == dict.fromkeys(range(NUM_EPOCHS), (8 * STEPS, list(range(STEPS))))


def without_epochs(_rank: int, _size: int) -> str:
    mine = Training(stands_ready=False)
    mine.session.state(reset="epoch", seen=0)
    with pytest.raises(UsageError) as caught:
        next(iter(mine.session.steps(3)))
    return str(caught.value)


def test_sums_of_an_epoch_need_epochs() -> None:
    [text] = run_ranks(1, without_epochs)
    assert text.startswith("session.state(reset='epoch')(seen=0) in a loop that has no epochs: use session.epochs(")
