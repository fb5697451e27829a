"""What lies in a device's buffer on another node, slot by slot, for its readers on this one."""

from __future__ import annotations

import threading

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.transfer.messages import BucketReady, BufferPlace
from keepstep.weights.memory.buffers import Fill, SlotBuffer, SlotPart

ON_A_GPU = "its buffers are on a GPU: with publishers on several nodes they must be on 'cpu'"
"""Why a buffer has no mirror."""
MAX_MIRROR_BYTES = 1 << 31
"""What claims more is refused before memory is taken for it."""


class Mirror:
    """A buffer like the device's. Any thread.

    The device writes a slot again only when all its readers have freed it, those on this node among them, so nothing
    here has to count readers. What an update that broke off has left on one stream of a link may come after what the
    next one sends on another: a slot takes only what was shipped later than what it has.
    """

    def __init__(self, place: BufferPlace) -> None:
        """Args:
        place: what the device says of its buffer.

        Raises:
            RemoteProtocolError: it is on a GPU, or too large.
            BufferUnavailable: there is not so much memory here.
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
        """By slot: the latest shipment that is there. While the next one comes it is still there in name only."""
        self._turns = [threading.Lock() for _ in range(place.num_slots)]

    def expect(self, shipment: int, ready: BucketReady) -> None:
        """A shipment comes, or is there already.

        Raises:
            RemoteProtocolError: it does not fit.
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
        """A shipment has come; see `keepstep.weights.memory.buffers.Fill`."""
        with self._lock:
            ready = self._expected.pop(shipment, None)
        if ready is None or ready.num_bytes != num_bytes:
            fill(None)
            return
        with self._turns[ready.slot]:
            if shipment < self._arrived[ready.slot]:
                fill(None)
                return
            fill(SlotPart(self.buffer, ready.slot, num_bytes))
            self._arrived[ready.slot] = shipment

    def has(self, shipment: int, slot: int) -> bool:
        """Whether a shipment has come into its slot."""
        return self._arrived[slot] >= shipment
