"""Consumers on other nodes get what is published, whole or not at all, and are named when they do not."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.weights.remote.nodes import (
    PATIENCE_S,
    SECRET,
    check_versions_on_two_nodes,
    consumer,
    credentials,
    equal,
    nodes,
    publisher,
    wait_for,
    weights,
    zeros,
)

import keepstep
from keepstep.errors import (
    BufferUnavailable,
    ConfigurationError,
    PublisherLost,
    RemoteProtocolError,
    StateMismatch,
    SubscriberLost,
    TokenRefused,
)
from keepstep.protocol.transfer.messages import SubscriberCalled
from keepstep.trust.tokens import Secret
from keepstep.weights.channels.connection import Connection
from keepstep.weights.memory.blocks import Block
from keepstep.weights.memory.buffers import SlotBuffer
from keepstep.weights.remote import feeder, switch
from keepstep.weights.remote.handshake import Joining, call, open_streams
from keepstep.weights.remote.link import NodeLink
from keepstep.weights.remote.messages import TunnelOpened, TunnelsTold
from keepstep.weights.remote.node import Links, WeightReceiver, WeightServer
from keepstep.weights.remote.stream import split_address


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_every_bit_comes_to_a_chain_of_nodes(tmp_path: Path, is_encrypted: bool) -> None:
    """To several consumers on one node, and to a node behind another."""
    held = weights()
    with nodes(tmp_path, is_encrypted=is_encrypted) as made, publisher(tmp_path, held) as source:
        made.receive("n1")
        made.receive("n2")
        assert {name: feeder for name, (feeder, _rate) in made.server.nodes.items()} == {"n1": "", "n2": "n1"}
        check_versions_on_two_nodes(tmp_path, made, source, held)


def sent_for(num_consumers: int, folder: Path, delta: bool, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What the device and the server of the publishers' node say, by kind, in an update to so many consumers elsewhere.

    They are on two nodes, one of which is fed by the other. With ``delta`` nothing has changed since the last version.
    """
    counted: set[object] = set()
    sent: Counter[str] = Counter()

    def count(kind: type[Connection] | type[NodeLink]) -> None:
        send = kind.send

        def counting(this: Any, message: Any, *rest: Any) -> None:
            if this in counted:
                what = message.message if isinstance(message, TunnelsTold) else message
                sent[f"{kind.__name__} {type(getattr(what, 'notice', what)).__name__}"] += 1
            send(this, message, *rest)

        monkeypatch.setattr(kind, "send", counting)

    held = weights()
    with nodes(folder) as made, publisher(folder, held) as source, ExitStack() as stack:
        for node in ("n1", "n2"):
            made.receive(node)
        for number in range(num_consumers):
            subscriber = keepstep.Subscriber(
                folder / f"n{1 + number % 2}", into=zeros(held), name=str(number), delta=delta
            )
            stack.enter_context(subscriber).start()
        source.wait_for_consumers(num_consumers, PATIENCE_S)
        source.publish(1)
        registry = source._device.subscriber_registry
        wait_for(lambda: len(made.server._devices._reached) == 1 + num_consumers)
        counted |= {each.connection for each in (*registry.present(), *registry._proxies.values())}
        counted |= {each.connection for each in made.server._devices._reached.values()}
        counted |= {link for _name, link in made.server._feeder.links}
        count(Connection)
        count(NodeLink)
        assert source.publish(2).failures == ()
        monkeypatch.undo()
    return sent


@pytest.mark.parametrize("delta", [False, True])
def test_the_publishers_node_says_everything_once_however_many_consumers_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delta: bool
) -> None:
    """Each consumer says that it has the version, and that it has switched to it; nothing else grows with them."""
    few, many = (sent_for(number, tmp_path / str(number), delta, monkeypatch) for number in (2, 7))
    for sent, number in ((few, 2), (many, 7)):
        del sent["Connection MovementSeen"], sent["NodeLink MovementSeen"]  # there are as many as it takes seconds
        for kind in ("VersionLoaded", "VersionTaken"):
            assert sent.pop(f"Connection {kind}") == number
    num_buckets = few["Connection BucketUnchanged" if delta else "Connection BucketReady"]
    assert num_buckets > 5
    each = {"Connection UpdateBeganFor": 1, "Connection VersionCommitted": 1}
    each |= {"NodeLink UpdateBeganFor": 1, "NodeLink VersionCommitted": 1}
    if delta:
        each |= {"Connection BucketUnchanged": num_buckets, "NodeLink BucketUnchanged": num_buckets}
    else:
        each |= {"Connection BucketReady": num_buckets, "Connection SlotFreed": num_buckets}
    assert few == many == each


