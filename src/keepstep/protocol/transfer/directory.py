"""The controller's directory of the nodes that publish weights, with their addresses."""

from __future__ import annotations

import msgspec

from keepstep.errors import RemoteProtocolError

KEEP_S = 15.0
"""How long a node stays in the directory after an announcement, so that a few announcements may be lost."""
ANNOUNCE_S = 2.0
"""Interval of announcements and questions. A restarted controller knows all nodes after this time."""
MAX_NODES = 4096
MAX_ADDRESS_CHARS = 300


class WeightsAsked(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, array_like=True):
    """A node asks which nodes publish weights. The token of the call names the node."""

    address: str | None
    """The address of the node's own server, if the node publishes weights; else None."""


class PublishingNode(msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """A node that publishes weights, and the address of its server."""

    name: str
    address: str


_encoder = msgspec.msgpack.Encoder()
_asked = msgspec.msgpack.Decoder(WeightsAsked)
_nodes = msgspec.msgpack.Decoder(tuple[PublishingNode, ...])


def encode(message: WeightsAsked | tuple[PublishingNode, ...]) -> bytes:
    """Returns a question or an answer as bytes."""
    return _encoder.encode(message)


def decode_question(body: bytes) -> WeightsAsked:
    """Decodes the question in ``body``.

    Raises:
        RemoteProtocolError: ``body`` is no question, or the address is too long.
    """
    try:
        asked = _asked.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"no question for nodes that publish weights: {error}") from error
    if asked.address is not None and len(asked.address) > MAX_ADDRESS_CHARS:
        raise RemoteProtocolError(f"an address of {len(asked.address)} characters")
    return asked


def decode_answer(body: bytes) -> tuple[PublishingNode, ...]:
    """Decodes the list of nodes in ``body``.

    Raises:
        RemoteProtocolError: ``body`` is no such list.
    """
    try:
        return _nodes.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"no list of nodes that publish weights: {error}") from error


class PublishingNodes:
    """The nodes that have announced themselves recently. They are not in the journal, as nodes repeat announcements."""

    def __init__(self, keep_s: float = KEEP_S) -> None:
        """Args:
        keep_s: how long a node stays after an announcement, in seconds.
        """
        self._keep_s = keep_s
        self._seen: dict[str, tuple[str, float]] = {}

    def seen(self, node: PublishingNode, now_s: float) -> None:
        """Records an announcement, which replaces the node's former address.

        Raises:
            RemoteProtocolError: there are more than `MAX_NODES` nodes.
        """
        self._forget(now_s)
        if node.name not in self._seen and len(self._seen) >= MAX_NODES:
            raise RemoteProtocolError(f"more than {MAX_NODES} nodes publish weights")
        self._seen[node.name] = node.address, now_s

    def present(self, now_s: float) -> tuple[PublishingNode, ...]:
        """Returns the nodes with a recent announcement, sorted by name."""
        self._forget(now_s)
        return tuple(PublishingNode(name, address) for name, (address, _at_s) in sorted(self._seen.items()))

    def _forget(self, now_s: float) -> None:
        for name in [name for name, (_address, at_s) in self._seen.items() if now_s >= at_s + self._keep_s]:
            del self._seen[name]
