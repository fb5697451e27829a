"""State that an object tells of only in its own ``state_dict()``: carried, undone, checked, or refused."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import join, run_ranks
from tests.worker.state.parts import Keeps
from torch import nn

from keepstep.errors import ConfigurationError, StateMismatch
from keepstep.worker.state.checkpoint import Checkpoints
from keepstep.worker.state.image import describe, finish, targets
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.state.rollback import StepSnapshot

Objects = dict[str, Any]


class Counted(torch.optim.Optimizer):
    """Keeps one value for all parameters under a text in its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        shared = self.state["global"]
        shared["t"] = shared.get("t", 0) + 1
        shared.setdefault("norms", torch.zeros(2)).add_(shared["t"])
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1 / shared["t"])


class Masters(torch.optim.Optimizer):
    """Keeps fp32 copies of bf16 parameters, and fp32 moments in its state, which torch's loading casts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.masters = [p.detach().float().clone() for group in self.param_groups for p in group["params"]]
        self.steps = 0

    def state_dict(self) -> Any:
        return {**super().state_dict(), "masters": self.masters, "steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]
        for own, other in zip(self.masters, state["masters"], strict=True):
            own.copy_(other)
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter, master in zip(parameters, self.masters, strict=True):
            moment = self.state[parameter].setdefault("moment", torch.zeros_like(master))
            moment.add_(1 / 3 + self.steps)
            master.sub_(moment, alpha=0.01)
            parameter.copy_(master)


class InPlace(Masters):
    """Its own tensors only, so torch's ``load_state_dict()`` will do."""

    steps = property(lambda _self: 3, lambda _self, _value: None)

    def state_dict(self) -> Any:
        return {**torch.optim.Optimizer.state_dict(self), "masters": self.masters}

    load_state_dict = torch.optim.Optimizer.load_state_dict


class Listed(torch.optim.Optimizer):
    """Keeps numbers, lists of tensors, texts and None for each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            own = self.state[parameter]
            own["n"] = own.get("n", 0) + 1
            own.setdefault("past", []).append(parameter.detach().clone())
            own["kind"], own["none"] = "listed", None


def with_a_dtype(parameters: Any) -> torch.optim.Optimizer:
    """As timm's Adafactor: the dtype of its moments is a value of its groups."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.param_groups[0]["momentum_dtype"] = torch.bfloat16
    return optimizer


def hooked(parameters: Any) -> torch.optim.Optimizer:
    """Its hooks add what an object beside it holds."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    scale = torch.ones(3)
    optimizer.register_step_post_hook(lambda *_: scale.mul_(1.5))
    optimizer.register_state_dict_post_hook(lambda _optimizer, state: {**state, "scale": scale})
    return optimizer


class Wrapper(torch.optim.Optimizer):
    """Wraps another optimizer, and has never called ``Optimizer.__init__()``, as schedulefree's does."""

    def __init__(self, parameters: Any) -> None:
        self.inner, self.steps = torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 0

    @property
    def param_groups(self) -> Any:  # type: ignore[override]  # an attribute of Optimizer's
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute of Optimizer's
        return self.inner.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]  # an attribute of Optimizer's
        return self.inner.defaults

    def state_dict(self) -> Any:
        return {**self.inner.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]
        self.inner.load_state_dict({key: state[key] for key in ("state", "param_groups")})

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.inner.step()


class Shares(torch.optim.Optimizer):
    """Its parameters share one tensor in its state, and it describes itself; its groups hold a dtype."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "dtype": torch.bfloat16})
        self.count = torch.zeros(1)

    def state_dict(self) -> Any:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count.copy_(state["count"])
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("step", self.count)
            self.state[parameter]["factors"] = [torch.arange(6.0).reshape(2, 3).t()]
            parameter.sub_(1 / self.count)


class SharesOnce(torch.optim.Optimizer):
    """Its parameters share one tensor, which nothing else holds."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first, *others = self.param_groups[0]["params"]
        count = self.state[first].setdefault("step", torch.zeros(1))
        count += 1
        first.sub_(1 / count)
        for parameter in others:
            parameter.sub_(1 / self.state[parameter].setdefault("step", count))


class Counter(nn.Linear):
    count = 0

    def __init__(self) -> None:
        super().__init__(4, 3)

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x)


