"""Frames between controller and relay: what comes out is what went in, and what is none is refused."""

import pytest

from keepstep.errors import RemoteProtocolError
from keepstep.protocol import messages as msg
from keepstep.protocol.relay.bundle import NodeConnected, NodeSaid, PacketBundle
from keepstep.transports import codec
from keepstep.transports.relay import wire

STOP = (msg.Stop(2, "rank 1 lost", None),)
ORDERS = PacketBundle(("node-0", "node-1"), (1, 4), (7, 9), (3, 5), ((), ()), STOP)


def test_an_upward_frame_comes_out_as_it_went_in() -> None:
    beat = msg.Packet("node-2", 1, 4, 4, (), misses=True)
    answers = PacketBundle(("node-0",), (1,), (7,), (3,), ((1, 2),), (msg.GroupsReset((), 2),))
    frame = wire.Upward((NodeConnected("node-2"), NodeSaid("node-2", beat), answers))
    assert wire.decode_upward(wire.encode(frame)) == frame


def test_a_relay_makes_the_packets_that_the_controller_would_have_made() -> None:
    frame = wire.Downward(True, tuple(wire.encoded_bundles([ORDERS])), (), (("node-3", "it lies"),), ())
    arrived = wire.decode_downward(wire.encode(frame))
    assert (arrived.has_taken, arrived.refused) == (True, (("node-3", "it lies"),))
    (bundle,) = arrived.bundles
    made = [(node, codec.decode(packet)) for node, packet in bundle.packets()]
    assert made == [(packet.node, packet) for packet in ORDERS.packets()]


def test_what_is_the_same_for_several_relays_is_encoded_once() -> None:
    other = PacketBundle(("node-5",), (1,), (2,), (2,), ((),), STOP)
    first, second = wire.encoded_bundles([ORDERS, other])
    assert first.messages is second.messages


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91", codec.encode(msg.Resume(1))])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    for decode in (wire.decode_upward, wire.decode_downward):
        with pytest.raises(RemoteProtocolError, match="not a frame between relay and controller"):
            decode(data)
