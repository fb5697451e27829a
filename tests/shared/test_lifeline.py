"""The lifeline tells of its holder's death, and only of that."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from keepstep.shared import lifeline

DEADLINE_S = 20.0


def hold_in_a_fork(descriptor: int, end: Callable[[lifeline.Lifeline], None]) -> tuple[int, int]:
    """A child that holds the lifeline and ends by ``end`` when a byte comes; returns its pid and the pipe."""
    held_read, held_write = os.pipe()
    go_read, go_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        line = lifeline.Lifeline(descriptor)
        line.hold()
        os.write(held_write, b"x")
        os.read(go_read, 1)
        end(line)
        os._exit(0)
    assert os.read(held_read, 1) == b"x"
    for end_of_pipe in (held_read, held_write, go_read):
        os.close(end_of_pipe)
    return pid, go_write


def release(line: lifeline.Lifeline) -> None:
    line.release()


ENDINGS: dict[str, Callable[[lifeline.Lifeline], None]] = {
    "killed": lambda _line: os.kill(os.getpid(), signal.SIGKILL),
    "left without a word": lambda _line: os._exit(3),
    "released": release,
}


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_death_is_reported_and_an_orderly_end_is_not(how: str) -> None:
    descriptor = lifeline.create("test")
    pid, go = hold_in_a_fork(descriptor, ENDINGS[how])
    died, over = threading.Event(), threading.Event()
    line = lifeline.Lifeline(descriptor)
    line.watch(died.set)
    os.write(go, b"x")
    os.waitpid(pid, 0)
    after = lifeline.Lifeline(descriptor)

    def take_after_the_watch() -> None:
        try:
            after.hold()  # the watch has had its turn when this comes through
            after.release()
        except lifeline.InternalError:
            pass  # after a death the lock is never good again
        over.set()

    if how == "released":
        threading.Thread(target=take_after_the_watch, daemon=True).start()
        assert over.wait(DEADLINE_S)
        assert not died.is_set()
    else:
        assert died.wait(DEADLINE_S)
    os.close(go)
    os.close(descriptor)
