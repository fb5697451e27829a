"""The reading side of another process's buffer: buckets in their order, credits back, and lies about slots."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from tests.weights.channels.descriptors import given_back
from tests.weights.channels.pairs import connection_pair
from tests.worker.ranks import DEADLINE_S

from keepstep.cancel import CancelToken
from keepstep.errors import PeerLost, RemoteProtocolError
from keepstep.protocol.transfer.messages import BucketReady, SlotFreed
from keepstep.protocol.transfer.plan import Bucket
from keepstep.weights.channels.connection import ConnectionEnded
from keepstep.weights.channels.flow import Inlet, Outlet, Stalled
from keepstep.weights.memory.buffers import SlotBuffer

UPDATE, NUM_SLOTS, SLOT_BYTES = 5, 2, 64
SOON_S = 0.05


def later() -> float:
    return time.monotonic() + DEADLINE_S


def bucket(index: int) -> Bucket:
    return Bucket(index, 0, 16, (), (0,), (0,))


class Ends:
    """A writer's buffer and connection, and an inlet at the other end."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.buffer = SlotBuffer.create(NUM_SLOTS, SLOT_BYTES)
        self.connection, self._theirs = connection_pair("the writer")
        self.stop = CancelToken()
        self.inlet = Inlet(UPDATE, self._theirs, self.buffer, deadline_s, self.stop)

    def say(self, index: int, slot: int, update: int = UPDATE) -> None:
        self.connection.send(BucketReady(update, index, slot, SLOT_BYTES), later())

    def close(self) -> None:
        for each in (self.buffer, self.connection, self._theirs, self.stop):
            each.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with given_back():
        made = Ends()
        yield made
        made.close()


def test_a_bucket_is_its_slot_and_its_release_a_credit_for_that(ends: Ends) -> None:
    for slot in range(NUM_SLOTS):
        ends.buffer.view(slot).fill_(slot + 1)
    for index, slot in [(3, 1), (4, 0), (9, 0)]:
        ends.say(index, slot)
        taken = ends.inlet.take(bucket(index))
        assert taken.tolist() == [slot + 1] * SLOT_BYTES
        assert ends.connection.receive_now() is None
        ends.inlet.release()
        assert ends.connection.receive_now() == SlotFreed(UPDATE, slot)


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS, 2**40])
def test_a_slot_that_is_not_there_breaks_the_protocol(ends: Ends, slot: int) -> None:
    ends.say(3, slot)
    with pytest.raises(RemoteProtocolError, match=f"bucket 3 in slot {slot} of {NUM_SLOTS}"):
        ends.inlet.take(bucket(3))


def test_buckets_out_of_turn_break_the_protocol(ends: Ends) -> None:
    ends.say(4, 0)
    with pytest.raises(RemoteProtocolError, match="bucket 3 of update 5 was due"):
        ends.inlet.take(bucket(3))


def test_what_an_earlier_update_left_is_dropped(ends: Ends) -> None:
    ends.say(3, 1, UPDATE - 1)
    ends.say(3, 0)
    ends.inlet.take(bucket(3))
    ends.inlet.release()
    assert ends.connection.receive_now() == SlotFreed(UPDATE, 0)


def test_a_writer_that_stands_or_is_gone() -> None:
    ends = Ends(SOON_S)
    with pytest.raises(Stalled):
        ends.inlet.take(bucket(3))
    ends.connection.close()
    with pytest.raises(ConnectionEnded):
        ends.inlet.take(bucket(3))
    with pytest.raises(PeerLost):
        ends.inlet.release()
    ends.close()


# ---- Both sides -----------------------------------------------------------------------------------------------------

NUM_BUCKETS = 40


def no_error(_key: int, error: Exception) -> None:
    raise error


def test_no_bucket_is_overwritten_while_it_is_read(ends: Ends) -> None:
    """Two threads, one slot after the other: what a reader has stays as it is until it lets go."""
    outlet = Outlet(UPDATE, {0: ends.connection}, DEADLINE_S, ends.stop, no_error, no_error, lambda _bucket: SLOT_BYTES)

    def write() -> None:
        for index in range(NUM_BUCKETS):
            slot = index % NUM_SLOTS
            outlet.wait_until_free(slot)
            ends.buffer.view(slot).fill_(index)
            outlet.announce(index, slot, [0])
        outlet.wait_until_all_free()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    for index in range(NUM_BUCKETS):
        taken = ends.inlet.take(bucket(index))
        for _ in range(3):
            assert torch.equal(taken, torch.full((SLOT_BYTES,), index, dtype=torch.uint8))
        ends.inlet.release()
    writer.join(DEADLINE_S)
    assert not writer.is_alive()
