"""Five ways to share the GPT of train_gpt.py among ranks, for its flag --parallel. This file does not use keepstep.

    ddp     every rank has the whole model
    fsdp2   every rank has a part of each tensor
    hsdp    two halves of the ranks, each of which shares one model as under fsdp2
    tp      the ranks of a pair share the heads and the hidden features of each block
    pp      the first rank of a pair has the first half of the blocks, the second rank the others

Under tp and pp the pairs are data-parallel replicas of each other; one pair is enough. Under tp an odd number of ranks
is one group instead of pairs. Under pp the head is a separate matrix, initialised as a copy of the embedding, and each
stage clips its own gradients. Otherwise the model is the same.

Shapes: B batch, T time (bytes), W width, V values of a byte.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from train_gpt import GPT

WAYS = ("ddp", "fsdp2", "hsdp", "tp", "pp")
BLOCK_PLAN = {
    "qkv": ColwiseParallel(),
    "attention_out": RowwiseParallel(),
    "mlp_in": ColwiseParallel(),
    "mlp_out": RowwiseParallel(),
}


class Part:
    """One rank's part of the model. Computes its gradients.

    Attributes:
        model: a replica, a shard or a stage.
        protect: further arguments for `session.protect`.
    """

    def __init__(self, model: nn.Module, **protect: object) -> None:
        self.model = model
        self.protect = protect

    def forward_backward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Computes the gradients of the model's parameters. Returns the loss of this rank's batch."""
        loss = self.model(tokens_BT, targets_BT)
        loss.backward()
        return loss


def parallelize(gpt: GPT, how: str, world_size: int, batch_size: int) -> Part:
    """Returns this rank's part of the model.

    Args:
        gpt: the model, with the same weights on every rank. It is changed.
        how: one of `WAYS`.
        world_size: number of ranks.
        batch_size: batch size of one data-parallel rank.
    """
    if how in ("hsdp", "pp") and world_size % 2:
        raise SystemExit(f"--parallel {how} needs an even number of ranks, not {world_size}")
    match how:
        case "ddp":
            return Part(DistributedDataParallel(gpt))
        case "fsdp2":
            return Part(fully_sharded(gpt, init_device_mesh("cpu", (world_size,))))
        case "hsdp":
            shape = (2, world_size // 2)
            return Part(fully_sharded(gpt, init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))))
        case "tp":
            size = world_size if world_size % 2 else 2
            mesh = init_device_mesh("cpu", (world_size // size, size), mesh_dim_names=("data", "tensor"))
            cut_blocks(gpt, mesh["tensor"])
            average_gradients(gpt, mesh["data"])
            return Part(gpt, data_mesh=mesh["data"])
        case "pp":
            mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("data", "pipeline"))
            return PipelinePart(gpt, mesh, batch_size)
    raise ValueError(f"{how!r} is none of {WAYS}")


def fully_sharded(gpt: GPT, mesh: DeviceMesh) -> nn.Module:
    """Shards the model with FSDP2, so that it gathers one block at a time."""
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(gpt, mesh=mesh)


# ---- Tensor parallelism ----------------------------------------------------------------------------------------------


def cut_blocks(gpt: GPT, mesh: DeviceMesh) -> None:
    """Gives each rank some heads and some hidden features of every block. All ranks hold the rest of the model."""
    for block in gpt.blocks:
        if block.heads % mesh.size():
            raise SystemExit(f"--parallel tp: {mesh.size()} ranks cannot share {block.heads} heads; change --heads")
        block.heads //= mesh.size()
        for tensor in (block.qkv.weight, block.qkv.bias):
            # The rows are all of q, then all of k, then all of v. A rank gets contiguous rows, so this reorders them:
            # the rows of one rank's heads in q, k and v come one after the other.
            tensor.data = tensor.data.unflatten(0, (3, mesh.size(), -1)).transpose(0, 1).flatten(0, 2)
        parallelize_module(block, mesh, BLOCK_PLAN)
    for module in gpt.modules():
        if isinstance(module, (nn.Embedding, nn.LayerNorm)) or module is gpt.head:
            distribute_module(module, mesh, input_fn=replicated, output_fn=local)
    gpt.head.weight = gpt.embedding.weight


def replicated(_module: nn.Module, inputs: tuple[torch.Tensor], mesh: DeviceMesh) -> tuple[DTensor]:
    """Returns replicated inputs as DTensors. All parameters are DTensors, because clipping accepts no mixture."""
    return (DTensor.from_local(inputs[0], mesh, [Replicate()]),)


def local(_module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> torch.Tensor:
    """Returns the local part of an output."""
    return output.to_local()


def average_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Averages each gradient over the replicas in the backward, as DDP does. DDP does not support DTensors."""

    def average(parameter: nn.Parameter) -> None:
        gradient = parameter.grad.to_local()
        dist.all_reduce(gradient, group=mesh.get_group())
        gradient /= mesh.size()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)


# ---- Pipeline parallelism --------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """A stage with half of the blocks. The first stage also has the embeddings, the last one norm and head."""

    def __init__(self, gpt: GPT, is_last: bool) -> None:
        super().__init__()
        self.gpt = gpt
        self.is_last = is_last
        for name in ("embedding", "position") if is_last else ("norm", "head"):
            delattr(gpt, name)
        half = len(gpt.blocks) // 2
        for number in range(half) if is_last else range(half, len(gpt.blocks)):
            gpt.blocks[number] = nn.Identity()  # the others keep their names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes activations from tokens, or in the last stage logits from activations."""
        if self.is_last:
            return self.gpt.read_out(self.gpt.blocks(x))
        return self.gpt.blocks(self.gpt.embed(x))


class PipelinePart(Part):
    """A stage of a pipeline. Equal stages are replicas of each other."""

    def __init__(self, gpt: GPT, mesh: DeviceMesh, batch_size: int) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # takes a second, only needed here

        number = mesh.get_local_rank("pipeline")
        self.is_first = number == 0
        self.group = mesh.get_group("pipeline")
        model = DistributedDataParallel(Stage(gpt, not self.is_first), process_group=mesh.get_group("data"))
        stage = PipelineStage(model, number, 2, torch.device("cpu"), group=self.group)
        self.schedule = Schedule1F1B(stage, n_microbatches=math.gcd(batch_size, 4), loss_fn=gpt.loss)
        super().__init__(model, schedule=self.schedule)

    def forward_backward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Computes the micro-batches. The last stage sends the loss to the first one."""
        losses: list[torch.Tensor] = []
        inputs = [tokens_BT] if self.is_first else []  # the last stage gets its inputs from the first one
        self.schedule.step(*inputs, target=targets_BT, losses=losses)
        loss = torch.zeros(()) if self.is_first else torch.stack(losses).detach().mean()
        dist.broadcast(loss, group=self.group, group_src=1)
        return loss
