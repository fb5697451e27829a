"""Credits: when a slot is free, who is lost, and who is waited for no more."""

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator

import pytest
from tests.weights.channels.descriptors import given_back
from tests.weights.channels.pairs import connection_pair
from tests.worker.ranks import DEADLINE_S

from keepstep.cancel import Cancelled, CancelToken
from keepstep.errors import PeerLost, RemoteProtocolError
from keepstep.protocol.transfer.messages import (
    AnyTransferMessage,
    BucketReady,
    BucketUnchanged,
    LoadFailed,
    MovementSeen,
    PathLost,
    SlotFreed,
    TransferFault,
    UpdateAborted,
    VersionCommitted,
    VersionLoaded,
)
from keepstep.weights.channels import flow
from keepstep.weights.channels.connection import Connection, ConnectionEnded, ConnectionStalled, wait, what_of
from keepstep.weights.channels.flow import Outlet, Stalled, next_bucket

UPDATE = 5
NUM_BYTES = 100
SOON_S = 0.05
"""A deadline that is to pass."""


def later() -> float:
    return time.monotonic() + DEADLINE_S


class Stand:
    """An outlet with its readers' ends, and what it has said of them."""

    def __init__(self, num_readers: int, deadline_s: float) -> None:
        pairs = [connection_pair(f"reader {key}") for key in range(num_readers)]
        self.connections: dict[int, Connection] = {key: ours for key, (ours, _theirs) in enumerate(pairs)}
        self.readers: dict[int, Connection] = {key: theirs for key, (_ours, theirs) in enumerate(pairs)}
        self.stop = CancelToken()
        self.lost: dict[int, Exception] = {}
        self.others: list[tuple[int, AnyTransferMessage]] = []
        self.freed: list[int] = []
        self.outlet = Outlet(
            UPDATE,
            self.connections,
            deadline_s,
            self.stop,
            self.lose,
            self.hear,
            lambda _bucket: NUM_BYTES,
            self.freed.append,
        )

    def lose(self, key: int, error: Exception) -> None:
        assert key not in self.lost, "lost twice"
        self.lost[key] = error

    def hear(self, key: int, message: AnyTransferMessage) -> None:
        self.others.append((key, message))

    def comes(self, connection: Connection, until_s: float) -> bool:
        return bool(wait([connection], until_s, self.stop))

    def say(self, key: int, *messages: AnyTransferMessage) -> None:
        for message in messages:
            self.readers[key].send(message, later())

    def heard(self, key: int) -> list[AnyTransferMessage]:
        """What has come to a reader by now."""
        return list(iter(self.readers[key].receive_now, None))

    def close(self) -> None:
        for connection in (*self.connections.values(), *self.readers.values()):
            connection.close()
        self.stop.close()


