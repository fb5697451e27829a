"""The transports that there are, by their names. Each is imported only where it is used."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.errors import ConfigurationError
from keepstep.weights.remote.link import BucketTransport
from keepstep.weights.remote.messages import NIXL, TCP
from keepstep.weights.remote.stream import ByteStream
from keepstep.weights.remote.transports.tcp import TcpTransport

TRANSPORTS = (TCP, NIXL)


def check_transport(name: str) -> None:
    """Checks that links with this transport can be made.

    Raises:
        ConfigurationError: there is none of this name, or what it needs is not installed, or does not work here.
    """
    if name not in TRANSPORTS:
        raise ConfigurationError(f"transport={name!r}: allowed are {' and '.join(map(repr, TRANSPORTS))}")
    if name == NIXL:
        from keepstep.weights.remote.transports.nixl import check_nixl

        check_nixl()


def make_transport(name: str, streams: Sequence[ByteStream], num_parallel: int) -> BucketTransport:
    """One end of it, for one link.

    Args:
        name: one for which `check_transport` raised nothing.
        streams: that the link has besides the connection for messages; the transport owns them.
        num_parallel: how many buckets are received at a time, where that does not follow from ``streams``.
    """
    if name == NIXL:
        from keepstep.weights.remote.transports.nixl import NixlTransport

        for stream in streams:
            stream.close()  # it needs none
        return NixlTransport(num_parallel)
    return TcpTransport(streams)
