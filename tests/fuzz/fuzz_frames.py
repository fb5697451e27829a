"""Frames, fuzzed by coverage: atheris looks for bytes that reach lines which no bytes have reached before.

    make fuzz RUNS=1000000
    python tests/fuzz/fuzz_frames.py -atheris_runs=1000000     the same; any option of libFuzzer may follow

What is executed is the check of `oracles.check_stream`, on one stream in pieces, and of `oracles.check_transfer` on the
same bytes. What fails is written to a file named crash-*, which can be given as an argument to run that alone.
msgspec, which does the decoding, is compiled: what atheris sees of it is what comes of its answers. So most new inputs
are made by those who know what a message looks like.
"""

from __future__ import annotations

import atexit
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

with atheris.instrument_imports():
    from tests.fuzz import inputs
    from tests.fuzz.oracles import Tally, check_stream, check_transfer

SEED = 1
"""Of the messages that it begins with; the rest is libFuzzer's own, see its option -seed."""
BODIES = inputs.bodies((*inputs.MESSAGE_TYPES, *inputs.TRANSFER_TYPES), 20, Random(SEED))
tally = Tally()


def execute(data: bytes) -> None:
    """The first byte says where the rest is split."""
    stream = data[1:]
    at = data[0] * len(stream) // 255 if data else 0
    check_stream([stream[:at], stream[at:]], tally)
    check_transfer(stream[4:])


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """As libFuzzer does it, or as it makes sense for msgpack; or starts over, for to libFuzzer most types are alike."""
    random = Random(seed)
    how = random.random()
    if how < 0.4:
        return bytes(atheris.Mutate(data, max_size))
    if how < 0.7:
        return (data[:1] + inputs.framed(inputs.damaged(data[5:], random)))[:max_size]
    return (random.randbytes(1) + inputs.stream(BODIES, random))[:max_size]


def first_inputs() -> Iterator[bytes]:
    """A frame of each message."""
    return (b"\x80" + inputs.framed(body) for body in BODIES)


def main() -> None:
    """Runs until libFuzzer has enough."""
    with tempfile.TemporaryDirectory(prefix="keepstep-fuzz-") as folder:
        for number, data in enumerate(first_inputs()):
            (Path(folder) / f"{number:03d}").write_bytes(data)
        atexit.register(lambda: print(tally, file=sys.stderr, flush=True))
        atheris.Setup([*sys.argv, *([] if names_files(sys.argv[1:]) else [folder])], execute, custom_mutator=mutate)
        atheris.Fuzz()


def names_files(arguments: list[str]) -> bool:
    """Whether anything but options was given."""
    return any(not argument.startswith("-") for argument in arguments)


if __name__ == "__main__":
    main()
