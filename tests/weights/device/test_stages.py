"""What the stages of a device make of what its consumers say, and when."""

import threading
import time
from pathlib import Path
from typing import TypeVar

import torch
from tests.weights.cast import publish
from tests.worker.ranks import DEADLINE_S

from keepstep.protocol.transfer import messages as msg
from keepstep.weights.channels.deltas import checksum_of_version
from keepstep.weights.channels.flow import attach_buffer
from keepstep.weights.channels.listener import dial, listener_path
from keepstep.weights.memory.copies import checksum_in

Message = TypeVar("Message")


def later() -> float:
    return time.monotonic() + DEADLINE_S


class Consumer:
    """Attached by hand. It says that it has a version of one bucket, and then that the bucket's slot is free.

    That is the order in which `keepstep weights serve` may say it for a consumer of another node.
    """

    def __init__(self, path: Path) -> None:
        called = msg.SubscriberCalled("by hand", None, 0, None, delta=False, proxied=None)
        self.connection, welcomed = dial(listener_path(path, 0), called, "rank 0", later())
        self.buffer = attach_buffer(welcomed.buffer, self.connection)

    def follow(self) -> None:
        """Takes one version."""
        began = self._next(msg.UpdateBegan)
        (bucket,) = began.layout.plan().buckets
        ready = self._next(msg.BucketReady)
        checksum = checksum_of_version([checksum_in(self.buffer.view(ready.slot), bucket)])
        self.connection.send(msg.VersionLoaded(began.update, checksum, ()), later())
        self.connection.send(msg.SlotFreed(began.update, ready.slot), later())
        self._next(msg.VersionCommitted)
        self.connection.send(msg.VersionTaken(began.update), later())

    def _next(self, kind: type[Message]) -> Message:
        while not isinstance(message := self.connection.receive(later()), kind):
            assert isinstance(message, msg.MovementSeen)
        return message


def test_a_slot_may_be_let_go_after_all_of_the_version_is_there(tmp_path: Path) -> None:
    with publish(tmp_path, {"x": torch.ones(4)}, 0, 1, deadline_s=2.0) as publisher:
        consumer = Consumer(tmp_path)
        thread = threading.Thread(target=consumer.follow)
        thread.start()
        assert publisher.publish(1).failures == ()
        thread.join()
        consumer.connection.close()
        consumer.buffer.close()
