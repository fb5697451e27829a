"""The attributes of a `State`: what they may hold, and that a change is noticed however it was made."""

import copy
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from keepstep.errors import ConfigurationError, RemoteProtocolError, StateMismatch, UsageError
from keepstep.worker.values import attributes
from keepstep.worker.values.attributes import State, from_bytes, to_bytes
from keepstep.worker.values.missing import Missing


def free(_attribute: str) -> None:
    """No refusal."""


def test_attributes_are_read_and_set() -> None:
    state = State("state", {"best": math.inf, "names": ["a"]}, free)
    state.best = 1.5
    state.names.append("b")
    assert state.best == 1.5
    assert state.state_dict() == {"best": 1.5, "names": ["a", "b"]}
    assert repr(state) == "state(best=1.5, names=['a', 'b'])"


def test_only_what_was_declared_can_be_set() -> None:
    state = State("state", {"best": 0}, free)
    with pytest.raises(UsageError, match=r"state has no attribute 'bets': declare it, session.state\(bets=...\)"):
        state.bets = 1
    with pytest.raises(UsageError, match=r"state\.best cannot be deleted"):
        del state.best
    with pytest.raises(AttributeError):
        state.bets  # noqa: B018 - that it raises is the test


@pytest.mark.parametrize("name", ["state_dict", "seal", "_label", "__class__"])
def test_names_that_are_taken(name: str) -> None:
    with pytest.raises(ConfigurationError, match="take another name"):
        State("state", {name: 1}, free)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (object(), "is a builtins.object"),
        ([lambda: 0], r"\[0\] is a builtins.function"),
        (torch.ones(2, requires_grad=True) * 2, "gradient graph: take .item"),
        ({"a": torch.nn.Parameter(torch.ones(1))}, "is a|gradient graph"),
    ],
)
def test_a_value_that_cannot_be_carried_is_refused_with_its_name(value: Any, what: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"state\.best.*({what})"):
        State("state", {"best": value}, free)
    state = State("state", {"best": 0}, free)
    with pytest.raises(ConfigurationError, match=rf"state\.best.*({what})"):
        state.best = value
    assert state.best == 0


def test_a_value_that_a_failure_has_cut_off_is_for_the_next_step_to_judge() -> None:
    state = State("state", {"best": 0.0, "losses": []}, free)
    state.best = Missing(1.0, lambda: None)
    state.losses = [state.best]
    assert isinstance(state.best, Missing)


def test_a_refusal_is_raised_and_nothing_is_set() -> None:
    state = State("state", {"best": 0}, lambda attribute: f"{attribute}: not now")
    with pytest.raises(UsageError, match=r"^state\.best: not now$"):
        state.best = 1
    assert state.best == 0


def test_a_change_in_place_is_noticed() -> None:
    state = State("state", {"best": 0, "deep": {"losses": [1.0]}, "total": torch.zeros(2)}, free)
    assert state.changed() is None  # nothing was sealed yet
    state.seal()
    assert state.changed() is None
    state.deep["losses"][0] = 2.0
    assert state.changed() == "state.deep"
    state.seal()
    state.total.add_(1)
    assert state.changed() == "state.total"


def test_what_is_loaded_is_no_change() -> None:
    state = State("state", {"best": 0}, lambda attribute: "never")
    state.seal()
    state.load_state_dict({"best": 7})
    assert state.best == 7
    assert state.changed() is None
    with pytest.raises(StateMismatch, match=r"state\.other is declared"):
        state.load_state_dict({"best": 7, "other": 1})


VALUES = [
    *(None, True, 0, 1 << 80, -1.5, -math.inf, "text", b"bytes", (1, [2, {"three": {4}}])),
    OrderedDict(a=1),
    torch.tensor(2.5),
    torch.empty(0, 3),
    torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    {"t": [torch.ones(2, dtype=torch.bool), torch.tensor(3)]},
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = from_bytes(to_bytes(value, "x"), "x")
    assert repr(back) == repr(value)
    assert type(back) is type(value)
    assert to_bytes(back, "x") == to_bytes(value, "x")


def test_numpy_numbers_become_numbers() -> None:
    assert from_bytes(to_bytes(np.float64(1.5), "x"), "x") == 1.5


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x92\x01\x90\x00", to_bytes(torch.ones(3), "x")[:-1]])
def test_what_does_not_parse(content: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="x does not parse"):
        from_bytes(content, "x")


@pytest.mark.parametrize("value", [1.5, "text", b"bytes", None, (1, 2.5)])
def test_what_cannot_change_is_encoded_once(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    calls = []
    monkeypatch.setattr(attributes, "to_bytes", lambda *given: calls.append(given) or to_bytes(*given))
    state = State("state", {"best": 0}, free)
    state.best = value
    state.seal()
    assert state.changed() is None
    assert state.as_bytes() == {"best": to_bytes(value, "x")}
    assert [given[0] for given in calls] == [0, value]
    state.best = (3,)
    assert state.changed() == "state.best"


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1.5], lambda value: value.append(1)),
        ((1, [2]), lambda value: value[1].append(3)),
        (torch.zeros(1), lambda value: value.add_(1)),
    ],
    ids=["list", "tuple with a list", "tensor"],
)
def test_what_can_change_is_looked_at_each_time(value: Any, change: Callable[[Any], object]) -> None:
    state = State("state", {"best": value}, free)
    state.seal()
    change(value)
    assert state.changed() == "state.best"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copy_has_the_values_alone(copied: Callable[[State], Any]) -> None:
    state = State("session.state()", {"best": 1.5, "lines": [1]}, lambda _attribute: "not now")
    assert b"keepstep" not in pickle.dumps(state)
    made = copied(state)
    made.lines.append(2)
    made.best = 0.0
    assert (state.best, state.lines) == (1.5, [1])
    assert vars(made) == {"best": 0.0, "lines": [1, 2]}
