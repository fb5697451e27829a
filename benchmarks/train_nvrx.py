"""The worker of `benchmarks/peers.py` under NVRx: the step of `train_plain.py` in NVRx's in-process restart.

It is written like NVRx's advanced example: the script makes model and optimizer once, and the wrapped function joins a
process group, loads the last checkpoint and trains. After a failure the survivors, and a process in reserve, call it
again. The processes start without torchrun, which would end all of them when one dies.
"""

import argparse
import json
import logging
import os
from datetime import timedelta
from typing import Optional

from nvidia_resiliency_ext import inprocess
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from train_plain import Events, Job, load, make_parser, save, seed_step

COLLECTIVE_TIMEOUT = timedelta(seconds=10)  # as in NVRx's example for gloo


def train(
    job: Job,
    store: dist.Store,
    args: argparse.Namespace,
    call_wrapper: Optional[inprocess.CallWrapper] = None,  # noqa: UP045 - NVRx looks for one of just this type
) -> None:
    """Trains. This is the wrapped function: NVRx passes the last argument."""
    assert call_wrapper is not None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # environ: NVRx says it there
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(str(call_wrapper.iteration), store),
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    plain = job.model
    try:
        job.model = DistributedDataParallel(plain)
        first = load(job, args.checkpoint)
        job.events = Events(args.events, rank, call_wrapper.iteration)
        job.events.note("world", world_size)
        for step in range(first, args.steps):
            seed_step(args.seed, step, rank)
            job.train_step(step, rank)
            job.completed(step)
            if rank == 0 and (step + 1) % args.checkpoint_every == 0:
                with call_wrapper.atomic():
                    save(job, args.checkpoint, step + 1)
    finally:
        job.model = plain


def main() -> None:
    """Trains until the benchmark ends the process."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    parser = make_parser()
    parser.add_argument("--active", type=int, required=True, help="ranks that train; the others are in reserve")
    parser.add_argument("--wrapper", type=json.loads, default={}, help="NVRx's settings as JSON, in seconds")
    args = parser.parse_args()
    port, world_size = int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])  # environ: as under srun
    store = dist.TCPStore(
        host_name=os.environ["MASTER_ADDR"],  # environ: as under srun
        port=port + 2,
        world_size=world_size,
        is_master=os.environ["RANK"] == "0",  # environ: as under srun
        multi_tenant=True,
        wait_for_workers=True,
        use_libuv=True,
    )
    job = Job(args, lambda model: model, args.active)
    wrapper = inprocess.Wrapper(
        store_kwargs={"port": port + 1},
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.MaxActiveWorldSize(args.active), inprocess.rank_assignment.ShiftRanks()
        ),
        **{name: timedelta(seconds=seconds) for name, seconds in args.wrapper.items()},
    )
    wrapper(train)(job, store, args)


if __name__ == "__main__":
    main()