def test_blocks_are_cut_for_consumers_of_other_nodes(tmp_path: Path) -> None:
    """A consumer of one half of a tensor, one of the other, and one of all of it."""
    held = {"a": torch.arange(60_000.0).reshape(300, 200)}
    halves = [torch.zeros(150, 200), torch.zeros(150, 200)]
    parts = [{"a": Block(half, (150 * n, 0), (300, 200))} for n, half in enumerate(halves)]
    whole = zeros(held)
    with nodes(tmp_path) as made, publisher(tmp_path, held) as source, ExitStack() as stack:
        made.receive("n1")
        made.receive("n2")
        for number, into in enumerate((*parts, whole)):
            subscriber = keepstep.Subscriber(tmp_path / f"n{1 + number % 2}", into=into, name=f"e{number}")
            stack.enter_context(subscriber).start()
        source.wait_for_consumers(3, PATIENCE_S)
        assert source.publish(1).failures == ()
        assert torch.equal(torch.cat(halves), held["a"])
        assert equal(whole, held)


def test_a_late_consumer_and_a_restarted_one_get_what_was_published_last(tmp_path: Path) -> None:
    held = weights()
    with nodes(tmp_path) as made, publisher(tmp_path, held, copies=True) as source:
        made.receive("n1")
        made.receive("n2")
        with consumer(tmp_path / "n1", zeros(held), "first"):
            source.wait_for_consumers(1, PATIENCE_S)
            source.publish(7)
            for _life in range(2):
                into = zeros(held)
                with consumer(tmp_path / "n2", into, "late") as late:
                    assert late.wait_for(7, PATIENCE_S) == 7
                    assert equal(into, held)


def test_a_node_that_keeps_a_version_feeds_late_consumers_alone(tmp_path: Path) -> None:
    """On the node, and on one behind it, while there is no publisher any more; and then the next version comes."""
    held = weights()
    with nodes(tmp_path, keeps=True) as made:
        made.receive("n1")
        made.receive("n2")
        first = zeros(held)
        with consumer(tmp_path / "n1", first, "first") as steady:
            with publisher(tmp_path, held) as source:
                source.wait_for_consumers(1, PATIENCE_S)
                source.publish(7)
            for node in ("n1", "n2"):
                into = zeros(held)
                with consumer(tmp_path / node, into, "restarted") as late:
                    assert late.wait_for(7, PATIENCE_S) == 7
                    assert equal(into, held)
            with consumer(tmp_path / "n2", into, "again") as late, publisher(tmp_path, held) as source:
                source.wait_for_consumers(2, PATIENCE_S)
                held["b"].add_(1)
                assert source.publish(8).failures == ()
                assert (late.version, steady.wait_for(8, PATIENCE_S)) == (8, 8)
                assert equal(into, held)
                assert equal(first, held)


def test_a_consumer_that_ends_is_named_and_the_others_are_served(tmp_path: Path) -> None:
    held = weights()
    gate, loading = threading.Event(), threading.Event()

    def load(name: str, tensor: torch.Tensor) -> None:
        loading.set()
        gate.wait(PATIENCE_S)

    with nodes(tmp_path) as made, publisher(tmp_path, held) as source, ExitStack() as stack:
        made.receive("n1")
        into = zeros(held)
        other = stack.enter_context(consumer(tmp_path / "n1", into, "other"))
        slow = keepstep.Subscriber(tmp_path / "n1", load=load, name="slow", deadline_s=PATIENCE_S)
        slow.start()
        source.wait_for_consumers(2, PATIENCE_S)
        published: list[keepstep.Published] = []
        thread = threading.Thread(target=lambda: published.append(source.publish(1)))
        thread.start()
        assert loading.wait(PATIENCE_S)
        assert slow._connection is not None
        slow._connection.hang_up()  # as if its process had been killed
        thread.join()
        gate.set()
        slow.close()
        (failure,) = published[0].failures
        assert isinstance(failure, SubscriberLost)
        assert str(failure).startswith("n1/slow: ")
        assert other.version == 1
        assert equal(into, held)


def test_a_consumer_that_stands_is_left_out_within_the_deadline(tmp_path: Path) -> None:
    """It holds a slot of its node for which the others wait. The node, which sees that, names it."""
    held = weights()
    gate = threading.Event()
    with nodes(tmp_path, deadline_s=1.5) as made, publisher(tmp_path, held, deadline_s=1.5) as source:
        made.receive("n1")
        made.receive("n2")
        into = zeros(held)
        with consumer(tmp_path / "n1", into, "other", 1.5) as other:
            slow = keepstep.Subscriber(
                tmp_path / "n2", load=lambda name, tensor: gate.wait(PATIENCE_S) and None, name="slow", deadline_s=1.5
            )
            slow.start()
            source.wait_for_consumers(2, PATIENCE_S)
            (failure,) = source.publish(1).failures
            assert isinstance(failure, SubscriberLost)
            assert str(failure).startswith("n1/n2/slow: has shown nothing for 1")
            assert other.version == 1
            gate.set()
            slow.close()


