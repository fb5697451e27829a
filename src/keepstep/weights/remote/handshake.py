"""How two nodes prove to each other that they belong to one job, before anything else is said.

Neither the secret nor a token travels. The caller's token ends in a seal (`keepstep.trust.tokens`) which the other side
computes from the job's secret; each proves to have it by a MAC (HMAC-SHA256, RFC 2104) over what both have said so far,
two random numbers among it. So a proof is good for one connection. Without TLS this authenticates the ends, not each
byte that follows: who can change packets on the way can take over a connection (docs/WEIGHTS.md says what that means).
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets
import socket
import ssl
import tempfile
import time
from collections.abc import Callable

from keepstep.errors import RemoteProtocolError, TokenRefused
from keepstep.trust import certificates
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret, mint, name_in
from keepstep.weights.channels.connection import ConnectionEnded, ConnectionLost
from keepstep.weights.remote import messages as msg
from keepstep.weights.remote.stream import CONNECT_S, ByteStream, connect

NONCE_BYTES = 16
MAX_STREAMS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Joining:
    """What a caller wants.

    Attributes:
        num_streams: for buckets.
        address: see `Greeting`.
        avoid: see `Greeting`.
        session: of the link that this connection becomes a stream of; empty: it begins a link.
        publishes: see `Greeting`.
        transport: for buckets.
    """

    num_streams: int
    address: str | None = None
    avoid: tuple[str, ...] = ()
    session: bytes = b""
    publishes: bool = False
    transport: str = msg.TCP


def _seal_of(token: str) -> bytes:
    return token.rpartition(".")[2].encode()


def _proof(seal: bytes, side: str, *said: msg.AnyLinkMessage | bytes) -> bytes:
    digest = hmac.new(seal, side.encode(), hashlib.sha256)
    for each in said:
        digest.update(each if isinstance(each, bytes) else msg.encode(each))
    return digest.digest()


def call(
    address: str, credentials: Credentials, joining: Joining, tls: ssl.SSLContext | None
) -> tuple[ByteStream, msg.Accepted]:
    """Opens a connection to a node and proves who this one is.

    Args:
        address: ``HOST:PORT``.
        credentials: this node's; its name is in them.
        joining: what for.
        tls: for encryption; None: there is none.

    Raises:
        ConnectionStalled, ConnectionEnded: there is no such node, or it does not answer.
        TokenRefused: one of the two does not belong to the other's job.
        RemoteProtocolError: the other side does not speak this protocol, or refuses for another reason.
    """
    until_s = time.monotonic() + CONNECT_S
    stream = ByteStream(_secured(connect(address, until_s), tls, address), address)
    try:
        name = name_in(credentials.token)
        greeting = msg.Greeting(
            msg.VERSION, name, secrets.token_bytes(NONCE_BYTES), joining.session, joining.num_streams, joining.address,
            joining.avoid, joining.publishes, joining.transport,
        )  # fmt: skip
        stream.send_message(greeting, until_s)
        challenge = stream.receive_message(until_s, msg.MAX_GREETING_BYTES)
        if isinstance(challenge, msg.Denied):
            raise RemoteProtocolError(f"{address} refuses {name!r}: {challenge.reason}")
        if not isinstance(challenge, msg.Challenge):
            raise RemoteProtocolError(f"{address} answers a greeting with {type(challenge).__name__}")
        seal = _seal_of(credentials.token)
        if not hmac.compare_digest(challenge.proof, _proof(seal, "feeder", greeting, challenge.nonce)):
            raise TokenRefused(f"{address} does not belong to the job of this token (node {name!r})")
        stream.send_message(msg.Proven(_proof(seal, "fed", greeting, challenge.nonce)), until_s)
        match stream.receive_message(until_s, msg.MAX_GREETING_BYTES):
            case msg.Accepted() as accepted:
                return stream, accepted
            case msg.Denied(reason):
                raise RemoteProtocolError(f"{address} refuses {name!r}: {reason}")
            case other:
                raise RemoteProtocolError(f"{address} answers a proof with {type(other).__name__}")
    except BaseException:  # the connection has no owner yet
        stream.close()
        raise


def open_streams(
    address: str, credentials: Credentials, joining: Joining, tls: ssl.SSLContext | None, control: ByteStream
) -> list[ByteStream]:
    """The streams of the link that ``joining`` names. Raises what `call` does; ``control`` is closed then, too."""
    streams: list[ByteStream] = []
    try:
        streams.extend(call(address, credentials, joining, tls)[0] for _ in range(joining.num_streams))
    except BaseException:  # of any kind: the connections have no other owner
        for opened in (control, *streams):
            opened.close()
        raise
    return streams


def answer(
    sock: socket.socket,
    caller: str,
    secret: Secret,
    tls: ssl.SSLContext | None,
    admit: Callable[[msg.Greeting], msg.Accepted | msg.Denied],
) -> tuple[ByteStream, msg.Greeting, msg.Accepted]:
    """The other side of `call`.

    Args:
        sock: accepted; owned by what is returned, closed on an error.
        caller: its address, for messages.
        secret: of the job.
        tls: for encryption; None: there is none.
        admit: says what a caller that has proved who it is gets.

    Raises:
        PeerLost: the caller is gone, or said nothing.
        TokenRefused: it has no token of this job.
        RemoteProtocolError: it does not speak this protocol, or was denied.
    """
    until_s = time.monotonic() + CONNECT_S
    stream: ByteStream | None = None
    try:
        stream = ByteStream(_secured_server(sock, tls), caller)
        greeting = stream.receive_message(until_s, msg.MAX_GREETING_BYTES)
        if not isinstance(greeting, msg.Greeting) or len(greeting.nonce) != NONCE_BYTES:
            raise RemoteProtocolError(f"{caller} does not greet")
        if greeting.protocol != msg.VERSION:
            stream.send_message(msg.Denied(f"this node speaks version {msg.VERSION} of the protocol"), until_s)
            raise RemoteProtocolError(f"{caller} speaks version {greeting.protocol} of the protocol")
        role = Role.PUBLISHER if greeting.publishes else Role.RECEIVER
        seal = _seal_of(mint(secret, Claim(role, greeting.name)))
        nonce = secrets.token_bytes(NONCE_BYTES)
        stream.send_message(msg.Challenge(nonce, _proof(seal, "feeder", greeting, nonce)), until_s)
        try:
            proven = stream.receive_message(until_s, msg.MAX_GREETING_BYTES)
        except ConnectionEnded:
            raise TokenRefused(f"{caller} (node {greeting.name!r}) has no token of this job") from None
        expected = _proof(seal, "fed", greeting, nonce)
        if not isinstance(proven, msg.Proven) or not hmac.compare_digest(proven.proof, expected):
            raise TokenRefused(f"{caller} (node {greeting.name!r}) has no token of this job")
        if not 0 <= greeting.num_streams <= MAX_STREAMS:
            admitted: msg.Accepted | msg.Denied = msg.Denied(f"0 to {MAX_STREAMS} streams are allowed")
        else:
            admitted = admit(greeting)
        stream.send_message(admitted, until_s)
        if isinstance(admitted, msg.Denied):
            raise RemoteProtocolError(f"{caller} (node {greeting.name!r}): {admitted.reason}")
        return stream, greeting, admitted
    except BaseException:  # the connection has no owner yet
        (stream or sock).close()
        raise


def _secured(sock: socket.socket, tls: ssl.SSLContext | None, address: str) -> socket.socket:
    if tls is None:
        return sock
    try:
        return tls.wrap_socket(sock, server_hostname=certificates.CONTROLLER_NAME)
    except ssl.SSLCertVerificationError as error:
        sock.close()
        raise TokenRefused(f"{address} shows no certificate of this job ({error.verify_message})") from None
    except OSError as error:
        sock.close()
        raise ConnectionLost(address, f"does not speak TLS ({error})") from None


def _secured_server(sock: socket.socket, tls: ssl.SSLContext | None) -> socket.socket:
    if tls is None:
        return sock
    sock.settimeout(CONNECT_S)
    try:
        return tls.wrap_socket(sock, server_side=True)
    except OSError as error:
        raise ConnectionLost("a caller", f"does not speak TLS ({error})") from None


def tls_of_feeder(secret: Secret) -> ssl.SSLContext:
    """What a node that feeds others shows them: a fresh certificate of the job's authority."""
    files = certificates.server(secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile(prefix="keepstep-") as both:  # mode 0600; ssl reads from files only
        both.write(files.key + files.certificate)
        both.flush()
        context.load_cert_chain(both.name)
    return context


def tls_of_fed(authority: bytes) -> ssl.SSLContext:
    """What a node that is fed believes: the job's authority alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority.decode())
    return context
