"""The common definitions of both ends of a stream: its name, the content of a gRPC message, and gRPC's settings.

A gRPC message consists of one or more complete frames of `keepstep.transports.framing`. Frames that are sent at the
same moment share a message: a gRPC message costs a hundred microseconds, a frame two.
"""

from __future__ import annotations

import contextlib
import urllib.parse
from collections import deque
from collections.abc import Iterable

from keepstep.errors import RemoteProtocolError, TokenRefused
from keepstep.protocol.messages import AnyMessage
from keepstep.transports.codec import MAX_MESSAGE_BYTES
from keepstep.transports.framing import FrameDecoder

SERVICE = "keepstep.Controller"
METHOD = "Converse"
PATH = f"/{SERVICE}/{METHOD}"
AUTHORIZATION = "authorization"
BEARER = "Bearer "
OPEN = "keepstep-open"
"""The key in the initial metadata with which a controller accepts an agent. The value is the term of its lease."""

MAX_CALL_BYTES = MAX_MESSAGE_BYTES + 4
"""Limit of a gRPC message. gRPC refuses a larger one by its length, before it reads it."""
PING_S = 2.0
"""Keepalive: gRPC pings a silent connection after this time, and closes it if the ping has no answer for as long."""

SETTINGS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_CALL_BYTES),
    ("grpc.max_send_message_length", MAX_CALL_BYTES),
    ("grpc.max_metadata_size", 8192),
    ("grpc.keepalive_time_ms", round(1000 * PING_S)),
    ("grpc.keepalive_timeout_ms", round(1000 * PING_S)),
    ("grpc.http2.ping_timeout_ms", round(1000 * PING_S)),  # default: a minute, also for a stopped process
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
    ("grpc.http2.bdp_probe", 0),  # it pings after every message, to size windows that this traffic never fills
)


def address_of(peer: str) -> str:
    """Returns the address in gRPC's name of a client: ``ipv4:10.0.0.1:5000``, or ``ipv6:%5B::1%5D:5000``."""
    return urllib.parse.unquote(peer.partition(":")[2])


def bearer_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Returns the bearer token in a call's metadata.

    Raises:
        TokenRefused: there is none.
    """
    with contextlib.suppress(UnicodeDecodeError):
        for name, value in metadata or ():
            text = value if isinstance(value, str) else value.decode()
            if name == AUTHORIZATION and text.startswith(BEARER):
                return text.removeprefix(BEARER)
    raise TokenRefused("no token")


def messages_in(data: bytes) -> list[AnyMessage]:
    """Decodes the messages in one gRPC message.

    Raises:
        RemoteProtocolError: it contains an incomplete frame, or a frame that is no message.
    """
    decoder = FrameDecoder()
    found = decoder.feed(data)
    if decoder.num_buffered:
        raise RemoteProtocolError(f"{decoder.num_buffered} bytes that are no whole frame")
    return found


class Outbox:
    """Frames that wait to be sent."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self.num_bytes = 0

    def put(self, frame: bytes) -> None:
        """Adds a frame."""
        self._frames.append(frame)
        self.num_bytes += len(frame)

    def take(self) -> bytes:
        """Removes and returns as many frames as fit into one gRPC message; empty if there are none."""
        taken = bytearray()
        while self._frames and (not taken or len(taken) + len(self._frames[0]) <= MAX_CALL_BYTES):
            taken += self._frames.popleft()
        self.num_bytes -= len(taken)
        return bytes(taken)
