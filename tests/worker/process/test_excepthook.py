"""What stands in front of each line of a traceback: the rank that the process has when it prints."""

from __future__ import annotations

import io
import sys

import pytest

from keepstep.worker.process.excepthook import RankInFront, is_usual


def printed(hook: RankInFront, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    hook(type(error), error, error.__traceback__)
    assert sys.stderr is stream
    return stream.getvalue().splitlines()


def test_a_spare_that_has_taken_a_rank_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rank: int | None = None
    hook = RankInFront(sys.__excepthook__, lambda: rank)
    error = ValueError("two\n\nlines")
    assert printed(hook, error, monkeypatch) == ["[spare]: ValueError: two", "", "[spare]: lines"]
    rank = 3
    assert printed(hook, error, monkeypatch)[0] == "[rank3]: ValueError: two"


def test_a_hook_of_the_script_prints_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(kind: type[BaseException], error: BaseException, where: object) -> None:
        print("mine:", error, file=sys.stderr)

    assert printed(RankInFront(own, lambda: 1), ValueError("bad"), monkeypatch) == ["[rank1]: mine: bad"]
    assert not is_usual(RankInFront(own, lambda: 1))
    assert is_usual(RankInFront(sys.__excepthook__, lambda: 1))


def test_a_hook_that_fails_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*_arguments: object) -> None:
        raise RuntimeError

    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(RuntimeError):
        RankInFront(own, lambda: 1)(ValueError, ValueError("bad"), None)
    assert sys.stderr is stream