Make = Callable[..., Stand]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes stands whose deadline does not pass, if none is asked for."""
    made: list[Stand] = []

    def stand(num_readers: int = 2, deadline_s: float = DEADLINE_S) -> Stand:
        made.append(Stand(num_readers, deadline_s))
        return made[-1]

    with given_back():
        yield stand
        for each in made:
            each.close()


def is_free(stand: Stand, slot: int) -> bool:
    """Whether the slot need not be waited for."""
    stand.stop.set()
    try:
        stand.outlet.wait_until_free(slot)
    except Cancelled:
        return False
    finally:
        stand.stop.clear()
    return True


def take_in(stand: Stand, key: int) -> None:
    """Has the outlet hear all that a reader has said."""
    stand.say(key, VersionLoaded(UPDATE, b"", ()))
    num_others = len(stand.others)
    stand.outlet.wait_while(lambda: {key} if len(stand.others) == num_others else set())


def freed(slot: int, update: int = UPDATE) -> SlotFreed:
    return SlotFreed(update, slot)


# ---- Slots ----------------------------------------------------------------------------------------------------------


def test_a_slot_that_no_reader_was_told_of_is_free(make: Make) -> None:
    stand = make()
    stand.outlet.announce(0, 1, [])
    assert is_free(stand, 0)
    assert is_free(stand, 1)
    stand.outlet.wait_until_all_free()


def test_only_the_readers_of_a_bucket_are_told_of_it(make: Make) -> None:
    stand = make(3)
    stand.outlet.announce(7, 1, [0, 2])
    assert stand.heard(0) == stand.heard(2) == [BucketReady(UPDATE, 7, 1, NUM_BYTES)]
    assert stand.heard(1) == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_slot_is_not_free_until_all_its_readers_have_freed_it(make: Make, order: tuple[int, ...]) -> None:
    stand = make(3)
    stand.outlet.announce(0, 0, range(3))
    stand.outlet.announce(1, 1, range(3))
    for key in order:
        assert not is_free(stand, 0)
        stand.say(key, freed(0))
        take_in(stand, key)
    assert is_free(stand, 0)
    assert not is_free(stand, 1)
    for key in order:
        stand.say(key, freed(1))
    stand.outlet.wait_until_all_free()


def test_a_credit_counts_for_its_own_slot(make: Make) -> None:
    stand = make(1)
    for slot in range(3):
        stand.outlet.announce(slot, slot, [0])
    stand.say(0, freed(2), freed(0))
    stand.outlet.wait_until_free(0)
    assert is_free(stand, 2)
    assert not is_free(stand, 1)


def test_a_slot_can_be_announced_again_and_has_to_be_freed_again(make: Make) -> None:
    stand = make(1)
    for bucket in range(3):
        stand.outlet.announce(bucket, 0, [0])
        assert not is_free(stand, 0)
        stand.say(0, freed(0))
        stand.outlet.wait_until_free(0)
    assert stand.heard(0) == [BucketReady(UPDATE, bucket, 0, NUM_BYTES) for bucket in range(3)]


@pytest.mark.parametrize("credit", [freed(1, UPDATE - 1), freed(1, UPDATE + 1), freed(-1), freed(-2), freed(2)])
def test_a_credit_of_another_update_or_slot_frees_nothing(make: Make, credit: SlotFreed) -> None:
    stand = make(1)
    for slot in range(2):
        stand.outlet.announce(slot, slot, [0])
    stand.say(0, credit)
    take_in(stand, 0)
    assert not is_free(stand, 0)
    assert not is_free(stand, 1)
    assert not stand.lost


def test_what_is_no_credit_is_passed_on(make: Make) -> None:
    stand = make(2)
    stand.outlet.announce(0, 0, [0, 1])
    stand.say(0, VersionLoaded(UPDATE, b"", ()), freed(0))
    stand.say(1, LoadFailed(UPDATE, "no memory"), freed(0))
    stand.outlet.wait_until_free(0)
    assert sorted(stand.others, key=lambda pair: pair[0]) == [
        (0, VersionLoaded(UPDATE, b"", ())),
        (1, LoadFailed(UPDATE, "no memory")),
    ]


def test_readers_are_heard_while_anything_of_them_is_awaited(make: Make) -> None:
    """As a device waits at the end, for consumers that have not reported the complete version."""
    stand = make(2)
    loaded: set[int] = set()
    stand.outlet._other = lambda key, _message: loaded.add(key)
    for key in range(2):
        stand.say(key, VersionLoaded(UPDATE, b"", ()))
    stand.outlet.wait_while(lambda: stand.outlet.readers - loaded)
    assert loaded == {0, 1}


# ---- Readers that are lost ------------------------------------------------------------------------------------------


class Clock:
    """A clock for the outlet that stands still but in a wait, where what is due happens."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now_s

    def at(self, time_s: float, happen: Callable[[], None]) -> None:
        self._due.append((time_s, happen))

    def wait(self, connections: Collection[Connection], until_s: float, stop: CancelToken) -> list[Connection]:
        while True:
            if ready := wait(connections, 0.0, stop):
                return ready
            if not self._due or self._due[0][0] > until_s:
                self.now_s = until_s
                return []
            self.now_s, happen = self._due.pop(0)
            happen()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(flow, "time", made)
    monkeypatch.setattr(flow, "wait", made.wait)
    return made


@pytest.mark.parametrize("rounds", [1, 5])
def test_a_reader_that_shows_nothing_is_lost_and_one_that_moves_is_not(make: Make, clock: Clock, rounds: int) -> None:
    """Whatever it says, and however long it takes."""
    stand = make(2, deadline_s=10.0)
    begun_s = clock.now_s
    stand.outlet.announce(0, 0, [0, 1])
    for number in range(1, rounds):
        clock.at(begun_s + 9.0 * number, lambda: stand.say(0, MovementSeen(UPDATE)))
    clock.at(begun_s + 9.0 * rounds, lambda: stand.say(0, freed(0)))
    lost_s = []
    stand.outlet._lose = lambda key, error: (stand.lose(key, error), lost_s.append(clock.now_s))
    stand.outlet.wait_until_free(0)
    assert list(stand.lost) == [1]
    assert isinstance(stand.lost[1], Stalled)
    assert str(stand.lost[1]) == "has shown nothing for 10 s"
    assert lost_s == [begun_s + 10.0]
    assert clock.now_s == begun_s + max(10.0, 9.0 * rounds)
    assert stand.outlet.readers == {0}


