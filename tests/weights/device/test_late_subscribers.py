"""What a device answers to another one that asks for its part of what was published last."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.weights.cast import publish
from tests.weights.channels.pairs import connection_pair
from tests.worker.ranks import DEADLINE_S

from keepstep.protocol.transfer.layout import Consumer, serve_one
from keepstep.protocol.transfer.messages import BucketReady, CatchUpCalled, Refused, SlotFreed, Welcomed
from keepstep.weights.channels.connection import Connection
from keepstep.weights.device.device import Device
from keepstep.weights.device.late_subscribers import LateSubscribers, PublishedCopy
from keepstep.weights.publisher import Publisher

VERSION = 1
SOON_S = 0.05
"""After which something happens that a call waits for."""


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    """One that has published a version, and keeps it."""
    with publish(tmp_path, {"x": torch.ones(4)}, 0, 1, copies=True) as made:
        made.publish(VERSION)
        yield made


class Asking:
    """The other device: it asks, and takes what it is given."""

    def __init__(self, publisher: Publisher, version: int = VERSION) -> None:
        self._late, self._device = publisher._late_subscribers, publisher._device
        assert publisher._plan is not None
        layout = serve_one(publisher._plan.layout, 0, Consumer("late", None))
        self._called = CatchUpCalled(0, 0, 7, version, layout)

    def ask(self) -> Welcomed | Refused:
        """The answer, once all is over."""
        theirs, ours = connection_pair("rank 0")
        found: list[Welcomed | Refused] = []
        thread = threading.Thread(target=lambda: found.append(take(ours)))
        thread.start()
        self._late.serve(self._device, theirs, self._called)
        thread.join()
        ours.close()
        return found[0]


def take(connection: Connection) -> Welcomed | Refused:
    until_s = time.monotonic() + DEADLINE_S
    answer = connection.receive(until_s)
    assert isinstance(answer, Welcomed | Refused)
    if isinstance(answer, Welcomed):
        ready = connection.receive(until_s)
        assert isinstance(ready, BucketReady)
        connection.send(SlotFreed(ready.update, ready.slot), until_s)
    return answer


def parts(publisher: Publisher) -> tuple[Device, LateSubscribers, PublishedCopy]:
    late = publisher._late_subscribers
    assert late._kept is not None
    return publisher._device, late, late._kept


def test_it_gives_what_it_keeps(publisher: Publisher) -> None:
    assert isinstance(Asking(publisher).ask(), Welcomed)


def test_another_version_is_refused(publisher: Publisher) -> None:
    assert Asking(publisher, VERSION + 1).ask() == Refused(f"version {VERSION + 1} is not kept here", stale=False)


def test_the_end_of_the_update_under_way_is_waited_for(publisher: Publisher) -> None:
    """The one that asks has kept the version already: it came to the end of the same update a moment earlier."""
    asking = Asking(publisher)
    device, late, kept = parts(publisher)
    late.forget()
    timer = threading.Timer(SOON_S, late.keep, [device, kept, []])
    timer.start()
    assert isinstance(asking.ask(), Welcomed)
    timer.join()


def test_an_update_that_breaks_off_is_waited_for_no_longer(publisher: Publisher) -> None:
    asking = Asking(publisher)
    _device, late, _kept = parts(publisher)
    late.forget()
    timer = threading.Timer(SOON_S, late.settle)
    timer.start()
    assert isinstance(asking.ask(), Refused)
    timer.join()


def test_a_publication_that_failed_leaves_no_process_waiting(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_look_again", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        publisher.publish(VERSION + 1)
    assert isinstance(Asking(publisher).ask(), Refused)
