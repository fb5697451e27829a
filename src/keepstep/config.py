"""Settings that keepstep passes through environment variables. Only this file reads environment variables.

The agent gives each worker its settings in ``KEEPSTEP_*`` variables; users do not set those of a worker. Tests set
``KEEPSTEP_GPU_BACKEND=gloo``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

import msgspec

from keepstep.devices import order_for
from keepstep.errors import ConfigurationError

VARIABLE = "KEEPSTEP_WORKER"
SECRET_VARIABLE = "KEEPSTEP_JOB_SECRET"
TOKEN_VARIABLE = "KEEPSTEP_TOKEN"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
MULTI_RANK_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
GPU_BACKEND_VARIABLE = "KEEPSTEP_GPU_BACKEND"
RESCUE_PREFIX = "keepstep-rescue-"
"""How the names of folders begin that hold the state of a job that could not go on. keepstep removes none of them."""

NCCL_ENVIRONMENT: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""With these settings a lost peer ends an NCCL operation, but never the process. They override the user's values.

The reasons are in torch's ProcessGroupNCCL.cpp. ``Watchdog::runLoop``: 2 is CleanUpOnly: the watchdog aborts a
communicator when an operation exceeds its timeout. 1 and 3 end the process. So does 0 with
TORCH_DISTRIBUTED_DEBUG=DETAIL, which turns it into 3. Before that the watchdog sleeps four times the dump timeout.
``HeartbeatMonitor::runLoop``: monitoring ends a process whose watchdog hangs, and after a dump on a timeout.
``Watchdog::run``: a CUDA error in the watchdog ends the process within 0.1 s, before the script can report the error.
``ProcessGroupNCCL::abort``: an extra dump precedes the abort. ``WorkNCCL::wait``: a blocking wait blocks the host and
has no watchdog.
"""


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings that an agent passes to a worker that it starts."""

    worker: int
    """The worker's number in its job."""
    rank: int | None
    """None for a spare."""
    local_rank: int | None
    """None for a spare."""
    device: int
    """Index of this process's own device among its visible devices."""
    world_size: int
    local_world_size: int
    position: int
    """torchrun's ``--node-rank``."""
    num_nodes: int
    address: str
    """Address at which the process groups listen."""
    run_dir: str
    link_fd: int
    """File descriptor of the worker's end of the socket to its agent. It is inherited, so no port is needed."""
    page_fd: int
    """File descriptor of the tag page."""
    lifeline_fd: int
    """File descriptor of the lock by which the agent notices that this process has died."""
    snapshots_fd: int
    """File descriptor of the memory for snapshots, which the agent holds too."""
    parks: bool = False
    """Whether a spare waits for a rank before the script's first line."""
    preload: tuple[str, ...] = ()
    """Modules that the worker imports before the script, and before it waits for a rank."""
    devices: tuple[str, ...] = ()
    """The node's devices, as CUDA_VISIBLE_DEVICES names them."""
    shares_gpus: bool = False
    """Whether another process may use the same device."""
    slot: int = 0
    """Index of the process's slot on the node: with GPUs, its place in `devices`."""
    digest: bool = False
    """Whether the worker reports a digest of all protected state after the last step."""
    drain_on: tuple[int, ...] = ()
    """Signals that drain the job besides SIGTERM and SIGHUP."""
    observer: str | None = None
    """``module:function`` that is called with each new session. The drill injects its faults through it."""
    checkpoint_root: str | None = None
    """Folder for checkpoints instead of the script's own. The two runs of a drill must not share checkpoints."""


def worker_environment(config: WorkerConfig) -> dict[str, str]:
    """Returns the variables that carry ``config`` to the worker, and torchrun's variables for this worker.

    `job_environment` has those of the whole job (``MASTER_ADDR``, ``TORCHELASTIC_RUN_ID``, ...).
    """
    environment = {
        VARIABLE: msgspec.json.encode(config).decode(),
        "WORLD_SIZE": str(config.world_size),
        "LOCAL_WORLD_SIZE": str(config.local_world_size),
        "GROUP_RANK": str(config.position),
        "GROUP_WORLD_SIZE": str(config.num_nodes),
        "ROLE_WORLD_SIZE": str(config.world_size),
    }
    if config.rank is not None and config.local_rank is not None:
        environment |= rank_environment(config.rank, config.local_rank, config.local_world_size)
    return environment


def rank_environment(rank: int, local_rank: int, local_world_size: int) -> dict[str, str]:
    """Returns torchrun's variables of one rank. A spare has none: any value would belong to another process."""
    return {
        "RANK": str(rank),
        "ROLE_RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
    }


def has_no_rank() -> bool:
    """Whether this process is a spare that holds no rank yet."""
    return VARIABLE in os.environ and "RANK" not in os.environ


def spare_to_park() -> WorkerConfig | None:
    """Returns this process's settings if it is a spare that must park; else None."""
    settings = worker_config() if VARIABLE in os.environ else None
    return settings if settings is not None and settings.parks and settings.rank is None else None


def leave_park(
    settings: WorkerConfig, rank: int, local_rank: int, local_world_size: int, device: int | None = None
) -> None:
    """Sets the environment of a parked spare that gets a rank, as if the agent had started it with that rank.

    Args:
        settings: the spare's settings so far.
        rank: its new rank.
        local_rank: as torchrun defines it.
        local_world_size: as torchrun defines it.
        device: index of its device among the node's devices, from 0; None: the device of its slot.
    """
    adopt_rank(rank, local_rank, local_world_size)
    if settings.devices:
        slot = settings.slot if device is None else device
        os.environ[VISIBLE_DEVICES] = ",".join(order_for(settings.devices, slot, local_rank))
        own = msgspec.structs.replace(settings, device=local_rank % len(settings.devices), slot=slot)
        os.environ[VARIABLE] = msgspec.json.encode(own).decode()


