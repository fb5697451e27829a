"""Parameter lists of real models, how trainers cut them, and what an engine with fused ones has, by torch.cat."""

import re
from collections.abc import Mapping

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from keepstep.weights.memory.blocks import Block

Tensors = dict[str, torch.Tensor]
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 20,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
MODELS = {
    "Llama": (LlamaForCausalLM, LlamaConfig),
    "Qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "Qwen3": (Qwen3ForCausalLM, Qwen3Config),
}
_ROWS = re.compile(r"(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)|embed_tokens\.weight|lm_head\.weight")
_COLUMNS = re.compile(r"(o_proj|down_proj)\.weight")


def model_of(kind: str) -> PreTrainedModel:
    """A tiny one with random weights."""
    model, config = MODELS[kind]
    return model(config(**SIZES))


def random_state(kind: str, seed: int) -> Tensors:
    """Random values under all names of its parameters, none equal to another's."""
    generator = torch.Generator().manual_seed(seed)
    state = model_of(kind).state_dict()
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}


def tensor_parallel_dim(name: str) -> int | None:
    """Along which dimension a tensor is cut among tensor-parallel ranks; None: each has all of it."""
    if _ROWS.search(name):
        return 0
    return 1 if _COLUMNS.search(name) else None


def _cut(tensor: torch.Tensor, dim: int | None, rank: int, num: int) -> torch.Tensor | Block:
    """As torch.chunk does it: parts of equal size, the last ones smaller or empty."""
    if dim is None or num == 1:
        return tensor
    size = -(-tensor.shape[dim] // num)
    first = min(rank * size, tensor.shape[dim])
    start = tuple(first if each == dim else 0 for each in range(tensor.dim()))
    part = tensor.narrow(dim, first, min(size, tensor.shape[dim] - first))
    return Block(part.clone(), start, tuple(tensor.shape))


def trainer(layout: str, state: Tensors) -> list[Mapping[str, torch.Tensor | Block]]:
    """What each rank of a trainer holds."""
    kind, *sizes = layout.split()
    num = int(sizes[0]) if sizes else 1
    match kind:
        case "whole":
            return [dict(state)]
        case "TP":
            cut = {name: tensor_parallel_dim(name) for name in state}
            return [{name: _cut(each, cut[name], rank, num) for name, each in state.items()} for rank in range(num)]
        case "FSDP":
            return [{name: _cut(each, 0, rank, num) for name, each in state.items()} for rank in range(num)]
        case "HSDP":
            return [own for _replica in range(2) for own in trainer(f"FSDP {num}", state)]
        case "PP":
            stage = {name: _stage_of(name, num) for name in state}
            return [{name: each for name, each in state.items() if stage[name] == rank} for rank in range(num)]
    raise AssertionError(layout)


def _stage_of(name: str, num: int) -> int:
    if layer := re.search(r"layers\.(\d+)\.", name):
        return int(layer[1]) * num // SIZES["num_hidden_layers"]
    return 0 if "embed" in name else num - 1


def engine(state: Tensors, rank: int, size: int) -> Tensors:
    """What a tensor-parallel rank of an engine has, cut and fused by hand."""
    own: Tensors = {}
    for name, tensor in state.items():
        dim = tensor_parallel_dim(name)
        own[name] = tensor if dim is None else tensor.chunk(size, dim)[rank]
    for name in state:
        for fused, parts in {
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        }.items():
            if parts[0] in name:
                taken = [own.pop(name.replace(parts[0], part)) for part in parts]
                own[name.replace(parts[0], fused)] = torch.cat(taken, dim=0)
    return own
