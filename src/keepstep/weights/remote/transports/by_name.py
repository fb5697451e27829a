"""The available transports by name. Each is imported only when it is used."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.errors import ConfigurationError
from keepstep.weights.remote.link import BucketTransport
from keepstep.weights.remote.messages import NIXL, TCP
from keepstep.weights.remote.stream import ByteStream
from keepstep.weights.remote.transports.tcp import TcpTransport

TRANSPORTS = (TCP, NIXL)


def check_transport(name: str) -> None:
    """Checks that a transport can be used on this machine.

    Raises:
        ConfigurationError: there is no transport of this name, or a required library is missing or does not work.
    """
    if name not in TRANSPORTS:
        raise ConfigurationError(f"transport={name!r}: allowed are {' and '.join(map(repr, TRANSPORTS))}")
    if name == NIXL:
        from keepstep.weights.remote.transports.nixl import check_nixl

        check_nixl()


def make_transport(name: str, streams: Sequence[ByteStream], num_parallel: int) -> BucketTransport:
    """Creates one end of a transport for one link.

    Args:
        name: name of the transport; `check_transport` must have accepted it.
        streams: the link's streams besides the connection for messages. The transport owns them.
        num_parallel: number of buckets that are received concurrently, if ``streams`` does not determine it.
    """
    if name == NIXL:
        from keepstep.weights.remote.transports.nixl import NixlTransport

        for stream in streams:
            stream.close()  # NIXL needs no streams
        return NixlTransport(num_parallel)
    return TcpTransport(streams)
