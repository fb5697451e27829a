"""Settings that travel through the environment; the only file that reads environment variables.

A launcher gives each worker its settings as variables named ``KEEPSTEP_*``; a user never sets them by hand. One
is for tests: ``KEEPSTEP_GPU_BACKEND=gloo``.
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
"""With these a lost peer ends an operation of NCCL's, and never the process. They replace what the user has set.

From torch's ProcessGroupNCCL.cpp. ``Watchdog::runLoop``: 2 is CleanUpOnly, with which the watchdog breaks a
communicator in which an operation's timeout has passed; 1 and 3 end the process, and so does 0 together with
TORCH_DISTRIBUTED_DEBUG=DETAIL, which turns it into 3. The watchdog sleeps four times the time for dumps before it does
so. ``HeartbeatMonitor::runLoop``: monitoring ends a process whose watchdog is held up, and after a dump on a timeout.
``Watchdog::run``: an error of CUDA's that the watchdog meets ends the process within 0.1 s, before the script can say
what it was. ``ProcessGroupNCCL::abort``: an extra dump comes before the abort. ``WorkNCCL::wait``: a blocking wait
holds up the host and has no watchdog.
"""


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an agent tells the worker it starts."""

    worker: int
    """The worker's number in its job."""
    rank: int | None
    """None for a spare."""
    local_rank: int | None
    """None for a spare."""
    device: int
    """Where this process's own device stands among those that it sees."""
    world_size: int
    local_world_size: int
    position: int
    """torchrun's ``--node-rank``."""
    num_nodes: int
    address: str
    """Where the process groups listen."""
    run_dir: str
    link_fd: int
    """The worker's end of the socket to its agent; inherited, so nothing has to listen for it."""
    page_fd: int
    """The tag page."""
    lifeline_fd: int
    """The lock that tells the agent of this process's death."""
    snapshots_fd: int
    """The memory for snapshots, which the agent holds as well."""
    parks: bool = False
    """As a spare, wait for a rank before the script's first line."""
    preload: tuple[str, ...] = ()
    """Modules to be imported before that."""
    devices: tuple[str, ...] = ()
    """Those of the node, as CUDA_VISIBLE_DEVICES names them."""
    shares_gpus: bool = False
    """Whether another process may use the same device."""
    slot: int = 0
    """The process's own place among them."""
    digest: bool = False
    """Report a digest of all protected state after the last step."""
    observer: str | None = None
    """``module:function`` called with the session when it is made: the drill's entrance."""
    checkpoint_root: str | None = None
    """Put checkpoints below this folder instead of where the script says (the drill's two runs must not meet)."""


def worker_environment(config: WorkerConfig) -> dict[str, str]:
    """The variables that carry ``config`` to the worker, with torchrun's own names beside them.

    What holds for the whole job (``MASTER_ADDR``, ``TORCHELASTIC_RUN_ID``, ...) is in `job_environment`.
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
    """torchrun's variables that belong to a rank. A spare has none of them: any value would be another process's."""
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
    """This process's settings if it is a parked spare; else None."""
    settings = worker_config() if VARIABLE in os.environ else None
    return settings if settings is not None and settings.parks and settings.rank is None else None


def leave_park(
    settings: WorkerConfig, rank: int, local_rank: int, local_world_size: int, device: int | None = None
) -> None:
    """A parked spare has a rank and its script begins, with everything set as if it had been started with that rank.

    Args:
        settings: its own until now.
        rank, local_rank, local_world_size: as torchrun has them.
        device: which of the node's devices it takes, counted from 0; None: the one of its slot.
    """
    adopt_rank(rank, local_rank, local_world_size)
    if settings.devices:
        slot = settings.slot if device is None else device
        os.environ[VISIBLE_DEVICES] = ",".join(order_for(settings.devices, slot, local_rank))
        own = msgspec.structs.replace(settings, device=local_rank % len(settings.devices), slot=slot)
        os.environ[VARIABLE] = msgspec.json.encode(own).decode()


