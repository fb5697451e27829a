"""Parts of `benchmarks/gpu.py` that move state: restores, snapshots and published weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from checkout import ROOT
from gpu_groups import Steps, device_of, kernels_on, through
from tests.worker.ranks import DEADLINE_S, meet, plain_gloo, run_ranks

from keepstep import config
from keepstep.cancel import CancelToken
from keepstep.protocol.messages import Member, Membership, Transfer
from keepstep.shared import snapshotfile
from keepstep.shared.snapshotfile import SnapshotFile
from keepstep.weights.memory.bytes_of import byte_view
from keepstep.weights.publisher import Buffers, Publisher
from keepstep.weights.subscriber import Subscriber
from keepstep.worker.backends.by_device import nccl_version
from keepstep.worker.backends.own_device import SHARED_SINCE
from keepstep.worker.state import neighbour
from keepstep.worker.state.image import describe
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.state.restore import Landing, Source, StateTransport, receive_state, send_state
from keepstep.worker.step.second_copies import SecondCopies
from keepstep.worker.step.side_copies import side_copies
from keepstep.worker.step.snapshots import Snapshots

ROUTE = Transfer((0, 1), (2,))
LAYERS = 8
WEIGHTS_BUCKET_BYTES = 32 << 20
DRILL_TIMEOUT_S = 150
PHASES = ("forward", "backward", "synced", "optimizer")
SCRIPT = ROOT / "tests" / "gpu" / "scripts" / "train.py"


def state_on(device: torch.device, num_bytes: int, seed: int) -> ProtectedState:
    """Returns a model with its Adam state, of about ``num_bytes`` in all, in memory that is already allocated."""
    width = max(8, round((num_bytes / LAYERS / 12) ** 0.5))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _layer in range(LAYERS))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return ProtectedState({"model": model, "optimizer": optimizer})


def bytes_of(state: ProtectedState) -> int:
    """Returns the bytes of all tensors of a state."""
    return sum(byte_view(tensor).numel() for _name, tensor in state.live_tensors())


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Runs a function, and returns the seconds until the device has completed it."""
    through(device)
    begun_s = time.monotonic()
    function()
    through(device)
    return time.monotonic() - begun_s


# ---- e: restore -----------------------------------------------------------------------------------------------------


def restores(kind: str, turns: int, folder: Path, num_bytes: int) -> dict[str, Any]:
    """Returns the seconds of each way on a receiver, which gets a state from two live holders, and of the floors."""
    answers = run_ranks(3, restored, folder, kind, turns, num_bytes)
    if len({answer["digest"] for answer in answers}) != 1:
        raise RuntimeError("the receiver has another state than the holders")
    found: dict[str, Any] = answers[ROUTE.receivers[0]]
    return found


