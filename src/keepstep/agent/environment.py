"""The environment of one worker."""

from __future__ import annotations

from keepstep.agent.settings import AgentSettings
from keepstep.config import MULTI_RANK_VARIABLE, VISIBLE_DEVICES, WorkerConfig, worker_environment
from keepstep.devices import order_for
from keepstep.protocol.node.effects import Spawn
from keepstep.transports.spawning import LIFELINE_FD, LINK_FD, PAGE_FD, SNAPSHOTS_FD


def environment_of(worker: Spawn, settings: AgentSettings) -> dict[str, str]:
    """Returns the variables of one worker: its own settings, torchrun's variables, and its devices.

    The worker inherits all other variables of its node from the spawner.
    """
    num = len(settings.devices)
    seen_at = worker.device if worker.local_rank is None else worker.local_rank
    config = WorkerConfig(
        worker=worker.worker,
        rank=worker.rank,
        local_rank=worker.local_rank,
        device=seen_at % num if num else 0,
        world_size=settings.place.world_size,
        local_world_size=worker.local_world_size,
        position=settings.place.position,
        num_nodes=settings.place.num_nodes,
        address=settings.place.address,
        run_dir=str(settings.run_dir),
        link_fd=LINK_FD,
        page_fd=PAGE_FD,
        lifeline_fd=LIFELINE_FD,
        snapshots_fd=SNAPSHOTS_FD,
        parks=settings.parks_spares,
        preload=settings.preload,
        devices=settings.devices,
        shares_gpus=settings.shares_gpus,
        slot=worker.device,
        digest=settings.digest,
        drain_on=settings.drain_on,
        observer=settings.observer,
        checkpoint_root=settings.checkpoint_root,
    )
    environment = settings.job_environment | worker_environment(config)
    if settings.shares_gpus:
        environment[MULTI_RANK_VARIABLE] = "1"
    if worker.local_rank is not None and num and worker.device % num != worker.local_rank % num:
        environment[VISIBLE_DEVICES] = ",".join(order_for(settings.devices, worker.device, worker.local_rank))
    return environment
