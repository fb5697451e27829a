"""Frames and what is in them, fuzzed: whatever comes, messages come out or a refusal, and nothing else.

In every run some thousand frames, drawn by hypothesis; a million with ``-m full``. `fuzz_frames.py` beside this file
goes on from there, led by which lines are reached.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tracemalloc
import typing
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.fuzz import inputs
from tests.fuzz.oracles import Decoder, Tally, check_body, check_stream, check_transfer

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import (
    AnyMessage,
    Member,
    Membership,
    Recover,
    Seconds,
    StepObserved,
    Tag,
    Transfer,
    WorkerFenced,
)
from keepstep.protocol.transfer.plan import Limits
from keepstep.transports import codec
from keepstep.transports.codec import MAX_MESSAGE_BYTES
from keepstep.transports.framing import FrameDecoder

NUM_FRAMES = 1_000_000
CORPUS = inputs.bodies(inputs.MESSAGE_TYPES, 6, Random(1))
TRANSFERS = inputs.bodies(inputs.TRANSFER_TYPES, 6, Random(1))
randoms = st.randoms(use_true_random=False)


# ---- hypothesis -----------------------------------------------------------------------------------------------------


@settings(max_examples=500)
@given(randoms)
def test_damaged_cut_and_glued_frames(random: Random) -> None:
    check_stream(inputs.split(inputs.stream(CORPUS, random), random), Tally())


@settings(max_examples=500)
@given(randoms, st.sampled_from(inputs.MESSAGE_TYPES))
def test_damaged_messages(random: Random, kind: type[msgspec.Struct]) -> None:
    check_body(inputs.damaged(msgspec.msgpack.encode(inputs.instance(kind, random)), random))


@settings(max_examples=50)  # a layout takes a while to draw
@given(randoms, st.sampled_from(inputs.TRANSFER_TYPES))
def test_damaged_messages_of_a_transfer(random: Random, kind: type[msgspec.Struct]) -> None:
    check_transfer(inputs.damaged(msgspec.msgpack.encode(inputs.instance(kind, random)), random))


@given(st.lists(st.binary(max_size=60), max_size=8))
@example([b"\x02\x00\x00\x00\x91", b"\xa1\xff"])
def test_random_bytes(pieces: list[bytes]) -> None:
    check_stream(pieces, Tally())
    check_body(b"".join(pieces))
    check_transfer(b"".join(pieces))


# ---- a million ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_frames", [5_000, NUM_FRAMES])
def test_many_frames(num_frames: int, seed: int) -> None:
    random, tally = Random(seed), Tally()
    corpus = inputs.bodies(inputs.MESSAGE_TYPES, 50, random)
    begun_s = time.monotonic()
    while tally.num_frames < num_frames:
        check_stream(inputs.split(inputs.stream(corpus, random), random), tally)
    print(f"{tally} in {time.monotonic() - begun_s:.0f} s")
    assert tally.num_messages > num_frames // 4, "hardly anything was a message"
    assert tally.num_refused > num_frames // 10, "hardly anything was none"


@pytest.mark.parametrize("num", [2_000, NUM_FRAMES])
def test_many_messages_of_transfers(num: int, seed: int) -> None:
    random = Random(seed)
    corpus = inputs.bodies(inputs.TRANSFER_TYPES, 50 if num > 10_000 else 5, random)
    num_messages = sum(check_transfer(inputs.damaged(random.choice(corpus), random)) for _ in range(num))
    assert num // 10 < num_messages < num * 9 // 10


# ---- what was found -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_time_that_is_no_number_is_refused(number: float) -> None:
    """An agent's NaN went into the journal as null, and the controller could not come back from it."""
    for message in (StepObserved("a", 1, 1, number, 1.0, ()), StepObserved("a", 1, 1, 1.0, number, ())):
        with pytest.raises(RemoteProtocolError, match="Expected `float`"):
            codec.decode(codec.encode(message))


def test_unknown_fields_are_refused_inside_of_messages_too() -> None:
    """`Transfer` and `Tag` let them pass."""
    body = codec.encode(Recover(1, 1, (Transfer((0,), (1,)),), Membership.of([Member(0, "n", "0")]), (), None))
    with pytest.raises(RemoteProtocolError, match="at most length 2"):
        codec.decode(body.replace(b"\x92\x91\x00\x91\x01", b"\x93\x91\x00\x91\x01\xc0"))
    structures = [kind for kind in every_structure() if not kind.__struct_config__.forbid_unknown_fields]
    assert structures == []


