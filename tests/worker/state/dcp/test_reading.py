"""Checkpoints that other ranks read than wrote them: every value in its place, or a clear refusal."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.state.parts import Keeps, Part, cut, rows_of, save_together

from keepstep.errors import RemoteProtocolError, StateMismatch
from keepstep.worker.state.checkpoint import Checkpoints
from keepstep.worker.state.protected import ProtectedState

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
STEP = "step_0000000001"


@pytest.mark.parametrize("after", [(0, 2, 3, 7), (0, 7), (0, 5, 5, 7), (0, 1, 2, 3, 4, 5, 6, 7)])
@pytest.mark.parametrize("before", [(0, 4, 7), (0, 7), (0, 0, 7, 7)])
def test_other_numbers_of_ranks_read_every_value(
    before: tuple[int, ...], after: tuple[int, ...], tmp_path: Path, seed: int
) -> None:
    writers, readers = cut(*before), cut(*after)
    for part in writers:
        part.train(seed)
        part.optimizer.param_groups[0]["lr"] = 0.25
    save_together(writers, tmp_path)
    for part in readers:
        checkpoints = Checkpoints(part.state, tmp_path, every=1)
        checkpoints.inspect()
        checkpoints.load(1)
        assert part.optimizer.param_groups[0]["lr"] == 0.25
        assert [float(state["step"]) for state in part.optimizer.state.values()] == [1.0, 1.0]
        assert part.state.gradient_marks() == (0, 1)
    assert all(map(torch.equal, rows_of(writers), rows_of(readers)))


def test_state_that_is_there_is_read_into_in_place(tmp_path: Path, seed: int) -> None:
    part = Part(0, 7)
    part.train(seed)
    save_together([part], tmp_path)
    rows = [tensor.clone() for tensor in part.rows()]
    places = [tensor.data_ptr() for tensor in part.rows()]
    part.train(seed + 1)
    Checkpoints(part.state, tmp_path, every=1).load(1)
    assert [tensor.data_ptr() for tensor in part.rows()] == places
    assert all(map(torch.equal, part.rows(), rows))


class Stage:
    """A stage of a pipeline: layers of its own, and an optimizer that counts them from 0."""

    def __init__(self, *layers: int) -> None:
        torch.manual_seed(sum(layers))
        self.layers = torch.nn.ModuleDict({f"layer{layer}": torch.nn.Linear(2, 2) for layer in layers})
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=0.1)
        self.state = ProtectedState({"model": self.layers, "optimizer": self.optimizer})
        self.state.has_stages = True

    def train(self) -> None:
        """Leaves ``momentum_buffer=None``, which is in no tensor, with every parameter of the odd layers."""
        for name, layer in self.layers.items():
            if int(name[-1]) % 2:
                layer(torch.ones(2)).sum().backward()
        self.optimizer.step()


def test_stages_of_a_pipeline_are_cut_again(tmp_path: Path) -> None:
    stages = [Stage(0, 1), Stage(2, 3)]
    stages[1].layers["layer2"].eval()
    stages[0].layers["layer1"].bias.requires_grad_(False)
    for stage in stages:
        stage.train()
    save_together(stages, tmp_path)
    whole = Stage(0, 1, 2, 3)
    Checkpoints(whole.state, tmp_path, every=1).load(1)
    for stage in stages:
        for name, layer in stage.layers.items():
            read = whole.layers[name]
            assert torch.equal(read.weight, layer.weight)
            assert read.training == layer.training
            assert read.bias.requires_grad == layer.bias.requires_grad
            for parameter, other in zip(layer.parameters(), read.parameters(), strict=True):
                assert stage.optimizer.state.get(parameter) == whole.optimizer.state.get(other)
                assert (parameter.grad is None) == (other.grad is None)
    middle = Stage(1, 2)
    Checkpoints(middle.state, tmp_path, every=1).load(1)
    assert torch.equal(middle.layers["layer2"].weight, stages[1].layers["layer2"].weight)


def test_a_stage_that_no_rank_has_written_is_refused(tmp_path: Path) -> None:
    save_together([Stage(0), Stage(1)], tmp_path)
    with pytest.raises(StateMismatch, match=r"this rank's model has \['model/model.layer2.bias', "):
        Checkpoints(Stage(1, 2).state, tmp_path, every=1).load(1)


def test_layers_that_no_rank_has_any_more_are_refused_without_stages(tmp_path: Path) -> None:
    save_together([Stage(0), Stage(1)], tmp_path)
    other = Stage(0)
    other.state.has_stages = False
    with pytest.raises(StateMismatch, match=r"'model/model.layer1.weight', which this rank's model lacks"):
        Checkpoints(other.state, tmp_path, every=1).load(1)


def test_host_state_of_each_rank_comes_back_to_its_shard_alone(tmp_path: Path) -> None:
    def ranks(*values: int) -> list[Part]:
        return [Part(0, 4, loader=Keeps(values[0])), Part(4, 7, loader=Keeps(values[1]))]

    save_together(ranks(1, 2), tmp_path)
    for part, value in zip(ranks(0, 0), (1, 2), strict=True):
        Checkpoints(part.state, tmp_path, every=1).load(1)
        assert part.state.others["loader"].state == value
    with pytest.raises(StateMismatch, match="different host values for each of its shards"):
        Checkpoints(Part(0, 7, loader=Keeps(0)).state, tmp_path, every=1).load(1)


class Keeper(torch.optim.SGD):
    """Has a list of tensors for each parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # of this test
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = [torch.ones(2), torch.arange(3)]


def test_tensors_inside_of_other_optimizer_state_come_back(tmp_path: Path) -> None:
    def made() -> tuple[ProtectedState, torch.nn.Module, Keeper]:
        model = torch.nn.Linear(2, 2)
        optimizer = Keeper(model.parameters())
        return ProtectedState({"model": model, "optimizer": optimizer}), model, optimizer

    (state, model, optimizer), (other, copy, read) = made(), made()
    optimizer.step()
    checkpoints = Checkpoints(state, tmp_path, every=1)
    checkpoints.after_step(1, 1)
    checkpoints.flush()
    Checkpoints(other, tmp_path, every=1).load(1)
    assert torch.equal(copy.weight, model.weight)
    for parameter in copy.parameters():
        first, second = read.state[parameter]["history"]
        assert first.tolist() == [1, 1]
        assert second.tolist() == [0, 1, 2]


def test_a_rank_looks_at_the_files_that_it_needs(tmp_path: Path) -> None:
    parts = cut(0, 4, 7)
    save_together(parts, tmp_path)
    path = tmp_path / STEP / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    first, second = (Checkpoints(part.state, tmp_path, every=1) for part in parts)
    first.inspect()
    assert first.steps() == (1,)
    first.load(1)
    with pytest.raises(RemoteProtocolError, match=r"__1_0\.distcp is damaged or gone"):
        second.load(1)
    assert second.steps() == ()
    path.unlink()
    with pytest.raises(RemoteProtocolError, match=r"__1_0\.distcp is damaged or gone"):
        Checkpoints(Part(0, 7).state, tmp_path, every=1).load(1)


@pytest.mark.parametrize("file", [".metadata", "content.msgpack"])
def test_every_rank_looks_at_what_describes_all(file: str, tmp_path: Path) -> None:
    parts = cut(0, 4, 7)
    save_together(parts, tmp_path)
    path = tmp_path / STEP / file
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    for part in parts:
        with pytest.raises(RemoteProtocolError, match=f"{file} is damaged or gone"):
            Checkpoints(part.state, tmp_path, every=1).load(1)
