"""Flow control between two stages: a slot is overwritten only when all its readers have released it.

Nothing is synchronised per bucket: a writer waits for the readers of one slot, a reader for its next bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

import torch

from keepstep.cancel import CancelToken
from keepstep.errors import PeerLost, RemoteProtocolError
from keepstep.protocol.transfer.messages import (
    AnyTransferMessage,
    BucketReady,
    BucketUnchanged,
    BufferPlace,
    SlotFreed,
    UpdateAborted,
)
from keepstep.protocol.transfer.plan import Bucket
from keepstep.weights.channels.connection import Connection, ConnectionEnded, wait
from keepstep.weights.memory.buffers import Buffer, SlotBuffer
from keepstep.weights.memory.gpu_buffers import GpuBuffer


class Stalled(PeerLost):
    """The awaited process made no progress within the deadline."""


Lose = Callable[[int, PeerLost | RemoteProtocolError], None]
Other = Callable[[int, AnyTransferMessage], None]
Await = Callable[[Connection, float], bool]
"""Waits for a message on a connection until a time on the monotonic clock. Returns whether it arrived."""


class Outlet:
    """The writing side of a buffer in one update."""

    def __init__(
        self,
        update: int,
        connections: Mapping[int, Connection],
        deadline_s: float,
        stop: CancelToken,
        lose: Lose,
        other: Other,
        size_of: Callable[[int], int],
        freed: Callable[[int], None] = lambda slot: None,
    ) -> None:
        """Args:
        update: number of the update, part of every message.
        connections: the readers' connections, by a key that the caller chooses.
        deadline_s: time without progress after which an awaited reader counts as lost.
        stop: cancels all waits.
        lose: called with a reader that is lost or stalled, after the outlet has removed it.
        other: called with every message other than `SlotFreed`.
        size_of: returns the bytes that a bucket and its checksum take in a slot, by index of the bucket.
        freed: called with each announced slot when no reader uses it any more.
        """
        self._update, self._deadline_s, self._stop = update, deadline_s, stop
        self._lose, self._other, self._size_of, self._freed = lose, other, size_of, freed
        self._connections = dict(connections)
        self._proxies: dict[int, int] = {}
        """Reader on another node -> key of the proxy's connection, on which buckets are announced."""
        self._held: dict[int, set[int]] = {}
        """By slot: its readers."""
        self._moved_s = dict.fromkeys(connections, time.monotonic())

    def share(self, proxies: Mapping[int, Connection], through: Mapping[int, int]) -> None:
        """Announces buckets to a proxy, once for all readers behind it on other nodes. Call it before anything else.

        Args:
            proxies: the proxies' connections, by keys of their own. A proxy holds slots in place of its readers.
            through: reader -> key of its proxy.
        """
        self._connections |= proxies
        self._proxies = dict(through)
        self._moved_s |= dict.fromkeys(proxies, time.monotonic())

    @property
    def readers(self) -> set[int]:
        """The readers that are not lost and have not been left out."""
        return set(self._connections) - set(self._proxies.values())

    def announce(self, bucket: int, slot: int, readers: Collection[int]) -> None:
        """Announces a bucket in a slot to those of the readers that are still present."""
        message = BucketReady(self._update, bucket, slot, self._size_of(bucket))
        present = self._told(readers)
        for key in present.keys() - self._holding:
            self._moved_s[key] = time.monotonic()
        self._held[slot] = set(present)
        if not present:
            self._freed(slot)
        for key in present:
            if key not in self._connections:
                continue
            try:
                self._connections[key].send(message, time.monotonic() + self._deadline_s)
            except ConnectionEnded as error:
                connection = self._connections[key]
                while key in self._connections and connection.has_ended:  # its last message may give the reason
                    self._read(key, connection)
                if key in self._connections:
                    self.leave_out(key, error)
            except PeerLost as error:
                self.leave_out(key, error)

    def announce_unchanged(self, bucket: int, checksum: bytes, readers: Collection[int]) -> None:
        """Tells those of the readers that are still present that they already have the content of a bucket."""
        message = BucketUnchanged(self._update, bucket, checksum)
        for key, connection in self._told(readers).items():
            if key not in self._holding:
                self._moved_s[key] = time.monotonic()
            try:
                connection.send(message, time.monotonic() + self._deadline_s)
            except PeerLost as error:
                self.leave_out(key, error)

    def _told(self, readers: Collection[int]) -> dict[int, Connection]:
        """The connections on which buckets are announced to those of the readers that are still present."""
        keys = dict.fromkeys(self._proxies.get(key, key) for key in readers if key in self._connections)
        return {key: self._connections[key] for key in keys if key in self._connections}

    def wait_until_free(self, slot: int) -> None:
        """Waits until no reader uses the slot. Raises Cancelled if ``stop`` is set."""
        self.wait_while(lambda: self._held.get(slot, set()))

    def wait_until_all_free(self) -> None:
        """Waits until no reader uses any slot. Raises Cancelled if ``stop`` is set."""
        self.wait_while(lambda: self._holding)

    def wait_while(self, pending: Callable[[], set[int]]) -> None:
        """Handles messages of the readers until none is pending. Readers that make no progress are lost.

        Args:
            pending: returns the keys of the readers to wait for.

        Raises:
            Cancelled: ``stop`` was set.
        """
        while waited := {key: self._connections[key] for key in pending() if key in self._connections}:
            for proxy in {self._proxies[key] for key in waited if key in self._proxies} & self._holding:
                waited[proxy] = self._connections[proxy]
            self._hear(waited, wait(waited.values(), self._due_s(waited), self._stop))

    def hear_until(self, awaited: Connection, until_s: float) -> bool:
        """Handles messages of the readers that hold slots, until a message arrives on another connection.

        Returns:
            whether it arrived before ``until_s``, on the monotonic clock.

        Raises:
            Cancelled: ``stop`` was set.
        """
        while True:
            holding = {key: self._connections[key] for key in self._holding}
            ready = wait([awaited, *holding.values()], min(until_s, self._due_s(holding)), self._stop)
            self._hear(holding, ready)
            if awaited in ready or time.monotonic() >= until_s:
                return awaited in ready

    @property
    def _holding(self) -> set[int]:
        """The readers that hold slots."""
        return set[int]().union(*self._held.values())

    def _due_s(self, waited: Collection[int]) -> float:
        """The earliest time at which one of the readers counts as lost if it sends nothing."""
        return min((self._last_moved_s(key) for key in waited), default=float("inf")) + self._deadline_s

    def _last_moved_s(self, key: int) -> float:
        """The time of the last message from a reader or its proxy, or of its first announcement."""
        return max(self._moved_s[key], self._moved_s[self._proxies.get(key, key)])

    def _hear(self, waited: Mapping[int, Connection], ready: Collection[Connection]) -> None:
        now_s = time.monotonic()
        for key, connection in waited.items():
            if connection in ready:
                self._moved_s[key] = now_s
                self._read(key, connection)
            elif now_s >= self._last_moved_s(key) + self._deadline_s:
                self.leave_out(key, Stalled(f"has shown nothing for {self._deadline_s:g} s"))

    def leave_out(self, key: int, error: PeerLost | RemoteProtocolError | None = None) -> None:
        """Removes a reader, and with a proxy all its readers. With an error, it reports each as lost."""
        self._connections.pop(key, None)
        for slot in list(self._held):
            self._let_go(slot, key)
        if key in self._proxies.values():
            for reader in [each for each, proxy in self._proxies.items() if proxy == key and each in self._connections]:
                self.leave_out(reader, error)
        elif error is not None:
            self._lose(key, error)

    def _read(self, key: int, connection: Connection) -> None:
        try:
            message = connection.receive_now()
        except (PeerLost, RemoteProtocolError) as error:
            self.leave_out(key, error)
            return
        if message is None:
            return
        if key in self._proxies.values() and not isinstance(message, SlotFreed):
            self.leave_out(key, RemoteProtocolError(f"sent {message!r:.80}"))
        elif not isinstance(message, SlotFreed):
            self._other(key, message)
        elif message.update == self._update:
            self._let_go(message.slot, key)

    def _let_go(self, slot: int, key: int) -> None:
        held = self._held.get(slot, set())
        if key in held:
            held.discard(key)
            if not held:
                self._freed(slot)