def test_no_number_in_a_message_may_be_none() -> None:
    """NaN is not even equal to itself; see `keepstep.protocol.messages.Seconds`."""
    loose = [
        f"{kind.__name__}.{name}"
        for kind in every_structure()
        for name, hint in typing.get_type_hints(kind, include_extras=True).items()
        if hint is float or float in typing.get_args(hint)[:1]
        if hint is not Seconds
    ]
    assert loose == []


def every_structure() -> set[type[msgspec.Struct]]:
    """What messages are made of."""
    found: set[type[msgspec.Struct]] = set()

    def visit(hint: Any) -> None:
        for part in typing.get_args(hint):
            visit(part)
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct) and hint not in found:
            found.add(hint)
            for field in typing.get_type_hints(hint).values():
                visit(field)

    for kind in (*inputs.MESSAGE_TYPES, *inputs.TRANSFER_TYPES):
        visit(kind)
    assert {Tag, Transfer, Limits} <= found
    return found


# ---- memory ---------------------------------------------------------------------------------------------------------


def tagged(tag: str, *fields: bytes) -> bytes:
    """A message with fields of any bytes."""
    return bytes([0x91 + len(fields), 0xA0 + len(tag)]) + tag.encode() + b"".join(fields)


def array(num: int, items: bytes) -> bytes:
    """An array that says it has so many items."""
    return b"\xdd" + num.to_bytes(4, "big") + items


HUGE = 2**32 - 1
ONE, EMPTY, FALSE = b"\x01", b"\xa0", b"\xc2"
NO_MEMBERS = tagged("Membership", *[b"\x90"] * 5)
BOMBS = {
    "an array": array(HUGE, b""),
    "a message of so many fields": array(HUGE, b"\xacWorkerFenced\x01"),
    "an array in a field": tagged("GroupsReset", array(HUGE, b"\x01"), ONE),
    "an array of arrays": tagged("Recover", ONE, ONE, array(HUGE, b"\x92" + array(HUGE, b""))),
    "messages in a packet": tagged("Packet", EMPTY, ONE, ONE, ONE, array(HUGE, b"\x92\xa6Resume\x01"), FALSE),
    "a text": tagged("WorkerFenced", b"\xdb\xff\xff\xff\xff"),
    "a text in a field of text": tagged("Abandon", b"\xdb\xff\xff\xff\xff"),
    "bytes": tagged("PhasesObserved", EMPTY, ONE, b"\xc6\xff\xff\xff\xff"),
    "an extension": tagged("PhasesObserved", EMPTY, ONE, b"\xc9\xff\xff\xff\xff\x05"),
    "a map": b"\xdf\xff\xff\xff\xff",
    "deep arrays": b"\x91" * 1_000_000,
    "deep arrays in a field": tagged("WorkerFenced", b"\x91" * 1_000_000),
    "deep arrays in an array": tagged("GroupsReset", array(1, b"\x91" * 1_000_000), ONE),
    "deep maps": tagged("WorkerFenced", b"\x81\xa1a" * 300_000),
    "deep arrays in a tag": b"\x92" + b"\x91" * 1_000_000,
}
"""What promises more than it holds."""


