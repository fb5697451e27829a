"""The two programs of weights between machines: one beside the publishers, one on each node that has consumers."""

from __future__ import annotations

import contextlib
import dataclasses
import ssl
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from keepstep.errors import ConfigurationError, PeerLost, RemoteProtocolError, TokenRefused
from keepstep.protocol.transfer.messages import AnyTransferMessage, SubscriberCalled
from keepstep.protocol.transfer.topology import ROOT, FedNode, choose_fanout, choose_feeder
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret
from keepstep.weights.remote import messages as msg
from keepstep.weights.remote.bridge.bridge import Bridge
from keepstep.weights.remote.consumers import LocalConsumers
from keepstep.weights.remote.devices import DeviceTunnels
from keepstep.weights.remote.feeder import Admission, Feeder
from keepstep.weights.remote.handshake import MAX_STREAMS, Joining, call, open_streams, tls_of_fed, tls_of_feeder
from keepstep.weights.remote.link import NodeLink
from keepstep.weights.remote.stream import split_address
from keepstep.weights.remote.switch import Switch

RETRY_S = 0.2
"""Pause between two attempts to find a feeder."""
MAX_AVOIDED = 16
"""Limit for the number of unreachable feeders in a greeting, which must be short."""
DEFAULT_STREAMS = 2
DEFAULT_DEADLINE_S = 30.0
HOP_S = 0.002
"""Estimated time for a node to forward a bucket, without its time on the link: some thread switches and the network's
latency. It affects only the choice of the fanout."""
Note = Callable[[str], None]
FindRoot = Callable[[str | None], str | None]
"""Gets the address that did not answer. Returns the next address to try; None if none is known yet."""


@dataclasses.dataclass(frozen=True, slots=True)
class Links:
    """Settings of the links between nodes. They must be the same on all nodes, except for ``num_streams``.

    Attributes:
        num_streams: number of connections for buckets from a node's feeder to the node.
        is_encrypted: whether links use TLS.
        deadline_s: the publishers' deadline, in seconds.
    """

    num_streams: int = DEFAULT_STREAMS
    is_encrypted: bool = False
    deadline_s: float = DEFAULT_DEADLINE_S

    def __post_init__(self) -> None:
        if not 1 <= self.num_streams <= MAX_STREAMS:
            raise ConfigurationError(f"num_streams={self.num_streams}: allowed are 1 to {MAX_STREAMS}")
        if self.deadline_s <= 0:
            raise ConfigurationError(f"deadline_s={self.deadline_s}: allowed are times above 0")


DEFAULT_LINKS = Links()


@dataclasses.dataclass(slots=True)
class _Member:
    """A node that has connected to the root."""

    fed: FedNode
    link: NodeLink | None = None