def test_a_reader_that_moved_and_stands_then_is_lost(make: Make, clock: Clock) -> None:
    stand = make(1, deadline_s=10.0)
    begun_s = clock.now_s
    stand.outlet.announce(0, 0, [0])
    clock.at(begun_s + 9.0, lambda: stand.say(0, MovementSeen(UPDATE)))
    stand.outlet.wait_until_free(0)
    assert isinstance(stand.lost[0], Stalled)
    assert clock.now_s == begun_s + 19.0


def test_what_a_reader_said_before_the_writer_listened_counts(make: Make, clock: Clock) -> None:
    """A writer that was busy for long must not take its readers for lost who freed their slots in time."""
    stand = make(1, deadline_s=10.0)
    stand.outlet.announce(0, 0, [0])
    stand.say(0, freed(0))
    clock.now_s += 1000.0
    stand.outlet.wait_until_free(0)
    assert not stand.lost


def test_the_deadline_begins_when_there_is_something_to_do(make: Make, clock: Clock) -> None:
    """A source may take long before the first bucket comes to a reader."""
    stand = make(1, deadline_s=10.0)
    clock.now_s += 1000.0
    begun_s = clock.now_s
    stand.outlet.announce(0, 0, [0])
    stand.outlet.wait_until_free(0)
    assert list(stand.lost) == [0]
    assert clock.now_s == begun_s + 10.0


def test_another_bucket_gives_one_who_stands_no_more_time(make: Make, clock: Clock) -> None:
    stand = make(1, deadline_s=10.0)
    begun_s = clock.now_s
    stand.outlet.announce(0, 0, [0])
    clock.now_s += 9.0
    stand.outlet.announce(1, 1, [0])
    stand.outlet.wait_until_free(0)
    assert list(stand.lost) == [0]
    assert clock.now_s == begun_s + 10.0


def test_all_who_show_nothing_are_lost(make: Make) -> None:
    stand = make(3, deadline_s=SOON_S)
    stand.outlet.announce(0, 0, range(3))
    stand.outlet.wait_until_free(0)
    assert set(stand.lost) == {0, 1, 2}
    assert stand.outlet.readers == set()


def test_who_is_not_waited_for_may_show_nothing(make: Make) -> None:
    stand = make(2, deadline_s=SOON_S)
    stand.outlet.announce(0, 0, [0])
    stand.outlet.wait_until_free(0)
    assert set(stand.lost) == {0}
    stand.outlet.wait_until_all_free()
    assert stand.outlet.readers == {1}


@pytest.mark.parametrize("where", ["while it is waited for", "before it is told"])
def test_a_reader_that_has_ended_is_lost_and_waited_for_no_more(make: Make, where: str) -> None:
    stand = make(2)
    if where == "before it is told":
        stand.readers[1].close()
    stand.outlet.announce(0, 0, [0, 1])
    stand.readers[1].close()
    stand.say(0, freed(0))
    stand.outlet.wait_until_free(0)
    assert list(stand.lost) == [1]
    assert isinstance(stand.lost[1], ConnectionEnded)
    assert stand.outlet.readers == {0}
    stand.outlet.announce(1, 1, [0, 1])
    stand.say(0, freed(1))
    stand.outlet.wait_until_all_free()


def test_a_reader_whose_line_was_closed_on_this_side_is_lost_like_any_other(make: Make) -> None:
    """As when a newer consumer of the same name takes its place: another thread closes the connection then."""
    stand = make(2)
    stand.outlet.announce(0, 0, [0, 1])
    stand.say(0, freed(0))
    stand.connections[1].close()
    stand.outlet.wait_until_free(0)
    assert list(stand.lost) == [1]
    assert isinstance(stand.lost[1], PeerLost)


def test_a_reader_whose_connection_was_closed_on_this_side_is_lost_when_it_is_told_of_a_bucket(make: Make) -> None:
    """As by a device that could not tell it that the update begins."""
    stand = make(2)
    stand.connections[0].close()
    stand.outlet.announce(7, 0, [0, 1])
    assert isinstance(stand.lost.pop(0), ConnectionEnded)
    assert (stand.lost, stand.outlet.readers) == ({}, {1})
    assert stand.readers[1].receive(later()) == BucketReady(UPDATE, 7, 0, NUM_BYTES)