class Saves(nn.Linear):
    """Saves and loads an attribute that is no buffer, as quantised layers do."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.scale, self.kind = torch.ones(3), "fresh"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"], destination[f"{prefix}kind"] = self.scale, self.kind

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        self.scale, self.kind = state.pop(f"{prefix}scale"), state.pop(f"{prefix}kind")
        super()._load_from_state_dict(state, prefix, *others)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale, self.kind = self.scale * 1.25, "used"
        return super().forward(x)


class Whole(nn.Module):
    """Overrides state_dict() of a module with children."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.total = Counter(), 0.0

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        return {**super().state_dict(*arguments, **keywords), "total": self.total}

    def load_state_dict(self, state: Any, *arguments: Any, **keywords: Any) -> Any:
        state = dict(state)
        self.total = state.pop("total")
        return super().load_state_dict(state, *arguments, **keywords)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += float(x.sum())
        result: torch.Tensor = self.inner(x)
        return result


def with_hook() -> nn.Module:
    model = nn.Linear(4, 3)
    seen: list[float] = []
    model.register_forward_hook(lambda _module, inputs, _output: seen.append(float(inputs[0].sum())))
    model.register_state_dict_post_hook(lambda _m, state, prefix, _l: state.update({f"{prefix}seen": seen}))
    return model


