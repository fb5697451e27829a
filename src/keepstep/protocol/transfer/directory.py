"""The controller's directory of the nodes that publish weights, with their addresses."""

from __future__ import annotations

import msgspec

from keepstep.errors import RemoteProtocolError

KEEP_S = 15.0
"""How long a node counts that has not announced itself again: some of the announcements in between may be lost."""
ANNOUNCE_S = 2.0
"""Between two announcements, and for all who ask: a controller that was started again knows all nodes as soon."""
MAX_NODES = 4096
MAX_ADDRESS_CHARS = 300


class WeightsAsked(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, array_like=True):
    """A node asks which nodes publish weights; the token says which node it is."""

    address: str | None
    """Where others reach it, if it publishes itself."""


class PublishingNode(msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """A node that publishes weights, and where its server listens."""

    name: str
    address: str


_encoder = msgspec.msgpack.Encoder()
_asked = msgspec.msgpack.Decoder(WeightsAsked)
_nodes = msgspec.msgpack.Decoder(tuple[PublishingNode, ...])


def encode(message: WeightsAsked | tuple[PublishingNode, ...]) -> bytes:
    """A question or an answer as bytes."""
    return _encoder.encode(message)


def decode_question(body: bytes) -> WeightsAsked:
    """The question in ``body``.

    Raises:
        RemoteProtocolError: there is none.
    """
    try:
        asked = _asked.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"no question for nodes that publish weights: {error}") from error
    if asked.address is not None and len(asked.address) > MAX_ADDRESS_CHARS:
        raise RemoteProtocolError(f"an address of {len(asked.address)} characters")
    return asked


def decode_answer(body: bytes) -> tuple[PublishingNode, ...]:
    """The nodes in ``body``.

    Raises:
        RemoteProtocolError: there are none.
    """
    try:
        return _nodes.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"no list of nodes that publish weights: {error}") from error


class PublishingNodes:
    """Those that have announced themselves lately. Nothing of it is journalled: it is said again all the time."""

    def __init__(self, keep_s: float = KEEP_S) -> None:
        """Args:
        keep_s: how long a node counts after it was heard of.
        """
        self._keep_s = keep_s
        self._seen: dict[str, tuple[str, float]] = {}

    def seen(self, node: PublishingNode, now_s: float) -> None:
        """A node has announced itself; the address that it had before is not told any more.

        Raises:
            RemoteProtocolError: there are too many.
        """
        self._forget(now_s)
        if node.name not in self._seen and len(self._seen) >= MAX_NODES:
            raise RemoteProtocolError(f"more than {MAX_NODES} nodes publish weights")
        self._seen[node.name] = node.address, now_s

    def present(self, now_s: float) -> tuple[PublishingNode, ...]:
        """The nodes that count, by name."""
        self._forget(now_s)
        return tuple(PublishingNode(name, address) for name, (address, _at_s) in sorted(self._seen.items()))

    def _forget(self, now_s: float) -> None:
        for name in [name for name, (_address, at_s) in self._seen.items() if now_s >= at_s + self._keep_s]:
            del self._seen[name]