def test_a_reader_that_reads_nothing_is_lost_at_the_next_message(make: Make) -> None:
    stand = make(2, deadline_s=SOON_S)
    for bucket in range(100_000):
        stand.outlet.announce(bucket, 0, [1])
        if stand.lost:
            break
    assert isinstance(stand.lost[1], ConnectionStalled)
    assert is_free(stand, 0)


def test_a_reader_that_sends_garbage_is_lost(make: Make) -> None:
    stand = make(1)
    stand.outlet.announce(0, 0, [0])
    stand.readers[0]._sock.send(b"garbage")
    stand.outlet.wait_until_free(0)
    assert isinstance(stand.lost[0], RemoteProtocolError)


def test_a_reader_that_is_left_out_is_neither_lost_nor_waited_for(make: Make) -> None:
    stand = make(2)
    stand.outlet.announce(0, 0, [0, 1])
    stand.outlet.announce(1, 1, [1])
    stand.outlet.leave_out(1)
    assert not is_free(stand, 0)
    assert is_free(stand, 1)
    stand.outlet.leave_out(0)
    stand.outlet.wait_until_all_free()
    assert not stand.lost
    assert stand.outlet.readers == set()


def test_a_reader_may_be_left_out_by_what_it_says(make: Make) -> None:
    stand = make(1)
    stand.outlet._other = lambda key, _message: stand.outlet.leave_out(key)
    stand.outlet.announce(0, 0, [0])
    stand.say(0, LoadFailed(UPDATE, "no memory"))
    stand.outlet.wait_until_free(0)
    assert not stand.lost


def test_an_error_in_telling_of_a_loss_ends_the_wait(make: Make) -> None:
    stand = make(1)

    def lose(_key: int, error: Exception) -> None:
        raise KeyError from error

    stand.outlet._lose = lose
    stand.outlet.announce(0, 0, [0])
    stand.readers[0].close()
    with pytest.raises(KeyError):
        stand.outlet.wait_until_free(0)


def test_the_flag_ends_a_wait(make: Make) -> None:
    stand = make()
    stand.outlet.announce(0, 0, [0])
    stand.stop.set()
    with pytest.raises(Cancelled):
        stand.outlet.wait_until_free(0)
    with pytest.raises(Cancelled):
        stand.outlet.wait_until_all_free()
    assert not stand.lost


def test_a_slot_is_freed_once_with_its_last_reader(make: Make) -> None:
    stand = make(3)
    stand.outlet.announce(0, 7, [0, 1, 2])
    stand.say(0, freed(7), freed(7))
    take_in(stand, 0)
    stand.say(1, freed(7))
    take_in(stand, 1)
    assert stand.freed == []
    stand.readers[2].close()
    stand.outlet.wait_until_free(7)
    assert stand.freed == [7]


def test_a_slot_that_no_reader_reads_is_freed_at_once(make: Make) -> None:
    stand = make(1)
    stand.outlet.announce(0, 3, [])
    stand.outlet.leave_out(0)
    stand.outlet.announce(1, 4, [0])
    assert stand.freed == [3, 4]


def test_a_slot_is_not_freed_while_others_are_still_told_of_it(make: Make) -> None:
    """The first one is gone, which shows when it is told."""
    stand = make(2)
    stand.readers[0].close()
    stand.outlet.announce(0, 1, [0, 1])
    assert (list(stand.lost), stand.freed) == ([0], [])
    stand.say(1, freed(1))
    stand.outlet.wait_until_free(1)
    assert stand.freed == [1]


# ---- While something else is waited for -----------------------------------------------------------------------------


def test_readers_are_heard_while_something_else_is_waited_for(make: Make) -> None:
    """What is waited for comes only when a reader has let go: as from a source that waits for its slot."""
    stand = make(1)
    ours, theirs = connection_pair("the source")
    stand.outlet = Outlet(
        UPDATE,
        stand.connections,
        DEADLINE_S,
        stand.stop,
        stand.lose,
        stand.hear,
        lambda _bucket: NUM_BYTES,
        lambda slot: theirs.send(BucketReady(UPDATE, slot, 0, NUM_BYTES), later()),
    )
    stand.outlet.announce(0, 1, [0])
    stand.say(0, freed(1))
    assert stand.outlet.hear_until(ours, later())
    assert ours.receive_now() == BucketReady(UPDATE, 1, 0, NUM_BYTES)
    for each in (ours, theirs):
        each.close()


