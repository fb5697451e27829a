"""The codec of a transfer: every message survives the line, and nothing else gets in."""

import enum
import types
import typing

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.transfer import messages
from keepstep.protocol.transfer.layout import Layout
from keepstep.protocol.transfer.messages import (
    AnyTransferMessage,
    MovementSeen,
    Refused,
    TransferMessage,
    UpdateAgreed,
    decode,
    encode,
)
from keepstep.protocol.transfer.names.recipes import (
    Chunk,
    Concat,
    Recipe,
    Select,
    Shard,
    Slice,
    Stack,
    Transpose,
)
from keepstep.protocol.transfer.plan import ALIGNMENT_BYTES, Limits

MESSAGE_TYPES: list[type[TransferMessage]] = sorted(typing.get_args(AnyTransferMessage), key=lambda kind: kind.__name__)

SCALARS: dict[object, st.SearchStrategy[typing.Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    bool: st.booleans(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    types.NoneType: st.none(),
}


def values_of(hint: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Values of one field, from its annotation; fails on an annotation that it does not know."""
    if hint in SCALARS:
        return SCALARS[hint]
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        if parts[-1] is not ...:
            return st.tuples(*map(values_of, parts))
        return st.lists(values_of(parts[0]), max_size=2).map(tuple)
    if hint == Recipe:
        return recipes()
    if typing.get_origin(hint) is types.UnionType:
        return st.one_of([values_of(part) for part in typing.get_args(hint)])
    if hint is Limits:
        return st.builds(Limits, st.integers(ALIGNMENT_BYTES, 2**40), st.integers(0, 2**40))
    if issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if issubclass(hint, msgspec.Struct):
        return instances_of(hint)
    raise TypeError(f"no values are known for a field of type {hint}")


def recipes() -> st.SearchStrategy[Recipe]:
    """Recipes of any operations, some of them with operations inside."""
    names, numbers = SCALARS[str], st.integers(-(2**63), 2**63 - 1)

    def applied(of: st.SearchStrategy[Recipe]) -> st.SearchStrategy[Recipe]:
        parts = st.lists(of, max_size=2).map(tuple)
        indices = st.one_of(numbers, names)
        return st.one_of(
            st.builds(Concat, parts, numbers),
            st.builds(Stack, parts, numbers),
            st.builds(Slice, of, numbers, numbers, numbers),
            st.builds(Chunk, of, numbers, indices, numbers),
            st.builds(Select, of, numbers, indices),
            st.builds(Transpose, of, st.lists(numbers, max_size=2).map(tuple)),
            st.builds(Shard, of, numbers, numbers),
        )

    return st.recursive(names, applied, max_leaves=3)


def instances_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[typing.Any]:
    """Messages of one type with any values in their fields."""
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field: values_of(hints[field]) for field in kind.__struct_fields__})


any_message = st.one_of([instances_of(kind) for kind in MESSAGE_TYPES])
each_type = pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)
moderately = settings(max_examples=60)  # a random layout takes milliseconds to make

LAYOUT = Layout((), (), (), (), Limits(ALIGNMENT_BYTES, 0))


def refused(body: bytes) -> bool:
    """Whether the codec says so; any other error than the one documented fails the test."""
    try:
        decode(body)
    except RemoteProtocolError:
        return True
    return False


def fields_of(message: AnyTransferMessage) -> list[typing.Any]:
    """What a message is on the line: its tag, then its fields."""
    found = msgspec.msgpack.decode(encode(message))
    assert isinstance(found, list)
    return found


# ---- What goes through ----------------------------------------------------------------------------------------------


def test_every_message_is_known_to_the_codec() -> None:
    defined = {kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, TransferMessage)}
    assert defined - {TransferMessage} == set(MESSAGE_TYPES)


@each_type
@settings(max_examples=20)
@given(data=st.data())
def test_a_message_comes_back_as_it_was(kind: type[TransferMessage], data: st.DataObject) -> None:
    message = data.draw(instances_of(kind))
    back = decode(encode(message))
    assert fields_of(message)[0] == kind.__name__
    assert type(back) is kind
    assert back == message


@moderately
@given(any_message)
def test_messages_cannot_be_changed(message: AnyTransferMessage) -> None:
    for field in (*type(message).__struct_fields__, "a new one"):
        with pytest.raises(AttributeError):
            setattr(message, field, 0)
    assert isinstance(hash(message), int)


# ---- What does not --------------------------------------------------------------------------------------------------


@moderately
@given(any_message)
def test_an_unknown_field_is_refused(message: AnyTransferMessage) -> None:
    assert refused(msgspec.msgpack.encode([*fields_of(message), 0]))


@moderately
@given(any_message)
def test_a_missing_field_is_refused(message: AnyTransferMessage) -> None:
    assert refused(msgspec.msgpack.encode(fields_of(message)[:-1]))


@moderately
@given(any_message, st.one_of(st.text(), st.integers(0, 99), st.none(), st.lists(st.text())))
def test_a_wrong_tag_is_refused(message: AnyTransferMessage, tag: object) -> None:
    assume(tag not in [kind.__name__ for kind in MESSAGE_TYPES])
    assert refused(msgspec.msgpack.encode([tag, *fields_of(message)[1:]]))


@moderately
@given(any_message, st.data())
def test_a_truncated_message_is_refused(message: AnyTransferMessage, data: st.DataObject) -> None:
    body = encode(message)
    assert refused(body[: data.draw(st.integers(0, len(body) - 1))])


@moderately
@given(any_message, st.binary(min_size=1, max_size=8))
def test_bytes_after_a_message_are_refused(message: AnyTransferMessage, rest: bytes) -> None:
    assert refused(encode(message) + rest)


@given(st.binary(max_size=200))
@example(b"\x91\xa1\xff")
def test_random_bytes_are_refused(body: bytes) -> None:
    assert refused(body)


@given(any_message, st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), min_size=1, max_size=4))
@example(Refused("ab", False), [(10, 0xFF)])
@example(UpdateAgreed(1, 1, 1, LAYOUT, ()), [(-2, 0)])
def test_damaged_bytes_are_refused_or_still_a_message(
    message: AnyTransferMessage, damage: list[tuple[int, int]]
) -> None:
    """A changed byte can hit a value, so the message may stay valid; but no other error may come out."""
    body = bytearray(encode(message))
    for place, value in damage:
        body[place % len(body)] = value
    if not refused(bytes(body)):
        assert isinstance(decode(bytes(body)), tuple(MESSAGE_TYPES))


def test_text_that_is_not_unicode_is_refused() -> None:
    assert refused(encode(Refused("ab", False)).replace(b"ab", b"\xff\xfe"))


def test_limits_that_cannot_be_are_refused() -> None:
    """They are checked where they are made, with an error for the user; on the line it is the sender's fault."""
    fields = fields_of(UpdateAgreed(1, 1, 1, LAYOUT, ()))
    assert fields[-2][4] == [ALIGNMENT_BYTES, 0]
    fields[-2][4] = [ALIGNMENT_BYTES - 1, 0]
    assert refused(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        msgspec.msgpack.encode({"type": "MovementSeen", "update": 1}),
        msgspec.json.encode(["MovementSeen", 1]),
        msgspec.msgpack.encode(["MovementSeen", "1"]),
        msgspec.msgpack.encode(["MovementSeen", 1.0]),
        msgspec.msgpack.encode(["MovementSeen", None]),
        msgspec.msgpack.encode(["TransferMessage"]),
        msgspec.msgpack.encode([]),
        b"\x91" * 100_000,
        b"\x92\xacMovementSeen" + b"\x91" * 100_000 + b"\x00",
        b"\x93\xacMovementSeen\x01" + b"\x91" * 100_000 + b"\x00",
        b"\x92\xacMovementSeen\xc7\x01\x05\x00",
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
    ],
)
def test_what_only_resembles_a_message_is_refused(body: bytes) -> None:
    assert refused(body)


def test_a_refusal_says_why() -> None:
    assert decode(msgspec.msgpack.encode(["MovementSeen", 1])) == MovementSeen(1)
    with pytest.raises(RemoteProtocolError, match=r"not a message of a transfer: Expected `int`, got `str`"):
        decode(msgspec.msgpack.encode(["MovementSeen", "1"]))
