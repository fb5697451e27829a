"""The processes of `benchmarks/weights.py`: a publisher and a consumer for each device.

The benchmark's own process sends tasks to each of them over a pipe, and does nothing else. A task is a function of a
module. Its first argument is the `Member` that runs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jobs import JobFailed
from torch import distributed as dist

from keepstep.weights.memory.bytes_of import byte_view, digest_of
from keepstep.weights.publisher import Buffers, Publisher
from keepstep.weights.subscriber import Subscriber

CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["keepstep.weights.publisher", "keepstep.weights.subscriber", "torch.distributed.checkpoint", "rich.console"]
IN_MEMORY = Path("/dev/shm")
"""Folder for files that stand for a fast disk."""

Form = tuple[torch.dtype, tuple[int, ...]]
Task = Callable[..., Any]


# ---- the weights ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The shapes of a decoder such as Llama: few large matrices, many small vectors and buffers."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    layers: int

    def forms(self) -> dict[str, Form]:
        """Returns name -> (dtype, shape) of every tensor."""
        bf16, head = torch.bfloat16, self.hidden // self.heads
        found: dict[str, Form] = {"model.embed_tokens.weight": (bf16, (self.vocab, self.hidden))}
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            found |= {
                f"{at}.self_attn.q_proj.weight": (bf16, (self.hidden, self.hidden)),
                f"{at}.self_attn.k_proj.weight": (bf16, (self.kv_heads * head, self.hidden)),
                f"{at}.self_attn.v_proj.weight": (bf16, (self.kv_heads * head, self.hidden)),
                f"{at}.self_attn.o_proj.weight": (bf16, (self.hidden, self.hidden)),
                f"{at}.self_attn.rotary_emb.inv_freq": (torch.float32, (head // 2,)),
                f"{at}.mlp.gate_proj.weight": (bf16, (self.ffn, self.hidden)),
                f"{at}.mlp.up_proj.weight": (bf16, (self.ffn, self.hidden)),
                f"{at}.mlp.down_proj.weight": (bf16, (self.hidden, self.ffn)),
                f"{at}.input_layernorm.weight": (bf16, (self.hidden,)),
                f"{at}.post_attention_layernorm.weight": (bf16, (self.hidden,)),
            }
        return found | {
            "model.norm.weight": (bf16, (self.hidden,)),
            "lm_head.weight": (bf16, (self.vocab, self.hidden)),
        }

    @property
    def num_bytes(self) -> int:
        """The size of all tensors together."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in self.forms().values())

    def __str__(self) -> str:
        num_small = sum(len(shape) == 1 for _dtype, shape in self.forms().values())
        return (
            f"Llama-style, bf16, {self.layers} layers, hidden {self.hidden}, {self.heads} heads ({self.kv_heads} for "
            f"keys and values), ffn {self.ffn}, vocabulary {self.vocab}: {len(self.forms())} tensors, "
            f"{num_small} of them vectors"
        )


SIZES = (
    Architecture(hidden=2048, heads=32, kv_heads=8, ffn=5632, vocab=32000, layers=0),
    Architecture(hidden=512, heads=8, kv_heads=2, ffn=1408, vocab=8000, layers=0),
    Architecture(hidden=128, heads=4, kv_heads=2, ffn=352, vocab=1000, layers=0),
)
"""Widest first. A benchmark uses the widest that has three layers in the requested size."""


def architecture_of(num_bytes: int) -> Architecture:
    """Returns the architecture of about ``num_bytes``."""
    for size in SIZES:
        layer_bytes = dataclasses.replace(size, layers=1).num_bytes - size.num_bytes
        layers = round((num_bytes - size.num_bytes) / layer_bytes)
        if layers >= 3:
            break
    return dataclasses.replace(size, layers=max(layers, 1))


# ---- one process ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setup:
    """The settings of all processes of a case."""

    architecture: Architecture
    num_devices: int
    bucket_bytes: int
    deadline_s: float
    atomic: bool
    """Whether consumers assemble a version in a second set of tensors."""
    folder: Path
    """The folder of the sockets, the group's store, and the files of the other ways. It is in memory."""


class Timing(NamedTuple):
    """Begin and end of a task in one process, on the monotonic clock, and its processor time."""

    begun_s: float
    ended_s: float
    cpu_s: float


class Stopwatch:
    """Times the code in its ``with`` block, including all threads of this process."""

    def __enter__(self) -> Stopwatch:
        self._cpu_s, self._begun_s = time.process_time(), time.monotonic()
        return self

    def __exit__(self, *_error: object) -> None:
        self.timing = Timing(self._begun_s, time.monotonic(), time.process_time() - self._cpu_s)


def wall_s(timings: Sequence[Timing]) -> float:
    """Returns the seconds from the first begin to the last end."""
    return max(timing.ended_s for timing in timings) - min(timing.begun_s for timing in timings)