def test_a_reader_that_stands_is_lost_while_something_else_is_waited_for(make: Make) -> None:
    stand = make(2, deadline_s=SOON_S)
    ours, theirs = connection_pair("the source")
    stand.outlet.announce(0, 1, [0])
    assert not stand.outlet.hear_until(ours, time.monotonic() + 2 * SOON_S)
    assert {key: type(error) for key, error in stand.lost.items()} == {0: Stalled}, "the other one holds nothing"
    assert stand.freed == [1]
    for each in (ours, theirs):
        each.close()


def test_the_flag_ends_a_wait_for_something_else(make: Make) -> None:
    stand = make(1)
    ours, theirs = connection_pair("the source")
    stand.stop.set()
    with pytest.raises(Cancelled):
        stand.outlet.hear_until(ours, later())
    for each in (ours, theirs):
        each.close()


# ---- The reading side -----------------------------------------------------------------------------------------------


def next_of(stand: Stand, bucket: int, deadline_s: float = DEADLINE_S) -> int:
    """The first reader waits for a bucket; its own connection is that of the stand's other side."""
    ready = next_bucket(stand.readers[0], UPDATE, bucket, deadline_s, stand.comes)
    assert isinstance(ready, BucketReady)
    return ready.slot


def test_buckets_come_with_their_slots(make: Make) -> None:
    stand = make(1)
    for bucket, slot in [(3, 0), (4, 1), (9, 0)]:
        stand.outlet.announce(bucket, slot, [0])
    assert [next_of(stand, bucket) for bucket in (3, 4, 9)] == [0, 1, 0]


def test_what_an_earlier_update_left_on_the_line_is_dropped(make: Make) -> None:
    stand = make(1)
    stand.connections[0].send(BucketReady(UPDATE - 1, 3, 1, NUM_BYTES), later())
    stand.connections[0].send(UpdateAborted(UPDATE - 1, TransferFault.LOST, "rank 2", "it is gone"), later())
    stand.connections[0].send(BucketReady(UPDATE - 2, 3, 1, NUM_BYTES), later())
    stand.outlet.announce(3, 0, [0])
    assert next_of(stand, 3) == 0


@pytest.mark.parametrize(
    "message",
    [
        BucketReady(UPDATE, 4, 0, NUM_BYTES),
        BucketReady(UPDATE, 2, 0, NUM_BYTES),
        BucketUnchanged(UPDATE, 4, b""),
        BucketReady(UPDATE + 1, 3, 0, NUM_BYTES),
        VersionCommitted(UPDATE, 1),
        SlotFreed(UPDATE, 0),
    ],
    ids=[
        "a later bucket",
        "an earlier bucket",
        "another that is unchanged",
        "a later update",
        "something else",
        "a credit",
    ],
)
def test_anything_else_breaks_the_protocol(make: Make, message: AnyTransferMessage) -> None:
    stand = make(1)
    stand.connections[0].send(message, later())
    with pytest.raises(RemoteProtocolError, match=rf"bucket 3 of update 5 was due, {type(message).__name__}\("):
        next_of(stand, 3)


def test_an_unchanged_bucket_takes_no_slot(make: Make) -> None:
    stand = make(2)
    stand.outlet.announce_unchanged(3, b"checksum", [0, 1])
    stand.outlet.wait_until_all_free()
    for reader in stand.readers.values():
        assert next_bucket(reader, UPDATE, 3, DEADLINE_S, stand.comes) == BucketUnchanged(UPDATE, 3, b"checksum")


def test_a_reader_that_is_gone_is_told_of_no_unchanged_bucket(make: Make) -> None:
    stand = make(2)
    stand.readers[0].close()
    for bucket in range(3):
        stand.outlet.announce_unchanged(bucket, b"checksum", [0, 1])
    assert stand.outlet.readers == {1}
    assert list(stand.lost) == [0]


def test_a_writer_that_sends_nothing_in_time(make: Make) -> None:
    with pytest.raises(Stalled, match=r"sent nothing for 0\.05 s"):
        next_of(make(1), 3, SOON_S)


def test_old_messages_do_not_count_as_movement(make: Make) -> None:
    """They were sent long ago; a writer that is stopped has sent nothing of this update."""
    stand = make(1)
    for _ in range(5):
        stand.connections[0].send(BucketReady(UPDATE - 1, 3, 1, NUM_BYTES), later())
    with pytest.raises(Stalled):
        next_of(stand, 3, SOON_S)


