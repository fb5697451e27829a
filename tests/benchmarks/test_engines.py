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


def judged(*answers: tuple[list[int], float], killed: Any = (), ready: Any = (), errors: Any = ()) -> Any:
    """Three versions and one prompt, to which version 2 answers closely."""
    engines = importlib.import_module("engines")
    lines = [[0, [[[5, 5], CLEAR_ROW]]], [1, [[[5, 6], CLEAR_ROW]]], [2, [[[5, 7], CLOSE_ROW]]]]
    expected = engines.Expected([json.dumps(line) for line in lines])
    server: Any = type("Server", (), {"kind": "vllm"})
    found = [engines.Answer(0, tokens, at_s, at_s + 0.5) for tokens, at_s in answers]
    asked = engines.Asked(server, found, list(killed), list(ready), list(errors))
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
    found = judged(([5, 6], 2.0), ([5, 5], 4.0), ([5, 5], 5.0), ([5, 6], 6.0), killed=[3.0], ready=[4.5])
    assert (found["back"], found["old_s"]) == (0, 1.5), "it was restarted"


def test_only_requests_of_a_server_that_was_not_killed_have_failed() -> None:
    errors = [(1.0, 3.1, "killed"), (5.0, 5.1, "gone"), (1.0, 1.1, "failed"), (10.0, 10.1, "too")]
    found = judged(([5, 5], 0.0), killed=[3.0], ready=[9.0], errors=errors)
    assert (found["failed"], found["kills"], found["why"]) == (2, 1, ["failed", "too"])
