"""What may be protected, what it consists of, and how its host-side part is carried."""

import copy
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.worker.ranks import join, run_ranks
from tests.worker.state.parts import OPTIMIZERS, SCHEDULERS, Keeps, advance, content, small, train
from torch.optim.swa_utils import AveragedModel

from keepstep.errors import ConfigurationError
from keepstep.worker.state import tree
from keepstep.worker.state.protected import ProtectedState


def carried(state: dict[str, Any]) -> dict[str, Any]:
    """A host state as another rank gets it."""
    tensors: list[torch.Tensor] = []
    encoded = msgspec.msgpack.encode(tree.pack(state, tensors))
    value: dict[str, Any] = tree.unpack(msgspec.msgpack.decode(encoded), [tensor.clone() for tensor in tensors])
    return value


# ---- what is refused ------------------------------------------------------------------------------------------------


def sparse_model() -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("columns", torch.arange(6.0).reshape(2, 3)[:, :2])
    return model


MODEL = small()
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "protect() was given no torch.nn.Module: pass at least model=..."),
    "no module": ({"numbers": Keeps(1)}, "protect() was given no torch.nn.Module"),
    "no state": ({"model": small(), "thing": object()}, "protect(thing=object): it has no state_dict()"),
    "half a state": (
        {"model": small(), "thing": type("Half", (), {"state_dict": dict})()},
        "protect(thing=Half): it has no state_dict() and load_state_dict()",
    ),
    "a closure": (
        {"model": small(), "optimizer": torch.optim.LBFGS(small().parameters())},
        "protect(optimizer=LBFGS): an optimizer that calls a closure",
    ),
    "not dense": ({"model": sparse_model()}, "protect(): model.columns does not fill one run of memory"),
    "not carried": (
        {"model": small(), "mine": Keeps({"a": [1, print]})},
        "['others']['mine']['a'][1] is a builtins.builtin_function_or_method: keepstep can carry numbers",
    ),
    "a function": ({"model": small(), "f": len}, "protect(f=builtin_function_or_method)"),
    "none": ({"model": small(), "scheduler": None}, "protect(scheduler=NoneType)"),
    "a parameter of another module": (
        {"model": MODEL, "optimizer": torch.optim.SGD([*MODEL.parameters(), *torch.nn.Linear(5, 1).parameters()])},
        f"protect(): parameter {len(list(MODEL.parameters()))} of optimizer, [1, 5], is in no module that is protected",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_object_and_what_to_do(name: str) -> None:
    objects, text = REFUSED[name]
    with pytest.raises(ConfigurationError) as caught:
        ProtectedState(objects)
    assert str(caught.value).startswith(text)


def flattened(rank: int, size: int, path: Path, how: str) -> str:
    warnings.simplefilter("ignore")  # torch's own, when it is imported
    from torch.distributed.fsdp import FullyShardedDataParallel

    join(path, rank, size)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    before = ProtectedState({"model": model})
    original = "original" in how
    model = FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
    with pytest.raises(ConfigurationError):
        before.check()
    with pytest.raises(ConfigurationError) as caught:
        ProtectedState({"model": model.module if "inside" in how else model})
    return str(caught.value)


FLATTENED = {
    "plain": "model is a FullyShardedDataParallel",
    "inside": "model._flat_param is a flattened parameter of FullyShardedDataParallel",
    "with the original parameters": "model is a FullyShardedDataParallel",
    "with the original parameters, inside": "model.0.weight is a flattened parameter of FullyShardedDataParallel",
}


@pytest.mark.parametrize("how", FLATTENED)
def test_fsdp1_is_refused(tmp_path: Path, how: str) -> None:
    """All ranks would look like replicas of each other, and a restore would give a rank another one's shard.

    Also where the model was protected before it was sharded, or its wrapper was not given.
    """
    for said in run_ranks(2, flattened, tmp_path, how):
        assert said.startswith(f"protect(): {FLATTENED[how]} (FSDP1), whose ranks hold runs of flattened tensors")
        assert "fully_shard()" in said


# ---- live tensors ---------------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """The output layer has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(6, 4)
        self.output = torch.nn.Linear(4, 6, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.register_buffer("same_mask", self.mask)


def test_tied_weights_stand_once_under_their_first_name() -> None:
    model = Tied()
    state = ProtectedState({"model": model, "part": model.output, "again": model})
    assert [name for name, _tensor in state.parameters()] == ["model.embedding.weight"]
    assert [name for name, _tensor in state.buffers()] == ["model.mask"]
    assert state.parameters()[0][1] is model.embedding.weight


def test_names_come_in_the_order_of_the_model() -> None:
    state = ProtectedState({"b": small(), "a": torch.nn.Linear(1, 1)})
    names = [name for name, _tensor in state.parameters()]
    assert names == ["b.0.weight", "b.0.bias", "b.1.weight", "b.1.bias", "b.3.weight", "b.3.bias", "a.weight", "a.bias"]
    assert [name for name, _t in state.buffers()] == [
        "b.1.running_mean",
        "b.1.running_var",
        "b.1.num_batches_tracked",
    ]
    assert [name for name, _t in state.live_tensors()] == [*names, *(name for name, _tensor in state.buffers())]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_state_of_an_optimizer_is_carried(name: str, seed: int) -> None:
    """The tensors and the host state together make another optimizer go on in the same way, bit for bit."""
    torch.manual_seed(seed)
    model = small()
    other = copy.deepcopy(model)
    optimizer, fresh = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    state = ProtectedState({"model": model, "optimizer": optimizer})
    copied = ProtectedState({"model": other, "optimizer": fresh})
    train(model, [optimizer], 3, seed)
    assert content(state) != content(copied)
    for (_name, target), (_same, source) in zip(copied.parameters(), state.parameters(), strict=True):
        target.detach().copy_(source.detach())
    for (_name, target), (_same, source) in zip(copied.buffers(), state.buffers(), strict=True):
        target.copy_(source)
    for tensor_name, tensor in state.optimizer_tensors():
        copied.place_optimizer_tensor(tensor_name, tensor.clone())
    copied.load_host_state(carried(state.host_state()))
    assert content(copied) == content(state)
    assert copied.digest() == state.digest()
    train(model, [optimizer], 2, seed + 1)
    train(other, [fresh], 2, seed + 1)
    assert content(copied) == content(state)


def test_optimizer_tensors_are_named_by_index_over_all_groups(seed: int) -> None:
    torch.manual_seed(seed)
    model = small()
    groups = [{"params": model[3].parameters(), "lr": 0.5}, {"params": model[0].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    state = ProtectedState({"model": model, "optimizer": optimizer})
    assert state.optimizer_tensors() == []
    train(model, [optimizer], 1, seed)
    names = [name for name, _tensor in state.optimizer_tensors()]
    assert names == [f"optimizer/{index}/momentum_buffer" for index in range(4)]
    assert state.optimizer_tensors()[0][1] is optimizer.state[model[3].weight]["momentum_buffer"]
    replacement = torch.ones(3)
    state.place_optimizer_tensor("optimizer/1/momentum_buffer", replacement)
    assert optimizer.state[model[3].bias]["momentum_buffer"] is replacement
    state.drop_optimizer_state()
    assert state.optimizer_tensors() == []


def test_two_optimizers_do_not_mix(seed: int) -> None:
    torch.manual_seed(seed)
    model = small()
    first = torch.optim.AdamW(model[0].parameters(), lr=0.1)
    second = torch.optim.AdamW(model[3].parameters(), lr=0.2)
    state = ProtectedState({"model": model, "first": first, "second": second})
    train(model, [first, second], 1, seed)
    names = [name for name, _tensor in state.optimizer_tensors()]
    assert names[0] == "first/0/exp_avg"
    assert names[len(names) // 2] == "second/0/exp_avg"
    taken = carried(state.host_state())
    first.param_groups[0]["lr"] = second.param_groups[0]["lr"] = 7.0
    state.load_host_state(taken)
    assert [optimizer.param_groups[0]["lr"] for optimizer in (first, second)] == [0.1, 0.2]


def test_an_optimizer_with_a_name_that_has_a_slash(seed: int) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = ProtectedState({"model": model, "my.optimizer": optimizer})
    train(model, [optimizer], 1, seed)
    for name, tensor in state.optimizer_tensors():
        state.place_optimizer_tensor(name, tensor)
    assert state.optimizer_tensors()[0][0] == "my.optimizer/0/momentum_buffer"


# ---- host state -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_where_it_was(name: str, seed: int) -> None:
    model, other = small(), small()
    optimizer, fresh = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other))
    scheduler, new = SCHEDULERS[name](optimizer), SCHEDULERS[name](fresh)
    state = ProtectedState({"model": model, "optimizer": optimizer, "scheduler": scheduler})
    copied = ProtectedState({"model": other, "optimizer": fresh, "scheduler": new})
    for step in range(4):
        train(model, [optimizer], 1, seed)
        advance(scheduler, 1.0 + step)
    copied.load_host_state(carried(state.host_state()))
    assert state.host_bytes()[0] == copied.host_bytes()[0]
    rates = []
    for step in range(6):
        train(model, [optimizer], 1, seed)
        train(other, [fresh], 1, seed)
        advance(scheduler, 5.0 + step)
        advance(new, 5.0 + step)
        rates.append(optimizer.param_groups[0]["lr"])
        assert fresh.param_groups[0] | {"params": 0} == optimizer.param_groups[0] | {"params": 0}
    assert len(set(rates)) > 1, "the scheduler did nothing: the test would prove nothing"


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_back_to_where_it_was(name: str, seed: int) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    state = ProtectedState({"model": model, "optimizer": optimizer, "scheduler": scheduler})
    train(model, [optimizer], 1, seed)
    advance(scheduler, 1.0)
    before, taken = state.host_bytes()[0], state.step_state()
    for step in range(5):
        train(model, [optimizer], 1, seed)
        advance(scheduler, 2.0 + step)
    assert state.host_bytes()[0] != before
    state.load_host_state(taken)
    assert state.host_bytes()[0] == before
    train(model, [optimizer], 1, seed)
    advance(scheduler, 9.0)
    assert state.host_bytes()[0] != before
    state.load_host_state(taken)
    assert state.host_bytes()[0] == before, "what was taken was changed by what came after it was put back"


def test_what_was_taken_shares_nothing_with_the_live_objects() -> None:
    mine = Keeps({"list": [1], "tensor": torch.zeros(2)})
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["own"] = [1]
    state = ProtectedState({"model": model, "mine": mine, "optimizer": optimizer})
    taken = state.step_state()
    mine.state["list"].append(2)
    mine.state["tensor"] += 1
    optimizer.param_groups[0]["own"].append(2)
    state.load_host_state(taken)
    assert mine.state["list"] == [1]
    assert mine.state["tensor"].tolist() == [0, 0]
    assert optimizer.param_groups[0]["own"] == [1]
    mine.state["list"].append(3)
    optimizer.param_groups[0]["own"].append(3)
    state.load_host_state(taken)
    assert (mine.state["list"], optimizer.param_groups[0]["own"]) == ([1], [1])


def test_a_hyperparameter_that_came_later_is_gone_again() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = ProtectedState({"model": model, "optimizer": optimizer})
    before, taken = state.host_bytes()[0], state.step_state()
    optimizer.param_groups[0]["initial_lr"] = 0.5
    state.load_host_state(taken)
    assert state.host_bytes()[0] == before


def test_tensors_in_the_host_state_are_carried() -> None:
    mine, other = Keeps({"a": torch.arange(3), "b": [torch.ones(2, dtype=torch.bfloat16)]}), Keeps(None)
    state = ProtectedState({"model": small(), "mine": mine})
    ProtectedState({"model": small(), "mine": other}).load_host_state(carried(state.host_state()))
    assert other.state["a"].tolist() == [0, 1, 2]
    assert other.state["b"][0].dtype is torch.bfloat16
    assert len(state.host_bytes()[1]) == 2
    before = state.digest()
    mine.state["a"][1] = 7
    assert state.digest() != before


@pytest.mark.parametrize("tensor", [torch.arange(6).reshape(2, 3).T, torch.arange(6)[::2]], ids=["turned", "sliced"])
def test_the_order_of_memory_of_tensors_in_the_host_state_is_no_difference(tensor: torch.Tensor) -> None:
    """It is the user's own object: what it does with the values it gets back is the same in any order of memory."""
    mine, other = Keeps({"a": tensor}), Keeps(None)
    state, copied = (ProtectedState({"model": torch.nn.ReLU(), "mine": each}) for each in (mine, other))
    host, tensors = state.host_bytes()
    copied.load_host_state(tree.unpack(msgspec.msgpack.decode(host), tensors))
    assert torch.equal(other.state["a"], tensor)
    assert copied.digest() == state.digest()


# ---- scaler and averages --------------------------------------------------------------------------------------------


def scaled(seed: int) -> tuple[ProtectedState, torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    torch.manual_seed(seed)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return ProtectedState({"model": model, "optimizer": optimizer, "scaler": scaler}), model, optimizer, scaler


def scaled_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, seed: int
) -> None:
    optimizer.zero_grad()
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    scaler.scale(model(inputs).square().mean()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def test_a_scaler_goes_on_where_it_was(seed: int) -> None:
    state, model, optimizer, scaler = scaled(seed)
    copied, _model, _optimizer, new = scaled(seed)
    for step in range(3):
        scaled_step(model, optimizer, scaler, seed + step)
    assert scaler.get_scale() == 16.0
    copied.load_host_state(carried(state.host_state()))
    assert new.state_dict() == scaler.state_dict()
    assert new.get_scale() == 16.0


def test_a_scaler_forgets_that_it_had_unscaled(seed: int) -> None:
    state, model, optimizer, scaler = scaled(seed)
    scaled_step(model, optimizer, scaler, seed)
    taken = state.step_state()
    before = copy.deepcopy(scaler.state_dict())
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(6, 4)).square().mean()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.unscale_(optimizer)
    state.load_host_state(taken)
    assert scaler.state_dict() == before
    scaled_step(model, optimizer, scaler, seed + 1)


@pytest.mark.parametrize("used", [False, True])
def test_a_disabled_scaler_is_no_obstacle(used: bool) -> None:
    model = small()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    state = ProtectedState({"model": model, "scaler": scaler})
    if used:
        scaler.scale(model(torch.ones(6, 4)).sum())
    state.load_host_state(carried(state.host_state()))
    state.load_host_state(state.step_state())


def test_an_averaged_model_is_a_module_like_any_other(seed: int) -> None:
    torch.manual_seed(seed)
    model = small()
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = ProtectedState({"model": model, "average": average, "optimizer": optimizer})
    assert [name for name, _tensor in state.buffers()][3:] == [
        "average.n_averaged",
        "average.module.1.running_mean",
        "average.module.1.running_var",
        "average.module.1.num_batches_tracked",
    ]
    assert len(state.parameters()) == 2 * len(list(model.parameters()))
    before = state.digest()
    average.update_parameters(model)
    assert state.digest() != before
