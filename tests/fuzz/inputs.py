"""What decoders are given: messages with any values in their fields, and what becomes of their bytes on the way.

Everything is drawn from a `random.Random`, so a seed says it all. Hypothesis has one of its own (`st.randoms()`), which
finds the smallest case.
"""

from __future__ import annotations

import enum
import struct
import types
import typing
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

from keepstep.errors import KeepstepError
from keepstep.protocol.messages import AnyMessage, Member, Membership
from keepstep.protocol.transfer.messages import AnyTransferMessage
from keepstep.transports.codec import MAX_MESSAGE_BYTES

MESSAGE_TYPES: tuple[type[msgspec.Struct], ...] = typing.get_args(AnyMessage)
TRANSFER_TYPES: tuple[type[msgspec.Struct], ...] = typing.get_args(AnyTransferMessage)

INTEGERS = (0, 1, 2, 3, 31, 32, 127, 128, 255, 256, 65535, 65536, 2**31, 2**32, 2**53, 2**63 - 1, 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, 0.1, -1e-300, 1e308, 5e-324)
TEXTS = ("", "a", "0", "node-1", "\x00", "ä", "\u2028", "\U0001f600", "x" * 31, "x" * 32, "x" * 256)
MAX_ITEMS = 3
MAX_DEPTH = 8
"""Of structures within each other: recipes hold recipes."""
NEAR_THE_LIMIT = (MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES + 1, 2**31, 2**32 - 1)

# ---- values ---------------------------------------------------------------------------------------------------------


def instance(kind: type[msgspec.Struct], random: Random, depth: int = 0) -> Any:
    """A message of one type, with any values in its fields."""
    if kind is Membership:
        return Membership.of(instance(Member, random) for _ in range(random.randint(0, MAX_ITEMS)))
    hints = typing.get_type_hints(kind)
    while True:
        fields = {name: value(hints[name], random, depth + 1) for name in kind.__struct_fields__}
        try:
            return kind(**fields)
        except KeepstepError:  # such values it does not take; others it does
            continue