class Lazy(nn.Linear):
    """Its forward creates, replaces, resizes and removes buffers."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("unset", None)
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("grows", torch.zeros(1))
        self.register_buffer("gone", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.unset is None:
                self.unset = torch.full((3,), 0.5)
                self.register_buffer("cached", torch.ones(2, 2), persistent=False)
                self.empty.resize_(3).fill_(7)
                self.gone = None
            self.grows = torch.cat([self.grows, self.grows + 1])
        return super().forward(x)


def made(
    model: Callable[[], nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype
) -> Objects:
    torch.manual_seed(5)
    module = model().to(dtype)
    return {"model": module, "optimizer": optimizer(module.parameters())}


def trained(objects: Objects, num_steps: int) -> Objects:
    dtype = next(objects["model"].parameters()).dtype
    for step in range(num_steps):
        inputs = torch.full((2, 4), float(step)).to(dtype)
        objects["optimizer"].zero_grad()
        objects["model"](inputs).sum().backward()
        objects["optimizer"].step()
    objects["optimizer"].zero_grad()
    return objects


def restored(source: ProtectedState, target: ProtectedState) -> None:
    header, blocks = describe(source, 3)
    content = [block.held.tensor.clone() for block in blocks]
    tensors, host_tensors = targets(target, header, "the source")
    for tensor, bytes_of in zip(tensors, content, strict=True):
        tensor.detach().copy_(bytes_of)
    finish(target, header, host_tensors)


def said(objects: Objects) -> Any:
    """Everything that torch itself would save, and all buffers."""
    model, optimizer = objects["model"], objects["optimizer"]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    transient = [sorted(part._non_persistent_buffers_set) for part in model.modules()]
    return [model.state_dict(), optimizer.state_dict(), buffers, transient, optimizer.state.keys() >= {"global"}]


def are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(are_equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def scripted() -> nn.Module:
    """Its buffers are in no dict."""
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        model: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    return model


def linear() -> nn.Module:
    return nn.Linear(4, 3)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.optim.Optimizer], torch.dtype]] = {
    "a text as key": (linear, Counted, torch.float32),
    "masters": (linear, Masters, torch.bfloat16),
    "masters in place": (linear, InPlace, torch.bfloat16),
    "values of parameters": (linear, Listed, torch.float32),
    "a wrapper": (linear, Wrapper, torch.float32),
    "a shared tensor": (linear, Shares, torch.float32),
    "a tensor that parameters share": (linear, SharesOnce, torch.float32),
    "a dtype": (linear, with_a_dtype, torch.float32),
    "a scripted model": (scripted, sgd, torch.float32),
    "an optimizer's hook": (linear, hooked, torch.float32),
    "extra state": (Counter, sgd, torch.float32),
    "_save_to_state_dict": (Saves, sgd, torch.float32),
    "state_dict": (Whole, sgd, torch.float32),
    "a module's hook": (with_hook, sgd, torch.float32),
    "lazy buffers": (Lazy, sgd, torch.float32),
}


@pytest.mark.parametrize("num_steps", [0, 1, 4], ids=["fresh", "behind", "ahead"])
@pytest.mark.parametrize("name", CASES)
def test_a_rank_gets_all_that_another_says(name: str, num_steps: int) -> None:
    """Also a rank that is ahead and goes back: it keeps nothing that the other has not."""
    source, target = trained(made(*CASES[name]), 2), trained(made(*CASES[name]), num_steps)
    first, second = ProtectedState(source), ProtectedState(target)
    wanted = said(source)
    restored(first, second)
    assert are_equal(said(target), wanted)
    assert first.digest() == second.digest()
    assert are_equal(said(trained(target, 2)), said(trained(source, 2))), "and trains on as the other does"


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_holds_all_that_it_says(name: str, tmp_path: Path) -> None:
    source, target = trained(made(*CASES[name]), 2), trained(made(*CASES[name]), 1)
    checkpoints = Checkpoints(ProtectedState(source), tmp_path, every=1)
    checkpoints.after_step(2, 1)
    checkpoints.flush()
    Checkpoints(ProtectedState(target), tmp_path, every=1).load(2)
    assert are_equal(said(target), said(source))


@pytest.mark.parametrize(
    "name", ["extra state", "_save_to_state_dict", "state_dict", "a module's hook", "lazy buffers"]
)
def test_a_forward_is_undone(name: str) -> None:
    objects = trained(made(*CASES[name]), 1)
    state = ProtectedState(objects)
    snapshot = StepSnapshot(state)
    for _ in range(5):
        snapshot.take()
        before = said(objects)
        live = dict(objects["model"].named_buffers())
        objects["model"](torch.ones(2, 4)).sum().backward()
        snapshot.put_back()
        assert are_equal(said(objects), before)
        assert all(buffer is live[key] for key, buffer in objects["model"].named_buffers())
        trained(objects, 1)


def test_a_tensor_in_a_value_keeps_its_strides() -> None:
    """Some kernels compute other bits from a tensor with other strides."""
    source, target = trained(made(linear, Shares, torch.float32), 1), made(linear, Shares, torch.float32)
    restored(ProtectedState(source), ProtectedState(target))
    strides = {state["factors"][0].stride() for state in target["optimizer"].state.values()}
    assert strides == {(1, 3)}


def test_what_an_optimizer_holds_itself_keeps_its_place() -> None:
    """The script, and the optimizer, may hold the same tensors and dicts elsewhere."""
    source, target = trained(made(linear, Counted, torch.float32), 2), trained(made(linear, Counted, torch.float32), 1)
    shared, norms = target["optimizer"].state["global"], target["optimizer"].state["global"]["norms"]
    restored(ProtectedState(source), ProtectedState(target))
    assert target["optimizer"].state["global"] is shared
    assert shared["norms"] is norms


def test_moments_stay_the_tensors_that_were_restored() -> None:
    """torch's load_state_dict() casts fp32 moments to bf16."""
    source, target = trained(made(*CASES["masters"]), 2), made(*CASES["masters"])
    restored(ProtectedState(source), ProtectedState(target))
    assert {state["moment"].dtype for state in target["optimizer"].state.values()} == {torch.float32}


# ---- what cannot be restored ----------------------------------------------------------------------------------------


class OnlySaves(Counted):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "steps": 3}


class KeyedByTensor(Counted):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.state[torch.zeros(2)] = {"n": 1}


class OnlyGets(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)

    def get_extra_state(self) -> Any:
        return {"count": 1}


