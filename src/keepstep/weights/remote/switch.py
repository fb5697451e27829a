"""Forwards messages and buckets on a node, between *above* (the publishers' side) and *below* (the consumers' side).

It is the same on the publishers' node and on each node below. Every consumer has a *tunnel* to its device for their
messages. A message from the device to several consumers arrives once and goes over each link once. So does a bucket: it
arrives in a slot of this node's buffer, from which local consumers copy it and links send it to other nodes. The slot
is free again when all of them have released it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from keepstep.errors import BufferUnavailable, PeerLost, RemoteProtocolError
from keepstep.protocol.transfer import messages as msg
from keepstep.protocol.transfer.layout import Layout
from keepstep.protocol.transfer.messages import AnyTransferMessage, TransferFault
from keepstep.protocol.transfer.plan import Bucket
from keepstep.weights.memory.buffers import Fill, SlotBuffer, SlotPart
from keepstep.weights.memory.pieces import CHECKSUM_BYTES
from keepstep.weights.remote.kept import Serving, VersionKeeper

CONSUMER_SHARE = 0.7
"""Share of the deadline for a local consumer that holds a slot that the next bucket needs. It is below 1, so that this
node, which knows the culprit, acts before the device, which sees only that no tunnel makes progress."""
NUM_SLOTS = 8
"""Number of slots in a node's buffer: the streams of a link fill some while others are read."""
MAX_SLOT_BYTES = 1 << 30
"""A larger claim of a peer is refused before memory is allocated for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class BucketInSlot:
    """A bucket in a slot of this node's buffer. It stays there until ``release`` is called.

    Attributes:
        update: number of the update.
        bucket: its index in the plan.
        part: the bucket and its checksum, readable until ``release``.
        release: the receiver of this object calls it when it no longer reads. Any thread, any number of times.
    """

    update: int
    bucket: int
    part: SlotPart
    release: Callable[[], None]


class Above(Protocol):
    """The way to the devices. No call blocks."""

    def open(self, tunnel: int, introduction: msg.SubscriberCalled) -> None:
        """Requests to attach a consumer."""
        ...

    def say(self, tunnel: int, message: AnyTransferMessage) -> None:
        """Sends a message from a consumer to its device."""
        ...

    def end(self, tunnel: int, reason: str) -> None:
        """Reports that a consumer is gone."""
        ...


class Below(Protocol):
    """The lower end of tunnels: the consumers of this node, or a link to another node. No call blocks for long."""

    def tell(self, key: int, message: AnyTransferMessage, buffer: SlotBuffer | None) -> None:
        """Sends a message from the device to a consumer. A `Welcomed` comes with this node's ``buffer``."""
        ...

    def begin(self, update: msg.UpdateBeganFor) -> None:
        """Announces an update. The numbers of its members are keys."""
        ...

    def tell_all(self, keys: Sequence[int], message: msg.Notice | msg.BucketUnchanged) -> None:
        """Sends a message from the device to these consumers; one about a bucket, to all that want the bucket."""
        ...

    def give(self, keys: Sequence[int], bucket: BucketInSlot) -> None:
        """Delivers a bucket to these consumers."""
        ...

    def end(self, key: int, reason: str) -> None:
        """Ends a tunnel."""
        ...


@dataclasses.dataclass(slots=True, eq=False)
class _Tunnel:
    """The connection of one consumer, as this node sees it."""

    below: Below
    key: int
    introduction: msg.SubscriberCalled
    update: int = 0
    is_local: bool = False
    moved_s: float = 0.0
    is_welcomed: bool = False
    serving: Serving | None = None
    """Set while this node sends the consumer the kept version. Afterwards the consumer attaches to the device."""


class _Group(NamedTuple):
    """Tunnels that lead to the same place, with their keys there."""

    below: Below
    tunnels: list[int]
    keys: list[int]