def test_a_writer_that_is_gone(make: Make) -> None:
    stand = make(1)
    stand.outlet.announce(3, 1, [0])
    stand.connections[0].close()
    assert next_of(stand, 3) == 1
    with pytest.raises(ConnectionEnded):
        next_of(stand, 4)


def test_the_flag_ends_waiting_for_a_bucket(make: Make) -> None:
    stand = make(1)
    stand.stop.set()
    with pytest.raises(Cancelled):
        next_of(stand, 3)


def test_what_a_reader_said_last_is_heard_when_it_cannot_be_told_of_a_bucket(make: Make) -> None:
    """It says why it goes, and is gone before the writer has looked."""
    stand = make(1)
    stand.say(0, LoadFailed(UPDATE, "it is full"), PathLost("its node is gone"))
    stand.readers[0].close()
    stand.outlet.announce(bucket=0, slot=0, readers=[0])
    assert stand.others == [(0, LoadFailed(UPDATE, "it is full"))]
    assert what_of(stand.lost[0]) == "its node is gone"


# ---- Readers that share a connection --------------------------------------------------------------------------------


@pytest.fixture
def shared() -> Iterator[Stand]:
    """Reader 0 is told of buckets itself; 1 and 2 are by way of connection 3."""
    with given_back():
        stand = Stand(4, DEADLINE_S)
        readers = {key: stand.connections[key] for key in range(3)}
        arguments = (UPDATE, readers, DEADLINE_S, stand.stop, stand.lose, stand.hear)
        stand.outlet = Outlet(*arguments, lambda _bucket: NUM_BYTES, stand.freed.append)
        stand.outlet.share({3: stand.connections[3]}, {1: 3, 2: 3})
        yield stand
        stand.close()


def test_a_bucket_is_announced_once_to_those_who_share(shared: Stand) -> None:
    assert shared.outlet.readers == {0, 1, 2}
    shared.outlet.announce(0, 0, (0, 1, 2))
    shared.outlet.announce_unchanged(1, b"c", (1, 2))
    ready, unchanged = BucketReady(UPDATE, 0, 0, NUM_BYTES), BucketUnchanged(UPDATE, 1, b"c")
    assert [shared.heard(key) for key in range(4)] == [[ready], [], [], [ready, unchanged]]
    shared.say(0, SlotFreed(UPDATE, 0))
    shared.say(3, SlotFreed(UPDATE, 0))
    shared.outlet.wait_until_all_free()
    assert shared.freed == [0]


def test_the_slot_of_those_who_share_is_waited_for_even_if_one_of_them_leaves(shared: Stand) -> None:
    shared.outlet.announce(0, 0, (1, 2))
    shared.outlet.leave_out(1)
    assert shared.freed == []
    shared.say(3, SlotFreed(UPDATE, 0))
    shared.outlet.wait_until_free(0)
    assert shared.freed == [0]
    shared.outlet.leave_out(2)
    shared.outlet.announce(1, 1, (1, 2))  # nobody is there any more
    assert shared.freed == [0, 1]
    assert len(shared.heard(3)) == 1


@pytest.mark.parametrize("how", ["ends", "sends something else"])
def test_with_a_shared_connection_all_its_readers_are_lost(shared: Stand, how: str) -> None:
    shared.outlet.announce(0, 0, (0, 1, 2))
    if how == "ends":
        shared.readers[3].close()
    else:
        shared.say(3, MovementSeen(UPDATE))
    shared.outlet.wait_while(lambda: {1, 2})
    assert sorted(shared.lost) == [1, 2]
    assert shared.outlet.readers == {0}
    assert shared.freed == []
    shared.say(0, SlotFreed(UPDATE, 0))
    shared.outlet.wait_until_all_free()
    assert shared.freed == [0]


def test_what_comes_on_a_shared_connection_is_a_sign_of_all_its_readers(shared: Stand) -> None:
    """The reader itself has said nothing for long, and says then that it has everything."""
    shared.outlet._moved_s[1] -= 2 * DEADLINE_S
    shared.outlet.announce(0, 0, (1, 2))
    shared.say(3, SlotFreed(UPDATE, 0))
    shared.outlet.wait_until_all_free()
    loaded = VersionLoaded(UPDATE, b"", ())
    timer = threading.Timer(SOON_S, lambda: shared.say(1, loaded))
    timer.start()
    shared.outlet.wait_while(lambda: set() if shared.others else {1})
    timer.join()
    assert shared.others == [(1, loaded)]
    assert shared.lost == {}
