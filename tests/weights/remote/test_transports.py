"""Transports by name, and the messages of the one over NIXL, whose reads are copies within this process here."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.weights.remote.nodes import PATIENCE_S, consumer, equal, nodes, publisher, wait_for, weights, zeros

from keepstep.cli.main import main
from keepstep.config import SECRET_VARIABLE
from keepstep.errors import ConfigurationError
from keepstep.trust.tokens import Secret
from keepstep.weights.channels.connection import ConnectionEnded
from keepstep.weights.memory.buffers import SlotBuffer, SlotPart
from keepstep.weights.memory.bytes_of import copy_bytes
from keepstep.weights.remote import messages as msg
from keepstep.weights.remote import node
from keepstep.weights.remote.messages import NIXL, TCP
from keepstep.weights.remote.node import Links
from keepstep.weights.remote.transports import nixl
from keepstep.weights.remote.transports.by_name import TRANSPORTS


class CopiedMemory:
    """In place of `RegisteredMemory`, where both ends of a link are in one process."""

    is_readable = True

    def __init__(self, who: str, *, is_read_by_others: bool) -> None:
        self._registered: set[int] = set()
        self._known = b""
        self._who = who

    def register(self, buffer: SlotBuffer) -> bool:
        is_new = buffer.address(0) not in self._registered
        self._registered.add(buffer.address(0))
        return is_new

    def description(self) -> bytes:
        return b",".join(str(address).encode() for address in self._registered)

    def know(self, description: bytes) -> None:
        self._known = description

    def read(self, part: SlotPart, address: int, until_s: float, stop: threading.Event) -> None:
        assert self._known, "a bucket was offered before its memory was shared"
        if not self.is_readable:
            raise ConnectionEnded(self._who, "lets no bucket be read")
        copy_bytes(part.address, address, part.num_bytes)

    def close(self) -> None:
        pass


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links over NIXL copy."""
    monkeypatch.setattr(nixl, "RegisteredMemory", CopiedMemory)
    monkeypatch.setattr(node, "check_transport", lambda name: None)


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_buckets_are_offered_and_read(tmp_path: Path, is_encrypted: bool) -> None:
    """Along a chain; and a node that wants TCP gets it from one that offers both."""
    held = weights()
    links = {"transport": NIXL, "is_encrypted": is_encrypted}
    with nodes(tmp_path, **links) as made, publisher(tmp_path, held) as source, ExitStack() as stack:
        made.receive("n1")
        made.receive("n2")
        made.set_transport(TCP)
        made.receive("n3")
        assert isinstance(dict(made.server._feeder.links)["n1"]._transport, nixl.NixlTransport)
        engines = {name: zeros(held) for name in made.receivers}
        for name, into in engines.items():
            stack.enter_context(consumer(tmp_path / name, into, "e"))
        source.wait_for_consumers(3, PATIENCE_S)
        for version in (1, 2):
            held["a"].add_(1)
            assert source.publish(version).failures == ()
            assert all(equal(into, held) for into in engines.values())


@pytest.mark.usefixtures("copied")
def test_a_bucket_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link ends, both sides say why, and the next version comes over a new one."""
    held = weights()
    with nodes(tmp_path, transport=NIXL) as made, publisher(tmp_path, held, copies=True) as source:
        receiver = made.receive("n1")
        into = zeros(held)
        with consumer(tmp_path / "n1", into, "e") as engine:
            source.wait_for_consumers(1, PATIENCE_S)
            monkeypatch.setattr(CopiedMemory, "is_readable", False)
            (failure,) = source.publish(1).failures
            assert str(failure).startswith("n1/e: node 'n1' at 127.0.0.1:")
            wait_for(lambda: any("lets no bucket be read" in note for note in made.notes))
            monkeypatch.setattr(CopiedMemory, "is_readable", True)
            wait_for(lambda: receiver.fed_by is not None)
            source.wait_for_consumers(1, PATIENCE_S)
            source.publish(2)
            engine.wait_for(2, PATIENCE_S)
            assert equal(into, held)


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize(
    "message",
    [msg.BucketRead(1), msg.BucketOffered(1, 1, 0, 4096, 8), msg.MemoryShared(b"")],
    ids=["read what was not offered", "offered by the receiver", "shared by the receiver"],
)
def test_messages_that_mean_nothing_to_a_sender(tmp_path: Path, message: msg.AnyLinkMessage) -> None:
    with nodes(tmp_path, transport=NIXL) as made:
        made.receive("n1")
        ((_name, former),) = made.server._feeder.links
        receiver = made.receivers["n1"]
        assert receiver.fed_by is not None
        above = receiver.switch._above
        assert isinstance(above, node._LinkAbove)
        above._link.send(message)
        assert former.lost.wait(PATIENCE_S)


def test_a_node_that_asks_for_what_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "check_transport", lambda name: None)
    with nodes(tmp_path) as made:
        made.set_transport(NIXL)
        made.begin("n1")
        wait_for(lambda: bool(made.notes))
        wanted = "refuses 'n1': it sends buckets over tcp, not over 'nixl' (--transport)"
        wait_for(lambda: any(note.endswith(wanted) for note in made.notes))


@pytest.mark.usefixtures("copied")
def test_a_feeder_without_it_is_gone_around(tmp_path: Path) -> None:
    """The root offers NIXL, and the node that it names does not."""
    with nodes(tmp_path, transport=NIXL) as made:
        made.set_transport(TCP)
        made.receive("n1")
        made.set_transport(NIXL)
        assert made.receive("n2").fed_by == made.server.address
        assert any("refuses 'n2': it sends buckets over tcp" in note for note in made.notes)


def test_transports_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="transport='rfc1149': allowed are 'tcp' and 'nixl'"):
        Links(transport="rfc1149")
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigurationError, match=r"NIXL cannot be imported .* pip install 'keepstep\[nixl\]'"):
        Links(transport=NIXL)


@pytest.mark.parametrize("command", [["serve", "w", "--listen", "127.0.0.1:0"], ["receive", "w", "--from", "a:1"]])
def test_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setenv(SECRET_VARIABLE, Secret(bytes(32)).text())
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    assert main(["weights", *command, "--transport", "nixl"]) == 2
    assert "pip install 'keepstep[nixl]'" in capsys.readouterr().err


def test_the_command_knows_all_transports(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["weights", "serve", "--help"])
    assert f"--transport {{{','.join(TRANSPORTS)}}}" in capsys.readouterr().out