class SavesCopies(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.scale = torch.ones(3)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.scale.clone()


@pytest.mark.parametrize(
    ("model", "optimizer", "text"),
    [
        (
            linear,
            OnlySaves,
            "protect(): optimizer.state_dict() gives ['steps'], and OnlySaves has no load_state_dict()",
        ),
        (linear, KeyedByTensor, "optimizer 'optimizer' has state for a tensor of shape [2] that is no parameter of it"),
        (OnlyGets, sgd, "protect(): model..state_dict() gives ['_extra_state']['count'], and OnlyGets has no method"),
        (SavesCopies, sgd, "protect(): model..state_dict() gives ['scale'], and SavesCopies has no method"),
    ],
    ids=["optimizer", "tensor", "extra state", "module"],
)
def test_what_nothing_would_restore_is_refused(model: Any, optimizer: Any, text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ProtectedState(made(model, optimizer, torch.float32))
    assert str(caught.value).startswith(text)


class Quantizes(Counted):
    """Its first update creates state that is no plain memory."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moment"] = Wrapped(torch.zeros_like(parameter))


class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        raise AssertionError(f"keepstep has called {function}")


def test_a_parameter_that_is_no_plain_memory_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        ProtectedState({"model": nn.Sequential(nn.LazyLinear(2))})
    assert str(caught.value).startswith("model.0.weight is a torch.nn.parameter.UninitializedParameter: its module")


def test_an_optimizer_that_has_created_other_than_memory_is_refused() -> None:
    objects = made(linear, Quantizes, torch.float32)
    state = ProtectedState(objects)
    state.refuse_other_than_memory(objects["optimizer"])
    objects["optimizer"].step()
    with pytest.raises(ConfigurationError) as caught:
        state.refuse_other_than_memory(objects["optimizer"])
    assert "optimizer/0/moment is a tests.worker.state.test_own.Wrapped, whose content lies" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("m", torch.ones(4, 8)[:, :4], "optimizer/0/m is a view that does not fill one run of memory"),
        ("m", torch.ones(1).expand(4), "optimizer/0/m is a view that does not fill one run of memory"),
        ("m", torch.ones(2, dtype=torch.complex64).conj(), "optimizer/0/m is a view that does not fill one run of mem"),
        (3, torch.ones(2), "optimizer 'optimizer' has a tensor under 3 in the state of a parameter"),
        (("m", 1), torch.ones(2), "optimizer 'optimizer' has a tensor under ('m', 1) in the state of a parameter"),
    ],
    ids=["a part", "expanded", "conjugate", "a number", "a tuple"],
)
def test_an_optimizer_that_has_created_what_no_recovery_can_write_is_refused(key: Any, value: Any, text: str) -> None:
    """In its first step, and not when a rank is lost."""
    objects = made(linear, sgd, torch.float32)
    state, optimizer = ProtectedState(objects), objects["optimizer"]
    optimizer.state[optimizer.param_groups[0]["params"][0]][key] = value
    with pytest.raises(ConfigurationError) as caught:
        state.refuse_other_than_memory(optimizer)
    assert str(caught.value).startswith(text)


class Forgets(Keeps):
    def load_state_dict(self, state: Any) -> None:
        pass


class Adds(Keeps):
    def load_state_dict(self, state: Any) -> None:
        self.state = {**self.state, **state}


@pytest.mark.parametrize(
    ("kind", "theirs", "text"),
    [
        (Forgets, {"a": 1, "b": [1, 2]}, "mine['b'][1] is not what was restored"),
        (Adds, {"a": 1}, "mine['b'] is not what was restored"),
    ],
    ids=["forgets", "keeps more"],
)
def test_what_is_not_what_was_restored_is_named(kind: Any, theirs: Any, text: str) -> None:
    source, target = made(linear, sgd, torch.float32), made(linear, sgd, torch.float32)
    first = ProtectedState({**source, "mine": Keeps(theirs)})
    second = ProtectedState({**target, "mine": kind({"a": 1, "b": [1, 3]})})
    with pytest.raises(StateMismatch) as caught:
        restored(first, second)
    assert str(caught.value).startswith(text)


def communicating(rank: int, size: int, path: Path) -> str:
    """What protect() says of an object whose state_dict() is a collective."""
    _registry, group = join(path, rank, size)

    class Gathers(Keeps):
        def state_dict(self) -> Any:
            group.allreduce([torch.ones(1)]).wait()
            return {}

    try:
        ProtectedState({"model": nn.Linear(2, 2), "mine": Gathers({})})
    except Exception as error:
        return str(error)
    return ""


def test_a_state_dict_that_communicates_is_refused(tmp_path: Path) -> None:
    [error] = run_ranks(1, communicating, tmp_path)
    assert error == "mine.state_dict() began all_reduce, which the other ranks do not take part in"
