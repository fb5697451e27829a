"""Connections between two ranks of one machine, over which a receiver reads its sources' buffers, on the host or a GPU.

The receiver listens under a random name in the abstract namespace of Unix sockets, which leaves no file, and tells it
to its sources over the group. A source that can connect to it is a neighbour; the kernel reports whether it runs as the
same user. Other sources (on another machine, in another network namespace) send over the group instead.
"""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path
from types import TracebackType

import msgspec

from keepstep.cancel import CancelToken
from keepstep.errors import PeerLost, RemoteProtocolError
from keepstep.protocol.transfer.messages import BufferPlace, Welcomed
from keepstep.weights.channels.connection import Connection, ConnectionStalled, same_user, wait
from keepstep.weights.channels.flow import attach_buffer
from keepstep.weights.memory.buffers import Buffer

_NAME_BYTES = 16
"""Too many to be guessed; and the kernel is asked who calls besides."""


class NeighbourPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a receiver can be reached. A name means something within one boot only."""

    boot: str
    name: bytes
    gpus: tuple[str, ...]
    """UUIDs of the GPUs whose memory it can map."""


def boot() -> str:
    """Of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class Neighbourhood:
    """The receiver's side: a socket on which its neighbours call."""

    def __init__(self, gpus: tuple[str, ...] = ()) -> None:
        """Args:
        gpus: UUIDs of those whose memory this process can map.
        """
        self.place = NeighbourPlace(boot(), b"\0keepstep-" + secrets.token_hex(_NAME_BYTES).encode(), gpus)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(self.place.name)
        self._socket.listen(64)

    def accept(self, num_sources: int, until_s: float, stop: CancelToken) -> dict[int, tuple[Connection, Buffer]]:
        """The connections and buffers of so many sources, by rank; the caller owns them.

        Raises:
            PeerLost: they did not call in time.
            RemoteProtocolError: another process called.
            MemoryNotMapped: CUDA does not map a source's buffer.
            Cancelled: by ``stop``.
        """
        sources: dict[int, tuple[Connection, Buffer]] = {}
        while len(sources) < num_sources:
            if not wait([self._socket], until_s, stop):
                raise ConnectionStalled("the sources", f"did not call: {len(sources)} of {num_sources} are here")
            sock, _address = self._socket.accept()
            connection = Connection(sock, "a source")
            if not same_user(sock):
                connection.close()
                raise RemoteProtocolError("a process of another user called in place of a source")
            match connection.receive(until_s):
                case Welcomed(rank, _generation, BufferPlace() as place):
                    sources[rank] = (connection, attach_buffer(place, connection))
                case other:
                    raise RemoteProtocolError(f"a source called with {other!r:.80}")
        return sources

    def __enter__(self) -> Neighbourhood:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()


def reach(place: NeighbourPlace) -> Connection | None:
    """The source's side: a connection to a receiver, which is the caller's; None if it is no neighbour."""
    if place.boot != boot():
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = Connection(sock, "the receiver")
    try:
        sock.connect(place.name)
        if same_user(sock):
            return connection
    except (OSError, PeerLost):
        pass  # it lives in another namespace, or is gone, which the group will tell
    connection.close()
    return None


def give_buffer(connection: Connection, rank: int, h2d: Buffer, deadline_s: float) -> None:
    """The source's side: lets a receiver that was reached read in a buffer.

    Raises:
        PeerLost: it is gone.
    """
    place, descriptors = h2d.share()
    connection.send(Welcomed(rank, 0, place), time.monotonic() + deadline_s, descriptors)
