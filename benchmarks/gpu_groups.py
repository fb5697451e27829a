"""Parts of `benchmarks/gpu.py`: measurements of communicators, and of the host's waits in a step."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - the tests have the code that runs functions as ranks
import torch
from tests.worker.ranks import Watcher, file_store, meet, plain_gloo, run_ranks

import keepstep
from keepstep.worker.backends.by_device import backends_of
from keepstep.worker.step.device_completion import completion_on

MOST_RANKS = 8
CONNECT_DEADLINE = timedelta(seconds=60)
Steps = dict[int, int]
"""Length of a step in milliseconds -> number of its steps in a turn."""
WAITS = ("runs ahead", "device", "device, host barrier", "device, barrier on it")
"""The kinds of the host's wait in a step."""
REVOKE_SINCE = (2, 28, 9)
"""The first version of NCCL with ``ncclCommRevoke``."""


def num_ranks(kind: str) -> int:
    """Returns the number of ranks: as many as GPUs, at most eight; two without GPUs."""
    return min(torch.cuda.device_count(), MOST_RANKS) if kind == "cuda" else 2


def device_of(kind: str, rank: int) -> torch.device:
    """Returns the device of a rank. If there are more ranks than GPUs, they share them."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def through(device: torch.device) -> None:
    """Waits until the device has completed all operations."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernels_on(device: torch.device) -> Callable[[float], None]:
    """Returns a function that launches kernels with a total time in milliseconds. On the CPU it sleeps."""
    if device.type == "cpu":
        return lambda ms: time.sleep(ms / 1000)
    cycles_of_a_ms = calibrated()

    def launch(ms: float) -> None:
        for _kernel in range(10):
            torch.cuda._sleep(int(cycles_of_a_ms * ms / 10))

    return launch


def calibrated() -> float:
    """Returns how many cycles of an idle kernel take a millisecond."""
    cycles = 100_000_000
    torch.cuda._sleep(cycles)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return float(cycles / begin.elapsed_time(end))


# ---- a: keepstep's communicators ------------------------------------------------------------------------------------


def communicators(kind: str, turns: int, folder: Path) -> dict[str, Any]:
    """Returns the times of the slowest rank in each turn."""
    number = num_ranks(kind)
    answers = run_ranks(number, rebuild, folder, kind, turns + 1)
    worst = [
        {name: max(answer[turn][name] for answer in answers) for name in answers[0][0]}
        for turn in range(1, turns + 1)  # the first one loads libraries
    ]
    return {"ranks": number, "turns": worst}


def rebuild(rank: int, size: int, path: Path, kind: str, turns: int) -> list[dict[str, float]]:
    """Connects, reduces, aborts with an operation in flight, waits until the device is idle. Returns their seconds."""
    device = device_of(kind, rank)
    tensor = torch.ones(1 << 20, device=device)
    found = []
    for turn in range(turns):
        group = backends_of(device)[device.type]("bench", Watcher(), "127.0.0.1")
        meet(path, size, f"ready {turn}")
        times = [time.monotonic()]
        group.connect(file_store(path, turn), rank, size, CONNECT_DEADLINE, CONNECT_DEADLINE)
        times.append(time.monotonic())
        group.barrier().wait()
        times.append(time.monotonic())
        meet(path, size, f"reduced {turn}")
        if rank == 0 and size > 1:
            group.barrier(tensor)  # the other ranks do not come
        times.append(time.monotonic())
        group.abort()
        if not group.wait_until_quiet(CONNECT_DEADLINE.total_seconds()):
            raise RuntimeError("the group was not quiet after it was aborted")
        times.append(time.monotonic())
        group.release()
        found.append({"connect": times[1] - times[0], "first": times[2] - times[1], "abort": times[4] - times[3]})
    return found