@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS.keys())
def test_what_promises_more_than_it_holds_takes_no_memory(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            codec.decode(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


IN_A_CHILD = """
import json, resource, sys
from keepstep.errors import RemoteProtocolError
from keepstep.transports.framing import FrameDecoder
bodies = [bytes.fromhex(each) for each in json.load(sys.stdin)]
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 64 * 2**20,) * 2)
for body in bodies:
    try:
        FrameDecoder().feed(len(body).to_bytes(4, "little") + body)
    except RemoteProtocolError:
        continue
    sys.exit("not refused: " + repr(body[:40]))
try:
    bytearray(2**27)
except MemoryError:
    print("all refused")
"""


def test_where_memory_is_short_they_are_refused_all_the_same() -> None:
    """Whatever is allocated by whomever counts here; the last lines show that the limit was one."""
    ended = subprocess.run(
        [sys.executable, "-c", IN_A_CHILD],
        input=json.dumps([body.hex() for body in BOMBS.values()]),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ended.stdout, ended.returncode) == ("all refused\n", 0), ended.stderr


MAX_GROWTH = 28
"""How many times its own size a message may take. The worst is a text of two letters: 3 bytes of it become an object of
51 in a tuple."""
SMALL = {
    "texts": lambda n: tagged("StoreRequested", ONE, ONE, ONE, EMPTY, array(n // 3, b"\xa2ab" * (n // 3)), b"\xc4\x00"),
    "empty texts": lambda n: tagged("StoreRequested", ONE, ONE, ONE, EMPTY, array(n, EMPTY * n), b"\xc4\x00"),
    "bytes": lambda n: tagged("StoreAnswered", ONE, ONE, array(n // 4, b"\xc4\x02ab" * (n // 4)), b"\xa0"),
    "integers": lambda n: tagged("ReleaseSnapshots", array(n // 3, b"\xcd\x7f\xff" * (n // 3))),
    "empty structures": lambda n: tagged(
        "Recover",
        ONE,
        ONE,
        array(n // 3, b"\x92\x90\x90" * (n // 3)),
        tagged("Membership", *[b"\x90"] * 5),
        b"\x90",
        b"\xc0",
    ),
    "messages": lambda n: tagged(
        "Packet", EMPTY, ONE, ONE, ONE, array(n // 11, b"\x92\xa6Resume\xcd\x7f\xff" * (n // 11)), FALSE
    ),
}
"""The smallest things that messages may be full of, in a message of about so many bytes."""


@pytest.mark.parametrize("fill", SMALL.values(), ids=SMALL.keys())
def test_the_memory_of_a_message_is_bounded_by_its_size(fill: Callable[[int], bytes]) -> None:
    body = fill(1 << 20)
    tracemalloc.start()
    try:
        codec.decode(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(body) < peak_bytes < MAX_GROWTH * len(body), f"{peak_bytes / len(body):.1f} times its size"


def test_a_decoder_keeps_no_more_than_the_largest_frame() -> None:
    """It is sent one that never becomes whole, and then one that is too long."""
    piece = bytes(1 << 16)
    decoder = FrameDecoder()
    tracemalloc.start()
    try:
        decoder.feed(MAX_MESSAGE_BYTES.to_bytes(4, "little"))
        for _ in range(MAX_MESSAGE_BYTES // len(piece) - 1):
            assert decoder.feed(piece) == []
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert decoder.num_buffered < MAX_MESSAGE_BYTES
    assert peak_bytes < 2.5 * MAX_MESSAGE_BYTES  # a bytearray is copied as it grows
    with pytest.raises(RemoteProtocolError):
        FrameDecoder().feed((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little") + piece)


# ---- the oracles can fail -------------------------------------------------------------------------------------------


class Broken(FrameDecoder):
    """To be broken in one place."""

    spoil: Callable[[Broken, bytes], list[AnyMessage]]

    def feed(self, data: bytes) -> list[AnyMessage]:
        return type(self).spoil(self, data)

    def good(self, data: bytes) -> list[AnyMessage]:
        return super().feed(data)


def _lets_another_error_out(decoder: Broken, data: bytes) -> list[AnyMessage]:
    try:
        return decoder.good(data)
    except RemoteProtocolError as error:
        raise ValueError from error


def _swallows_the_refusal(decoder: Broken, data: bytes) -> list[AnyMessage]:
    try:
        return decoder.good(data)
    except RemoteProtocolError:
        return []


def _loses_what_is_split(decoder: Broken, data: bytes) -> list[AnyMessage]:
    found = decoder.good(data)
    decoder._buffer.clear()
    return found


def _invents(decoder: Broken, data: bytes) -> list[AnyMessage]:
    return [*decoder.good(data), WorkerFenced(7)]


def _has_it_twice(decoder: Broken, data: bytes) -> list[AnyMessage]:
    return decoder.good(data) * 2


MUTANTS = (_lets_another_error_out, _swallows_the_refusal, _loses_what_is_split, _invents, _has_it_twice)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_broken_decoder_is_found(mutant: Callable[[Broken, bytes], list[AnyMessage]]) -> None:
    def run(new_decoder: Callable[[], Decoder]) -> None:
        random = Random(2)
        for _ in range(300):
            check_stream(inputs.split(inputs.stream(CORPUS, random), random), Tally(), new_decoder)

    run(FrameDecoder)
    with pytest.raises((AssertionError, ValueError)):
        run(type("Mutant", (Broken,), {"spoil": mutant}))


def test_the_streams_hold_messages_of_every_type_and_refusals() -> None:
    random, tally = Random(3), Tally()
    for _ in range(1000):
        check_stream([inputs.stream(CORPUS, random)], tally)
    assert tally.num_messages > 500
    assert tally.num_refused > 200
    assert {type(codec.decode(body)) for body in CORPUS} == set(inputs.MESSAGE_TYPES)
