"""Data-parallel, sharded and tensor-parallel training."""

from typing import Any

import torch
from tests.worker.constructs.construct import SIZE, STEPS, WIDTH, Constructs, Ranks, Result, adds_to, local
from torch import distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

CONSTRUCTS: Constructs = {}
construct = adds_to(CONSTRUCTS)

MICRO_BATCHES = 3


class Block(nn.Module):
    """A residual perceptron. Its 10 hidden features are no multiple of four ranks, so shards are uneven."""

    def __init__(self, hidden: int = 10) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, hidden)
        self.narrow = nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
        return result


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).float().square().mean()
    return loss


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(), Block(), Block()]


# ---- replicas -------------------------------------------------------------------------------------------------------


def ddp(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(8), *blocks()), **options)


@construct("DDP")
def plain_ddp(ranks: Ranks) -> Result:
    model = ddp()
    return ranks.trained(model, lambda step: loss_of(model, ranks.batch(step)).backward())


@construct("DDP, gradients as views of buckets of 1 KB, SGD")
def ddp_views(ranks: Ranks) -> Result:
    model = ddp(gradient_as_bucket_view=True, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
    return ranks.trained(model, lambda step: loss_of(model, ranks.batch(step)).backward(), optimizer)


@construct("DDP, accumulation with `no_sync()`")
def ddp_accumulation(ranks: Ranks) -> Result:
    model = ddp()

    def step_of(number: int) -> None:
        with model.no_sync():
            loss_of(model, ranks.batch(number)).backward()
        loss_of(model, ranks.batch(number + STEPS)).backward()

    return ranks.trained(model, step_of)


def train_by_zero(ranks: Ranks, **options: Any) -> Result:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    model = ddp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.05, **options)
    found = ranks.trained(model, lambda step: loss_of(model, ranks.batch(step)).backward(), optimizer)
    for number, state in enumerate(optimizer.optim.state.values()):
        found |= {f"own {name} {number}": value for name, value in state.items()}
    return found


@construct("`ZeroRedundancyOptimizer`")
def zero(ranks: Ranks) -> Result:
    return train_by_zero(ranks)


@construct("`ZeroRedundancyOptimizer`, parameters as views of buckets")
def zero_buckets(ranks: Ranks) -> Result:
    return train_by_zero(ranks, parameters_as_bucket_view=True)


# ---- FSDP2 ----------------------------------------------------------------------------------------------------------


def sharded(layers: list[nn.Module], mesh: DeviceMesh | None = None, **how: Any) -> Any:
    mesh = mesh or init_device_mesh("cpu", (SIZE,))
    for layer in layers:
        fully_shard(layer, mesh=mesh, **how)
    return fully_shard(nn.Sequential(*layers, nn.Linear(WIDTH, 3)), mesh=mesh, **how)


def train_sharded(ranks: Ranks, model: nn.Module) -> Result:
    return ranks.trained(model, lambda step: loss_of(model, ranks.batch(step)).backward())


