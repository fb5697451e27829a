"""The processes of `weights_nodes.py`. They get their orders as lines of JSON.

    python benchmarks/weights_roles.py '{"role": "consumer", ...}'

A process prints ``{"ready": true}`` when it is ready, and answers each line that it reads with a line.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import distributed as dist

import keepstep

TENSOR_BYTES = 8 << 20
NUM_VECTORS = 32
DEADLINE_S = 60.0
CHUNK_BYTES = 1 << 18
Do = Callable[[dict[str, Any]], dict[str, Any]]


def weights(num_bytes: int) -> dict[str, torch.Tensor]:
    """Returns matrices of 8 MiB in bf16, and some small vectors, all zero."""
    sizes = [TENSOR_BYTES] * (num_bytes // TENSOR_BYTES)
    if rest := num_bytes % TENSOR_BYTES:
        sizes.append(rest)
    matrices = {f"layers.{i}.weight": torch.zeros(size // 2, dtype=torch.bfloat16) for i, size in enumerate(sizes)}
    return matrices | {f"layers.{i}.norm": torch.zeros(2048, dtype=torch.bfloat16) for i in range(NUM_VECTORS)}


def randomize(tensors: dict[str, torch.Tensor], version: int) -> None:
    """Fills the tensors with values that differ in each version."""
    generator = torch.Generator().manual_seed(version)
    for tensor in tensors.values():
        tensor.view(torch.int16).random_(generator=generator)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Returns a digest of every bit."""
    state = xxhash.xxh3_64()
    for name in sorted(tensors):
        state.update(tensors[name].view(torch.int16).numpy().data)
    return state.hexdigest()


@contextlib.contextmanager
def publisher(settings: dict[str, Any]) -> Iterator[Do]:
    """Order ``publish``: publishes one version to all consumers."""
    held = weights(settings["num_bytes"])
    with keepstep.Publisher(settings["folder"], held, deadline_s=DEADLINE_S) as source:

        def do(order: dict[str, Any]) -> dict[str, Any]:
            if order["do"] == "wait":
                source.wait_for_consumers(order["num"], DEADLINE_S)
                return {}
            randomize(held, order["version"])
            began_s = time.monotonic()
            failures = source.publish(order["version"]).failures
            return {
                "seconds": time.monotonic() - began_s, "failures": list(map(str, failures)), "digest": digest(held),
            }  # fmt: skip

        yield do


@contextlib.contextmanager
def consumer(settings: dict[str, Any]) -> Iterator[Do]:
    """Order ``look``: waits for a version, and returns it with the digest of the weights."""
    into = weights(settings["num_bytes"])
    with keepstep.Subscriber(settings["folder"], into=into, atomic=False, deadline_s=DEADLINE_S) as subscriber:
        subscriber.start()

        def do(order: dict[str, Any]) -> dict[str, Any]:
            subscriber.wait_for(order["version"], DEADLINE_S)
            with subscriber.using() as version:
                return {"version": version, "digest": digest(into)}

        yield do


@contextlib.contextmanager
def broadcaster(settings: dict[str, Any]) -> Iterator[Do]:
    """Order ``broadcast``: broadcasts all weights as one tensor from rank 0, with gloo."""
    os.environ["GLOO_SOCKET_IFNAME"] = settings["interface"]
    dist.init_process_group(
        "gloo", init_method=f"tcp://{settings['meeting']}", rank=settings["rank"], world_size=settings["world_size"]
    )
    tensor = torch.zeros(settings["num_bytes"], dtype=torch.uint8)

    def do(order: dict[str, Any]) -> dict[str, Any]:
        dist.barrier()
        began_s = time.monotonic()
        dist.broadcast(tensor, 0)
        dist.barrier()
        return {"seconds": time.monotonic() - began_s}

    yield do
    dist.destroy_process_group()


