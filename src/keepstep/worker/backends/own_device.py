"""Checks whether a process may use its device."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep import config
from keepstep.errors import ConfigurationError

SHARED_SINCE = (2, 30)
"""The first version of NCCL in which two ranks can use one GPU, with ``NCCL_MULTI_RANK_GPU_ENABLE=1``."""


def refuse_sharing(settings: config.WorkerConfig, num_gpus: int, nccl_version: Sequence[int]) -> None:
    """Refuses a rank or spare without a GPU of its own, unless it may share one. Called before any group is connected.

    Args:
        settings: settings of this process.
        num_gpus: number of GPUs that torch finds; at least one.
        nccl_version: version of the NCCL that carries tensors on a GPU; empty: gloo carries them.

    Raises:
        ConfigurationError: another process has the same GPU, and sharing is not allowed, or NCCL is too old for it.
    """
    if settings.slot < num_gpus:
        return
    who = "a spare" if settings.rank is None else f"rank {settings.rank}"
    if not settings.shares_gpus:
        raise ConfigurationError(
            f"{who} is process {settings.slot + 1} of its node, which has {num_gpus} GPU{'s' * (num_gpus > 1)}: start "
            "fewer ranks and spares on it, have spares wait without a GPU until they get a rank (--park-spares), let "
            "processes share GPUs with --share-gpus, or hide the GPUs from a job that "
            f'trains on the CPU: {config.VISIBLE_DEVICES}=""'
        )
    version = tuple(nccl_version[:2])
    if nccl_version and (version < SHARED_SINCE or not config.ranks_may_share_a_gpu()):
        raise ConfigurationError(
            f"--share-gpus: {who} shares a GPU, which NCCL allows from {'.'.join(map(str, SHARED_SINCE))} on with "
            f"{config.MULTI_RANK_VARIABLE}=1; torch was built with {'.'.join(map(str, nccl_version))}: start fewer "
            "ranks and spares on this node"
        )
