"""Whether the threads of a gloo communicator rest."""

import threading
import time
from collections.abc import Iterator

import pytest

from keepstep.errors import ConfigurationError
from keepstep.worker.backends.gloo import threads
from keepstep.worker.backends.gloo.threads import GlooThreads

DEADLINE_S = 30.0


class Thread:
    """A thread that sleeps."""

    def __init__(self, name: str) -> None:
        self.observed, self._over = GlooThreads(), threading.Event()
        with self.observed.recording():
            self._thread = threading.Thread(target=self._work, args=[name], daemon=True)
            self._named = threading.Event()
            self._thread.start()
            assert self._named.wait(DEADLINE_S)

    def _work(self, name: str) -> None:
        with open("/proc/thread-self/comm", "w", encoding="ascii") as file:
            file.write(name)
        self._named.set()
        self._over.wait()

    def end(self) -> None:
        self._over.set()
        self._thread.join(DEADLINE_S)


@pytest.fixture(params=["pt_gloo_runloop"])
def thread(request: pytest.FixtureRequest) -> Iterator[Thread]:
    made = Thread(request.param)
    yield made
    made.end()


def rests_within(observed: GlooThreads, seconds: float) -> bool:
    """Whether two looks, some milliseconds apart, find the threads at rest."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        if observed.have_rested():
            return True
        threading.Event().wait(0.01)
    return False


def test_threads_that_sleep_rest(thread: Thread) -> None:
    thread.observed.check()
    assert not thread.observed.have_rested(), "one look does not tell"
    assert rests_within(thread.observed, DEADLINE_S)


def test_a_thread_that_has_ended_rests(thread: Thread) -> None:
    thread.end()
    assert rests_within(thread.observed, DEADLINE_S)


@pytest.mark.parametrize("thread", ["of_another_name"], indirect=True)
def test_threads_of_another_name_are_not_known_to_rest(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_NAMED_S", 0.05)
    with pytest.raises(ConfigurationError, match="no thread of a gloo group is named pt_gloo_runloop"):
        thread.observed.check()
    assert not rests_within(thread.observed, 0.1)


def test_where_nothing_was_recorded_nothing_runs() -> None:
    assert rests_within(GlooThreads(), DEADLINE_S)