@dataclasses.dataclass(slots=True, eq=False)
class _Flow:
    """An update that comes through this node."""

    layout: Layout
    buckets: dict[int, Bucket]
    members: dict[int, int] = dataclasses.field(default_factory=dict)
    """Tunnel -> reader."""
    groups: dict[tuple[int, ...], list[_Group]] = dataclasses.field(default_factory=dict)
    """Readers of a bucket -> its destinations. Cleared when the members change."""


class Switch:
    """Connects a node's tunnels. All methods are thread-safe. It calls `Below.tell` and `Below.end` while locked."""

    def __init__(self, deadline_s: float, *, keeps: bool = False) -> None:
        """Args:
        deadline_s: the publishers' deadline, in seconds.
        keeps: keep the last version in host memory, for consumers that attach late. It takes as much memory as the
            weights, and twice as much while the next version arrives.
        """
        self._deadline_s = deadline_s
        self._keeper = VersionKeeper() if keeps else None
        self._generation, self._rank = 0, 0
        self._changed = threading.Condition(threading.RLock())
        self._tunnels: dict[int, _Tunnel] = {}
        self._flows: dict[int, _Flow] = {}
        self._last_tunnel = 0
        self._above: Above | None = None
        self._buffer: SlotBuffer | None = None
        self._holders: list[set[object]] = []
        """For each slot, the holders that have not released it: tunnels, links, or the thread that fills it."""
        self._last_layout: tuple[Layout, dict[int, Bucket]] | None = None
        self.version: int | None = None
        """The last version that was committed on a tunnel of this node."""
        self.version_bytes = 0
        """Total size of the last version's buckets."""
        self.num_bytes = 0
        """Total size of all received buckets."""

    # ---- from below -------------------------------------------------------------------------------------------------

    def open(self, below: Below, key: int, introduction: msg.SubscriberCalled, *, is_local: bool) -> int:
        """Opens a tunnel for a consumer and returns its number. The consumer waits while there is no way up."""
        with self._changed:
            self._last_tunnel += 1
            tunnel = self._last_tunnel
            there = self._tunnels[tunnel] = _Tunnel(below, key, introduction, is_local=is_local)
            kept = None if self._keeper is None or self._buffer is None else self._keeper.for_consumer(introduction)
            if kept is not None:
                assert self._buffer is not None
                place = msg.BufferPlace(self._buffer.num_slots, self._buffer.slot_bytes, None)
                welcomed = msg.Welcomed(self._rank, self._generation, place)
                there.serving = Serving(self, tunnel, kept, welcomed, self._deadline_s)
            elif self._above is not None:
                self._above.open(tunnel, introduction)
            return tunnel

    def say(self, tunnel: int, message: AnyTransferMessage) -> None:
        """A consumer says something to its device."""
        with self._changed:
            if (there := self._tunnels.get(tunnel)) is None:
                return
            if isinstance(message, msg.LoadFailed):
                self._part(tunnel, there)  # it takes no more of this update
            if there.serving is not None:
                there.serving.hear(message)
            elif self._above is not None:
                self._above.say(tunnel, message)

    def leave(self, tunnel: int, reason: str) -> None:
        """A consumer is gone."""
        with self._changed:
            there = self._drop(tunnel)
            if there is not None and there.serving is None and self._above is not None:
                self._above.end(tunnel, reason)

    @property
    def slot_bytes(self) -> int:
        """Size of a slot in this node's buffer; 0 while there is no buffer."""
        with self._changed:
            return 0 if self._buffer is None else self._buffer.slot_bytes

    @property
    def num_tunnels(self) -> int:
        """Number of consumers that are attached through this node, or are waiting to be."""
        with self._changed:
            return len(self._tunnels)

    # ---- from above -------------------------------------------------------------------------------------------------

    def rise(self, above: Above) -> None:
        """Sets the way up, and opens the waiting tunnels there."""
        with self._changed:
            self._above = above
            for number, tunnel in self._tunnels.items():
                if tunnel.serving is None:
                    above.open(number, tunnel.introduction)

    def fall(self, culprit: str, reason: str) -> None:
        """Removes the way up, which is lost, and ends its tunnels. The consumers keep their weights and reconnect."""
        with self._changed:
            self._above = None
            for number, tunnel in list(self._tunnels.items()):
                if tunnel.serving is None:
                    self._end_below(number, culprit, reason)

    def hear(self, tunnel: int, message: AnyTransferMessage) -> None:
        """The device says something to a consumer."""
        with self._changed:
            if (there := self._tunnels.get(tunnel)) is None:
                return
            buffer = None
            match message:
                case msg.Welcomed(buffer=place):
                    self._rank, self._generation = message.rank, message.generation
                    former = self._buffer
                    try:
                        buffer = self._buffer_for(place)
                    except (BufferUnavailable, RemoteProtocolError) as error:
                        self._refuse(tunnel, str(error))
                        return
                    if there.is_welcomed and buffer is former:
                        return
                    if there.is_welcomed:
                        self._refuse(tunnel, "the publisher's buckets have another size now")
                        return
                    there.is_welcomed = True
                    place = msg.BufferPlace(buffer.num_slots, buffer.slot_bytes, None)
                    message = msg.Welcomed(message.rank, message.generation, place)
                case msg.UpdateAborted():
                    self._part(tunnel, there)
                case _:
                    pass
            there.below.tell(there.key, message, buffer)
            if isinstance(message, msg.Refused):
                self._end_below(tunnel, "the device", message.reason, is_told=True)

    def hear_all(self, message: msg.ToProxied) -> None:
        """Forwards a message from the device to several consumers, by the numbers of their tunnels."""
        with self._changed:
            match message:
                case msg.UpdateBeganFor():
                    self._begin(message)
                case msg.BucketUnchanged(update, bucket):
                    if self._keeper is not None:
                        self._keeper.stayed(message)
                    for group in self._wanting(update, bucket):
                        group.below.tell_all(group.keys, message)
                case msg.SaidTo(numbers, notice):
                    if isinstance(notice, msg.VersionCommitted):
                        self.version = notice.version
                        if self._keeper is not None:
                            self._keeper.commit(notice.update)
                    groups = self._grouped(numbers)
                    for group in groups:
                        group.below.tell_all(group.keys, notice)
                        if not isinstance(notice, msg.MovementSeen):
                            for number in group.tunnels:
                                self._part(number, self._tunnels[number])

    def ended(self, tunnel: int, reason: str) -> None:
        """Nothing more comes on a tunnel."""
        with self._changed:
            self._end_below(tunnel, "the device", reason)

    def bring(self, update: int, bucket: int, num_bytes: int, fill: Fill) -> None:
        """Receives a bucket: waits for its slot, calls ``fill``, and gives the bucket to all consumers that want it.

        Before this call, the caller must have forwarded all messages that the device sent before the bucket.

        Args:
            update, bucket: number of the update, and index of the bucket.
            num_bytes: size of the bucket and its checksum.
            fill: writes these bytes into the slot. Called once, with None if no consumer wants the bucket any more.

        Raises:
            PeerLost: from ``fill``, or because no slot became free in time.
        """
        claim = object()
        claimed = self._claim(update, bucket, num_bytes, claim)
        if claimed is None:
            fill(None)
            return
        part, holders = claimed
        try:
            fill(part)
            with self._changed:
                self.num_bytes += num_bytes
                if self._keeper is not None:
                    self._keeper.came(update, bucket, part.content)
                gifts = [(group, self._gift(update, bucket, part, group)) for group in self._wanting(update, bucket)]
            for group, gift in gifts:
                group.below.give(group.keys, gift)
        finally:
            self._release(holders, claim)

    def served(self, number: int, version: int | None, has_failed: bool) -> None:
        """Called when a consumer has loaded the kept version, or has not (None). Attaches it to the device next."""
        with self._changed:
            if (tunnel := self._tunnels.get(number)) is None:
                return
            self._part(number, tunnel)
            tunnel.serving = None
            if version is not None:
                tunnel.introduction = msgspec.structs.replace(tunnel.introduction, version=version)
            elif not has_failed:
                self._end_below(number, "this node", "the consumer has not taken what is kept here")
                return
            if self._above is not None:
                self._above.open(number, tunnel.introduction)

    # ---- slots ------------------------------------------------------------------------------------------------------

    def _claim(self, update: int, bucket: int, num_bytes: int, claim: object) -> tuple[SlotPart, set[object]] | None:
        """Waits for the slot of a bucket and claims it. Returns its memory and its holders.

        None: no consumer wants the bucket. A buffer with slots of another size may take this one's place at any time.
        """
        until_s = time.monotonic() + 2 * self._deadline_s
        with self._changed:
            while True:
                flow = self._flows.get(update)
                if flow is None or self._buffer is None or not self._wanting(update, bucket):
                    return None
                if num_bytes != flow.buckets[bucket].num_bytes + CHECKSUM_BYTES or num_bytes > self._buffer.slot_bytes:
                    raise RemoteProtocolError(f"bucket {bucket} of update {update} came with {num_bytes} bytes")
                slot = bucket % self._buffer.num_slots
                if not self._holders[slot]:
                    self._holders[slot].add(claim)
                    return SlotPart(self._buffer, slot, num_bytes), self._holders[slot]
                self._let_go_of_the_slow(self._holders[slot])
                if self._holders[slot] and time.monotonic() >= until_s:
                    raise PeerLost(f"slot {slot} of this node was not freed")
                self._changed.wait(0.1)

    def _let_go_of_the_slow(self, holders: set[object]) -> None:
        patience_s = CONSUMER_SHARE * self._deadline_s
        for holder in list(holders):
            tunnel = self._tunnels.get(holder) if isinstance(holder, int) else None
            if tunnel is not None and time.monotonic() >= tunnel.moved_s + patience_s:
                assert isinstance(holder, int)
                reason = f"has shown nothing for {patience_s:g} s"
                self.leave(holder, reason)
                tunnel.below.end(tunnel.key, reason)

    def _wanting(self, update: int, bucket: int) -> list[_Group]:
        """The tunnels that want a bucket, by destination."""
        flow = self._flows.get(update)
        if flow is None or bucket not in flow.buckets:
            return []
        readers = flow.buckets[bucket].readers
        if readers not in flow.groups:
            wanting = set(readers)
            numbers = [number for number, reader in flow.members.items() if reader in wanting]
            flow.groups[readers] = self._grouped(numbers)
        return flow.groups[readers]

    def _grouped(self, numbers: Sequence[int]) -> list[_Group]:
        """Those of the tunnels that are still open, grouped by destination."""
        groups: dict[int, _Group] = {}
        for number in numbers:
            if (tunnel := self._tunnels.get(number)) is not None:
                group = groups.setdefault(id(tunnel.below), _Group(tunnel.below, [], []))
                group.tunnels.append(number)
                group.keys.append(tunnel.key)
        return list(groups.values())

    def _gift(self, update: int, bucket: int, part: SlotPart, group: _Group) -> BucketInSlot:
        """Makes the group holders of the bucket's slot: each tunnel of a local consumer, or a link as a whole."""
        holders = self._holders[part.slot]
        if self._tunnels[group.tunnels[0]].is_local:
            now_s = time.monotonic()
            for number in group.tunnels:
                if not any(number in each for each in self._holders):
                    self._tunnels[number].moved_s = now_s
            holders |= set(group.tunnels)
            return BucketInSlot(update, bucket, part, lambda: None)
        token = object()
        holders.add(token)
        return BucketInSlot(update, bucket, part, lambda: self._release(holders, token))

    def free(self, tunnel: int, update: int, slot: int) -> None:
        """Releases a slot for a consumer of this node."""
        with self._changed:
            if tunnel in self._tunnels and self._tunnels[tunnel].update == update and 0 <= slot < len(self._holders):
                self._tunnels[tunnel].moved_s = time.monotonic()
                self._release(self._holders[slot], tunnel)

    def _release(self, holders: set[object], holder: object) -> None:
        with self._changed:
            holders.discard(holder)
            self._changed.notify_all()

    def _buffer_for(self, place: msg.BufferPlace | None) -> SlotBuffer:
        """This node's buffer, for buckets as large as the device's."""
        if place is None or place.gpu is not None:
            raise RemoteProtocolError("the publisher's buffers are on a GPU: for other nodes they must be on 'cpu'")
        if not 0 < place.slot_bytes <= MAX_SLOT_BYTES:
            raise RemoteProtocolError(f"the publisher's buckets take {place.slot_bytes} bytes")
        if self._buffer is None or self._buffer.slot_bytes != place.slot_bytes:
            fresh = SlotBuffer.create(NUM_SLOTS, place.slot_bytes)
            if self._buffer is not None:
                self._buffer.close()
            self._buffer, self._holders = fresh, [set() for _ in range(NUM_SLOTS)]
        return self._buffer

    # ---- updates and tunnels ----------------------------------------------------------------------------------------

    def _begin(self, began: msg.UpdateBeganFor) -> None:
        """Begins an update for its members. They leave their former updates."""
        members = {member.number: member for member in began.members if member.number in self._tunnels}
        for number in members:
            self._part(number, self._tunnels[number])
        flow = self._flows.get(began.update)
        if flow is None or flow.layout != began.layout:
            if self._last_layout is None or self._last_layout[0] != began.layout:
                self._last_layout = began.layout, {bucket.index: bucket for bucket in began.layout.plan().buckets}
                self.version_bytes = sum(bucket.num_bytes for bucket in self._last_layout[1].values())
            flow = self._flows[began.update] = _Flow(*self._last_layout)
            if self._keeper is not None:
                self._keeper.begin(began, flow.buckets)
        flow.groups.clear()
        for group in self._grouped(list(members)):
            for number in group.tunnels:
                flow.members[number] = members[number].reader
                self._tunnels[number].update = began.update
            theirs = (
                msgspec.structs.replace(members[number], number=key)
                for number, key in zip(group.tunnels, group.keys, strict=True)
            )
            group.below.begin(msgspec.structs.replace(began, members=tuple(theirs)))

    def _part(self, number: int, tunnel: _Tunnel) -> None:
        """Removes a tunnel from its update, and releases all its slots."""
        for holders in self._holders:
            holders.discard(number)
        flow = self._flows.get(tunnel.update)
        if flow is not None:
            flow.members.pop(number, None)
            flow.groups.clear()
            if not flow.members:
                del self._flows[tunnel.update]
        tunnel.update = 0
        self._changed.notify_all()

    def _drop(self, number: int) -> _Tunnel | None:
        tunnel = self._tunnels.pop(number, None)
        if tunnel is not None:
            self._part(number, tunnel)
            if tunnel.serving is not None:
                tunnel.serving.end()
        return tunnel

    def _end_below(self, number: int, culprit: str, reason: str, *, is_told: bool = False) -> None:
        if (tunnel := self._drop(number)) is None:
            return
        if not is_told:
            tunnel.below.tell(tunnel.key, msg.UpdateAborted(0, TransferFault.LOST, culprit, reason), None)
        tunnel.below.end(tunnel.key, reason)

    def _refuse(self, number: int, reason: str) -> None:
        """Refuses a consumer, because this node cannot forward the device's buckets to it."""
        tunnel = self._tunnels[number]
        tunnel.below.tell(tunnel.key, msg.Refused(reason, stale=False), None)
        if self._above is not None:
            self._above.end(number, reason)
        self._end_below(number, "this node", reason, is_told=True)

    def close(self) -> None:
        """Ends the tunnels and frees the buffer, which must not be used any more."""
        self.fall("this node", "it is shut down")
        with self._changed:
            if self._buffer is not None:
                with contextlib.suppress(BufferError):
                    self._buffer.close()
                self._buffer = None
