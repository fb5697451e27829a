"""When a rank knows of a failure: at once, within a deadline that it waits for, or not at all."""

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Set

import pytest

from keepstep.protocol.messages import Stop
from keepstep.shared.tagpage import TagReader, TagWriter, create
from keepstep.transports.framing import frame
from keepstep.worker.coordination import SIGN_OF_LIFE_S, Coordination
from keepstep.worker.link import EXIT_ORPHANED, Link

DEADLINE_S = 60.0
STOP = Stop(generation=2, reason="rank 1 was lost", synced_step=None)


@pytest.fixture
def page() -> Iterator[int]:
    page = create("test")
    yield page
    os.close(page)


@pytest.fixture
def coordination(page: int) -> Iterator[Coordination]:
    ours, theirs = socket.socketpair()
    yield Coordination(Link(ours, worker=5), TagWriter(page), os.getpid(), rank=0)
    ours.close()
    theirs.close()


def test_no_failure_is_known_while_none_is_reported(coordination: Coordination) -> None:
    assert not coordination.knows_failure(0.0)
    assert not coordination.knows_failure(0.01)


def test_a_failure_that_is_told_of_is_known_at_once(coordination: Coordination) -> None:
    coordination.on_order(STOP)
    assert coordination.knows_failure(0.0)


def test_who_waits_for_a_failure_is_woken_by_it(coordination: Coordination) -> None:
    """A deadline of a collective passes a little before the controller has given up the node."""
    known = []
    waiting = threading.Thread(target=lambda: known.append(coordination.knows_failure(DEADLINE_S)))
    waiting.start()
    coordination.on_order(STOP)
    waiting.join(DEADLINE_S / 2)
    assert known == [True]


def test_who_waits_for_a_failure_has_not_stalled(coordination: Coordination, page: int) -> None:
    """All other ranks may wait for this one meanwhile."""
    before = TagReader(page).read()
    assert not coordination.knows_failure(2.5 * SIGN_OF_LIFE_S)
    after = TagReader(page).read()
    assert after.progress >= before.progress + 2
    assert not after.waiting


def test_a_connection_that_ended_is_a_failure_that_is_known(coordination: Coordination) -> None:
    assert coordination.failed("world", RuntimeError("Connection closed by peer"))
    assert coordination.knows_failure(0.0)


def test_after_the_last_step_a_failure_is_the_scripts_own(
    coordination: Coordination, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Coordination, "completed", property(lambda self: True))
    assert not coordination.failed("world", RuntimeError("Connection closed by peer"))
    assert not coordination.knows_failure(DEADLINE_S)


class Groups:
    """Groups that are always connected at once."""

    def __init__(self) -> None:
        self.connected: list[int] = []
        self.num_taken_down = 0

    def drain(self) -> None: ...

    def connect(self, generation: int, rank: int, replaced: Set[int]) -> None:
        self.connected.append(generation)

    def take_down(self) -> None:
        self.num_taken_down += 1


@pytest.mark.parametrize("is_late", [False, True])
def test_who_breaks_off_late_leaves_the_next_generation_alone(
    coordination: Coordination, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """The thread that heard of the error is stopped between its decision and what it does."""
    groups, break_off = Groups(), coordination._break
    coordination.groups = groups  # type: ignore[assignment]  # it records what is done to it
    monkeypatch.setattr(coordination.machine, "connected", lambda: None)
    decided, goes_on = threading.Event(), threading.Event()

    def stopped(generation: int) -> None:
        decided.set()
        assert goes_on.wait(DEADLINE_S)
        break_off(generation)

    coordination._connect(1)
    monkeypatch.setattr(coordination, "_break", stopped)
    hearing = threading.Thread(target=coordination.failed, args=["world", RuntimeError("Connection closed by peer")])
    hearing.start()
    assert decided.wait(DEADLINE_S)
    if is_late:
        coordination._connect(2)
    goes_on.set()
    hearing.join(DEADLINE_S)
    assert groups.num_taken_down == (0 if is_late else 1)
    assert bool(select.select([coordination.broken], [], [], 0)[0]) != is_late


LISTENS = """
import socket, sys, time
from keepstep.worker.link import EXIT_ORPHANED, Link
link = Link(socket.socket(fileno=int(sys.argv[1])), 5)
link.listen(lambda order: 1 / 0)
time.sleep(60)
"""


@pytest.mark.parametrize("sent", [b"", frame(STOP), b"\xff" * 64], ids=["nothing", "an order", "no frame"])
def test_a_worker_that_hears_no_order_any_more_ends(sent: bytes) -> None:
    """It would train on, and answer no order until the next recovery times out."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", LISTENS, str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True) as worker:
        theirs.close()
        ours.sendall(sent)
        if not sent:
            ours.close()
        _, told = worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == EXIT_ORPHANED
    assert ("the agent of this worker is gone" in told) == (not sent)
    assert ("this worker cannot handle what its agent sends" in told) == bool(sent)
