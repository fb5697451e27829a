"""The comparisons of `benchmarks/weights.py`: the floors of this machine, and the ways without keepstep.

A floor is one stage of the transfer alone, on all devices at once and in the same processes, with only the copies: no
checksum, no message, no wait for another stage. Each is measured with pieces of several sizes, and the fastest counts.

The other ways move the same weights from the publishers to the same consumers' tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import shutil
import statistics
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from weights_cast import Cast, Member, Stopwatch, Timing, check_equal, wall_s

from keepstep.weights.memory.bytes_of import byte_view

NUM_SLOTS = 2
COPY_PIECES = (1 << 18, 1 << 23)
"""Sizes of pieces: half of a second-level cache, and a bucket. None is larger than a bucket."""
GLOO_PIECES = (1 << 21, 1 << 23, 1 << 25)


# ---- floors ---------------------------------------------------------------------------------------------------------


def measure_floors(cast: Cast) -> list[dict[str, Any]]:
    """Measures each stage alone, once with each size of its pieces.

    Returns:
        rows of stage, bytes of a piece, seconds from the first begin to the last end of a process, and processor
        seconds of all processes together.
    """
    stages = (
        ("one", copy_out, cast.consumers[:1], COPY_PIECES),
        ("h2d", copy_in, cast.publishers, COPY_PIECES),
        ("gloo", broadcast_rotating, cast.publishers, GLOO_PIECES),
        ("memcpy", copy_across, cast.publishers, COPY_PIECES),
        ("reload", copy_out, cast.consumers, COPY_PIECES),
    )
    cast.ask(cast.publishers, make_slots)
    rows = []
    for stage, task, members, sizes in stages:
        largest = GLOO_PIECES[-1] if stage == "gloo" else cast.setup.bucket_bytes
        for piece_bytes in sorted({min(size, largest) for size in sizes}):
            timings = cast.ask(members, task, piece_bytes)
            rows.append(
                {
                    "stage": stage,
                    "piece_bytes": piece_bytes,
                    "seconds": wall_s(timings),
                    "cpu_s": sum(timing.cpu_s for timing in timings),
                }
            )
    return rows


def best_floors(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns stage -> the medians with its fastest size of a piece."""
    best: dict[str, dict[str, float]] = {}
    for stage, piece_bytes in sorted({(row["stage"], row["piece_bytes"]) for row in rows}):
        found = [row for row in rows if (row["stage"], row["piece_bytes"]) == (stage, piece_bytes)]
        seconds = statistics.median(row["seconds"] for row in found)
        if stage not in best or seconds < best[stage]["seconds"]:
            cpu_s = statistics.median(row["cpu_s"] for row in found)
            best[stage] = {"seconds": seconds, "cpu_s": cpu_s, "piece_bytes": piece_bytes}
    return best


def make_slots(member: Member) -> None:
    """Makes the shared memory that stands for this device's H2D buffer."""
    with _slots_path(member, member.device).open("wb") as file:
        file.truncate(NUM_SLOTS * member.setup.bucket_bytes)


def _slots_path(member: Member, device: int) -> Path:
    return member.setup.folder / f"slots-{device}"


@contextlib.contextmanager
def _slots(member: Member, device: int | None) -> Iterator[int]:
    """Yields the address of a device's slots, or of this process's own slots."""
    size = NUM_SLOTS * member.setup.bucket_bytes
    with contextlib.ExitStack() as stack:
        if device is None:
            descriptor, flags = -1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        else:
            descriptor, flags = stack.enter_context(_slots_path(member, device).open("r+b")).fileno(), mmap.MAP_SHARED
        memory = mmap.mmap(descriptor, size, flags | mmap.MAP_POPULATE)
        yield int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        memory.close()


def copy_in(member: Member, piece_bytes: int) -> Timing:
    """Copies a publisher's share of the weights into its slots, in turn."""
    devices, total = member.setup.num_devices, member.setup.architecture.num_bytes
    begin, end = (total * index // devices for index in (member.device, member.device + 1))
    with _slots(member, member.device) as slots:
        places = _places(member, [slots], piece_bytes)
        return _carry_out([(next(places), *run) for run in _runs(member, begin, end, piece_bytes)])


def copy_across(member: Member, piece_bytes: int) -> Timing:
    """Copies as many bytes as the weights have from the slots of each device in turn to a publisher's own."""
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(_slots(member, device)) for device in range(member.setup.num_devices)]
        froms = _places(member, sources, piece_bytes)
        places = _places(member, [stack.enter_context(_slots(member, None))], piece_bytes)
        runs = _runs(member, 0, member.setup.architecture.num_bytes, piece_bytes)
        return _carry_out([(next(places), next(froms), size) for _address, size in runs])


def copy_out(member: Member, piece_bytes: int) -> Timing:
    """Copies from the slots of a consumer's device, in turn, to all of its weights."""
    with _slots(member, member.device) as slots:
        places = _places(member, [slots], piece_bytes)
        runs = _runs(member, 0, member.setup.architecture.num_bytes, piece_bytes)
        return _carry_out([(address, next(places), size) for address, size in runs])


