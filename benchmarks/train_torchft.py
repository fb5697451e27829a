"""The worker of `benchmarks/peers.py` under torchft: the step of `train_plain.py` in the loop of its train_ddp.py.

Each rank is a separate replica group, as in torchft's README: torchrun starts one process per group, a lighthouse
coordinates the groups, and a group that comes back gets the state of another group. REPLICA_GROUP_ID and
NUM_REPLICA_GROUPS are the variables of that example.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from train_plain import Events, Job, make_parser, seed_step


def main() -> None:
    """Trains until the benchmark ends the process."""
    parser = make_parser()
    parser.add_argument("--collective", type=float, required=True, help="timeout of the process group, seconds")
    parser.add_argument("--manager", type=float, required=True, help="timeout of the manager, seconds")
    args = parser.parse_args()
    rank = int(os.environ["REPLICA_GROUP_ID"])  # environ: as torchft's own example
    num_groups = int(os.environ["NUM_REPLICA_GROUPS"])  # environ: as torchft's own example

    def state_dict() -> dict[str, object]:
        return {
            "model": job.model.state_dict(),
            "optimizer": job.optimizer.state_dict(),
            "scheduler": job.scheduler.state_dict(),
        }

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        job.model.load_state_dict(state["model"])
        job.optimizer.load_state_dict(state["optimizer"])
        job.scheduler.load_state_dict(state["scheduler"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=args.collective)),
        min_replica_size=num_groups - 1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"rank_{rank}",
        timeout=timedelta(seconds=args.manager),
        hostname="localhost",
    )
    job = Job(args, lambda model: DistributedDataParallel(manager, model), num_groups)
    optimizer = Optimizer(manager, job.optimizer)
    events, world_size = Events(args.events, rank, 0), num_groups
    job.events = events
    while (step := manager.current_step()) < args.steps:
        seed_step(args.seed, step, rank)
        optimizer.zero_grad()  # requests the quorum of this step
        loss = job.model(*job.data.batch(step, rank))
        loss.backward()
        nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        optimizer.step()  # runs only if all gradients were reduced
        if manager.current_step() == step:
            continue
        job.scheduler.step()
        events.attempt = manager._quorum_id  # not public; changes whenever a group joins or leaves
        if manager.num_participants() != world_size:
            world_size = manager.num_participants()
            events.note("world", world_size)
        job.completed(manager.current_step() - 1)
    manager.shutdown()


if __name__ == "__main__":
    main()
