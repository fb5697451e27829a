"""The systems that `benchmarks/peers.py` compares: the commands and settings of a job under each.

Each has two settings: the default of its own example or README, and the lowest practical one, with the shortest
intervals and timeouts under which a job of this benchmark still runs undisturbed on a busy machine with two cores.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from jobs import Workload

HERE = Path(__file__).resolve().parent
CHECKPOINT_EVERY = 10
"""Steps between two checkpoints, for systems that need checkpoints."""
DIGEST_EVERY = 10
NUM_RESERVES = 2
"""Number of processes that NVRx keeps in reserve. It starts no new ones, so a job needs one for each kill."""
NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
NVRX_LOWEST = {
    "monitor_thread_interval": 0.1,
    "monitor_process_interval": 0.1,
    "heartbeat_interval": 0.1,
    "progress_watchdog_interval": 0.1,
    "heartbeat_timeout": 5.0,
    "soft_timeout": 5.0,
    "hard_timeout": 7.0,
    "last_call_wait": 0.1,
    "termination_grace_time": 0.0,
}


@dataclasses.dataclass(frozen=True)
class Process:
    """One command of a job, with its own environment variables."""

    command: list[str]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class System:
    """One system with one setting.

    Attributes:
        name: the system's public name.
        setting: "default" or "lowest".
        packages: the packages that it needs.
        says: the setting in words, with its source.
        start: returns the commands of a job that writes its files to a folder.
    """

    name: str
    setting: str
    packages: tuple[str, ...]
    says: str
    start: Callable[[Workload, Path], list[Process]]

    @property
    def title(self) -> str:
        """Its name and setting."""
        return f"{self.name}, {self.setting}"

    def missing(self) -> str | None:
        """Returns why it cannot be measured here; None if it can."""
        for package in self.packages:
            try:
                importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                return f"{package} is not installed: pip install -e '.[peers]'"
        return None


def _worker(script: str, workload: Workload, folder: Path, *more: str) -> list[str]:
    digests = ["--digest-every", str(DIGEST_EVERY)]
    return [str(HERE / script), *workload.worker_arguments(folder, *digests, *more)[1:]]


def _saving(folder: Path) -> list[str]:
    return ["--checkpoint", str(folder / "checkpoint.pt"), "--checkpoint-every", str(CHECKPOINT_EVERY)]


def _keepstep(*more: str) -> Callable[[Workload, Path], list[Process]]:
    def start(workload: Workload, folder: Path) -> list[Process]:
        flags = ["--nproc-per-node", str(workload.world_size), "--spares", "1", *more]
        worker = _worker("train_plain.py", workload, folder, "--keepstep")
        return [Process([sys.executable, "-m", "keepstep.cli.main", "run", *flags, *worker])]

    return start


def _torchrun(*more: str, environment: Mapping[str, str] | None = None) -> Callable[[Workload, Path], list[Process]]:
    def start(workload: Workload, folder: Path) -> list[Process]:
        worker = _worker("train_plain.py", workload, folder, *_saving(folder), *more)
        return [Process(workload.torchrun(worker, max_restarts=100), environment or {})]

    return start


def _torchft(
    lighthouse_flags: dict[str, int], collective_s: float, manager_s: float
) -> Callable[[Workload, Path], list[Process]]:
    def start(workload: Workload, folder: Path) -> list[Process]:
        address = f"127.0.0.1:{_free_ports(1)}"
        flags = [text for flag, value in lighthouse_flags.items() for text in (f"--{flag}", str(value))]
        smallest = ["--min_replicas", str(workload.world_size - 1)]
        lighthouse = str(Path(sys.executable).with_name("torchft_lighthouse"))
        timeouts = ["--collective", str(collective_s), "--manager", str(manager_s)]
        worker = _worker("train_torchft.py", workload, folder, *timeouts)
        shared = {"TORCHFT_LIGHTHOUSE": f"http://{address}", "NUM_REPLICA_GROUPS": str(workload.world_size)}
        group = dataclasses.replace(workload, world_size=1).torchrun(worker, max_restarts=100)
        groups = [Process(group, {**shared, "REPLICA_GROUP_ID": str(rank)}) for rank in range(workload.world_size)]
        return [Process([lighthouse, *smallest, *flags, "--bind", address]), *groups]

    return start


def _nvrx(wrapper: dict[str, float]) -> Callable[[Workload, Path], list[Process]]:
    def start(workload: Workload, folder: Path) -> list[Process]:
        world_size = workload.world_size + NUM_RESERVES
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_ports(3)), "WORLD_SIZE": str(world_size)}
        settings = ["--active", str(workload.world_size), "--wrapper", json.dumps(wrapper)]
        command = [sys.executable, *_worker("train_nvrx.py", workload, folder, *_saving(folder), *settings)]
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
        return [Process(command, {**shared, **rank}) for rank in ranks]

    return start


def _free_ports(num: int) -> int:
    """Returns the first of ``num`` consecutive ports on which no process listens at the moment."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            if port + num < 2**16 and all(_is_free(port + more) for more in range(1, num)):
                return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


