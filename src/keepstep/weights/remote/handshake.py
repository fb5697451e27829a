"""Mutual authentication of two nodes of one job, the first messages on a connection.

Neither the secret nor a token is sent. The caller's token ends in a seal (`keepstep.trust.tokens`), which the other
side can compute from the job's secret. Each side proves that it has the seal by a MAC (HMAC-SHA256, RFC 2104) over all
messages so far, which include two random numbers. So a proof is valid for one connection only. Without TLS this
authenticates the two ends but not each later byte: an attacker who can modify packets can take over a connection
(docs/WEIGHTS.md describes the consequences).
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
    """A caller's request.

    Attributes:
        num_streams: number of streams for buckets.
        address: see `Greeting`.
        avoid: see `Greeting`.
        session: session id of the link to which this connection adds a stream; empty to begin a link.
        publishes: see `Greeting`.
    """

    num_streams: int
    address: str | None = None
    avoid: tuple[str, ...] = ()
    session: bytes = b""
    publishes: bool = False


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
    """Connects to a node and authenticates.

    Args:
        address: address of the node, ``HOST:PORT``.
        credentials: credentials of this node, with its name.
        joining: the request.
        tls: TLS context; None disables TLS.

    Returns:
        the stream, which the caller owns, and the answer of the node.

    Raises:
        ConnectionStalled, ConnectionEnded: the node cannot be reached, or does not answer.
        TokenRefused: the two nodes do not belong to the same job.
        RemoteProtocolError: the node does not speak this protocol, or refuses for another reason.
    """
    until_s = time.monotonic() + CONNECT_S
    stream = ByteStream(_secured(connect(address, until_s), tls, address), address)
    try:
        name = name_in(credentials.token)
        greeting = msg.Greeting(
            msg.VERSION, name, secrets.token_bytes(NONCE_BYTES), joining.session, joining.num_streams, joining.address,
            joining.avoid, joining.publishes,
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
    """Opens the streams of the link ``joining.session``. Raises as `call`; on an error it also closes ``control``."""
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
        sock: an accepted socket. The returned stream owns it; on an error it is closed.
        caller: address of the caller, for messages.
        secret: the job's secret.
        tls: TLS context; None disables TLS.
        admit: decides on an authenticated caller.

    Raises:
        PeerLost: the caller is gone, or sent nothing in time.
        TokenRefused: the caller has no token of this job.
        RemoteProtocolError: the caller does not speak this protocol, or was denied.
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
        if not 1 <= greeting.num_streams <= MAX_STREAMS:
            admitted: msg.Accepted | msg.Denied = msg.Denied(f"1 to {MAX_STREAMS} streams are allowed")
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
    """The TLS context of a feeder: it presents a new certificate signed by the job's certificate authority."""
    files = certificates.server(secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile(prefix="keepstep-") as both:  # mode 0600; ssl reads from files only
        both.write(files.key + files.certificate)
        both.flush()
        context.load_cert_chain(both.name)
    return context


def tls_of_fed(authority: bytes) -> ssl.SSLContext:
    """The TLS context of a fed node: it trusts only the job's certificate authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority.decode())
    return context