class WeightServer:
    """The server on a node with publishers. It connects consumers on other nodes to a device of this node.

    Nodes must present the job's token. The server selects the feeder of each node, and is itself the feeder of the
    first ones. If several nodes have publishers, each runs a `WeightServer`, and `reach` connects all their devices.
    """

    def __init__(
        self,
        folder: Path,
        listen: str,
        secret: Secret,
        *,
        node: str = "publishers",
        rank: int | None = None,
        fanout: int | None = None,
        links: Links = DEFAULT_LINKS,
        note: Note = lambda text: None,
    ) -> None:
        """Args:
        folder: the folder of the publishers on this node.
        listen: address to listen on, ``HOST:PORT``. Port 0 selects a free port.
        secret: the job's secret.
        node: name of this node.
        rank: rank of the publisher on this node to which consumers attach; None selects the lowest one.
        fanout: number of nodes that each node feeds; None selects it by `choose_fanout`. 1 makes a chain.
        links: settings of the links.
        note: called with a message when a node connects, disconnects or is refused.

        Raises:
            ConfigurationError: an argument is invalid.
        """
        if fanout is not None and fanout < 1:
            raise ConfigurationError(f"fanout={fanout}: allowed are 1 and more")
        self._fanout, self._note = fanout, note
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}
        self._last_number = ROOT
        self.switch = Switch(links.deadline_s)
        credentials = Credentials.of(secret, Claim(Role.PUBLISHER, node))
        fed = tls_of_fed(credentials.authority) if links.is_encrypted and credentials.authority is not None else None
        joining = Joining(links.num_streams, publishes=True)
        with contextlib.ExitStack() as begun:
            self._devices = DeviceTunnels(folder, rank, self.switch)
            begun.callback(self._devices.close)
            self.switch.rise(self._devices)
            self._bridge = Bridge(folder, credentials, joining, fed, links.deadline_s, note)
            begun.callback(self._bridge.close)
            # Last: a node may have been waiting for this address, and is admitted at once.
            tls = tls_of_feeder(secret) if links.is_encrypted else None
            self._feeder = Feeder(listen, secret, tls, self.switch, links.deadline_s, self._admit, note)
            begun.pop_all()

    @property
    def address(self) -> str:
        """The address on which the server listens."""
        return self._feeder.address

    @property
    def nodes(self) -> dict[str, tuple[str, float]]:
        """Name of each connected node -> (name of its feeder, empty for this node; its last rate in bytes/s)."""
        with self._lock:
            names = {member.fed.number: name for name, member in self._members.items()}
            return {
                name: (names.get(member.fed.feeder, ""), member.link.peer_bytes_per_s if member.link else 0.0)
                for name, member in self._members.items()
            }

    @property
    def linked(self) -> frozenset[str]:
        """Addresses of the other nodes with publishers to which this node has an open link."""
        return self._bridge.linked

    @property
    def num_bytes_from_peers(self) -> int:
        """Bytes of buckets received from other nodes with publishers."""
        return self._bridge.num_bytes

    def reach(self, peers: Collection[str]) -> None:
        """Connects the devices of this node to those of other nodes, and disconnects nodes that are not in ``peers``.

        Args:
            peers: addresses of the servers on the other nodes. Each of them must call `reach` with this one, too.

        Raises:
            ConfigurationError: an address is not ``HOST:PORT``.
        """
        for peer in peers:
            split_address(peer)
        self._bridge.reach(peers)

    def _admit(self, greeting: msg.Greeting) -> Admission:
        if greeting.publishes:
            return Admission(end=lambda link: self._bridge.end_of(link, greeting.name))
        if greeting.address is not None:
            split_address(greeting.address)
        with self._lock:
            former = self._members.pop(greeting.name, None)
            present = [member.fed for member in self._members.values()]
            feeder = choose_feeder(present, self._choose_fanout(len(present) + 1), greeting.avoid)
            self._last_number += 1
            member = _Member(FedNode(self._last_number, greeting.address, feeder))
            self._members[greeting.name] = member
            address = next((each.address for each in present if each.number == feeder), None)
        if former is not None and former.link is not None:
            former.link.close("came again")
        self._note(f"node {greeting.name!r} is fed by {address or 'this one'}")

        def came(link: NodeLink) -> None:
            member.link = link

        def gone(reason: str) -> None:
            with self._lock:
                if self._members.get(greeting.name) is member:
                    del self._members[greeting.name]

        return Admission(address, came, gone)

    def _choose_fanout(self, num_nodes: int) -> int:
        if self._fanout is not None:
            return self._fanout
        rates = [member.link.peer_bytes_per_s for member in self._members.values() if member.link is not None]
        measured = [rate for rate in rates if rate > 0]
        return choose_fanout(
            num_nodes, self.switch.version_bytes, self.switch.slot_bytes, min(measured, default=0.0), HOP_S
        )

    def close(self) -> None:
        """Closes every link and disconnects from the device."""
        self._feeder.close()
        self._bridge.close()
        self.switch.close()
        self._devices.close()


class _LinkAbove:
    """The link from a node to its feeder. See `keepstep.weights.remote.switch.Above`."""

    def __init__(self, link: NodeLink, switch: Switch) -> None:
        self._link, self._switch = link, switch

    def open(self, tunnel: int, introduction: SubscriberCalled) -> None:
        """See `Above`."""
        self._link.send(msg.TunnelOpened(tunnel, introduction))

    def say(self, tunnel: int, message: AnyTransferMessage) -> None:
        """See `Above`."""
        self._link.send(msg.TunnelSaid(tunnel, message))

    def end(self, tunnel: int, reason: str) -> None:
        """See `Above`."""
        self._link.send(msg.TunnelEnded(tunnel, reason))

    def hear(self, message: msg.AnyLinkMessage) -> None:
        """Handles a message from the feeder.

        Raises:
            RemoteProtocolError: the message is not valid here.
        """
        match message:
            case msg.TunnelSaid(tunnel, said):
                self._switch.hear(tunnel, said)
            case msg.TunnelsTold(said):
                self._switch.hear_all(said)
            case msg.TunnelEnded(tunnel, reason):
                self._switch.ended(tunnel, reason)
            case other:
                raise RemoteProtocolError(f"sent {other!r:.80}")