def _places(member: Member, slots: Sequence[int], piece_bytes: int) -> Iterator[int]:
    """Yields addresses for consecutive pieces: all pieces of a slot, then those of the same slot in the next buffer."""
    slot_bytes = member.setup.bucket_bytes
    while True:
        for number in range(NUM_SLOTS):
            for address in slots:
                begin = address + number * slot_bytes
                yield from range(begin, begin + slot_bytes - piece_bytes + 1, piece_bytes)


def _runs(member: Member, begin: int, end: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields (address, bytes) of the weights between two offsets, as if all tensors were contiguous."""
    offset = 0
    for tensor in member.weights.values():
        first, last = max(begin - offset, 0), min(end - offset, tensor.nbytes)
        for at in range(first, last, piece_bytes):
            yield tensor.data_ptr() + at, min(piece_bytes, last - at)
        offset += tensor.nbytes


def _carry_out(copies: list[tuple[int, int, int]]) -> Timing:
    with Stopwatch() as watch:
        for to, source, size in copies:
            ctypes.memmove(to, source, size)
    return watch.timing


def broadcast_rotating(member: Member, piece_bytes: int) -> Timing:
    """Broadcasts as many bytes as the weights have among the publishers with gloo, in pieces.

    Each piece comes from the next publisher, and as many pieces are in transit at once as there are publishers.
    """
    group, devices = member.groups["publishers"], member.setup.num_devices
    total = member.setup.architecture.num_bytes
    buffers = [torch.zeros(piece_bytes, dtype=torch.uint8) for _ in range(devices)]
    dist.barrier(group)
    works: list[Any] = []
    with Stopwatch() as watch:
        for number, begin in enumerate(range(0, total, piece_bytes)):
            if len(works) == devices:
                works.pop(0).wait()
            piece = buffers[number % devices][: total - begin]
            works.append(dist.broadcast(piece, number % devices, group=group, async_op=True))
        for work in works:
            work.wait()
    dist.barrier(group)
    return watch.timing


# ---- other ways -----------------------------------------------------------------------------------------------------

OTHERS = {
    "checkpoint": "torch.distributed.checkpoint to a folder in memory: all publishers save their share at once, each "
    "consumer loads all of it into its tensors",
    "broadcast": "one dist.broadcast (gloo) for each tensor, from rank 0 to all consumers, into their tensors",
    "safetensors": "one safetensors file in memory, written by rank 0; each consumer copies it into its tensors",
}


def measure_other(cast: Cast, way: str) -> float:
    """Returns the seconds of one update in another way, until every consumer has it.

    Raises:
        JobFailed: the update has failed, or received weights differ from the sent ones.
    """
    cast.ask(cast.consumers, spoil)
    if way == "broadcast":
        timings = cast.ask([0, *cast.consumers], broadcast_tensors)
    else:
        save, load = {"checkpoint": (save_dcp, load_dcp), "safetensors": (save_safetensors, load_safetensors)}[way]
        timings = cast.ask(cast.publishers if way == "checkpoint" else cast.publishers[:1], save)
        timings += cast.ask(cast.consumers, load)
    check_equal(cast, way)
    cast.ask(cast.publishers[:1], remove_files)
    return wall_s(timings)


def spoil(member: Member) -> None:
    """Overwrites a consumer's weights, so that they are of no version."""
    for tensor in member.weights.values():
        byte_view(tensor).fill_(255)


def broadcast_tensors(member: Member) -> Timing:
    """Broadcasts the weights from rank 0 to every consumer."""
    with Stopwatch() as watch:
        for tensor in member.weights.values():
            dist.broadcast(tensor, 0, group=member.groups["consumers"])
    return watch.timing


def save_dcp(member: Member) -> Timing:
    """Saves the weights with DCP. Each publisher writes a part."""
    with Stopwatch() as watch:
        writer = dcp.FileSystemWriter(_checkpoint(member), sync_files=False)
        dcp.save(dict(member.weights), storage_writer=writer, process_group=member.groups["publishers"])
    return watch.timing


def load_dcp(member: Member) -> Timing:
    """Loads the weights with DCP, in each consumer without the others."""
    with warnings.catch_warnings(), Stopwatch() as watch:
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # intended here
        dcp.load(dict(member.weights), storage_reader=dcp.FileSystemReader(_checkpoint(member)), no_dist=True)
    return watch.timing


def save_safetensors(member: Member) -> Timing:
    """Saves the weights on rank 0 as a safetensors file."""
    from safetensors.torch import save_file

    with Stopwatch() as watch:
        save_file(member.weights, _file(member))
    return watch.timing


def load_safetensors(member: Member) -> Timing:
    """Loads the safetensors file in a consumer, tensor by tensor, as inference engines do."""
    from safetensors import safe_open

    with Stopwatch() as watch, safe_open(_file(member), framework="pt") as file:
        for name, tensor in member.weights.items():
            tensor.copy_(file.get_tensor(name))
    return watch.timing


def remove_files(member: Member) -> None:
    """Removes the files, which frees their memory."""
    shutil.rmtree(_checkpoint(member), ignore_errors=True)
    _file(member).unlink(missing_ok=True)


def _checkpoint(member: Member) -> Path:
    return member.setup.folder / "checkpoint"


def _file(member: Member) -> Path:
    return member.setup.folder / "weights.safetensors"