class Member:
    """One of the processes, with its own objects."""

    def __init__(self, number: int, setup: Setup, end: Connection) -> None:
        self.number, self.setup, self._end = number, setup, end
        self.weights: dict[str, torch.Tensor] = {}
        self.publisher: Publisher | None = None
        self.subscriber: Subscriber | None = None
        self.groups: dict[str, dist.ProcessGroup] = {}

    @property
    def is_publisher(self) -> bool:
        """Whether it is a publisher; otherwise it is a consumer."""
        return self.number < self.setup.num_devices

    @property
    def device(self) -> int:
        """The device on which it publishes or consumes."""
        return self.number % self.setup.num_devices

    def note(self, value: object) -> None:
        """Sends a note to the benchmark in the middle of a task. It arrives even if this process is killed then."""
        self._end.send(("note", value))


def _live(number: int, setup: Setup, end: Connection) -> None:
    torch.set_num_threads(1)
    member = Member(number, setup, end)
    with contextlib.suppress(EOFError, OSError):  # the benchmark is gone, or ends this process
        while True:
            task, arguments = end.recv()
            try:
                answer = ("done", task(member, *arguments))
            except Exception:  # the benchmark prints the error
                answer = ("failed", traceback.format_exc())
            end.send(answer)
    os._exit(0)  # no connection, group or buffer needs an orderly shutdown