def test_a_node_in_the_middle_that_is_lost_is_named_and_gone_around(tmp_path: Path) -> None:
    held = weights()
    with nodes(tmp_path, deadline_s=3.0) as made, publisher(tmp_path, held, copies=True, deadline_s=3.0) as source:
        made.receive("n1")
        behind = made.receive("n2")
        into = zeros(held)
        with consumer(tmp_path / "n2", into, "e", 3.0) as engine:
            source.wait_for_consumers(1, PATIENCE_S)
            source.publish(1)
            former = behind.fed_by
            made.receivers["n1"].close()
            wait_for(lambda: behind.fed_by not in (None, former))
            assert behind.fed_by == made.server.address
            held["a"].add_(1)
            source.wait_for_consumers(1, PATIENCE_S)
            source.publish(2)
            engine.wait_for(2, PATIENCE_S)
            assert equal(into, held)


def test_a_feeder_that_cannot_be_reached_is_gone_around(tmp_path: Path) -> None:
    """The node is still there for the root, which names it to the next one, but it listens no more."""
    with nodes(tmp_path) as made:
        first = made.receive("n1")
        assert first._feeder is not None
        first._feeder.close()
        assert made.receive("n2").fed_by == made.server.address
        assert any(f"{first._feeder.address} cannot be reached" in note for note in made.notes)
        assert made.server.nodes.keys() == {"n1", "n2"}


def test_a_link_that_breaks_off_in_an_update_is_named_on_both_sides(tmp_path: Path) -> None:
    held = weights()
    gate, loading = threading.Event(), threading.Event()

    def load(name: str, tensor: torch.Tensor) -> None:
        loading.set()
        gate.wait(PATIENCE_S)

    with nodes(tmp_path) as made, publisher(tmp_path, held) as source:
        made.receive("n1")
        slow = keepstep.Subscriber(tmp_path / "n1", load=load, name="e", deadline_s=PATIENCE_S)
        slow.start()
        source.wait_for_consumers(1, PATIENCE_S)
        published: list[keepstep.Published] = []
        thread = threading.Thread(target=lambda: published.append(source.publish(1)))
        thread.start()
        assert loading.wait(PATIENCE_S)
        ((name, link),) = made.server._feeder.links
        link.close("was cut")
        thread.join()
        gate.set()
        (failure,) = published[0].failures
        assert name == "n1"
        assert isinstance(failure, SubscriberLost)
        assert "n1/e: node 'n1' at 127.0.0.1" in str(failure)
        wait_for(lambda: slow.last_error is not None)
        assert isinstance(slow.last_error, PublisherLost)
        slow.close()


def test_the_server_is_started_again(tmp_path: Path) -> None:
    held = weights()
    with nodes(tmp_path) as made, publisher(tmp_path, held, copies=True) as source:
        made.receive("n1")
        into = zeros(held)
        with consumer(tmp_path / "n1", into, "e") as engine:
            source.wait_for_consumers(1, PATIENCE_S)
            source.publish(1)
            engine.wait_for(1, PATIENCE_S)
            address = made.server.address
            made.server.close()
            held["b"].add_(1)
            made.server = made.serve(address)
            source.wait_for_consumers(1, PATIENCE_S)
            source.publish(2)
            engine.wait_for(2, PATIENCE_S)
            assert equal(into, held)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_a_token_of_another_job(tmp_path: Path) -> None:
    with nodes(tmp_path) as made:
        made.begin("n1", secret=Secret.new())
        wait_for(lambda: bool(made.errors))
        (error,) = made.errors
        assert isinstance(error, TokenRefused)
        assert "does not belong to the job of this token (node 'n1')" in str(error)
        wait_for(lambda: any("has no token of this job" in note for note in made.notes))