def adopt_rank(rank: int, local_rank: int, local_world_size: int) -> None:
    """Sets torchrun's variables of a rank in this process, which was a spare until now."""
    os.environ.update(rank_environment(rank, local_rank, local_world_size))


def job_environment(
    *, role: str, run_id: str, max_restarts: int | None, master_address: str, master_port: int
) -> dict[str, str]:
    """Returns the variables that are the same in all processes of a job.

    They are those that `torch.distributed.elastic.agent.server.local_elastic_agent` of torch 2.13 to 2.15 sets, and
    `NCCL_ENVIRONMENT`. keepstep never restarts a process, so the restart count is 0. torchrun's default for
    ``max_restarts`` is 0 as well.
    """
    return {
        "ROLE_NAME": role,
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts or 0),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    } | NCCL_ENVIRONMENT


def has_safe_path() -> bool:
    """Whether the user keeps the script's folder out of Python's search path for modules, as ``python -P`` does."""
    return bool(os.environ.get("PYTHONSAFEPATH"))


def visible_devices() -> str | None:
    """Returns the value of ``CUDA_VISIBLE_DEVICES``; None if it is not set, so that all devices are visible."""
    return os.environ.get(VISIBLE_DEVICES)


def numbers_devices_by_bus() -> bool:
    """Whether CUDA numbers the devices by their PCI bus id; otherwise the fastest device is the first."""
    return os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def ranks_may_share_a_gpu() -> bool:
    """Whether the user's environment lets NCCL put several ranks on one GPU, as ``--share-gpus`` does (NCCL 2.30+)."""
    return os.environ.get(MULTI_RANK_VARIABLE) == "1"


def forces_gloo() -> bool:
    """Whether keepstep must use gloo for tensors on GPUs although torch has NCCL. With gloo, ranks can share a GPU.

    Raises:
        ConfigurationError: the variable names another backend.
    """
    name = os.environ.get(GPU_BACKEND_VARIABLE, "nccl")
    if name not in ("nccl", "gloo"):
        raise ConfigurationError(f"{GPU_BACKEND_VARIABLE}={name}: allowed are nccl, where torch has it, and gloo")
    return name == "gloo"


def job_secret() -> str | None:
    """Returns the job's secret from the environment; None if it is not set."""
    return os.environ.get(SECRET_VARIABLE)


def agent_token() -> str | None:
    """Returns the credentials of this node's agent from the environment; None if they are not set."""
    return os.environ.get(TOKEN_VARIABLE)


def ray_address() -> str | None:
    """Returns the address of the Ray cluster from ``RAY_ADDRESS``, which Ray's commands read too; None if not set."""
    return os.environ.get("RAY_ADDRESS")


ALLOCATOR_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Settings of glibc's allocator with which a worker on a CPU keeps the memory of a step's tensors for the next step.

Allocations up to 32 MiB, the maximum of glibc, come from the heap, and up to 1 GiB of free heap stays with the process.
By default glibc returns the activations of a step to the kernel after backward, and the next forward gets new pages. A
step then took up to 7,800 page faults and 14 of 120 ms in a forked worker, and up to 2,700 and 5 ms in one that was not
forked (a perceptron of 8 layers, one thread, 2 cores, 2026-11-26)."""


def script_environment() -> dict[str, str]:
    """Returns this process's environment without the job's secret, the agent's token and the variables of a rank."""
    kept_back = {SECRET_VARIABLE, TOKEN_VARIABLE, *rank_environment(0, 0, 1)}
    return {name: value for name, value in os.environ.items() if name not in kept_back}


def inherited_environment(*, is_alone: bool) -> dict[str, str]:
    """Returns the environment that the workers of a node inherit.

    It contains `ALLOCATOR_VARIABLES`, unless the user configures glibc's allocator in any way.

    Args:
        is_alone: the node has one rank, which may use all cores. Otherwise each worker gets one thread, as with
            torchrun, unless the user sets ``OMP_NUM_THREADS``.
    """
    inherited = script_environment()
    defaults = {} if is_alone else {"OMP_NUM_THREADS": "1"}
    if not any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in inherited):
        defaults |= ALLOCATOR_VARIABLES
    return defaults | inherited


def worker_config(environment: Mapping[str, str] | None = None) -> WorkerConfig | None:
    """Returns this process's settings, or None if no keepstep agent has started it.

    Raises:
        ConfigurationError: the variable does not parse, or another launcher has set a ``WORLD_SIZE`` above 1.
    """
    environment = os.environ if environment is None else environment
    text = environment.get(VARIABLE)
    if text is None:
        size = environment.get("WORLD_SIZE", "1")
        if size not in ("", "1"):
            raise ConfigurationError(
                f"WORLD_SIZE={size} is set but keepstep did not start this process: "
                "start the script with 'keepstep run' in place of 'torchrun', or with plain python for one rank"
            )
        return None
    try:
        return msgspec.json.decode(text, type=WorkerConfig)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{VARIABLE} is set by keepstep's agent only, and does not parse: {error}") from error