class Cast:
    """The processes of one case. Use it in a ``with`` block, which ends all of them, stopped ones too."""

    def __init__(self, setup: Setup, patience_s: float) -> None:
        """Args:
        setup: the settings of all processes.
        patience_s: the deadline of a task.
        """
        self.setup, self._patience_s = setup, patience_s
        self.publishers = range(setup.num_devices)
        self.consumers = range(setup.num_devices, 2 * setup.num_devices)
        self.all = range(2 * setup.num_devices)
        self.notes: list[object] = []
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        CONTEXT.set_forkserver_preload(PRELOAD)  # global in a process, so not set at import
        for number in self.all:
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_live, args=(number, setup, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Cast:
        return self

    def __exit__(self, *_error: object) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def pid(self, number: int) -> int:
        """Returns the id of a member's process."""
        return int(self._processes[number].pid)

    def name(self, number: int) -> str:
        """Returns the name of a member, for messages."""
        return f"{'publisher' if number in self.publishers else 'consumer'} {number % self.setup.num_devices}"

    def tell(self, members: Sequence[int], task: Task, *arguments: object) -> None:
        """Sends a task to some members. `hear` returns their answers."""
        for number in members:
            self._ends[number].send((task, arguments))

    def hear(self, members: Sequence[int]) -> list[Any]:
        """Returns the answers, in the order of ``members``. Notes that arrive meanwhile go to `notes`.

        Raises:
            JobFailed: a member has raised an exception, died, or did not answer in time.
        """
        answers: dict[int, Any] = {}
        until_s = time.monotonic() + self._patience_s
        while pending := {self._ends[number]: number for number in members if number not in answers}:
            ready = wait(list(pending), timeout=max(0.0, until_s - time.monotonic()))
            if not ready:
                names = ", ".join(self.name(number) for number in pending.values())
                raise JobFailed(f"no answer from {names} within {self._patience_s:g} s")
            for end in ready:
                assert isinstance(end, Connection)
                number = pending[end]
                try:
                    kind, value = end.recv()
                except EOFError:
                    raise JobFailed(f"{self.name(number)} died") from None
                if kind == "failed":
                    raise JobFailed(f"{self.name(number)}:\n{value}")
                if kind == "note":
                    self.notes.append(value)
                else:
                    answers[number] = value
        return [answers[number] for number in members]

    def ask(self, members: Sequence[int], task: Task, *arguments: object) -> list[Any]:
        """Calls `tell`, then `hear`."""
        self.tell(members, task, *arguments)
        return self.hear(members)

    def last_note(self, number: int) -> object:
        """Returns the latest note of a member, also of a dead one. Raises as `hear` does."""
        while not self.notes:
            if not self._ends[number].poll(self._patience_s):
                raise JobFailed(f"nothing from {self.name(number)} within {self._patience_s:g} s")
            kind, value = self._ends[number].recv()
            if kind == "failed":
                raise JobFailed(f"{self.name(number)}:\n{value}")
            if kind == "note":
                self.notes.append(value)
        return self.notes[-1]


@contextlib.contextmanager
def assembled(setup: Setup, patience_s: float) -> Iterator[Cast]:
    """Starts the processes of a case with their weights, and a folder in memory for their sockets."""
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-", dir=IN_MEMORY) as name:
        setup = dataclasses.replace(setup, folder=Path(name))
        with Cast(setup, patience_s) as cast:
            cast.ask(cast.all, build)
            yield cast


# ---- the tasks ------------------------------------------------------------------------------------------------------

PATTERN_BYTES = 1_048_583
"""A prime, so that any two buckets of a tensor differ."""


def build(member: Member) -> None:
    """Makes the tensors in allocated memory: with bytes of one seed in a publisher, with other ones in a consumer."""
    pattern = torch.randint(0, 256, (PATTERN_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for index, (name, (dtype, shape)) in enumerate(member.setup.architecture.forms().items()):
        member.weights[name] = tensor = torch.empty(shape, dtype=dtype)
        flat = byte_view(tensor)
        if not member.is_publisher:
            flat.fill_(1)
            continue
        turned = pattern.roll(4099 * index)
        for begin in range(0, flat.numel(), PATTERN_BYTES):
            flat[begin : begin + PATTERN_BYTES] = turned[: flat.numel() - begin]


def join_groups(member: Member) -> None:
    """Connects two gloo groups: one of the publishers, and one of rank 0 and the consumers."""
    devices = member.setup.num_devices
    store = dist.FileStore(str(member.setup.folder / "store"), 2 * devices)
    dist.init_process_group("gloo", store=store, rank=member.number, world_size=2 * devices)
    for name, ranks in (("publishers", [*range(devices)]), ("consumers", [0, *range(devices, 2 * devices)])):
        group = dist.new_group(ranks)
        if member.number in ranks:
            member.groups[name] = group
            dist.barrier(group)


def open_transfer(member: Member) -> int:
    """Makes the publisher or the consumer. Returns the bytes of a publisher's buffers, 0 for a consumer."""
    setup = member.setup
    settings: dict[str, Any] = {"deadline_s": setup.deadline_s}
    if member.is_publisher:
        member.publisher = Publisher(
            setup.folder,
            member.weights,
            rank=member.device,
            world_size=setup.num_devices,
            buffers=Buffers(setup.bucket_bytes),
            **settings,
        )
        return member.publisher.buffer_bytes
    name = f"consumer {member.device}"
    member.subscriber = Subscriber(
        setup.folder, into=member.weights, atomic=setup.atomic, device=member.device, name=name, **settings
    )
    return 0


def attach(member: Member) -> None:
    """Waits for the other side: a publisher for its consumer, a consumer for its publisher."""
    if member.publisher is not None:
        member.publisher.wait_for_consumers(1, member.setup.deadline_s)
    if member.subscriber is not None:
        member.subscriber.attach(member.setup.deadline_s)


def stamp(member: Member, version: int) -> None:
    """Changes every tensor, as a step of training does."""
    for tensor in member.weights.values():
        byte_view(tensor)[0] = version % 251


def update(member: Member, version: int) -> tuple[Timing, list[tuple[str, int, int, int]]]:
    """Publishes or receives a version. Returns its time, and (stage, bucket, begun_ns, ended_ns) of its stages.

    Raises:
        RuntimeError: the version did not reach all consumers, or differs from the published one.
    """
    with Stopwatch() as watch:
        if member.publisher is not None:
            published = member.publisher.publish(version)
        if member.subscriber is not None:
            received = member.subscriber.receive(member.setup.deadline_s)
    if member.publisher is not None:
        if published.failures:
            raise RuntimeError(f"version {version}: {published.failures}")
        spans = published.spans
    else:
        assert member.subscriber is not None
        firsts = {int(byte_view(tensor)[0]) for tensor in member.weights.values()}
        if received != version or firsts != {version % 251}:
            raise RuntimeError(f"version {received} came in place of {version}, with first bytes {firsts}")
        spans = member.subscriber.spans
    return watch.timing, [(span.stage, span.bucket, span.begun_ns, span.ended_ns) for span in spans.spans]


def check_equal(cast: Cast, way: str) -> None:
    """Raises:
    JobFailed: the weights of two processes differ, so this way did not deliver them to all.
    """
    if len(set(cast.ask(cast.all, digest))) != 1:
        raise JobFailed(f"{way}: a consumer's weights are not those that were published")


def digest(member: Member) -> str:
    """Returns a digest of all weights of this process."""
    return digest_of(member.weights.items(), b"")


def reset_peak(_member: Member) -> None:
    """Restarts the measurement of this process's peak memory."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def memory(_member: Member) -> dict[str, int]:
    """Returns the bytes of this process's memory, as the kernel counts them, and the number of its descriptors.

    rss, pss, pss_shmem: now, from smaps_rollup, which counts each page. peak: the highest rss since `reset_peak`.
    rss_shmem: the shared memory in rss, to which the buffers of a transfer belong. It first returns free memory that
    malloc keeps to the system, so that it does not count now, and is no hidden reserve later.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = _kib("smaps_rollup", {"Rss": "rss", "Pss": "pss", "Pss_Shmem": "pss_shmem"})
    found |= _kib("status", {"VmHWM": "peak", "RssShmem": "rss_shmem"})
    return found | {"descriptors": len(os.listdir("/proc/self/fd"))}


def _kib(name: str, wanted: dict[str, str]) -> dict[str, int]:
    lines = Path("/proc/self", name).read_text(encoding="ascii", errors="replace").splitlines()
    fields = {key: value for key, _colon, value in (line.partition(":") for line in lines)}
    return {name: int(fields[field].split()[0]) * 1024 for field, name in wanted.items()}