def next_bucket(
    connection: Connection, update: int, bucket: int, deadline_s: float, comes: Await
) -> BucketReady | BucketUnchanged:
    """Waits for the announcement of one bucket. Drops messages of earlier updates.

    Args:
        connection: the connection to the writer.
        update: number of the update.
        bucket: index of the expected bucket.
        deadline_s: time without progress after which the writer counts as lost.
        comes: waits for a message.

    Raises:
        Cancelled: ``comes`` was cancelled.
        PeerLost: the writer is gone, or did not write within the deadline.
        RemoteProtocolError: the writer announced another bucket.
    """
    until_s = time.monotonic() + deadline_s
    while True:
        message = connection.receive_now()
        match message:
            case None:
                if not comes(connection, until_s):
                    raise Stalled(f"sent nothing for {deadline_s:g} s")
            case BucketReady() | BucketUnchanged() | UpdateAborted() if message.update < update:
                continue
            case BucketReady() | BucketUnchanged() if (message.update, message.bucket) == (update, bucket):
                return message
            case other:
                raise RemoteProtocolError(f"bucket {bucket} of update {update} was due, {other!r:.80} came")


class Inlet:
    """The reading side of another process's buffer in one update."""

    def __init__(
        self, update: int, connection: Connection, buffer: Buffer, deadline_s: float, stop: CancelToken
    ) -> None:
        """Args:
        update: number of the update, part of every message.
        connection: connection to the writer.
        buffer: the writer's buffer.
        deadline_s: time without progress after which the writer counts as lost.
        stop: cancels all waits.
        """
        self._update, self._connection, self._buffer = update, connection, buffer
        self._deadline_s, self._stop = deadline_s, stop
        self._slot = 0

    def take(self, bucket: Bucket) -> torch.Tensor:
        """Waits for a bucket and returns its slot, uint8, valid until `release`. Raises as `next_bucket`."""
        ready = self.next(bucket, lambda connection, until_s: bool(wait([connection], until_s, self._stop)))
        if isinstance(ready, BucketUnchanged):
            raise RemoteProtocolError(f"bucket {bucket.index} is said to be here, and nothing is")
        self._slot = ready.slot
        return self._buffer.view(ready.slot)

    def release(self) -> None:
        """Frees the slot of the bucket that was taken. Raises as `free`."""
        self.free(self._slot)

    def next(self, bucket: Bucket, comes: Await) -> BucketReady | BucketUnchanged:
        """Waits for a bucket. Returns its slot, valid until `free`, or that the readers already have its content.

        The caller may take several buckets before it frees the first. Raises as `next_bucket`.
        """
        ready = next_bucket(self._connection, self._update, bucket.index, self._deadline_s, comes)
        if isinstance(ready, BucketReady) and not 0 <= ready.slot < self._buffer.num_slots:
            raise RemoteProtocolError(f"bucket {bucket.index} in slot {ready.slot} of {self._buffer.num_slots}")
        return ready

    def free(self, slot: int) -> None:
        """Releases a slot to the writer.

        Raises:
            PeerLost: the writer is gone, or does not read.
        """
        self._connection.send(SlotFreed(self._update, slot), time.monotonic() + self._deadline_s)


def attach_buffer(place: BufferPlace | None, connection: Connection) -> Buffer:
    """Maps another process's buffer for reading.

    Args:
        place: the process's description of the buffer.
        connection: the connection that ``place`` came on.

    Raises:
        RemoteProtocolError: there is no buffer, or it does not match its description.
    """
    if place is None:
        raise RemoteProtocolError(f"{connection.who} named no buffer where one belongs")
    if place.gpu is not None:
        return GpuBuffer.attach(place)
    return SlotBuffer.attach(connection.take_descriptor(), place.num_slots, place.slot_bytes)
