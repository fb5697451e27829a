"""Both ends of a connection inside one process."""

import socket

from keepstep.weights.channels.connection import Connection


def connection_pair(name: str) -> tuple[Connection, Connection]:
    """The two ends; each calls the other one ``name``."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Connection(left, name), Connection(right, name)
