"""Every collective of `torch.distributed`, on the default group, as plain values: one dictionary a rank."""

import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

from keepstep.errors import PeerLost

COLLECTIVES: dict[str, Callable[[int, int], Any]] = {}


def collective(function: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    COLLECTIVES[function.__name__] = function
    return function


def run_all(rank: int, size: int, only: Collection[str] = COLLECTIVES.keys()) -> dict[str, Any]:
    """Runs each in turn; an error of the collective itself is its result, as its type."""
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames some; the old names must work too
    results: dict[str, Any] = {}
    for name, function in COLLECTIVES.items():
        if name not in only:
            continue
        try:
            results[name] = plain(function(rank, size))
        except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError, PeerLost) as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), value.tolist()]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def own(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that no other rank has."""
    count = int(torch.Size(shape).numel())
    return (torch.arange(count, dtype=torch.float64) * 0.37 + rank * 1.3 + 1).reshape(shape).to(dtype)


def places(size: int, *shape: int) -> list[torch.Tensor]:
    return [torch.full(shape, -1.0) for _ in range(size)]


@collective
def all_reduce(rank: int, size: int) -> Any:
    tensor = own(rank, 3, 4)
    dist.all_reduce(tensor)
    return tensor


@collective
def all_reduce_by_every_operation(rank: int, size: int) -> Any:
    results = []
    for operation in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        tensor = own(rank, 5)
        dist.all_reduce(tensor, op=operation)
        results.append(tensor)
    for operation in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        tensor = torch.tensor([rank + 1, 6])
        dist.all_reduce(tensor, op=operation)
        results.append(tensor)
    return results


@collective
def all_reduce_average(rank: int, size: int) -> Any:
    tensor = own(rank, 5)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    return tensor


@collective
def all_reduce_of_every_type(rank: int, size: int) -> Any:
    results = []
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8):
        tensor = own(rank, 7, dtype=dtype)
        dist.all_reduce(tensor)
        results.append(tensor)
    return results


@collective
def all_reduce_asynchronous(rank: int, size: int) -> Any:
    first, second = own(rank, 2), own(rank + 1, 1000)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
    answers = [work.wait() for work in works]
    return [first, second, answers, [work.is_completed() for work in works]]


@collective
def all_reduce_by_its_future(rank: int, size: int) -> Any:
    work = dist.all_reduce(own(rank, 6), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] * 2).wait()


@collective
def all_reduce_coalesced(rank: int, size: int) -> Any:
    tensors = [own(rank, 3), own(rank, 2, 2)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


@collective
def broadcast(rank: int, size: int) -> Any:
    tensor = own(rank, 4)
    dist.broadcast(tensor, src=size - 1)
    return tensor


@collective
def reduce(rank: int, size: int) -> Any:
    tensor = own(rank, 4)
    dist.reduce(tensor, dst=1)
    return tensor if rank == 1 else None


@collective
def barrier(rank: int, size: int) -> Any:
    dist.barrier()
    return True


@collective
def all_gather(rank: int, size: int) -> Any:
    outputs = places(size, 2, 3)
    dist.all_gather(outputs, own(rank, 2, 3))
    return outputs


@collective
def all_gather_into_tensor(rank: int, size: int) -> Any:
    output = torch.zeros(size * 2, 3)
    dist.all_gather_into_tensor(output, own(rank, 2, 3))
    return output


@collective
def all_gather_coalesced(rank: int, size: int) -> Any:
    outputs = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    dist.all_gather_coalesced(outputs, [own(rank, 2), own(rank, 3)])
    return outputs


@collective
def monitored_barrier(rank: int, size: int) -> Any:
    dist.monitored_barrier(dist.new_group(backend="gloo"))
    return True


@collective
def gather(rank: int, size: int) -> Any:
    outputs = places(size, 3) if rank == 1 else None
    dist.gather(own(rank, 3), outputs, dst=1)
    return outputs


@collective
def scatter(rank: int, size: int) -> Any:
    output = torch.zeros(3)
    dist.scatter(output, [own(rank + peer, 3) for peer in range(size)] if rank == 0 else None, src=0)
    return output


@collective
def reduce_scatter(rank: int, size: int) -> Any:
    output = torch.zeros(3)
    dist.reduce_scatter(output, [own(rank + peer, 3) for peer in range(size)])
    return output


@collective
def reduce_scatter_tensor(rank: int, size: int) -> Any:
    output = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(output, own(rank, size * 2, 3))
    return output


@collective
def all_to_all(rank: int, size: int) -> Any:
    outputs = places(size, 2)
    dist.all_to_all(outputs, [own(rank * size + peer, 2) for peer in range(size)])
    return outputs


@collective
def all_to_all_single(rank: int, size: int) -> Any:
    output = torch.zeros(size, 2)
    dist.all_to_all_single(output, own(rank, size, 2))
    return output


@collective
def all_to_all_single_uneven(rank: int, size: int) -> Any:
    """Rank r sends r + 1 rows to each."""
    output = torch.zeros(sum(peer + 1 for peer in range(size)), 2)
    dist.all_to_all_single(output, own(rank, size * (rank + 1), 2), [p + 1 for p in range(size)], [rank + 1] * size)
    return output


@collective
def send_and_recv(rank: int, size: int) -> Any:
    tensor = own(rank, 5)
    if rank == 0:
        dist.send(tensor, dst=1, tag=3)
    elif rank == 1:
        dist.recv(tensor, src=0, tag=3)
    return tensor


@collective
def recv_from_anybody(rank: int, size: int) -> Any:
    tensor = own(rank, 5)
    if rank == 1:
        dist.send(tensor, dst=0, tag=9)
    elif rank == 0:
        return [dist.recv(tensor, tag=9), tensor]
    return None


@collective
def isend_and_irecv(rank: int, size: int) -> Any:
    tensor = torch.zeros(4)
    works = [dist.isend(own(rank, 4), dst=(rank + 1) % size), dist.irecv(tensor, src=(rank - 1) % size)]
    for work in works:
        work.wait()
    return tensor


@collective
def batched_isend_and_irecv(rank: int, size: int) -> Any:
    tensor = torch.zeros(4)
    operations = [
        dist.P2POp(dist.isend, own(rank, 4), (rank + 1) % size),
        dist.P2POp(dist.irecv, tensor, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return tensor


@collective
def all_gather_object(rank: int, size: int) -> Any:
    outputs: list[Any] = [None] * size
    dist.all_gather_object(outputs, {"rank": rank, "text": "x" * rank})
    return outputs


@collective
def gather_object(rank: int, size: int) -> Any:
    outputs: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(("from", rank), outputs, dst=0)
    return outputs


@collective
def broadcast_object_list(rank: int, size: int) -> Any:
    objects = [rank, {"a": [rank]}, "y" * (rank + 1)]
    dist.broadcast_object_list(objects, src=0)
    return objects


@collective
def recv_object_list(rank: int, size: int) -> Any:
    objects: list[Any] = [rank, "y" * (rank + 1)]
    if rank == 0:
        for peer in range(1, size):
            dist.send_object_list(objects, peer)
    else:
        dist.recv_object_list(objects, 0)
    return objects


@collective
def scatter_object_list(rank: int, size: int) -> Any:
    output: list[Any] = [None]
    dist.scatter_object_list(output, [("for", peer) for peer in range(size)] if rank == 0 else None, src=0)
    return output


@collective
def all_reduce_in_a_subgroup(rank: int, size: int) -> Any:
    pair, all_members = dist.new_group([0, size - 1]), dist.new_group()
    tensor, whole = own(rank, 3), own(rank, 3)
    if rank in (0, size - 1):
        dist.all_reduce(tensor, group=pair)
    dist.all_reduce(whole, group=all_members)
    return [tensor, whole, dist.get_rank(pair), dist.get_world_size(all_members)]


# What DTensor and compiled code call, by way of torch's C++.


@collective
def functional_all_reduce(rank: int, size: int) -> Any:
    return functional.wait_tensor(functional.all_reduce(own(rank, 3), "sum", list(range(size))))


@collective
def functional_broadcast(rank: int, size: int) -> Any:
    return functional.wait_tensor(functional.broadcast(own(rank, 3), 1, list(range(size))))


@collective
def functional_all_to_all(rank: int, size: int) -> Any:
    return functional.wait_tensor(functional.all_to_all_single(own(rank, size, 2), None, None, list(range(size))))


@collective
def functional_all_gather(rank: int, size: int) -> Any:
    return functional.wait_tensor(functional.all_gather_tensor(own(rank, 2, 2), 0, list(range(size))))


@collective
def functional_reduce_scatter(rank: int, size: int) -> Any:
    return functional.wait_tensor(functional.reduce_scatter_tensor(own(rank, size * 2), "sum", 0, list(range(size))))


@collective
def functional_all_reduce_coalesced(rank: int, size: int) -> Any:
    results = functional.all_reduce_coalesced([own(rank, 3), own(rank, 2)], "sum", list(range(size)))
    return [functional.wait_tensor(result) for result in results]


@collective
def functional_all_gather_coalesced(rank: int, size: int) -> Any:
    results = functional.all_gather_into_tensor_coalesced([own(rank, 3), own(rank, 2)], list(range(size)))
    return [functional.wait_tensor(result) for result in results]


@collective
def functional_reduce_scatter_coalesced(rank: int, size: int) -> Any:
    results = functional.reduce_scatter_tensor_coalesced([own(rank, size)], "sum", [0], list(range(size)))
    return [functional.wait_tensor(result) for result in results]
