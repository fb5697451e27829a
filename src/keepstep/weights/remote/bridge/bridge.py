"""The links of one node with publishers to all other such nodes."""

from __future__ import annotations

import dataclasses
import functools
import ssl
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from keepstep.errors import PeerLost, RemoteProtocolError
from keepstep.trust.credentials import Credentials
from keepstep.weights.remote.bridge.far_devices import FarDevices, FarNode
from keepstep.weights.remote.bridge.local_devices import LocalDevices
from keepstep.weights.remote.handshake import Joining, call, open_streams
from keepstep.weights.remote.link import NodeLink

RETRY_S = 0.2
"""Pause between two attempts to connect to a node."""


@dataclasses.dataclass(slots=True, eq=False)
class _Peer:
    """Another node to which this node keeps a link."""

    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when the link is lost or no longer needed."""
    thread: threading.Thread | None = None
    is_linked: bool = False

    def leave(self) -> None:
        """Ends the link, which is no longer needed."""
        self.stop.set()
        self.ended.set()


class Bridge:
    """Keeps the links to other nodes. Between two nodes there are two links: each node opens one to receive buckets."""

    def __init__(
        self,
        folder: Path,
        credentials: Credentials,
        joining: Joining,
        tls: ssl.SSLContext | None,
        deadline_s: float,
        note: Callable[[str], None],
    ) -> None:
        """Args:
        folder: folder of the publishers on this node.
        credentials: credentials of this node, for the role of a publisher.
        joining: settings of the links.
        tls: TLS context; None disables TLS.
        deadline_s: the publishers' deadline, in seconds.
        note: called with a message when a link opens or is lost.

        Raises:
            ConfigurationError: the folder cannot be used.
        """
        self._folder, self._credentials, self._joining = folder, credentials, joining
        self._tls, self._deadline_s, self._note = tls, deadline_s, note
        self._far_devices = FarDevices(folder)
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}

    @property
    def linked(self) -> frozenset[str]:
        """Addresses of the nodes to which this node has an open link."""
        with self._lock:
            return frozenset(address for address, peer in self._peers.items() if peer.is_linked)

    @property
    def num_bytes(self) -> int:
        """Bytes of buckets received from other nodes."""
        return self._far_devices.num_bytes

    def end_of(self, link: NodeLink, name: str) -> LocalDevices:
        """Creates this node's end of a link that another node has opened."""
        return LocalDevices(self._folder, link, name)

    def reach(self, addresses: Collection[str]) -> None:
        """Keeps links to exactly these nodes from now on. It retries nodes that cannot be reached."""
        with self._lock:
            for address in set(self._peers) - set(addresses):
                self._peers.pop(address).leave()
            fresh = [address for address in addresses if address not in self._peers]
            for address in fresh:
                peer = self._peers[address] = _Peer()
                run = functools.partial(self._keep_link, address, peer)
                peer.thread = threading.Thread(target=run, name="keepstep-peer", daemon=True)
                peer.thread.start()

    def _keep_link(self, address: str, peer: _Peer) -> None:
        last_problem = ""
        while not peer.stop.is_set():
            try:
                self._be_linked(address, peer)
                last_problem = ""
            except (PeerLost, RemoteProtocolError) as error:
                if str(error) != last_problem:
                    self._note(str(error))
                last_problem = str(error)
            peer.stop.wait(RETRY_S)

    def _be_linked(self, address: str, peer: _Peer) -> None:
        """Opens a link, and returns when it is lost."""
        control, accepted = call(address, self._credentials, self._joining, self._tls)
        joining = dataclasses.replace(self._joining, session=accepted.session)
        streams = open_streams(address, self._credentials, joining, self._tls, control)
        link = NodeLink(control, streams, self._deadline_s)
        peer.ended.clear()
        if peer.stop.is_set():
            peer.ended.set()
        lost: list[str] = []

        def lose(reason: str) -> None:
            lost.append(reason)
            peer.ended.set()

        node = FarNode(f"node at {address}", link)
        link.start(
            functools.partial(self._far_devices.hear, node), lose, functools.partial(self._far_devices.bring, node)
        )
        self._far_devices.rise(node)
        peer.is_linked = True
        self._note(f"linked to {address}")
        peer.ended.wait()
        peer.is_linked = False
        reason = lost[0] if lost else "is not wanted any more"
        self._far_devices.fall(node, reason)
        link.close("was left")
        link.join()
        self._note(f"node at {address} {reason}")

    def close(self) -> None:
        """Closes every link that this node has opened, and every connection."""
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.leave()
        for peer in peers:
            if peer.thread is not None:
                peer.thread.join()
        self._far_devices.close()
