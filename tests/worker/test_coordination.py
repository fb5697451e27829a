"""When a rank knows of a failure: at once, within a deadline that it waits for, or not at all."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from keepstep.protocol.messages import Stop
from keepstep.shared.tagpage import TagReader, TagWriter, create
from keepstep.worker.coordination import SIGN_OF_LIFE_S, Coordination
from keepstep.worker.link import Link

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