def value(hint: Any, random: Random, depth: int = 0) -> Any:
    """A value of one annotation; fails on an annotation that it does not know."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        flat = [part for part in parts if part in _SCALARS]
        return value(random.choice(flat if flat and depth > MAX_DEPTH else parts), random, depth)
    if origin is tuple and parts[-1] is Ellipsis:
        return tuple(value(parts[0], random, depth) for _ in range(random.randint(0, MAX_ITEMS)))
    if origin is tuple:
        return tuple(value(part, random, depth) for part in parts)
    if hint in _SCALARS:
        return _SCALARS[hint](random)
    if issubclass(hint, enum.Enum):
        return random.choice(list(hint))
    if issubclass(hint, msgspec.Struct):
        return instance(hint, random, depth)
    raise TypeError(f"no values are known for a field of type {hint}")


_SCALARS: dict[Any, Callable[[Random], Any]] = {
    int: lambda random: random.choice((1, 1, -1)) * random.choice(INTEGERS[:-1]),
    bool: lambda random: random.choice((False, True)),
    float: lambda random: random.choice(FLOATS),
    str: lambda random: random.choice(TEXTS),
    bytes: lambda random: random.randbytes(random.choice((0, 1, 8, 40, 300))),
    types.NoneType: lambda random: None,
}


def bodies(kinds: Sequence[type[msgspec.Struct]], num_each: int, random: Random) -> list[bytes]:
    """The wire form of so many messages of each type."""
    return [msgspec.msgpack.encode(instance(kind, random)) for kind in kinds for _ in range(num_each)]


# ---- damage ---------------------------------------------------------------------------------------------------------

ODD = (
    b"\xcb" + struct.pack(">d", float("nan")),
    b"\xcb" + struct.pack(">d", float("inf")),
    b"\xca" + struct.pack(">f", float("-inf")),
    b"\xcf" + b"\xff" * 8,
    b"\xd3" + b"\x80" + b"\x00" * 7,
    b"\xc0",
    b"\xc1",
    b"\xc3",
    b"\xa1\xff",
    b"\xa3\xed\xa0\x80",  # a lone surrogate
    b"\x90",
    b"\x80",
    b"\x81\xc0\xc0",
    b"\xd6\xff\x00\x00\x00\x01",  # a time
    b"\xd4\x05\x00",  # of no known type
)
"""Values that belong into no message, or into few."""
LENGTHS = (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")
"""Arrays, maps, texts, bytes and extensions of up to 4 GiB."""


def _set(data: bytearray, at: int, random: Random) -> None:
    data[at : at + 1] = random.randbytes(1)


def _insert(data: bytearray, at: int, random: Random) -> None:
    data[at:at] = random.randbytes(random.randint(1, 8))


def _insert_odd(data: bytearray, at: int, random: Random) -> None:
    data[at : at + random.randint(0, 1)] = random.choice(ODD)


def _claim(data: bytearray, at: int, random: Random) -> None:
    size = random.choice((0, 1, 0xFFFF, 2**24, 2**31, 2**32 - 1))
    data[at : at + 1] = random.choice(LENGTHS) + struct.pack(">I", size)


def _widen(data: bytearray, at: int, random: Random) -> None:
    """An array has one item more, or one less."""
    starts = [place for place in range(at, len(data)) if 0x90 <= data[place] < 0x9F]
    if starts and random.random() < 0.8:
        data[starts[0]] += 1
        data[starts[0] + 1 : starts[0] + 1] = random.choice((b"\x00", b"\x90", b"\xa0", b"\xc0"))
    elif starts and data[starts[0]] > 0x90:
        data[starts[0]] -= 1


def _delete(data: bytearray, at: int, random: Random) -> None:
    del data[at : at + random.randint(1, 8)]


def _repeat(data: bytearray, at: int, random: Random) -> None:
    data[at:at] = data[at : at + random.randint(1, 20)] * random.randint(1, 4)


def _nest(data: bytearray, at: int, random: Random) -> None:
    data[at:at] = random.choice((b"\x91", b"\x81\x01", b"\xdc\x00\x01")) * random.choice((1, 3, 40, 3000))


def _cut(data: bytearray, at: int, random: Random) -> None:
    del data[at:]


DAMAGES: tuple[Callable[[bytearray, int, Random], None], ...] = (
    _set, _set, _set, _insert, _insert_odd, _insert_odd, _claim, _widen, _delete, _repeat, _nest, _cut,
)  # fmt: skip


def damaged(body: bytes, random: Random) -> bytes:
    """What is left of some bytes after up to four kinds of damage; now and then nothing has happened."""
    data = bytearray(body)
    for _ in range(random.choice((0, 1, 1, 1, 2, 4))):
        random.choice(DAMAGES)(data, random.randint(0, len(data)), random)
    return bytes(data)


# ---- streams --------------------------------------------------------------------------------------------------------


def stream(corpus: Sequence[bytes], random: Random) -> bytes:
    """Some frames, one after the other, of whole and of damaged messages; lengths may lie, and the end be missing."""
    parts = []
    for _ in range(random.choice((1, 1, 2, 3))):
        body = random.choice(corpus) if random.random() < 0.5 else damaged(random.choice(corpus), random)
        claimed = len(body)
        if random.random() < 0.05:
            claimed = random.choice(
                (0, claimed + 1, max(0, claimed - 1), MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES + 1, 2**31)
            )
        parts.append(struct.pack("<I", claimed) + body)
    whole = b"".join(parts)
    how = random.random()
    if how < 0.1:
        return damaged(whole, random)
    return whole[: random.randint(0, len(whole))] if how < 0.2 else whole


def split(data: bytes, random: Random) -> list[bytes]:
    """The same bytes in some pieces, or each alone."""
    if len(data) <= 64 and random.random() < 0.2:
        return [data[at : at + 1] for at in range(len(data))]
    cuts = sorted(random.randint(0, len(data)) for _ in range(random.choice((0, 1, 2, 5))))
    return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def framed(body: bytes) -> bytes:
    """A body as a frame, whatever it holds."""
    return struct.pack("<I", len(body)) + body
