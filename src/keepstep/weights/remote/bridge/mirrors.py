"""Mirrors: local copies of the buffers of devices on other nodes."""

from __future__ import annotations

import threading

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.transfer.messages import BucketReady, BufferPlace
from keepstep.weights.memory.buffers import Fill, SlotBuffer, SlotPart

ON_A_GPU = "its buffers are on a GPU: with publishers on several nodes they must be on 'cpu'"
"""Error for a buffer that cannot have a mirror."""
MAX_MIRROR_BYTES = 1 << 31
"""A larger claim of a peer is refused before memory is allocated for it."""


class Mirror:
    """A local copy of a remote device's buffer, slot by slot. Any thread.

    The device overwrites a slot only after all its readers, including those on this node, have freed it. So the mirror
    need not count readers. Shipments arrive in the order of their numbers, as a link delivers buckets in order.
    """

    def __init__(self, place: BufferPlace) -> None:
        """Args:
        place: the device's description of its buffer.

        Raises:
            RemoteProtocolError: the buffer is on a GPU, or too large.
            BufferUnavailable: this node does not have enough memory.
        """
        if place.gpu is not None:
            raise RemoteProtocolError(ON_A_GPU)
        if not 0 < place.num_slots * place.slot_bytes <= MAX_MIRROR_BYTES:
            raise RemoteProtocolError(f"its buffer has {place.num_slots} slots of {place.slot_bytes} bytes")
        self.buffer = SlotBuffer.create(place.num_slots, place.slot_bytes)
        self._lock = threading.Lock()
        self._expected: dict[int, BucketReady] = {}
        self._last_expected = 0
        self._arrived = [0] * place.num_slots
        """For each slot, the number of its latest complete shipment. The next one may be overwriting it."""

    def expect(self, shipment: int, ready: BucketReady) -> None:
        """Registers a shipment that will arrive, or has arrived.

        Raises:
            RemoteProtocolError: the shipment does not fit into its slot.
        """
        if not (0 <= ready.slot < self.buffer.num_slots and 0 < ready.num_bytes <= self.buffer.slot_bytes):
            raise RemoteProtocolError(
                f"announced bucket {ready.bucket} of {ready.num_bytes} bytes in slot {ready.slot}"
            )
        with self._lock:
            if shipment > self._last_expected:
                self._last_expected = shipment
                self._expected[shipment] = ready

    def take(self, shipment: int, num_bytes: int, fill: Fill) -> None:
        """Receives a shipment into its slot by calling ``fill``; see `keepstep.weights.memory.buffers.Fill`."""
        with self._lock:
            ready = self._expected.pop(shipment, None)
        if ready is None or ready.num_bytes != num_bytes:
            fill(None)
            return
        fill(SlotPart(self.buffer, ready.slot, num_bytes))
        self._arrived[ready.slot] = shipment

    def has(self, shipment: int, slot: int) -> bool:
        """Whether a shipment has arrived in its slot."""
        return self._arrived[slot] >= shipment
