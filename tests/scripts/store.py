"""Uses torch's default store, in a way that its first argument names, and loses a rank; the second is a folder."""

import json
import os
import signal
import sys
import threading
import uuid
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store, _get_process_group_store, _store_based_barrier
from torch.distributed.elastic.utils.store import barrier
from torch.nn.parallel import DistributedDataParallel

import keepstep
from keepstep.worker.session import current_session

HOW, FOLDER = sys.argv[1], Path(sys.argv[2])
STEPS = 10
AT = 4
"""The step in which, or behind which, a rank is lost; in one way it is the first step."""

session = keepstep.init()
store = _get_default_store()


def die_once(name: str) -> None:
    """Kills this process, if none has died here before."""
    try:
        (FOLDER / name).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_recovery() -> None:
    """Until this process knows of one."""
    mine = current_session()
    assert mine is not None
    while not mine._coordination.interrupted:
        threading.Event().wait(0.01)


def start_up() -> dict[str, object]:
    """What all ranks know afterwards. `run` is another one in each process, so only rank 0's own may be seen."""
    rank, size = session.rank, session.world_size
    barrier(store, size, "elastic", rank=rank)
    _store_based_barrier(rank, store, "by hand", size, timedelta(seconds=60))
    if rank == 0:
        store.set("run", str(uuid.uuid4()))
    store.wait(["run"])
    mesh = init_device_mesh("cpu", (size,))
    of_group = _get_process_group_store(dist.new_group(list(range(size))))
    of_group.append(f"rank {rank}", "here")
    first = store.compare_set("first", "", str(rank)).decode()
    barrier(store, size, "all have compared")
    return {
        "run": store.get("run").decode(),
        "ticket": store.add("tickets", 1),
        "first": first,
        "others": [of_group.get(f"rank {each}").decode() for each in range(size)],
        "mesh": mesh.size(),
        "there": store.check(["run", "not there"]),
        "gone": rank == 0 and store.delete_key("elastic/num_members"),
    }


def lose_in_start_up() -> None:
    if session.rank == 0:
        store.wait(["rank 1 is there", "rank 2 is there"])  # so their groups are connected
        die_once("in start-up")
        store.set("go", "on")
    else:
        store.set(f"rank {session.rank} is there", "")
        store.wait(["go"], timedelta(seconds=600))


def in_first_step() -> None:
    """Rank 0 sets a key that the others wait for, and is lost before."""
    if session.rank == 0:
        die_once("in a step")
        store.set("from the first step", "1")
    else:
        assert store.get("from the first step") == b"1"


def in_first_step_of_a_replacement() -> None:
    """The replacement of rank 2 waits for a key that rank 0 sets when it knows of that."""
    if session.rank == 2:
        die_once("in a step")
        store.set("it waits", "")
        assert store.get("for the replacement") == b"1"
    elif session.rank == 0 and session.generation == 2:
        while not store.check(["it waits"]):
            threading.Event().wait(0.01)
        threading.Event().wait(0.2)  # so that the request of rank 2 is there, too
        store.set("for the replacement", "1")


def in_forward(index: int) -> None:
    if HOW == "first step" and index == 0:
        in_first_step()
    if HOW == "first step of a replacement" and index == AT:
        in_first_step_of_a_replacement()
    if HOW == "later step" and index == AT and session.rank == 1:
        store.wait(["of rank 0"])


def between_steps(index: int) -> None:
    if session.rank == 0 and index == AT and HOW in ("between", "vain"):
        store.wait(["all wait"])
        die_once("between steps")
    if session.generation > 1 or index != AT:
        return
    if HOW == "between" and session.rank == 1:
        store.set("all wait", "")
        print(f"rank 1 got {store.get('late').decode()}", flush=True)
    if HOW == "between" and session.rank == 2:
        wait_for_recovery()
        store.set("late", "what rank 2 has set")
    if HOW == "vain" and session.rank == 1:
        store.set("all wait", "")
        try:
            store.wait(["of rank 0"], timedelta(seconds=600))
        except dist.DistStoreError as error:
            print(f"rank 1: {error}", flush=True)


def in_thread() -> None:
    """Waits for what rank 0 sets after the recovery."""
    print(f"thread of rank {session.rank} got {store.get('at the end').decode()}", flush=True)


known = start_up() if HOW == "start" else None
if HOW == "lose in start-up":
    lose_in_start_up()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model=model, optimizer=optimizer)
thread = threading.Thread(target=in_thread)
if HOW == "thread" and session.rank == 1:
    store.set_timeout(timedelta(seconds=600))
    thread.start()
for step in session.steps(STEPS):
    with step:
        if HOW in ("start", "thread") and step.index == AT and session.rank == 0:
            die_once("in a step")
        in_forward(step.index)
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if step.committed:
        between_steps(step.index)
if HOW == "thread" and session.rank == 0:
    store.set("at the end", "what rank 0 has set")
if thread.ident is not None:
    thread.join()
barrier(store, session.world_size, "through", rank=session.rank)
print(f"rank {session.rank} is through: {json.dumps(known)}", flush=True)