def restored(rank: int, size: int, path: Path, kind: str, turns: int, num_bytes: int) -> dict[str, Any]:
    """Runs the ways in turns. The receiver measures the floors while the other processes are idle."""
    device = device_of(kind, rank)
    state = state_on(device, num_bytes, rank // 2)
    landing, source, stop = Landing(device), Source(), CancelToken()
    gpus, reach, group = landing.gpus, neighbour.reach, plain_gloo(path, rank, size)
    found: dict[str, list[float]] = {}
    for turn in range(turns + 1):
        for way in ("from GPU to GPU", "host memory", "group"):
            landing.gpus = gpus if way == "from GPU to GPU" else ()
            neighbour.reach = reach if way != "group" else lambda place: None
            meet(path, size, f"{turn}/{way}")
            seconds = timed(lambda: _move(state, rank, StateTransport(group, stop), source, landing), device)
            if turn:  # the first one takes memory
                found.setdefault(way, []).append(seconds)
        meet(path, size, f"{turn}/floors")
        if rank in ROUTE.receivers and turn:
            for floor, seconds in floors(device, bytes_of(state)).items():
                found.setdefault(floor, []).append(seconds)
    meet(path, size, "through")
    return {"digest": state.digest(), "bytes": bytes_of(state), "seconds": found}


def _move(state: ProtectedState, rank: int, way: StateTransport, source: Source, landing: Landing) -> None:
    if rank in ROUTE.receivers:
        receive_state(state, 1, rank, ROUTE, way, lambda: None, landing)
    else:
        header, blocks = describe(state, 1)
        send_state(header, [block.held for block in blocks], rank, ROUTE, way, source, lambda: None)


def floors(device: torch.device, num_bytes: int) -> dict[str, float]:
    """Returns the seconds to copy ``num_bytes`` in pieces of 32 MiB, from pinned memory, or from another GPU."""
    piece = min(32 << 20, num_bytes)
    first, second = (torch.empty(piece, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.empty(piece, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def copied(to: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            for _piece in range(-(-num_bytes // piece)):
                to.copy_(source, non_blocking=True)

        copy()
        return timed(copy, device) * num_bytes / (piece * -(-num_bytes // piece))

    found = {"floor: on the device": copied(second, first), "floor: host to device": copied(first, host)}
    found["floor: device to host"] = copied(host, first)
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        other = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
        found["floor: from another GPU"] = copied(first, torch.empty(piece, dtype=torch.uint8, device=other))
    return found


# ---- f: snapshots ---------------------------------------------------------------------------------------------------


def snapshots(kind: str, turns: int, _folder: Path, num_bytes: int, steps: Steps) -> dict[str, Any]:
    """Returns the seconds of a copy alone, of its floors, and of steps with and without a snapshot."""
    [found] = run_ranks(1, with_snapshots, kind, turns, num_bytes, steps)
    return dict(found)


def with_snapshots(rank: int, _size: int, kind: str, turns: int, num_bytes: int, numbers: Steps) -> dict[str, Any]:
    """Measures one rank, which has the device to itself."""
    device = device_of(kind, rank)
    state, launch = state_on(device, num_bytes, 0), kernels_on(device)
    file = SnapshotFile(snapshotfile.create("bench"))
    none = SecondCopies(file, lambda: None, lambda error: None)
    taking = Snapshots(state, file, 1, none, side=side_copies(device))
    taking.resumed(0, 0, Membership.of(Member(each, "n", str(each)) for each in range(2)), None)
    step = 0

    def alone() -> None:
        nonlocal step
        taking.hand_out(step)
        taking.complete(step, lambda is_waiting: None)
        step += 1

    first = timed(alone, device)  # takes the memory, and pins it
    timed(alone, device)
    copies = [timed(alone, device) for _turn in range(turns)]
    content = torch.empty(bytes_of(state), dtype=torch.uint8).numpy().data
    found: dict[str, Any] = {"bytes": bytes_of(state), "first": first, "copy": copies, "steps": {}}
    found["hash"] = timed(lambda: xxhash.xxh3_128(content).digest(), device)
    found["floor"] = floors(device, bytes_of(state))["floor: device to host"]
    for ms, steps in numbers.items():
        lengths: dict[str, list[float]] = {"without": [], "with": []}
        for _turn in range(turns):
            for how, each in lengths.items():
                through(device)
                begun_s = time.monotonic()
                for _step in range(steps):
                    if how == "with":
                        taking.hand_out(step)
                    launch(ms)
                    if how == "with":
                        taking.complete(step, lambda is_waiting: None)
                    through(device)
                    step += 1
                each.append((time.monotonic() - begun_s) / steps)
        found["steps"][str(ms)] = lengths
    return found


# ---- g: weights -----------------------------------------------------------------------------------------------------


def weights(kind: str, turns: int, folder: Path, num_bytes: int) -> dict[str, Any]:
    """Returns the seconds of a version with buffers on the GPU, and of each stage. The second process consumes."""
    found: dict[str, Any] = {}
    for source in ("copies in pinned host memory", "weights on the GPU"):
        (folder / source[:3]).mkdir()
        publisher, consumer = run_ranks(2, published, folder / source[:3], kind, turns, num_bytes, source)
        if publisher["digest"] != consumer["digest"]:
            raise RuntimeError("the consumer has other weights")
        found[source] = {**publisher, "busy": publisher["busy"] | consumer["busy"]}
    return found


def published(rank: int, size: int, path: Path, kind: str, turns: int, num_bytes: int, source: str) -> dict[str, Any]:
    """Publishes on rank 0, and consumes on rank 1 into tensors on its device."""
    device = device_of(kind, rank)
    number = max(1, num_bytes >> 25)
    g = torch.Generator().manual_seed(3 + rank)
    made = torch.randn(num_bytes // number // 4, generator=g)
    tensors = {str(index): made.to(device, copy=True) for index in range(number)}
    seconds, spans = [], []
    if rank == 0:
        copies, buffers = source.startswith("copies"), Buffers(WEIGHTS_BUCKET_BYTES, str(device))
        with Publisher(
            path, tensors, rank=0, world_size=1, copies=copies, buffers=buffers, deadline_s=DEADLINE_S
        ) as publisher:
            publisher.wait_for_consumers(1, DEADLINE_S)
            for version in range(turns + 1):
                begun_s = time.monotonic()
                done = publisher.publish_in_background(version).result() if copies else publisher.publish(version)
                seconds.append(time.monotonic() - begun_s)
                spans = done.spans.spans
            meet(path, size, "through")
    else:
        with Subscriber(path, into=tensors, deadline_s=DEADLINE_S) as subscriber:
            while subscriber.version != turns:
                subscriber.receive(DEADLINE_S)
                spans = subscriber.spans.spans
            meet(path, size, "through")
    busy: dict[str, float] = {}
    for span in spans:
        busy[span.stage] = busy.get(span.stage, 0.0) + (span.ended_ns - span.begun_ns) / 1e9
    digest = xxhash.xxh3_64_hexdigest(tensors["0"].cpu().numpy().data)
    found = {"digest": digest, "seconds": seconds[1:], "busy": busy, "bytes": number * made.numel() * 4}
    return found | ({"floors": floors(device, number * made.numel() * 4)} if rank == 0 else {})


# ---- h: recovery ----------------------------------------------------------------------------------------------------


def recovery(kind: str, _turns: int, folder: Path) -> dict[str, Any]:
    """Returns the parts of a recovery of two ranks on GPUs, as a drill reports them."""
    number = torch.cuda.device_count() if kind == "cuda" else 0
    shares = ["--share-gpus"] if number < 3 else []
    version = tuple(nccl_version()[:2])
    if kind == "cpu" or (shares and version < SHARED_SINCE):
        needed = ".".join(map(str, SHARED_SINCE))
        return {"skipped": f"two ranks and a spare need three GPUs, or NCCL {needed}: there are {number}"}
    faults = [f"kill@step={step},phase={phase},rank=1" for step, phase in ((6, "forward"), (10, "backward"))]
    return drilled(folder / "drill.json", 2, faults, shares, {})


def shared(kind: str, _turns: int, folder: Path) -> dict[str, Any]:
    """Returns the same for three and four ranks and a spare that share one GPU over gloo, with a kill in each phase.

    Without a GPU: for three ranks on the CPU, with one kill.
    """
    found: dict[str, Any] = {}
    for number in (3, 4) if kind == "cuda" else (3,):
        places = list(zip(range(3, 19, 4), PHASES, strict=True))[: None if kind == "cuda" else 1]
        faults = [f"kill@step={step},phase={phase},rank={step % number}" for step, phase in places]
        shares, environment = [], {}
        if kind == "cuda":
            shares = ["--share-gpus"]
            environment = {config.GPU_BACKEND_VARIABLE: "gloo", config.VISIBLE_DEVICES: first_gpu()}
        found[str(number)] = drilled(folder / f"drill-{number}.json", number, faults, shares, environment)
    return found


def first_gpu() -> str:
    """Returns the name of the first GPU that this process sees, as in CUDA_VISIBLE_DEVICES."""
    return (config.visible_devices() or "0").partition(",")[0]


def drilled(
    report: Path, num_ranks: int, faults: list[str], options: list[str], environment: dict[str, str]
) -> dict[str, Any]:
    """Runs a drill with these faults, with one spare, and returns its report.

    Raises:
        RuntimeError: the drill has failed.
    """
    command = [sys.executable, "-m", "keepstep.cli.main", "drill", "--nproc-per-node", str(num_ranks), "--spares", "1"]
    command += [*options, "--json", str(report), "--faults", ";".join(faults), str(SCRIPT)]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])  # environ: the job inherits it
    own = os.environ | {"PYTHONPATH": paths} | environment
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DRILL_TIMEOUT_S, env=own, check=False)
    if ended.returncode or not report.exists():
        raise RuntimeError(f"the drill ended with exit code {ended.returncode}: {(ended.stdout + ended.stderr)[-800:]}")
    result = json.loads(report.read_text(encoding="utf-8"))
    return {"identical": result["identical"], "faults": result["faults"]}
