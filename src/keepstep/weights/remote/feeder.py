"""Feeds other nodes: a TCP listener where they authenticate with their tokens, and their consumers' tunnels."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from keepstep.errors import ConfigurationError, KeepstepError, PeerLost, RemoteProtocolError
from keepstep.protocol.transfer.messages import AnyTransferMessage, BucketUnchanged, Notice, SaidTo, UpdateBeganFor
from keepstep.trust.tokens import Secret
from keepstep.weights.memory.buffers import SlotBuffer
from keepstep.weights.remote import messages as msg
from keepstep.weights.remote.handshake import answer
from keepstep.weights.remote.link import NodeLink
from keepstep.weights.remote.stream import CONNECT_S, ByteStream, split_address
from keepstep.weights.remote.switch import BucketInSlot, Switch

SESSION_BYTES = 16
BACKLOG = 128
MAX_GREETINGS = 128
"""Limit for concurrent callers that have not authenticated yet. For one more, the feeder closes the one that came
first: so a silent caller keeps no node out, and a node authenticates within some milliseconds."""


class LinkEnd(Protocol):
    """Handles the messages of the node at the other end of a link."""

    def hear(self, message: msg.AnyLinkMessage) -> None:
        """Handles a message.

        Raises:
            RemoteProtocolError: the message is not valid here.
        """
        ...

    def lose(self, reason: str) -> None:
        """The link has ended."""
        ...


class FedTunnels:
    """The tunnels of one node that this one feeds. See `keepstep.weights.remote.switch.Below`.

    A consumer's name begins with that of the node that its tunnel comes from, as authenticated: a node can use no name
    that is another one's. Behind a relay it is the whole path, such as ``relay/engine-1/a``.
    """

    def __init__(self, link: NodeLink, name: str, switch: Switch) -> None:
        self._link, self._name, self._switch = link, name, switch
        self._numbers: dict[int, int] = {}
        self._lock = threading.Lock()

    def hear(self, message: msg.AnyLinkMessage) -> None:
        """Handles a message of the fed node.

        Raises:
            RemoteProtocolError: the message is not valid here.
        """
        match message:
            case msg.TunnelOpened(tunnel, introduction):
                named = msgspec.structs.replace(introduction, name=f"{self._name}/{introduction.name}")
                number = self._switch.open(self, tunnel, named, is_local=False)
                with self._lock:
                    self._numbers[tunnel] = number
            case msg.TunnelSaid(tunnel, said):
                if (found := self._number(tunnel)) is not None:
                    self._switch.say(found, said)
            case msg.TunnelEnded(tunnel, reason):
                with self._lock:
                    ended = self._numbers.pop(tunnel, None)
                if ended is not None:
                    self._switch.leave(ended, reason)
            case other:
                raise RemoteProtocolError(f"sent {other!r:.80}")

    def lose(self, reason: str) -> None:
        """The link has ended."""
        with self._lock:
            numbers, self._numbers = list(self._numbers.values()), {}
        for number in numbers:
            self._switch.leave(number, f"node {self._name!r} at {self._link.who} {reason}")

    def _number(self, tunnel: int) -> int | None:
        with self._lock:
            return self._numbers.get(tunnel)

    def tell(self, key: int, message: AnyTransferMessage, buffer: SlotBuffer | None) -> None:
        """See `Below`."""
        self._link.send(msg.TunnelSaid(key, message))

    def begin(self, update: UpdateBeganFor) -> None:
        """See `Below`."""
        self._link.send(msg.TunnelsTold(update))

    def tell_all(self, keys: Sequence[int], message: Notice | BucketUnchanged) -> None:
        """See `Below`."""
        self._link.send(
            msg.TunnelsTold(message if isinstance(message, BucketUnchanged) else SaidTo(tuple(keys), message))
        )

    def give(self, keys: Sequence[int], bucket: BucketInSlot) -> None:
        """See `Below`."""
        self._link.ship(bucket)

    def end(self, key: int, reason: str) -> None:
        """See `Below`."""
        with self._lock:
            self._numbers.pop(key, None)
        self._link.send(msg.TunnelEnded(key, reason))


@dataclasses.dataclass(slots=True)
class Admission:
    """The decision on an authenticated caller.

    Attributes:
        feeder: address of another node that will feed the caller; None: this node does.
        came: called with the link once it is open.
        gone: called with the reason when the link has ended.
        end: creates this node's end of the link; None: an end for the tunnels of consumers.
    """

    feeder: str | None = None
    came: Callable[[NodeLink], None] = lambda link: None
    gone: Callable[[str], None] = lambda reason: None
    end: Callable[[NodeLink], LinkEnd] | None = None


@dataclasses.dataclass(slots=True, eq=False)
class _Session:
    """A link that is being established or is open."""

    name: str
    publishes: bool
    num_streams: int
    admission: Admission
    control: ByteStream | None = None
    streams: list[ByteStream] = dataclasses.field(default_factory=list)
    link: NodeLink | None = None


class Feeder:
    """The TCP listener for nodes that want to be fed."""

    def __init__(
        self,
        address: str,
        secret: Secret,
        tls: ssl.SSLContext | None,
        switch: Switch,
        deadline_s: float,
        admit: Callable[[msg.Greeting], Admission] = lambda greeting: Admission(),
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Args:
        address: address to listen on, ``HOST:PORT``. Port 0 selects a free port.
        secret: the job's secret. A caller without a token made from it is refused.
        tls: TLS context; None disables TLS.
        switch: the switch of this node.
        deadline_s: the publishers' deadline, in seconds.
        admit: decides on an authenticated caller. It may raise ConfigurationError to refuse it.
        note: called with a message when a node connects, disconnects or is refused.

        Raises:
            ConfigurationError: the address cannot be used.
        """
        self._secret, self._tls, self._switch, self._deadline_s = secret, tls, switch, deadline_s
        self._admit, self._note = admit, note
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._sessions: dict[bytes, _Session] = {}
        self._greetings: dict[socket.socket, None] = {}
        """Callers that have not authenticated yet, in the order in which they came."""
        host, port = split_address(address)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigurationError(f"cannot listen at {address}: {error.strerror or error}") from None
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._socket.getsockname()[1]}"
        """The address on which the feeder listens."""
        threading.Thread(target=self._listen, name="keepstep-feeder", daemon=True).start()

    @property
    def links(self) -> list[tuple[str, NodeLink]]:
        """The open links, with the names of their nodes."""
        with self._lock:
            return [(each.name, each.link) for each in self._sessions.values() if each.link is not None]

    def drop_all(self, reason: str) -> None:
        """Closes every link. The fed nodes must find another feeder."""
        for _name, link in self.links:
            link.close(reason)

    def close(self) -> None:
        """Stops listening and closes every link."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.drop_all("was left")

    # ---- threads ----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                sock, address = self._socket.accept()
            except OSError:
                return
            with self._lock:
                if len(self._greetings) >= MAX_GREETINGS:
                    first = next(iter(self._greetings))
                    del self._greetings[first]
                    with contextlib.suppress(OSError):
                        first.shutdown(socket.SHUT_RDWR)  # its thread closes it
                self._greetings[sock] = None
            arguments = (sock, f"{address[0]}:{address[1]}")
            threading.Thread(target=self._greet, args=arguments, name="keepstep-greet", daemon=True).start()

    def _greet(self, sock: socket.socket, caller: str) -> None:
        try:
            introduced = self._introduce(sock, caller)
        finally:
            with self._lock:
                self._greetings.pop(sock, None)
        if introduced is not None:
            self._put_together(*introduced)

    def _introduce(self, sock: socket.socket, caller: str) -> tuple[bytes, _Session, ByteStream, bool] | None:
        """Authenticates a caller. Returns session id, session, stream and whether it begins a link; None on failure."""
        chosen: list[tuple[bytes, _Session]] = []

        def admit(greeting: msg.Greeting) -> msg.Accepted | msg.Denied:
            if greeting.session:
                with self._lock:
                    session = self._sessions.get(greeting.session)
                if (
                    session is None
                    or (session.name, session.publishes) != (greeting.name, greeting.publishes)
                    or len(session.streams) >= session.num_streams
                ):
                    return msg.Denied("there is no such session")
                chosen.append((greeting.session, session))
                return msg.Accepted(greeting.session, None)
            try:
                admission = self._admit(greeting)
            except ConfigurationError as error:
                return msg.Denied(str(error))
            number = secrets.token_bytes(SESSION_BYTES)
            num_streams = greeting.num_streams if admission.feeder is None else 0
            session = _Session(greeting.name, greeting.publishes, num_streams, admission)
            with self._lock:
                self._sessions[number] = session
            chosen.append((number, session))
            return msg.Accepted(number, admission.feeder)

        try:
            stream, greeting, _accepted = answer(sock, caller, self._secret, self._tls, admit)
        except (PeerLost, KeepstepError) as error:
            self._note(f"refused: {error}")
            for number, session in chosen:
                self._forget(number, session, str(error))
            return None
        ((number, session),) = chosen
        return number, session, stream, not greeting.session

    def _put_together(self, number: bytes, session: _Session, stream: ByteStream, is_first: bool) -> None:
        """Adds a connection to a link. The last connection opens the link."""
        with self._lock:
            if is_first:
                session.control = stream
            else:
                session.streams.append(stream)
            is_whole = session.control is not None and len(session.streams) == session.num_streams
            if is_whole:
                assert session.control is not None
                session.link = NodeLink(session.control, session.streams, self._deadline_s)
            self._changed.notify_all()
        if is_whole:
            self._begin(number, session)
        elif is_first:
            with self._changed:
                stands = self._changed.wait_for(lambda: session.link is not None, CONNECT_S)
            if not stands:
                self._forget(number, session, "did not open its streams")

    def _begin(self, number: bytes, session: _Session) -> None:
        assert session.link is not None
        make = session.admission.end
        end = FedTunnels(session.link, session.name, self._switch) if make is None else make(session.link)

        def lost(reason: str) -> None:
            end.lose(reason)
            self._forget(number, session, reason)

        session.admission.came(session.link)
        self._note(f"node {session.name!r} at {session.link.who} has come")
        session.link.start(end.hear, lost, None)

    def _forget(self, number: bytes, session: _Session, reason: str) -> None:
        with self._lock:
            is_new = self._sessions.pop(number, None) is not None
        if not is_new:
            return
        session.admission.gone(reason)
        self._note(f"node {session.name!r} {reason}")
        link = session.link
        if link is not None:
            threading.Thread(target=link.join, name="keepstep-link-end", daemon=True).start()
            return
        for each in (session.control, *session.streams):
            if each is not None:
                each.close()
