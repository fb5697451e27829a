"""Connections between two ranks of one machine, over which a receiver reads its sources' buffers, on the host or a GPU.

The receiver listens on an abstract Unix socket with a random name, which leaves no file, and sends the name to its
sources over the process group. A source that can connect is a neighbour. The kernel reports whether it runs as the same
user. Other sources (on another machine or in another network namespace) send over the process group instead.
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
"""Long enough that the name cannot be guessed. The receiver also checks the user of each caller."""


class NeighbourPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The address of a receiver. A socket name is valid only within one boot of one machine."""

    boot: str
    name: bytes
    gpus: tuple[str, ...]
    """UUIDs of the GPUs whose memory it can map."""


def boot() -> str:
    """The boot id of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class Neighbourhood:
    """The receiver's side: a socket to which its neighbours connect."""

    def __init__(self, gpus: tuple[str, ...] = ()) -> None:
        """Args:
        gpus: UUIDs of the GPUs whose memory this process can map.
        """
        self.place = NeighbourPlace(boot(), b"\0keepstep-" + secrets.token_hex(_NAME_BYTES).encode(), gpus)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(self.place.name)
        self._socket.listen(64)

    def accept(self, num_sources: int, until_s: float, stop: CancelToken) -> dict[int, tuple[Connection, Buffer]]:
        """Waits for connections from sources and attaches their buffers. The caller owns connections and buffers.

        Args:
            num_sources: how many sources will connect.
            until_s: deadline on the monotonic clock.
            stop: cancels the wait.

        Returns:
            rank of each source -> (connection, buffer).

        Raises:
            PeerLost: the sources did not connect in time.
            RemoteProtocolError: a process of another user connected, or one that is no source.
            MemoryNotMapped: CUDA cannot map a source's buffer.
            Cancelled: ``stop`` was set.
        """
        sources: dict[int, tuple[Connection, Buffer]] = {}
        while len(sources) < num_sources:
            if not wait([self._socket], until_s, stop):
                raise ConnectionStalled("the sources", f"did not connect: {len(sources)} of {num_sources} did")
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
    """The source's side: connects to a receiver; None if it is no neighbour. The caller owns the connection."""
    if place.boot != boot():
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = Connection(sock, "the receiver")
    try:
        sock.connect(place.name)
        if same_user(sock):
            return connection
    except (OSError, PeerLost):
        pass  # the receiver is in another namespace, or is gone: then the group reports it
    connection.close()
    return None


def give_buffer(connection: Connection, rank: int, h2d: Buffer, deadline_s: float) -> None:
    """The source's side: shares a buffer with a receiver, for reading.

    Args:
        connection: the connection to the receiver, from `reach`.
        rank: this rank.
        h2d: the buffer.
        deadline_s: timeout of the send, in seconds.

    Raises:
        PeerLost: the receiver is gone.
    """
    place, descriptors = h2d.share()
    connection.send(Welcomed(rank, 0, place), time.monotonic() + deadline_s, descriptors)