@contextlib.contextmanager
def web_server(settings: dict[str, Any]) -> Iterator[Do]:
    """Order ``save``: writes the weights to files in memory, a safetensors file or a checkpoint, and serves them."""
    from safetensors.torch import save_file
    from torch.distributed import checkpoint as dcp

    held = weights(settings["num_bytes"])
    with tempfile.TemporaryDirectory(prefix="kb", dir="/dev/shm") as folder:

        class Answer(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments, directory=folder)

            def log_message(self, *_: object) -> None:
                return

        host, port = settings["meeting"].split(":")
        server = http.server.ThreadingHTTPServer((host, int(port)), Answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def do(order: dict[str, Any]) -> dict[str, Any]:
            began_s = time.monotonic()
            if settings["kind"] == "safetensors":
                save_file(held, f"{folder}/weights.safetensors")
            else:
                with quiet_checkpoint():
                    dcp.save(dict(held), storage_writer=dcp.FileSystemWriter(folder, sync_files=False), no_dist=True)
            return {"seconds": time.monotonic() - began_s, "files": sorted(os.listdir(folder))}

        yield do
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def web_client(settings: dict[str, Any]) -> Iterator[Do]:
    """Order ``load``: reads the files and copies them to its own tensors."""
    from safetensors.torch import load
    from torch.distributed import checkpoint as dcp

    into = weights(settings["num_bytes"])
    with tempfile.TemporaryDirectory(prefix="kb", dir="/dev/shm") as folder:

        def read(name: str) -> bytes:
            with urllib.request.urlopen(f"http://{settings['meeting']}/{name}", timeout=DEADLINE_S) as answer:
                return bytes(answer.read())

        def do(order: dict[str, Any]) -> dict[str, Any]:
            began_s = time.monotonic()
            if settings["kind"] == "safetensors":
                found = load(read("weights.safetensors"))
                for name, tensor in into.items():
                    tensor.copy_(found[name])
            else:
                for name in order["files"]:
                    Path(folder, name).write_bytes(read(name))
                with quiet_checkpoint():
                    dcp.load(dict(into), storage_reader=dcp.FileSystemReader(folder), no_dist=True)
            return {"seconds": time.monotonic() - began_s}

        yield do


@contextlib.contextmanager
def quiet_checkpoint() -> Iterator[None]:
    """Suppresses the warning that one process saves or loads everything, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


@contextlib.contextmanager
def relay(settings: dict[str, Any]) -> Iterator[Do]:
    """Order ``take``: receives a number of bytes over plain TCP, and forwards them if there is a ``next``."""
    with socket.create_server((settings["host"], settings["port"])) as listener:

        def do(order: dict[str, Any]) -> dict[str, Any]:
            memory, left = memoryview(bytearray(CHUNK_BYTES)), settings["num_bytes"]
            with contextlib.ExitStack() as stack:
                if further := settings["next"]:
                    connection = socket.create_connection((further, settings["port"]), DEADLINE_S)
                    onward = stack.enter_context(connection).sendall
                else:
                    onward = None
                source = stack.enter_context(listener.accept()[0])
                while left > 0:
                    received = source.recv_into(memory, min(CHUNK_BYTES, left))
                    if not received:
                        raise ConnectionError("the relay before this one has ended")
                    if onward is not None:
                        onward(memory[:received])
                    left -= received
            return {"ended_s": time.monotonic()}

        yield do


@contextlib.contextmanager
def spring(settings: dict[str, Any]) -> Iterator[Do]:
    """Order ``pour``: sends the bytes to the first `relay`."""
    memory = bytes(CHUNK_BYTES)

    def do(order: dict[str, Any]) -> dict[str, Any]:
        began_s = time.monotonic()
        with socket.create_connection((settings["host"], settings["port"]), DEADLINE_S) as connection:
            left = settings["num_bytes"]
            while left > 0:
                connection.sendall(memory[: min(CHUNK_BYTES, left)])
                left -= CHUNK_BYTES
        return {"began_s": began_s}

    yield do


ROLES = {
    "publisher": publisher, "consumer": consumer, "broadcaster": broadcaster, "web_server": web_server,
    "web_client": web_client, "relay": relay, "spring": spring,
}  # fmt: skip


def main() -> None:
    """Obeys orders until its input ends or SIGTERM arrives. Then removes its files in memory."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if "folder" in settings:
        settings["folder"] = Path(settings["folder"])
    with ROLES[settings["role"]](settings) as do:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(do(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