@construct("FSDP2")
def fsdp2(ranks: Ranks) -> Result:
    model = sharded(blocks())

    def step_of(number: int) -> None:
        loss_of(model, ranks.batch(number)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    return ranks.trained(model, step_of)


@construct("FSDP2, `reshard_after_forward=False`")
def fsdp2_kept(ranks: Ranks) -> Result:
    return train_sharded(ranks, sharded(blocks(), reshard_after_forward=False))


@construct("FSDP2, `reshard_after_forward=2`")
def fsdp2_smaller(ranks: Ranks) -> Result:
    return train_sharded(ranks, sharded(blocks(), reshard_after_forward=2))


@construct("FSDP2, mixed precision with bfloat16")
def fsdp2_mixed(ranks: Ranks) -> Result:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return train_sharded(ranks, sharded(blocks(), mp_policy=policy))


@construct("FSDP2, accumulation with `set_requires_gradient_sync()`")
def fsdp2_accumulation(ranks: Ranks) -> Result:
    model = sharded(blocks())

    def step_of(number: int) -> None:
        for micro_batch in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(micro_batch == MICRO_BATCHES - 1)
            loss_of(model, ranks.batch(number * MICRO_BATCHES + micro_batch)).backward()

    return ranks.trained(model, step_of)


@construct("FSDP2, activation checkpointing")
def fsdp2_checkpointing(ranks: Ranks) -> Result:
    return train_sharded(ranks, sharded([checkpoint_wrapper(block) for block in blocks()]))


@construct("FSDP2, compiled blocks (`aot_eager`)")
def fsdp2_compiled(ranks: Ranks) -> Result:
    layers = blocks()
    for layer in layers:
        layer.compile(backend="aot_eager")
    return train_sharded(ranks, sharded(layers))


def squares(outer: str, inner: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=(outer, inner))


@construct("HSDP 2 × 2")
def hsdp(ranks: Ranks) -> Result:
    return train_sharded(ranks, sharded(blocks(), squares("replicate", "shard")))


# ---- tensor parallelism ---------------------------------------------------------------------------------------------


TENSOR_PLAN: dict[str, Any] = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
SEQUENCE_PLAN: dict[str, Any] = {
    "norm": SequenceParallel(),
    "wide": ColwiseParallel(input_layouts=Shard(1)),
    "narrow": RowwiseParallel(output_layouts=Shard(1)),
}


def tensor_parallel(mesh: DeviceMesh, plan: dict[str, Any]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [parallelize_module(Block(4 * SIZE), mesh, plan) for _ in range(2)]


@construct("TP, columns and rows")
def tensor(ranks: Ranks) -> Result:
    model = nn.Sequential(*tensor_parallel(init_device_mesh("cpu", (SIZE,)), TENSOR_PLAN))
    return ranks.trained(model, lambda step: loss_of(model, ranks.batch(step, 0)).backward())


@construct("TP, sequence parallel")
def sequence(ranks: Ranks) -> Result:
    model = nn.Sequential(*tensor_parallel(init_device_mesh("cpu", (SIZE,)), SEQUENCE_PLAN))
    return ranks.trained(model, lambda step: loss_of(model, ranks.batch(step, 0).chunk(SIZE, 1)[ranks.rank]).backward())


@construct("TP, loss parallel")
def parallel_loss(ranks: Ranks) -> Result:
    mesh = init_device_mesh("cpu", (SIZE,))
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, 4 * SIZE)
    parallelize_module(head, mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    model = nn.Sequential(*tensor_parallel(mesh, TENSOR_PLAN), head)
    losses: list[torch.Tensor] = []

    def step_of(number: int) -> None:
        batch = ranks.batch(number, 0)
        classes = torch.arange(batch[..., 0].numel()) % (4 * SIZE)
        with loss_parallel():
            loss: Any = nn.functional.cross_entropy(model(batch).flatten(0, 1), classes)
            loss.backward()
        losses.append(loss.full_tensor().detach())

    return ranks.trained(model, step_of) | {"losses": torch.stack(losses)}


@construct("FSDP2 × TP 2 × 2")
def fsdp2_tensor(ranks: Ranks) -> Result:
    mesh = squares("data", "tensor")
    data_rank = mesh.get_local_rank("data")
    layers = tensor_parallel(mesh["tensor"], TENSOR_PLAN)
    for layer in layers:
        fully_shard(layer, mesh=mesh["data"])
    model = fully_shard(nn.Sequential(*layers), mesh=mesh["data"])
    return ranks.trained(model, lambda step: loss_of(model, ranks.batch(step, data_rank)).backward())


@construct("TP × DP 2 × 2, gradients averaged by the script")
def tensor_data(ranks: Ranks) -> Result:
    mesh = squares("data", "tensor")
    data_rank, group = mesh.get_local_rank("data"), mesh.get_group("data")
    model = nn.Sequential(*tensor_parallel(mesh["tensor"], TENSOR_PLAN))

    def step_of(number: int) -> None:
        loss_of(model, ranks.batch(number, data_rank)).backward()
        for parameter in model.parameters():
            dist.all_reduce(local(parameter.grad), group=group)

    return ranks.trained(model, step_of)


# ---- expert parallelism ---------------------------------------------------------------------------------------------


@construct("EP × DP 2 × 2: pairs of experts, tokens exchanged by `all_to_all()`")
def experts(ranks: Ranks) -> Result:
    mesh = squares("data", "expert")
    exchange, number = mesh.get_group("expert"), mesh.get_local_rank("expert")
    torch.manual_seed(0)
    shared = Block()
    torch.manual_seed(1 + number)
    expert = nn.Linear(WIDTH, WIDTH)
    model = nn.ModuleDict({"shared": shared, "expert": expert})

    def step_of(step: int) -> None:
        tokens = shared(ranks.batch(step)).flatten(0, 1)  # the first half of them goes to the first expert
        half = [len(tokens) // 2] * 2
        there = all_to_all_single_autograd(tokens, half, half, exchange)
        back = all_to_all_single_autograd(expert(there).relu(), half, half, exchange)
        (tokens + back).square().mean().backward()
        for parameter in shared.parameters():
            dist.all_reduce(parameter.grad)
        for parameter in expert.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("data"))

    return ranks.trained(model, step_of, shard=f"expert {number}")
