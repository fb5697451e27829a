"""Which nodes publish weights, as they said lately."""

from __future__ import annotations

import pytest

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.transfer import directory
from keepstep.protocol.transfer.directory import (
    PublishingNode,
    PublishingNodes,
    WeightsAsked,
    decode_answer,
    decode_question,
    encode,
)


def test_nodes_count_while_they_announce_themselves() -> None:
    nodes = PublishingNodes(keep_s=10)
    nodes.seen(PublishingNode("b", "b:1"), now_s=0)
    nodes.seen(PublishingNode("a", "a:1"), now_s=5)
    nodes.seen(PublishingNode("b", "b:2"), now_s=6)  # started again
    assert nodes.present(now_s=9) == (PublishingNode("a", "a:1"), PublishingNode("b", "b:2"))
    assert nodes.present(now_s=15) == (PublishingNode("b", "b:2"),)
    assert nodes.present(now_s=16) == ()


def test_there_are_not_more_than_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MAX_NODES", 2)
    nodes = PublishingNodes(keep_s=10)
    for name in "aba":
        nodes.seen(PublishingNode(name, "x:1"), now_s=0)
    with pytest.raises(RemoteProtocolError, match="more than 2 nodes"):
        nodes.seen(PublishingNode("c", "x:1"), now_s=9)
    nodes.seen(PublishingNode("c", "x:1"), now_s=10)


def test_messages_are_what_was_meant() -> None:
    for asked in (WeightsAsked(None), WeightsAsked("a:1")):
        assert decode_question(encode(asked)) == asked
    found = (PublishingNode("a", "a:1"), PublishingNode("b", "b:1"))
    assert decode_answer(encode(found)) == found


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x91\xa1x", encode(()), encode(WeightsAsked("x" * 301))])
def test_something_else_than_a_question(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_question(body)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x91\xa1x", encode(WeightsAsked(None))])
def test_something_else_than_an_answer(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_answer(body)
