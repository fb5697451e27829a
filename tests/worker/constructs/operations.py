"""Collectives and checkpoints as scripts and torch's own layers call them."""

import torch
from tests.worker.constructs.construct import SIZE, Constructs, Ranks, Result, adds_to, local
from tests.worker.constructs.training import Block, blocks, sharded, squares, train_sharded
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

CONSTRUCTS: Constructs = {}
construct = adds_to(CONSTRUCTS)


@construct("`new_group()`: pairs, and a group in another order")
def groups(ranks: Ranks) -> Result:
    found = {}
    for members in ([0, 1], [2, 3], [3, 0, 2]):
        group = dist.new_group(members)
        if ranks.rank in members:
            found[f"{members}"] = ranks.batch(0)
            dist.all_reduce(found[f"{members}"], group=group)
    return found


@construct("`new_subgroups()`")
def subgroups(ranks: Ranks) -> Result:
    group, _groups = dist.new_subgroups(2)
    output = torch.empty(8, 8, 8)
    dist.all_gather_into_tensor(output, ranks.batch(0), group=group)
    return {"gathered": output}


@construct("`DeviceMesh`: its groups, and a flattened one")
def meshes(ranks: Ranks) -> Result:
    mesh = init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("outer", "inner"))
    found = {}
    for name, group in (
        *zip(("outer", "inner"), mesh.get_all_groups(), strict=True),
        ("flat", mesh._flatten().get_group()),
    ):
        found[name] = ranks.batch(0)
        dist.all_reduce(found[name], group=group)
    return found


@construct("`all_to_all()`, `all_to_all_single()` with uneven parts")
def all_to_all(ranks: Ranks) -> Result:
    rows = ranks.batch(0).flatten(0, 1)
    parts = [torch.empty(2, rows.shape[1]) for _ in range(SIZE)]
    dist.all_to_all(parts, list(rows[: 2 * SIZE].chunk(SIZE)))
    output = torch.empty(sum(range(1, SIZE + 1)), rows.shape[1])
    own = ranks.rank + 1
    dist.all_to_all_single(output, rows[: own * SIZE], list(range(1, SIZE + 1)), [own] * SIZE)
    return {"parts": torch.stack(parts), "uneven": output}


@construct("`send()`, `recv()`, `batch_isend_irecv()`")
def point_to_point(ranks: Ranks) -> Result:
    received, around = torch.empty_like(ranks.batch(0)), torch.empty_like(ranks.batch(0))
    peer = ranks.rank ^ 1
    if ranks.rank < peer:
        dist.send(ranks.batch(0), peer)
        dist.recv(received, peer)
    else:
        dist.recv(received, peer)
        dist.send(ranks.batch(0), peer)
    both = [
        dist.P2POp(dist.isend, ranks.batch(1), (ranks.rank + 1) % SIZE),
        dist.P2POp(dist.irecv, around, (ranks.rank - 1) % SIZE),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return {"received": received, "around": around}


@construct("`reduce_scatter()`, `all_gather()`, `broadcast()`, `reduce()`")
def collectives(ranks: Ranks) -> Result:
    scattered, total, sent = torch.empty(8, 8), ranks.batch(0), ranks.batch(1)
    dist.reduce_scatter_tensor(scattered, ranks.batch(2).flatten(0, 1))
    gathered = [torch.empty(8, 8) for _ in range(SIZE)]
    dist.all_gather(gathered, scattered)
    dist.reduce(total, dst=1)
    dist.broadcast(sent, src=2)
    return {
        "scattered": scattered,
        "gathered": torch.stack(gathered),
        "sent": sent,
        "total": total if ranks.rank == 1 else sent,
    }


def parts_of(ranks: Ranks) -> list[torch.Tensor]:
    return [ranks.batch(0), ranks.batch(1)[0], ranks.batch(2)[0, 0]]


@construct("`all_reduce()` of one tensor after the other")
def one_by_one(ranks: Ranks) -> Result:
    tensors = parts_of(ranks)
    for tensor in tensors:
        dist.all_reduce(tensor)
    return {str(number): tensor for number, tensor in enumerate(tensors)}


@construct("coalesced `all_reduce()`")
def coalesced(ranks: Ranks) -> Result:
    tensors = parts_of(ranks)
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return {str(number): tensor for number, tensor in enumerate(tensors)}


@construct("coalesced functional collectives")
def functional_coalesced(ranks: Ranks) -> Result:
    all_members = list(range(SIZE))
    reduced = functional.all_reduce_coalesced(parts_of(ranks), "sum", all_members)
    gathered = functional.all_gather_into_tensor_coalesced(parts_of(ranks), all_members)
    scattered = functional.reduce_scatter_tensor_coalesced(parts_of(ranks)[:2], "sum", [0, 0], all_members)
    found = [functional.wait_tensor(tensor) for tensor in (*reduced, *gathered, *scattered)]
    return {str(number): tensor.clone() for number, tensor in enumerate(found)}


@construct("a DTensor that is redistributed")
def redistributed(ranks: Ranks) -> Result:
    mesh = squares("outer", "inner")
    whole = ranks.batch(0, 0).flatten(0, 1)
    placed = distribute_tensor(whole, mesh, [Shard(0), Replicate()])
    columns = (placed.square() @ placed.t()).redistribute(placements=[Shard(1), Shard(0)])
    return {"columns": local(columns), "whole": columns.full_tensor()}


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@construct("DCP: `save()`, and `load()` into another sharding")
def distributed_checkpoint(ranks: Ranks) -> Result:
    model = sharded(blocks())
    saved = train_sharded(ranks, model)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=ranks.path / "checkpoint")
    torch.manual_seed(1)
    other = sharded([Block(), Block(), Block()], squares("replicate", "shard"))
    state = {"model": other.state_dict()}
    checkpoint.load(state, checkpoint_id=ranks.path / "checkpoint")
    loaded = {name: local(value) for name, value in state["model"].items()}
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), state["model"][name].full_tensor())
    return saved | loaded