class WeightReceiver:
    """The receiver on a node with consumers. It receives versions from another node and reconnects lost links.

    Consumers on this node attach to ``folder`` as if the publishers were on this node.
    """

    def __init__(
        self,
        folder: Path,
        root: str | FindRoot,
        credentials: Credentials,
        *,
        secret: Secret | None = None,
        listen: str | None = None,
        links: Links = DEFAULT_LINKS,
        keeps: bool = False,
        note: Note = lambda text: None,
    ) -> None:
        """Args:
        folder: the folder to which consumers on this node attach. It is created with access for this user only, if
            missing.
        root: address of the `WeightServer`, or a function that returns it.
        credentials: credentials of this node. No other node may have the same name.
        secret: the job's secret; required with ``listen``.
        listen: address at which this node accepts other nodes to feed them, ``HOST:PORT``; None: it feeds no node.
        links: settings of the links.
        keeps: keep the last version in host memory, and send it to consumers that attach late to this node or to nodes
            that it feeds. It needs the memory of the weights, and twice as much while the next version arrives.
        note: called with a message when a link opens or is lost.

        Raises:
            ConfigurationError: an argument is invalid.
        """
        if listen is not None and secret is None:
            raise ConfigurationError("a node that feeds others needs the job's secret, to know them")
        if isinstance(root, str):
            split_address(root)
        if links.is_encrypted and credentials.authority is None:
            raise ConfigurationError("for TLS the credentials must hold the certificate of the job's authority")
        self._find_root: FindRoot = root if not isinstance(root, str) else lambda _former: root
        self._credentials, self._links = credentials, links
        self._note = note
        self._tls: ssl.SSLContext | None = None
        if links.is_encrypted and credentials.authority is not None:
            self._tls = tls_of_fed(credentials.authority)
        self.switch = Switch(links.deadline_s, keeps=keeps)
        self._feeder: Feeder | None = None
        if listen is not None and secret is not None:
            tls = tls_of_feeder(secret) if links.is_encrypted else None
            self._feeder = Feeder(listen, secret, tls, self.switch, links.deadline_s, note=note)
        self._consumers = LocalConsumers(folder, self.switch)
        self._stop = threading.Event()
        self._ended = threading.Event()
        """Set when the link to the feeder is lost, or `close` was called."""
        self.fed_by: str | None = None
        """The address of the feeder, while there is one."""

    def run(self) -> None:
        """Runs until another thread calls `close`. It reconnects after a link is lost.

        Raises:
            TokenRefused: this node and the root do not belong to the same job.
        """
        avoid: tuple[str, ...] = ()
        former: str | None = None
        while not self._stop.is_set():
            root = self._find_root(former)
            former = None
            try:
                if root is not None:
                    feeder = self._be_fed(root, avoid)
                    avoid = () if feeder == root else (feeder,)
            except _FeederAway as error:
                self._note(str(error))
                avoid = (*avoid, error.address)[-MAX_AVOIDED:]
            except TokenRefused:
                raise
            except (PeerLost, RemoteProtocolError) as error:
                self._note(str(error))
                avoid, former = (), root
            self._stop.wait(RETRY_S)

    def _be_fed(self, root: str, avoid: tuple[str, ...]) -> str:
        """Connects to a feeder, and returns its address when the link is lost."""
        self._ended.clear()
        lost: list[tuple[str, str]] = []

        def lose(culprit: str, reason: str) -> None:
            lost.append((culprit, reason))
            self._ended.set()

        links: list[NodeLink] = []
        own = None if self._feeder is None else self._feeder.address
        wanted = Joining(self._links.num_streams)
        asked = dataclasses.replace(wanted, address=own, avoid=avoid)
        stream, accepted = call(root, self._credentials, asked, self._tls)
        address = accepted.feeder or root
        session = accepted.session
        try:
            if accepted.feeder is not None:
                presence = NodeLink(stream, (), self._links.deadline_s)
                presence.start(lambda message: None, lambda reason: lose(f"node at {root}", reason), None)
                links.append(presence)
                try:
                    stream, accepted = call(address, self._credentials, wanted, self._tls)
                except (PeerLost, RemoteProtocolError) as error:
                    raise _FeederAway(address, error) from None
                session = accepted.session
            joining = dataclasses.replace(wanted, session=session)
            streams = open_streams(address, self._credentials, joining, self._tls, stream)
            link = NodeLink(stream, streams, self._links.deadline_s)
            links.append(link)
            above = _LinkAbove(link, self.switch)
            link.start(above.hear, lambda reason: lose(f"node at {address}", reason), self.switch.bring)
            self.fed_by = address
            self._note(f"fed by {address}")
            self.switch.rise(above)
            self._ended.wait()
        finally:
            self.fed_by = None
            culprit, reason = lost[0] if lost else ("this node", "it is shut down")
            self.switch.fall(culprit, reason)
            if self._feeder is not None:
                self._feeder.drop_all("has lost its own feeder")
            for each in links:
                each.close("was left")
                each.join()
        self._note(f"{culprit} {reason}")
        return address

    def close(self) -> None:
        """Ends `run` and closes every connection. The consumers keep their weights."""
        self._stop.set()
        self._ended.set()
        self._consumers.close()
        if self._feeder is not None:
            self._feeder.close()
        self.switch.close()


class _FeederAway(Exception):
    """The feeder that the root selected does not feed this node."""

    def __init__(self, address: str, error: Exception) -> None:
        super().__init__(str(error))
        self.address = address
