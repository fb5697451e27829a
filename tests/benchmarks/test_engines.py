"""The benchmark of inference engines tells mixtures from answers. What it measures needs real servers."""

import importlib
import json
from typing import Any

import pytest
from tests.benchmarks.quick import BENCHMARKS

CLEAR_ROW, CLOSE_ROW = [1.0, 1.0], [1.0, 1e-6]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def judged(*answers: tuple[list[int], float], lives: Any = ((0.0,),), errors: Any = ()) -> Any:
    """Three versions and one prompt, to which version 2 answers closely."""
    engines = importlib.import_module("engines")
    lines = [[0, [[[5, 5], CLEAR_ROW]]], [1, [[[5, 6], CLEAR_ROW]]], [2, [[[5, 7], CLOSE_ROW]]]]
    expected = engines.Expected([json.dumps(line) for line in lines])
    server: Any = type("Server", (), {"kind": "vllm"})
    found = [engines.Answer(0, tokens, at_s, at_s + 0.5) for tokens, at_s in answers]
    asked = engines.Asked(server, found, [list(life) for life in lives], list(errors))
    return engines.judged(asked, expected, [(1.0, 1), (5.0, 2)])


def test_answers_of_one_version() -> None:
    found = judged(([5, 5], 0.0), ([5, 6], 2.0), ([5, 6], 6.0))
    assert (found["mixed"], found["near"], found["back"], found["versions"], found["lag"]) == (0, 0, 0, 2, 0)


def test_a_mixture_a_tie_and_an_older_version() -> None:
    assert judged(([6, 5], 0.0))["mixed"] == 1
    found = judged(([5, 8], 0.0))
    assert (found["mixed"], found["near"]) == (0, 1)
    assert judged(([5, 6], 2.0), ([5, 5], 3.0))["back"] == 1
    assert judged(([5, 6], 2.0), ([5, 5], 2.1))["back"] == 0, "they ran at the same time"
    assert judged(([5, 6], 2.0), ([5, 5], 4.0), lives=[(0.0, 3.0), (3.5,)])["back"] == 0, "it was restarted"


def test_only_requests_of_a_server_that_was_not_killed_have_failed() -> None:
    lives = [(0.0, 3.0), (9.0,)]
    found = judged(([5, 5], 0.0), lives=lives, errors=[(2.8, "killed"), (5.0, "gone"), (1.0, "failed"), (10.0, "too")])
    assert (found["failed"], found["kills"]) == (2, 1)