# ---- b: NCCL's own ways ---------------------------------------------------------------------------------------------


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class Nccl:
    """NCCL's library, as torch has loaded it. Its calls block until they are complete."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnccl.so.2")
        self.has_revoke = hasattr(self._library, "ncclCommRevoke")

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self._library, name)

        def call(*arguments: object) -> None:
            if code := function(*arguments):
                raise RuntimeError(f"{name}: error {code} of NCCL")

        return call

    def connect(self, rank: int, size: int, path: Path, name: str) -> ctypes.c_void_p:
        """Returns a communicator of all ranks."""
        store, own = file_store(path, name=f"nccl/{name}"), _UniqueId()
        if rank == 0:
            self.ncclGetUniqueId(ctypes.byref(own))
            store.set("id", bytes(bytearray(own)))
        content = store.get("id")
        unique, communicator = _UniqueId.from_buffer_copy(content), ctypes.c_void_p()
        self.ncclCommInitRank(ctypes.byref(communicator), ctypes.c_int(size), unique, ctypes.c_int(rank))
        return communicator

    def reduce(self, communicator: ctypes.c_void_p, tensor: torch.Tensor) -> None:
        """Begins to sum a tensor of float32 over all ranks, on the current stream."""
        place, stream = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        count, float32, total = ctypes.c_size_t(tensor.numel()), ctypes.c_int(7), ctypes.c_int(0)
        self.ncclAllReduce(place, place, count, float32, total, communicator, stream)


def nccl_ways(kind: str, turns: int, folder: Path) -> dict[str, Any]:
    """Returns for each way the seconds from the end of a communicator to the first reduction of the next one."""
    if kind == "cpu":
        return {"skipped": "NCCL needs GPUs"}
    try:
        Nccl()
    except OSError as error:  # linked into torch, as in some builds
        return {"skipped": f"there is no library of NCCL by itself: {error}"}
    number = num_ranks(kind)
    answers = run_ranks(number, replace, folder, turns)
    ways = answers[0]
    worst = {way: [max(each) for each in zip(*(answer[way] for answer in answers), strict=True)] for way in ways}
    return {"ranks": number, "version": list(torch.cuda.nccl.version()), "ways": worst}


def replace(rank: int, size: int, path: Path, turns: int) -> dict[str, list[float]]:
    """Measures the ways in turns. Rank 0 has an operation in flight that no other rank enters, except with destroy."""
    device_of("cuda", rank)
    nccl, tensor = Nccl(), torch.ones(1 << 20, device="cuda")
    ways = ["destroy, init", "abort, init", *(["revoke, init, abort"] if nccl.has_revoke else [])]
    found: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for way in ways:
            name = f"{turn}/{way}"
            former = nccl.connect(rank, size, path, f"{name}/former")
            nccl.reduce(former, tensor)
            torch.cuda.synchronize()
            meet(path, size, f"{name}/reduced")
            if rank == 0 and size > 1 and not way.startswith("destroy"):
                nccl.reduce(former, tensor)
            meet(path, size, f"{name}/begun")
            begun_s = time.monotonic()
            if way.startswith("destroy"):
                nccl.ncclCommDestroy(former)
            elif way.startswith("abort"):
                nccl.ncclCommAbort(former)
            else:
                nccl.ncclCommRevoke(former, ctypes.c_int(0))
            following = nccl.connect(rank, size, path, f"{name}/following")
            nccl.reduce(following, tensor)
            torch.cuda.synchronize()
            seconds = time.monotonic() - begun_s
            if way.startswith("revoke"):
                nccl.ncclCommAbort(former)
            nccl.ncclCommDestroy(following)
            if turn:  # the first one loads libraries
                found[way].append(seconds)
    return found


# ---- c: what the host waits for -------------------------------------------------------------------------------------


def waits(kind: str, turns: int, folder: Path, steps: Steps) -> dict[str, Any]:
    """Returns the seconds of a step, by the length of its kernels and the kind of wait, of the slower of two ranks.

    With one GPU the second rank only sleeps, because two processes would take turns on the GPU.
    """
    answers = run_ranks(2, steps_of_kernels, folder, kind, turns, steps)
    return {
        ms: {way: [max(each) for each in zip(*(answer[ms][way] for answer in answers), strict=True)] for way in taken}
        for ms, taken in answers[0].items()
    }


def steps_of_kernels(
    rank: int, size: int, path: Path, kind: str, turns: int, lengths: Steps
) -> dict[str, dict[str, list[float]]]:
    """Measures the waits in turns. Every step launches ten kernels. At its end the host waits for them, or runs on."""
    device = device_of(kind if rank < torch.cuda.device_count() else "cpu", rank)
    completion, launch, host = completion_on(device), kernels_on(device), plain_gloo(path, rank, size)
    has_own = kind == "cuda" and torch.cuda.device_count() >= size
    on_device: Any = None
    if has_own:
        on_device = backends_of(device)["cuda"]("bench", Watcher(), "127.0.0.1")
        on_device.connect(file_store(path, 7), rank, size, CONNECT_DEADLINE, CONNECT_DEADLINE)
    token = torch.ones(1, device=device)
    found: dict[str, dict[str, list[float]]] = {}
    for step_ms, steps in lengths.items():
        taken: dict[str, list[float]] = {way: [] for way in WAITS if has_own or "on it" not in way}
        for turn in range(turns):
            for way, each in taken.items():
                meet(path, size, f"{step_ms}/{turn}/{way}")
                through(device)
                begun_s = time.monotonic()
                for _step in range(steps):
                    launch(step_ms)
                    if "on it" in way:
                        on_device.barrier(token).wait()
                    if way != "runs ahead":
                        completion.wait(lambda: None, lambda: False)
                    if "host barrier" in way:
                        host.barrier().wait()
                through(device)
                each.append((time.monotonic() - begun_s) / steps)
        found[str(step_ms)] = taken
    return found


# ---- d: a loop with keepstep ----------------------------------------------------------------------------------------


def overhead(kind: str, turns: int, _folder: Path, steps: Steps) -> dict[str, Any]:
    """Returns the seconds of a step of one rank, by the length of its kernels, in a plain loop and in keepstep's."""
    [found] = run_ranks(1, both_loops, kind, turns, steps)
    return dict(found)


def both_loops(rank: int, _size: int, kind: str, turns: int, numbers: Steps) -> dict[str, dict[str, list[float]]]:
    """Runs the plain loop first, because keepstep's hooks cannot be removed."""
    device = device_of(kind, rank)
    launch = kernels_on(device)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _layer in range(8))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.ones(16, 256, device=device)
    found: dict[str, dict[str, list[float]]] = {str(ms): {"plain": [], "keepstep": []} for ms in numbers}

    def body(ms: float) -> None:
        launch(ms)
        model(inputs).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _turn in range(turns):
        for ms, steps in numbers.items():
            through(device)
            begun_s = time.monotonic()
            for _step in range(steps):
                body(ms)
            through(device)
            found[str(ms)]["plain"].append((time.monotonic() - begun_s) / steps)
    session = keepstep.init()
    session.protect(model=model, optimizer=optimizer)
    lengths = [ms for _turn in range(turns) for ms, steps in numbers.items() for _step in range(steps)]
    begun_s, done = 0.0, 0
    for step in session.steps(len(lengths)):
        if done == 0:
            through(device)
            begun_s = time.monotonic()
        ms = lengths[step.index]
        with step:
            body(ms)
        done += 1
        if done == numbers[ms]:
            through(device)
            found[str(ms)]["keepstep"].append((time.monotonic() - begun_s) / done)
            done = 0
    return found
