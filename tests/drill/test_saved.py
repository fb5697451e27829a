"""Two files of torch.save: the first value that differs is named, and nothing is run by reading them."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.drill.saved import describe_difference

NAN = float("nan")
SAME = [
    {"model": OrderedDict(weight=torch.arange(6.0).reshape(2, 3)), "best": 0.3, "names": ["a", ("b", None)]},
    torch.tensor([NAN, 1.0]),
    {"loss": NAN},
    torch.tensor(True),
    torch.ones(2, 2, dtype=torch.bfloat16),
    torch.empty(0),
    torch.eye(3).to_sparse(),
]
DIFFERENT: list[tuple[Any, Any, str]] = [
    (
        {"model": {"fc1.weight": torch.zeros(2, 2), "fc2.weight": torch.zeros(4)}},
        {"model": {"fc1.weight": torch.zeros(2, 2), "fc2.weight": torch.tensor([0.0, 0.5, 0.0, -0.25])}},
        "['model']['fc2.weight']: 2 of 4 values differ, by up to 0.5",
    ),
    ({"best": 0.25}, {"best": 0.5}, "['best'] is 0.25 and 0.5"),
    ({"a": 1, "step": 1}, {"a": 1}, "['step'] is there in only one of the runs"),
    ({"a": 1}, {"a": 1, 0: 1}, "[0] is there in only one of the runs"),
    ([1, [2, 3]], [1, [2, 4]], "[1][1] is 3 and 4"),
    ([1], [1, 2], "its value has 1 and 2 items"),
    ({"n": 1}, {"n": 1.0}, "['n'] is 1 and 1.0"),
    ({"n": True}, {"n": 1}, "['n'] is True and 1"),
    (torch.zeros(2), torch.zeros(3), "its value is float32[2] and float32[3]"),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "its value is float32[2] and float64[2]"),
    (torch.tensor([0.0]), torch.tensor([-0.0]), "its value: 1 of 1 values differ, by up to 0"),
    (torch.tensor([1, 2]), torch.tensor([1, 3]), "its value: 1 of 2 values differ"),
    (torch.eye(3).to_sparse(), torch.zeros(3, 3).to_sparse(), "its value: 3 of 9 values differ, by up to 1"),
    ({"a": torch.ones(1)}, {"a": 1.0}, "['a'] is tensor([1.]) and 1.0"),
]


def difference(tmp_path: Path, first: Any, second: Any) -> str | None:
    torch.save(first, tmp_path / "first.pt")
    torch.save(second, tmp_path / "second.pt")
    return describe_difference(tmp_path / "first.pt", tmp_path / "second.pt")


@pytest.mark.parametrize("value", SAME, ids=str)
def test_equal_values(tmp_path: Path, value: Any) -> None:
    assert difference(tmp_path, value, value) is None


@pytest.mark.parametrize(("first", "second", "text"), DIFFERENT, ids=[text for _, _, text in DIFFERENT])
def test_the_first_value_that_differs_is_named(tmp_path: Path, first: Any, second: Any, text: str) -> None:
    assert difference(tmp_path, first, second) == text


class _RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("echo this must not run > ran.txt",))


def test_a_pickle_that_would_run_code_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = difference(tmp_path, {"a": _RunsCode()}, {"a": 1})
    assert text is not None
    assert text.startswith("its bytes differ, and torch.load(weights_only=True) does not read it: ")
    assert not (tmp_path / "ran.txt").exists()


@pytest.mark.parametrize("data", [b"", b"no checkpoint", b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_checkpoint(tmp_path: Path, data: bytes) -> None:
    torch.save(1, tmp_path / "first.pt")
    (tmp_path / "second.pt").write_bytes(data)
    text = describe_difference(tmp_path / "first.pt", tmp_path / "second.pt")
    assert text is not None
    assert "does not read it" in text