README_OF_TORCHFT = "its README and train_ddp.py, which write no checkpoint"
SYSTEMS = [
    System("keepstep", "default", (), "`--spares 1`, everything else as it comes", _keepstep()),
    System("keepstep", "lowest", (), "`--spares 1 --hang-after 1`", _keepstep("--hang-after", "1")),
    System(
        "torchft",
        "default",
        ("torchft-nightly",),
        f"lighthouse `--quorum_tick_ms 100 --join_timeout_ms 10000`, heartbeat timeout 5 s, ProcessGroupGloo 5 s, "
        f"Manager 30 s, a torchrun for each replica group ({README_OF_TORCHFT}); `--min_replicas 2`",
        _torchft({"quorum_tick_ms": 100, "join_timeout_ms": 10000}, 5.0, 30.0),
    ),
    System(
        "torchft",
        "lowest",
        ("torchft-nightly",),
        "the same with `--heartbeat_timeout_ms 400 --quorum_tick_ms 10`, ProcessGroupGloo 2 s",
        _torchft({"quorum_tick_ms": 10, "join_timeout_ms": 10000, "heartbeat_timeout_ms": 400}, 2.0, 30.0),
    ),
    System(
        "NVRx in-process",
        "default",
        ("nvidia-resiliency-ext",),
        f"inprocess.Wrapper with its defaults and MaxActiveWorldSize(3), {NUM_RESERVES} processes in reserve, a "
        f"checkpoint every {CHECKPOINT_EVERY} steps, gloo 10 s (its advanced_example.py)",
        _nvrx({}),
    ),
    System(
        "NVRx in-process",
        "lowest",
        ("nvidia-resiliency-ext",),
        "the same with " + ", ".join(f"{name} {seconds:g} s" for name, seconds in NVRX_LOWEST.items()),
        _nvrx(NVRX_LOWEST),
    ),
    System(
        "torchrun",
        "default",
        (),
        f"`--standalone --max-restarts 100`, a checkpoint every {CHECKPOINT_EVERY} steps, gloo 30 min",
        _torchrun(),
    ),
    System(
        "torchrun",
        "lowest",
        (),
        "the same with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (a store of its own for each attempt) and gloo 5 s",
        _torchrun("--collective-timeout", "5", environment=NO_SHARED_STORE),
    ),
]


def versions() -> dict[str, str]:
    """Returns the versions of the systems' packages that are installed."""
    found = {}
    for package in sorted({"torch", "keepstep", *(package for system in SYSTEMS for package in system.packages)}):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def environment(folder: Path, process: Process) -> dict[str, str]:
    """Returns the environment of a process of a job. TMPDIR identifies the job."""
    own = dict(os.environ)  # environ: the job inherits it
    own.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    return own | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **process.environment}
