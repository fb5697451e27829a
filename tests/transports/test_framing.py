"""Frames: however the byte stream is split, the same messages come out."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import (
    AnyMessage,
    StoreAnswered,
    WorkerFailed,
    WorkerFenced,
    WorkerJoined,
)
from keepstep.transports.codec import MAX_MESSAGE_BYTES
from keepstep.transports.framing import FrameDecoder, frame

numbers = st.integers(0, 2**31)
messages = st.one_of(
    st.builds(WorkerFenced, numbers),
    st.builds(WorkerJoined, numbers, numbers),
    st.builds(WorkerFailed, numbers, st.text(max_size=300), st.text(), st.booleans()),
    st.builds(StoreAnswered, numbers, numbers, st.none() | st.lists(st.binary(max_size=300), max_size=3).map(tuple)),
)
message_lists = st.lists(messages, max_size=6)


@given(message_lists, st.data())
def test_any_split_of_the_stream_gives_the_same_messages(sent: list[AnyMessage], data: st.DataObject) -> None:
    stream = b"".join(frame(message) for message in sent)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=20).map(sorted))
    decoder, received = FrameDecoder(), list[AnyMessage]()
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += decoder.feed(stream[begin:end])
    assert received == sent


@given(message_lists)
def test_a_message_comes_out_with_its_last_byte_and_not_before(sent: list[AnyMessage]) -> None:
    decoder = FrameDecoder()
    for message in sent:
        body = frame(message)
        assert [decoder.feed(body[index : index + 1]) for index in range(len(body) - 1)] == [[]] * (len(body) - 1)
        assert decoder.feed(body[-1:]) == [message]
    assert decoder.feed(b"") == []


def test_an_oversize_length_is_refused_before_the_body_arrives() -> None:
    header = (MAX_MESSAGE_BYTES + 1).to_bytes(4, "little")
    decoder = FrameDecoder()
    assert decoder.feed(header[:3]) == []
    with pytest.raises(RemoteProtocolError, match=f"{MAX_MESSAGE_BYTES + 1} bytes: at most {MAX_MESSAGE_BYTES}"):
        decoder.feed(header[3:])


def test_the_greatest_length_is_waited_for() -> None:
    assert FrameDecoder().feed(MAX_MESSAGE_BYTES.to_bytes(4, "little") + b"\x91") == []


@given(st.binary(max_size=100))
@example(b"\x91\xa1\xff")
def test_a_frame_that_is_no_message_is_refused(body: bytes) -> None:
    decoder = FrameDecoder()
    with pytest.raises(RemoteProtocolError):
        decoder.feed(len(body).to_bytes(4, "little") + body)


def test_the_length_is_little_endian_and_counts_the_body() -> None:
    whole = frame(WorkerFenced(1))
    assert int.from_bytes(whole[:4], "little") == len(whole) - 4
