"""The common definitions of both ends of a stream: its name, the content of a gRPC message, and gRPC's settings.

A gRPC message consists of one or more complete frames of `keepstep.transports.framing`. Frames that are sent at the
same moment share a message: a gRPC message costs a hundred microseconds, a frame two.
"""

from __future__ import annotations

import contextlib
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
"""Stands in the first metadata of a controller that has let an agent in: its term, the number of its lease."""

MAX_CALL_BYTES = MAX_MESSAGE_BYTES + 4
"""Of a gRPC message; gRPC refuses a larger one by its length, before anything of it is read."""
PING_S = 2.0
"""A connection over which nothing comes is probed this often, and ends when the probe has no answer as long."""

SETTINGS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_CALL_BYTES),
    ("grpc.max_send_message_length", MAX_CALL_BYTES),
    ("grpc.max_metadata_size", 8192),
    ("grpc.keepalive_time_ms", round(1000 * PING_S)),
    ("grpc.keepalive_timeout_ms", round(1000 * PING_S)),
    ("grpc.http2.ping_timeout_ms", round(1000 * PING_S)),  # its own default is a minute, and a stopped process has that
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # as many as it takes
    ("grpc.http2.bdp_probe", 0),  # it answers every message with a ping, for windows that this traffic never fills
)


def bearer_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The token that came with a call.

    Raises:
        TokenRefused: none came.
    """
    with contextlib.suppress(UnicodeDecodeError):
        for name, value in metadata or ():
            text = value if isinstance(value, str) else value.decode()
            if name == AUTHORIZATION and text.startswith(BEARER):
                return text.removeprefix(BEARER)
    raise TokenRefused("no token")


def messages_in(data: bytes) -> list[AnyMessage]:
    """The messages of one gRPC message.

    Raises:
        RemoteProtocolError: it is not whole frames, or one of them is no message.
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
        """As many frames as one gRPC message may hold, at least one if there is any."""
        taken = bytearray()
        while self._frames and (not taken or len(taken) + len(self._frames[0]) <= MAX_CALL_BYTES):
            taken += self._frames.popleft()
        self.num_bytes -= len(taken)
        return bytes(taken)