def adopt_rank(rank: int, local_rank: int, local_world_size: int) -> None:
    """This process, a spare until now, has the environment of its rank from now on."""
    os.environ.update(rank_environment(rank, local_rank, local_world_size))


def job_environment(
    *, role: str, run_id: str, max_restarts: int | None, master_address: str, master_port: int
) -> dict[str, str]:
    """torchrun's variables that are the same in all processes of a job.

    As `torch.distributed.elastic.agent.server.local_elastic_agent` of torch 2.13 sets them. No process is ever started
    again under keepstep, so the restart count is 0; torchrun's default for the bound is 0 as well. What torch does
    about errors of NCCL's is keepstep's choice: see `NCCL_ENVIRONMENT`.
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


def visible_devices() -> str | None:
    """The devices that the environment leaves visible, as CUDA reads it; None: all of them."""
    return os.environ.get(VISIBLE_DEVICES)


def numbers_devices_by_bus() -> bool:
    """Whether CUDA numbers the devices by their place on the bus; otherwise the fastest comes first."""
    return os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def ranks_may_share_a_gpu() -> bool:
    """Whether the environment has NCCL accept two ranks on one GPU, as ``--share-gpus`` does (NCCL 2.30 and newer)."""
    return os.environ.get(MULTI_RANK_VARIABLE) == "1"


def forces_gloo() -> bool:
    """Whether gloo is to carry tensors on GPUs as well, though torch has NCCL: several ranks on one GPU can, then.

    Raises:
        ConfigurationError: the variable names another backend.
    """
    name = os.environ.get(GPU_BACKEND_VARIABLE, "nccl")
    if name not in ("nccl", "gloo"):
        raise ConfigurationError(f"{GPU_BACKEND_VARIABLE}={name}: allowed are nccl, where torch has it, and gloo")
    return name == "gloo"


def job_secret() -> str | None:
    """The secret of the job that this process is about to serve, where the environment holds one."""
    return os.environ.get(SECRET_VARIABLE)


def agent_token() -> str | None:
    """The credentials of this node's agent, where the environment holds them."""
    return os.environ.get(TOKEN_VARIABLE)


def ray_address() -> str | None:
    """The Ray cluster that the environment names, in the variable that all of Ray's own commands read."""
    return os.environ.get("RAY_ADDRESS")


ALLOCATOR_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""What keeps the memory of a step's tensors in a worker on a CPU: allocations up to 32 MiB, the most that glibc allows,
come from the heap, of which up to 1 GiB that is free stays with the process. By default glibc gives the activations of
a step back to the kernel at the end of backward, and the next forward gets them as new pages: up to 7,800 page faults
and 14 ms of 120 in a forked worker, up to 2,700 and 5 ms in one that was not forked (a perceptron of 8 layers, one
thread, 2 cores, 2026-11-26)."""


def script_environment() -> dict[str, str]:
    """What workers inherit: everything but what would let them speak as an agent, or take another's rank."""
    kept_back = {SECRET_VARIABLE, TOKEN_VARIABLE, *rank_environment(0, 0, 1)}
    return {name: value for name, value in os.environ.items() if name not in kept_back}


def inherited_environment(*, is_alone: bool) -> dict[str, str]:
    """What the workers of a node inherit. ``is_alone``: there is one rank on it, which may use all cores.

    Else each has one thread unless the user says otherwise: torchrun's default, for the same reason. The C library's
    allocator is set as `ALLOCATOR_VARIABLES` says, unless the user sets it in any way.
    """
    inherited = script_environment()
    defaults = {} if is_alone else {"OMP_NUM_THREADS": "1"}
    if not any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in inherited):
        defaults |= ALLOCATOR_VARIABLES
    return defaults | inherited


def worker_config(environment: Mapping[str, str] | None = None) -> WorkerConfig | None:
    """This process's settings, or None where no keepstep agent started it.

    Raises:
        ConfigurationError: the variable is there but is not what an agent writes, or another launcher's
            variables name more than one rank.
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