def test_callers_that_say_nothing_keep_no_node_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one too many, the one that came first is hung up on."""
    monkeypatch.setattr(feeder, "MAX_GREETINGS", 3)
    with nodes(tmp_path) as made:
        where = split_address(made.server.address)
        with contextlib.ExitStack() as stack:
            callers = [stack.enter_context(socket.create_connection(where, PATIENCE_S)) for _ in range(4)]
            assert callers[0].recv(1) == b""
            callers[3].setblocking(False)
            with pytest.raises(BlockingIOError):  # it is still greeted, so the first did not run into a timeout
                callers[3].recv(1)
            made.receive("n1")


def test_a_node_cannot_take_the_name_of_anothers_consumer(tmp_path: Path) -> None:
    """With its own token; the former consumer of that name would have to leave."""
    held, token, joining = weights(), credentials("n2"), Joining(1)
    with nodes(tmp_path) as made, publisher(tmp_path, held) as source:
        made.receive("n1", feeds=False)
        with consumer(tmp_path / "n1", zeros(held), "a") as known:
            source.wait_for_consumers(1, PATIENCE_S)
            stream, accepted = call(made.server.address, token, joining, None)
            joined = dataclasses.replace(joining, session=accepted.session)
            link = NodeLink(stream, open_streams(made.server.address, token, joined, None, stream), PATIENCE_S)
            link.start(lambda message: None, lambda reason: None, lambda *_: None)
            link.send(TunnelOpened(1, SubscriberCalled("n1/a", None, 0, None, False, None)))
            source.wait_for_consumers(2, PATIENCE_S)
            assert sorted(source.consumers) == ["n1/a", "n2/n1/a"]
            assert known.is_attached
            link.close("is over")
            link.join()


def test_tls_on_one_side_only(tmp_path: Path) -> None:
    with nodes(tmp_path) as made:
        receiver = WeightReceiver(
            tmp_path / "n1",
            made.server.address,
            credentials("n1"),
            links=Links(is_encrypted=True),
            note=made.notes.append,
        )
        thread = threading.Thread(target=receiver.run)
        thread.start()
        wait_for(lambda: any("does not speak TLS" in note for note in made.notes))
        receiver.close()
        thread.join()


def test_an_older_generation(tmp_path: Path) -> None:
    held = weights()
    with nodes(tmp_path) as made:
        made.receive("n1")
        with keepstep.Subscriber(tmp_path / "n1", into=zeros(held), name="e", deadline_s=PATIENCE_S) as engine:
            with publisher(tmp_path, held, generation=5) as source:
                engine.attach(PATIENCE_S)
                published = threading.Thread(target=lambda: source.publish(1))
                published.start()
                assert engine.receive(PATIENCE_S) == 1
                published.join()
            with publisher(tmp_path, held, generation=4):
                while engine.is_attached:
                    with contextlib.suppress(PublisherLost):  # the former one has ended
                        engine.receive(PATIENCE_S)
                with pytest.raises(RemoteProtocolError, match="it is of generation 4, the caller of 5"):
                    engine.receive(PATIENCE_S)
            assert engine.version == 1


def test_weights_that_are_not_published(tmp_path: Path) -> None:
    held = weights()
    with nodes(tmp_path) as made, publisher(tmp_path, held) as source:
        made.receive("n1")
        with consumer(tmp_path / "n1", {"unknown": torch.zeros(3)}, "e") as engine:
            source.wait_for_consumers(1, PATIENCE_S)
            (failure,) = source.publish(1).failures
            assert isinstance(failure, StateMismatch)
            assert str(failure) == "n1/e wants 'unknown', which is not published"
            wait_for(lambda: isinstance(engine.last_error, StateMismatch))


def test_too_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = weights()

    class Full(SlotBuffer):
        @classmethod
        def create(cls, num_slots: int, slot_bytes: int) -> SlotBuffer:
            raise BufferUnavailable(f"{num_slots * slot_bytes} bytes of shared memory are not available")

    with nodes(tmp_path) as made, publisher(tmp_path, held):
        made.receive("n1")
        monkeypatch.setattr(switch, "SlotBuffer", Full)
        with (
            keepstep.Subscriber(tmp_path / "n1", into=zeros(held), name="e") as engine,
            pytest.raises(RemoteProtocolError, match="bytes of shared memory are not available"),
        ):
            engine.attach(PATIENCE_S)


def test_settings_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="must be HOST:PORT"):
        WeightServer(tmp_path, "nowhere", SECRET)
    with pytest.raises(ConfigurationError, match="fanout=0"):
        WeightServer(tmp_path, "127.0.0.1:0", SECRET, fanout=0)
    with pytest.raises(ConfigurationError, match="num_streams=0"):
        Links(num_streams=0)
    with pytest.raises(ConfigurationError, match="deadline_s=0"):
        Links(deadline_s=0)
    with pytest.raises(ConfigurationError, match="needs the job's secret"):
        WeightReceiver(tmp_path, "127.0.0.1:1", credentials("n"), listen="127.0.0.1:0")
    with pytest.raises(ConfigurationError, match="cannot listen at"):
        WeightServer(tmp_path, "192.0.2.1:1", SECRET)  # TEST-NET-1 (RFC 5737): no address of this machine
