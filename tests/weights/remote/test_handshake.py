"""Two nodes that prove to each other that they are of one job; and those that are not, or say other things."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
from tests.weights.remote.nodes import SECRET, credentials

from keepstep.errors import ConfigurationError, KeepstepError, PeerLost, RemoteProtocolError, TokenRefused
from keepstep.protocol.transfer.messages import SlotFreed
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret
from keepstep.weights.remote import messages as msg
from keepstep.weights.remote.handshake import Joining, answer, call
from keepstep.weights.remote.stream import ByteStream, split_address

Answered = tuple[ByteStream, msg.Greeting, msg.Accepted]
Begin = Callable[..., tuple[str, Future[Answered]]]


def accept(greeting: msg.Greeting) -> msg.Accepted | msg.Denied:
    """Lets anyone in."""
    return msg.Accepted(b"session", None)


@pytest.fixture
def answering() -> Iterator[Begin]:
    """Starts the other side: returns its address, and what comes of one caller."""
    listeners = []

    def begin(
        admit: Callable[[msg.Greeting], msg.Accepted | msg.Denied] = accept, secret: Secret = SECRET
    ) -> tuple[str, Future[Answered]]:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        future: Future[Answered] = Future()

        def run() -> None:
            sock, _ = listener.accept()
            try:
                future.set_result(answer(sock, "the caller", secret, None, admit))
            except KeepstepError as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}", future

    yield begin
    for listener in listeners:
        listener.close()


def test_both_know_each_other_and_go_on(answering: Begin) -> None:
    address, answered = answering()
    stream, accepted = call(address, credentials("n1"), Joining(3, "n1:5", ("n2:5",)), None)
    other, greeting, _ = answered.result(5)
    assert accepted == msg.Accepted(b"session", None)
    assert (greeting.name, greeting.num_streams, greeting.address, greeting.avoid) == ("n1", 3, "n1:5", ("n2:5",))
    said = msg.TunnelSaid(1, SlotFreed(2, 3))
    stream.send_message(said)
    assert other.receive_message() == said
    stream.close()
    other.close()


@pytest.mark.parametrize(
    "caller",
    [credentials("n1", Secret.new()), Credentials.of(SECRET, Claim(Role.AGENT, "n1"))],
    ids=["another job", "another role"],
)
def test_a_caller_without_the_right_token(answering: Begin, caller: Credentials) -> None:
    """Both sides say so; the token itself has not travelled."""
    address, answered = answering()
    with pytest.raises(TokenRefused, match="does not belong to the job of this token"):
        call(address, caller, Joining(1), None)
    with pytest.raises(TokenRefused, match=r"node 'n1'\) has no token of this job"):
        answered.result(5)


def test_a_caller_that_takes_no_proof_for_an_answer(answering: Begin) -> None:
    """It goes on without a token, as an attacker would."""
    address, answered = answering()
    host, port = split_address(address)
    stream = ByteStream(socket.create_connection((host, port)), address)
    stream.send_message(msg.Greeting(msg.VERSION, "n1", bytes(16), b"", 1, None, (), False))
    assert isinstance(stream.receive_message(), msg.Challenge)
    stream.send_message(msg.Proven(bytes(32)))
    with pytest.raises(TokenRefused):
        answered.result(5)
    with pytest.raises(PeerLost):
        stream.receive_message()
    stream.close()


def test_a_caller_that_is_denied(answering: Begin) -> None:
    address, answered = answering(lambda greeting: msg.Denied("no room"))
    with pytest.raises(RemoteProtocolError, match="no room"):
        call(address, credentials("n1"), Joining(1), None)
    with pytest.raises(RemoteProtocolError, match="no room"):
        answered.result(5)


@pytest.mark.parametrize("num_streams", [-1, 0, 65])
def test_a_number_of_streams_that_is_not_allowed(answering: Begin, num_streams: int) -> None:
    address, _ = answering()
    with pytest.raises(RemoteProtocolError, match="1 to 64 streams"):
        call(address, credentials("n1"), Joining(num_streams), None)


def test_another_version_of_the_protocol(answering: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    address, answered = answering()
    host, port = split_address(address)
    stream = ByteStream(socket.create_connection((host, port)), address)
    stream.send_message(msg.Greeting(msg.VERSION + 1, "n1", bytes(16), b"", 1, None, (), False))
    assert isinstance(stream.receive_message(), msg.Denied)
    with pytest.raises(RemoteProtocolError, match=f"speaks version {msg.VERSION + 1}"):
        answered.result(5)
    stream.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", msg.LENGTH.pack(3) + b"abc", msg.LENGTH.pack(1 << 31)])
def test_something_else_than_a_greeting(answering: Begin, data: bytes) -> None:
    """Before a caller is known, nothing large is read from it."""
    address, answered = answering()
    host, port = split_address(address)
    with socket.create_connection((host, port)) as sock:
        sock.sendall(data)
        with pytest.raises(RemoteProtocolError):
            answered.result(5)


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:65536", "host:-1"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigurationError, match="must be HOST:PORT"):
        split_address(address)


def test_addresses() -> None:
    assert split_address("host:1") == ("host", 1)
    assert split_address("[::1]:65535") == ("::1", 65535)
