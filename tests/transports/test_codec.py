"""The codec: every message survives the wire, and nothing else gets in."""

import dataclasses
import enum
import re
import types
import typing

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from keepstep.errors import RemoteProtocolError
from keepstep.protocol import messages
from keepstep.protocol.messages import (
    AnyMessage,
    Cause,
    Member,
    Membership,
    Message,
    NodeEvicted,
    NodeLeft,
    Packet,
    Tag,
    WorkerFailed,
    WorkerFenced,
    WorkerLost,
)
from keepstep.protocol.phases import Phase
from keepstep.transports import codec
from keepstep.transports.codec import MAX_MESSAGE_BYTES

MESSAGE_TYPES: list[type[Message]] = sorted(typing.get_args(AnyMessage), key=lambda kind: kind.__name__)

SCALARS: dict[object, st.SearchStrategy[typing.Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=30),
    bytes: st.binary(max_size=30),
    types.NoneType: st.none(),
}


def values_of(hint: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Values of one field, from its annotation; fails on an annotation that it does not know."""
    if hint in SCALARS:
        return SCALARS[hint]
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        if parts[-1] is not ...:
            return st.tuples(*(values_of(part) for part in parts))
        return st.lists(values_of(parts[0]), max_size=4).map(tuple)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # the second one if a part is annotated
        return st.one_of([values_of(part) for part in typing.get_args(hint)])
    if issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if issubclass(hint, msgspec.Struct):
        return instances_of(hint)
    raise TypeError(f"no values are known for a field of type {hint}")


def instances_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[typing.Any]:
    """Messages of one type with any values in their fields."""
    if kind is Membership:
        return st.lists(instances_of(Member), max_size=4).map(Membership.of)
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field: values_of(hints[field]) for field in kind.__struct_fields__})


any_message = st.one_of([instances_of(kind) for kind in MESSAGE_TYPES])
each_type = pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)


def refused(frame: bytes) -> bool:
    """Whether the codec says so; any other error than the one documented fails the test."""
    try:
        codec.decode(frame)
    except RemoteProtocolError:
        return True
    return False


# ---- What goes through ----------------------------------------------------------------------------------------------


def test_every_message_is_known_to_the_codec() -> None:
    defined = {kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message)}
    assert defined - {Message} == set(MESSAGE_TYPES)


def test_a_message_is_either_a_report_or_an_order_or_what_carries_them() -> None:
    reports, orders = set(typing.get_args(messages.Report)), set(typing.get_args(messages.AgentOrder))
    assert reports & orders == set()
    assert reports | orders == set(MESSAGE_TYPES) - {Packet, NodeEvicted, NodeLeft} - set(
        typing.get_args(messages.Aside)
    )


@each_type
@settings(max_examples=30)
@given(data=st.data())
def test_a_message_comes_back_as_it_was(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(instances_of(kind))
    frame = codec.encode(message)
    back = codec.decode(frame)
    assert msgspec.msgpack.decode(frame)[0] == kind.__name__
    assert type(back) is kind
    assert back == message


@given(any_message)
def test_any_kind_of_buffer_can_be_decoded(message: AnyMessage) -> None:
    frame = codec.encode(message)
    assert codec.decode(bytearray(frame)) == codec.decode(memoryview(frame)) == message


@given(any_message)
def test_messages_cannot_be_changed(message: AnyMessage) -> None:
    for field in (*type(message).__struct_fields__, "a new one"):
        with pytest.raises(AttributeError):
            setattr(message, field, 0)
    assert isinstance(hash(message), int)


def test_text_that_is_not_unicode_can_still_be_told() -> None:
    """Python keeps undecodable bytes of a file name as lone surrogates, and error texts name files."""
    error = OSError(b"no such file: caf\xe9.pt".decode(errors="surrogateescape"))
    told = messages.text(error)
    back = codec.decode(codec.encode(WorkerFailed(1, told, told, False)))
    assert isinstance(back, WorkerFailed)
    assert back.error.startswith("no such file: caf")


@each_type
def test_no_field_of_a_message_has_a_default(kind: type[Message]) -> None:
    """A default would let a message through that was cut short."""
    assert kind.__struct_defaults__ == ()


# ---- What does not --------------------------------------------------------------------------------------------------


@given(any_message)
def test_an_unknown_field_is_refused(message: AnyMessage) -> None:
    assert refused(msgspec.msgpack.encode([*msgspec.msgpack.decode(codec.encode(message)), 0]))


@given(any_message)
def test_a_missing_field_is_refused(message: AnyMessage) -> None:
    assert refused(msgspec.msgpack.encode(msgspec.msgpack.decode(codec.encode(message))[:-1]))


@given(any_message, st.one_of(st.text(), st.integers(0, 99), st.none(), st.lists(st.text())))
def test_a_wrong_tag_is_refused(message: AnyMessage, tag: object) -> None:
    assume(tag not in [kind.__name__ for kind in MESSAGE_TYPES])
    fields = msgspec.msgpack.decode(codec.encode(message))
    assert refused(msgspec.msgpack.encode([tag, *fields[1:]]))


@given(any_message, st.data())
def test_a_truncated_message_is_refused(message: AnyMessage, data: st.DataObject) -> None:
    frame = codec.encode(message)
    assert refused(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(any_message, st.binary(min_size=1, max_size=8))
def test_bytes_after_a_message_are_refused(message: AnyMessage, rest: bytes) -> None:
    assert refused(codec.encode(message) + rest)


def of(*reports: messages.Report) -> Packet:
    return Packet("a", 1, 0, 0, reports, misses=False)


JOINED = messages.NodeJoined("a", 8, "rack-1", 0, 16, (), 0)
LOST = WorkerLost(1, Cause.EXIT, "exit code 1", True, None, 0.0)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (of(msgspec.structs.replace(JOINED, domain="r" * 257)), "NodeJoined.domain: Expected `str` of length <= 256"),
        (of(msgspec.structs.replace(JOINED, node="n" * 8_000_000)), "NodeJoined.node: Expected `str` of length <= 256"),
        (
            of(msgspec.structs.replace(JOINED, closed=tuple(range(1025)))),
            "Packet.messages[0] NodeJoined.closed: Expected `array` of length <= 1024",
        ),
        (of(LOST, messages.NodeDraining("a", "r" * 4097)), "Packet.messages[1] NodeDraining.reason: Expected `str` of"),
        (of(msgspec.structs.replace(LOST, detail="d" * 4097)), "WorkerLost.detail: Expected `str` of length <= 4096"),
        (of(messages.DevicesClosed("a", (0,) * 1025, "")), "DevicesClosed.devices: Expected `array` of length <= 1024"),
        (of(messages.SnapshotsLeft(1, ((0, (1,) * 65537),))), "SnapshotsLeft.snapshots[0][1]: Expected `array` of"),
        (of(WorkerFailed(1, "", "t" * 16001, False)), "WorkerFailed.traceback: Expected `str` of length <= 16000"),
        (NodeLeft("a", 1, "r" * 4097), "NodeLeft.reason: Expected `str` of length <= 4096"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_what_the_journal_would_record_is_bounded(message: AnyMessage, told: str) -> None:
    with pytest.raises(RemoteProtocolError, match=re.escape(told)):
        codec.decode(codec.encode(message))


UNBOUNDED = {
    "StoreRequested.keys",  # no report in a packet, and not in the journal: each store has a limit of its own
    "StoreRequested.operation",
    "Packet.messages",  # by the limit of a frame
}
OF_REPORTS = [*typing.get_args(messages.Report), NodeLeft, Packet, *typing.get_args(messages.Aside)]


def test_every_text_and_list_of_a_report_has_a_bound() -> None:
    def unbounded(hint: typing.Any, is_bounded: bool = False) -> bool:
        origin = typing.get_origin(hint)
        if origin is typing.Annotated:
            inner, *metas = typing.get_args(hint)
            return unbounded(inner, any(getattr(meta, "max_length", None) is not None for meta in metas))
        if hint is str or (origin is tuple and typing.get_args(hint)[-1] is ...):
            parts = () if hint is str else typing.get_args(hint)[:1]
            return not is_bounded or any(map(unbounded, parts))
        if origin is not None:
            return any(map(unbounded, typing.get_args(hint)))
        is_struct = isinstance(hint, type) and issubclass(hint, msgspec.Struct)
        return is_struct and any(map(unbounded, typing.get_type_hints(hint, include_extras=True).values()))

    found = {
        f"{kind.__name__}.{field}"
        for kind in OF_REPORTS
        for field, hint in typing.get_type_hints(kind, include_extras=True).items()
        if field in kind.__struct_fields__ and unbounded(hint)
    }
    assert found == UNBOUNDED


def test_an_error_names_no_place_where_that_would_take_much_memory() -> None:
    message = of(*[LOST] * (codec.MAX_UNPACKED + 1), messages.NodeDraining("a", "r" * 4097))
    with pytest.raises(RemoteProtocolError, match=r": Packet\.messages\[4097\]\[2\]: Expected"):
        codec.decode(codec.encode(message))


def test_an_error_before_malformed_bytes_is_told_without_its_place() -> None:
    frame = codec.encode(NodeLeft("n" * 257, 1, ""))
    assert refused(frame[:-1])
    nested = frame[:-1] + b"\x91" * 100_000 + b"\x00"
    assert refused(nested)


@given(st.binary(max_size=200))
@example(b"\x91\xa1\xff")
def test_random_bytes_are_refused(frame: bytes) -> None:
    assert refused(frame)


@given(any_message, st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), min_size=1, max_size=4))
@example(NodeEvicted("ab", 0, "why", False), [(14, 0xFF)])
def test_damaged_bytes_are_refused_or_still_a_message(message: AnyMessage, damage: list[tuple[int, int]]) -> None:
    """A changed byte can hit a value, so the message may stay valid; but no other error may come out."""
    frame = bytearray(codec.encode(message))
    for place, value in damage:
        frame[place % len(frame)] = value
    if not refused(bytes(frame)):
        assert isinstance(codec.decode(bytes(frame)), tuple(MESSAGE_TYPES))


JSON = {"type": "WorkerFenced", "worker": 1}


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        msgspec.msgpack.encode(JSON),
        msgspec.json.encode(JSON),
        msgspec.msgpack.encode(["WorkerFenced", "1"]),
        msgspec.msgpack.encode(["WorkerFenced", 1.0]),
        msgspec.msgpack.encode(["WorkerFenced", None]),
        msgspec.msgpack.encode(["Message"]),
        msgspec.msgpack.encode([]),
        b"\x91" * 100_000,
        b"\x92\xacWorkerFenced" + b"\x91" * 100_000 + b"\x00",
        b"\x93\xacWorkerFenced\x01" + b"\x91" * 100_000 + b"\x00",
        b"\x92\xacWorkerFenced\xc7\x01\x05\x00",
        b"\x94\xaaNodeJoined\xa2\xff\xfe\x01\xa0",
    ],
    ids=[
        "nothing",
        "map",
        "JSON",
        "number as text",
        "number as float",
        "null",
        "the root",
        "empty",
        "deep nesting",
        "deep nesting in a field",
        "deep nesting in an unknown field",
        "extension type",
        "text that is not UTF-8",
    ],
)
def test_what_only_resembles_a_message_is_refused(frame: bytes) -> None:
    assert refused(frame)


def test_an_oversize_message_is_refused_unread() -> None:
    message = messages.StoreAnswered(1, 1, (bytes(MAX_MESSAGE_BYTES - 100),), "")
    fits = codec.encode(message)
    assert len(fits) <= MAX_MESSAGE_BYTES
    assert codec.decode(fits) == message
    with pytest.raises(RemoteProtocolError, match=f"{MAX_MESSAGE_BYTES + 1} bytes: at most {MAX_MESSAGE_BYTES}"):
        codec.decode(bytes(MAX_MESSAGE_BYTES + 1))


def test_a_refusal_says_why() -> None:
    with pytest.raises(
        RemoteProtocolError, match=r"not a message of this protocol: WorkerFenced.worker: Expected `int`, got"
    ):
        codec.decode(msgspec.msgpack.encode(["WorkerFenced", "1"]))


def test_a_tag_travels_inside_a_message() -> None:
    """`Tag` itself is no message: alone on the wire it is refused."""
    assert refused(msgspec.msgpack.encode(Tag(1, 2, Phase.FORWARD)))
    assert not dataclasses.is_dataclass(Tag)
    assert codec.decode(codec.encode(WorkerFenced(3))) == WorkerFenced(3)
