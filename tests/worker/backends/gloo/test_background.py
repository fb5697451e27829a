"""Threads that wait for gloo's sends and receives."""

import threading
import time
from collections.abc import Callable

import pytest

from keepstep.worker.backends.gloo import background
from keepstep.worker.backends.gloo.background import MAX_IDLE, in_background

DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def _no_thread_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_idle", [])


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s
        threading.Event().wait(0.001)


@pytest.mark.parametrize("at_once", [1, MAX_IDLE - 1, MAX_IDLE, MAX_IDLE + 1, 2 * MAX_IDLE])
def test_a_task_runs_however_many_ran_at_once_before(at_once: int) -> None:
    """As many as `batch_isend_irecv` with eight peers has in flight."""
    go = threading.Event()
    for _ in range(at_once):
        in_background(go.wait, DEADLINE_S)
    go.set()
    until(lambda: len(background._idle) == min(at_once, MAX_IDLE))
    done = [threading.Event() for _ in range(at_once)]
    for each in done:
        in_background(each.set)
    assert all(each.wait(DEADLINE_S) for each in done)


def test_a_thread_is_used_again() -> None:
    used = set()
    for _ in range(3):
        in_background(lambda: used.add(threading.get_ident()))
        until(lambda: bool(background._idle))
    assert len(used) == 1


def test_an_idle_thread_keeps_nothing_alive() -> None:
    gone = threading.Event()

    class Thing:
        def __del__(self) -> None:
            gone.set()

    in_background(lambda _thing: None, Thing())
    assert gone.wait(DEADLINE_S)
